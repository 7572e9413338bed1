//! A row of figures, for all kinds of measurement.

use serde::Serialize;

use crate::periter::PerIter;

/// One half of a row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measure {
    pub seconds: f64,
    /// GB/s.
    pub algbw: f64,
    pub busbw: f64,
    /// Wrong elements on all ranks; `None` without a check.
    pub wrong: Option<u64>,
    /// Statistics of the iterations (`-I 1`).
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
    /// The engine's description of the call's path.
    pub path: Option<String>,
    /// Additional figures of OSU's tests.
    pub osu: Option<Osu>,
}

/// Figures of OSU's tests, in addition to the time of an iteration in the row.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Osu {
    Messages {
        /// Millions of bytes per second over all pairs.
        mb_per_s: f64,
        messages_per_s: f64,
    },
    /// Overlap of a call with a computation. The row's time is the time of both together.
    Overlap { compute_us: f64, communication_us: f64, overlap_pct: f64 },
}

/// Totals of all rows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Summary {
    /// Checks that found a wrong element, or a byte written outside a buffer.
    pub failed: u64,
    /// Average over both halves of all rows, GB/s.
    pub busbw: f64,
}
