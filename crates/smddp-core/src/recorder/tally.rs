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

    pub(crate) fn get(&self, collective: Collective, algorithm: Algorithm) -> (u64, u64) {
        let (operations, bytes) = &self.0[collective as usize][algorithm as usize];
        (operations.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed))
    }
}
