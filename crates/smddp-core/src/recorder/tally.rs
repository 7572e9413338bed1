//! What went which way so far.

use std::sync::atomic::{AtomicU64, Ordering};

use smddp_plan::format::Way;
use smddp_plan::{Algorithm, Collective, Format};

/// Operations and bytes of their whole buffers, by format between nodes (none first).
type Counts = [(AtomicU64, AtomicU64); Format::ALL.len() + 1];

/// The same by collective and algorithm. The driver counts, anybody may look.
#[derive(Default)]
pub(crate) struct Tally([[Counts; Algorithm::ALL.len()]; Collective::ALL.len()]);

impl Tally {
    /// Only the driver calls this, so a load and a store do.
    pub(crate) fn add(&self, collective: Collective, (algorithm, format): Way, size: usize) {
        let row = format.map_or(0, |format| format as usize + 1);
        let (operations, bytes) = &self.0[collective as usize][algorithm as usize][row];
        operations.store(operations.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        bytes.store(bytes.load(Ordering::Relaxed) + size as u64, Ordering::Relaxed);
    }

    /// Collective, way, operations and bytes of all that was taken.
    pub(crate) fn taken(&self) -> impl Iterator<Item = (Collective, Way, u64, u64)> {
        let formats = || std::iter::once(None).chain(Format::ALL.map(Some));
        let ways = Collective::ALL
            .into_iter()
            .flat_map(|c| Algorithm::ALL.map(|a| (c, a)))
            .flat_map(move |(c, a)| formats().enumerate().map(move |(row, format)| (c, a, row, format)));
        let counted = ways.map(|(c, a, row, format)| {
            let (operations, bytes) = &self.0[c as usize][a as usize][row];
            (c, (a, format), operations.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed))
        });
        counted.filter(|(_, _, operations, _)| *operations > 0)
    }
}
