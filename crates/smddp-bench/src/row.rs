//! A row of figures, whatever was measured.

use serde::Serialize;

use crate::periter::PerIter;

/// One half of a row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measure {
    pub seconds: f64,
    /// GB/s.
    pub algbw: f64,
    pub busbw: f64,
    /// Wrong elements on all ranks; `None` where nothing was checked.
    pub wrong: Option<u64>,
    /// Where that was asked for.
    pub per_iter: Option<PerIter>,
}

#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub bytes: usize,
    pub count: usize,
    pub dtype: &'static str,
    pub redop: &'static str,
    pub root: i64,
    pub out_of_place: Measure,
    pub in_place: Measure,
    /// The way the call takes, in the engine's words.
    pub path: Option<String>,
    /// What OSU's tests tell.
    pub osu: Option<Osu>,
}

/// Figures of OSU's tests, besides the time of an iteration, which is the row's.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Osu {
    Messages {
        /// Millions of bytes in a second, over all pairs.
        mb_per_s: f64,
        messages_per_s: f64,
    },
    /// The row's time is that of call and computation together.
    Overlap { compute_us: f64, communication_us: f64, overlap_pct: f64 },
}

/// What is left when all rows are done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Summary {
    /// Checks that found a wrong element, or a byte written outside a buffer.
    pub failed: u64,
    /// Average over both halves of all rows, GB/s.
    pub busbw: f64,
}
