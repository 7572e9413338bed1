//! The order of a team's jobs: one stands, helpers come in and leave, and it is over when it is closed and nobody is inside.

use super::{AtomicU32, Ordering, fence};

#[derive(Default)]
pub(crate) struct JobGate {
    /// Odd while a job stands; each has another.
    generation: AtomicU32,
    /// Helpers that look at the job, or are about to find out that they are late.
    helpers: AtomicU32,
}

impl JobGate {
    /// From now on a job stands; who comes in sees what was written before. By the leader, where none does.
    pub(crate) fn open(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        // Whoever has fallen asleep is seen to, or sees this.
        fence(Ordering::SeqCst);
    }

    /// Nobody comes in any more: who is inside is seen by [`Self::is_empty`] from now on.
    pub(crate) fn close(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Whether all have left; what they did is seen then.
    pub(crate) fn is_empty(&self) -> bool {
        self.helpers.load(Ordering::Acquire) == 0
    }

    /// The turn of a job that stands, if it is another than `last`.
    pub(crate) fn open_job(&self, last: u32) -> Option<u32> {
        let generation = self.generation.load(Ordering::Relaxed);
        (generation % 2 == 1 && generation != last).then_some(generation)
    }

    /// Whether the job of that turn stands, until [`Self::leave`] at the least; called once for each that does.
    pub(crate) fn enter(&self, generation: u32) -> bool {
        self.helpers.fetch_add(1, Ordering::Relaxed);
        // Either this sees that the job is closed, or the leader that somebody is inside.
        fence(Ordering::SeqCst);
        let stands = self.generation.load(Ordering::Acquire) == generation;
        if !stands {
            self.leave();
        }
        stands
    }

    pub(crate) fn leave(&self) {
        self.helpers.fetch_sub(1, Ordering::Release);
    }
}
