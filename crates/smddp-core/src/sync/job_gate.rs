//! Access to the jobs of a helper pool. One job is open at a time; helpers enter and leave it. The job is over when
//! it is closed and no helper is inside.

use super::{AtomicU32, Ordering, fence};

#[derive(Default)]
pub(crate) struct JobGate {
    /// Generation of the job: odd while a job is open, and different for each job.
    generation: AtomicU32,
    /// Number of helpers inside a job, or about to find out that it is closed.
    helpers: AtomicU32,
}

impl JobGate {
    /// Opens a job; helpers that enter see all earlier writes. Called by the leader while no job is open.
    pub(crate) fn open(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        // Either the leader sees a sleeping helper and wakes it, or the helper sees this generation.
        fence(Ordering::SeqCst);
    }

    /// Closes the job. Helpers inside it are visible to [`Self::is_empty`] from now on; no further helper enters.
    pub(crate) fn close(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Returns true if all helpers have left. Their writes are visible then.
    pub(crate) fn is_empty(&self) -> bool {
        self.helpers.load(Ordering::Acquire) == 0
    }

    /// Returns the generation of the open job if it differs from `last`.
    pub(crate) fn open_job(&self, last: u32) -> Option<u32> {
        let generation = self.generation.load(Ordering::Relaxed);
        (generation % 2 == 1 && generation != last).then_some(generation)
    }

    /// Enters the job of that generation. If this returns true, the job stays open to the helper until
    /// [`Self::leave`]. Called once per open job.
    pub(crate) fn enter(&self, generation: u32) -> bool {
        self.helpers.fetch_add(1, Ordering::Relaxed);
        // Either this thread sees that the job is closed, or the leader sees that a helper is inside.
        fence(Ordering::SeqCst);
        let is_open = self.generation.load(Ordering::Acquire) == generation;
        if !is_open {
            self.leave();
        }
        is_open
    }

    pub(crate) fn leave(&self) {
        self.helpers.fetch_sub(1, Ordering::Release);
    }
}
