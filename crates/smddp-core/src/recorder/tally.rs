//! What went which way so far.

use std::sync::atomic::{AtomicU64, Ordering};

use smddp_plan::{Algorithm, Collective};

/// Operations and bytes of their whole buffers, by collective and algorithm. The driver counts, anybody may look.
#[derive(Default)]
pub(crate) struct Tally([[(AtomicU64, AtomicU64); Algorithm::ALL.len()]; Collective::ALL.len()]);

impl Tally {
    /// Only the driver calls this, so a load and a store do.
    pub(crate) fn add(&self, collective: Collective, algorithm: Algorithm, size: usize) {
        let (operations, bytes) = &self.0[collective as usize][algorithm as usize];
        operations.store(operations.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        bytes.store(bytes.load(Ordering::Relaxed) + size as u64, Ordering::Relaxed);
    }

    /// Collective, algorithm, operations and bytes of all that was taken.
    pub(crate) fn taken(&self) -> impl Iterator<Item = (Collective, Algorithm, u64, u64)> {
        let ways = Collective::ALL.into_iter().flat_map(|c| Algorithm::ALL.map(|a| (c, a)));
        let counted = ways.map(|(c, a)| {
            let (operations, bytes) = &self.0[c as usize][a as usize];
            (c, a, operations.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed))
        });
        counted.filter(|(_, _, operations, _)| *operations > 0)
    }
}
