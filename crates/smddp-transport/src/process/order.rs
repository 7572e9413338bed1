//! Who may read what another process has written, and when: words of the shared memory, each with the order in which it is
//! written and read. `models/` holds these lines against every order that memory allows.

use super::layout::{CALL, COUNT, SLOT_HEADER, SLOTS, STAGE, TAG};
use super::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// A number that one rank tells others, and that only grows: messages published, messages read, operations finished.
#[derive(Clone, Copy)]
pub(crate) struct Counter<'a>(pub(crate) &'a AtomicU64);

impl Counter<'_> {
    /// Release: whoever hears it sees what was written before, and may write over what was read before.
    #[inline]
    pub(crate) fn publish(self, count: u64) {
        self.0.store(count, Ordering::Release);
    }

    /// Acquire: pairs with `publish`.
    #[inline]
    pub(crate) fn read(self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// The header of an operation, in a slot that later operations take over.
#[derive(Clone, Copy)]
pub(crate) struct Slot<'a>(pub(crate) &'a [AtomicU64; SLOT_HEADER / 8]);

impl<'a> Slot<'a> {
    /// The number of the operation whose header it is, and one.
    #[inline]
    pub(crate) fn tag(self) -> Counter<'a> {
        Counter(self.field(TAG))
    }

    #[inline]
    fn field(self, offset: usize) -> &'a AtomicU64 {
        &self.0[offset / 8]
    }

    /// Writes a header (what, count, stage), which is one as soon as it is told.
    #[inline]
    pub(crate) fn write(self, header: (u64, u64, u64)) {
        // Whoever sees this header in place of the one before sees that the operations before it are done (`read_if_current`).
        fence(Ordering::Release);
        self.field(CALL).store(header.0, Ordering::Relaxed);
        self.field(COUNT).store(header.1, Ordering::Relaxed);
        self.field(STAGE).store(header.2, Ordering::Relaxed);
    }

    /// The header is that of operation `seq`. Whoever sees it sees the region's table, or the payload beside it.
    #[inline]
    pub(crate) fn publish(self, seq: u64) {
        self.tag().publish(seq + 1);
    }

    /// (what, count, stage) of operation `seq`, if it was told. To be asked while that operation is not over here, because then
    /// nobody takes the slot over.
    #[inline]
    pub(crate) fn read(self, seq: u64) -> Option<(u64, u64, u64)> {
        if self.tag().read() != seq + 1 {
            return None;
        }
        let of = |at| self.field(at).load(Ordering::Relaxed);
        Some((of(CALL), of(COUNT), of(STAGE)))
    }

    /// The tag, and (what, count) of operation `seq`, which is over here: so the slot may be taken over under my eyes, and
    /// then it tells nothing. `done`: operations that its writer has finished.
    pub(crate) fn read_if_current(self, seq: u64, done: Counter<'_>) -> (u64, Option<(u64, u64)>) {
        let tag = self.tag().read();
        if tag != seq + 1 {
            return (tag, None);
        }
        let found = (self.field(CALL).load(Ordering::Acquire), self.field(COUNT).load(Ordering::Acquire));
        // Nobody takes it over before that operation is done.
        let read_if_current = done.0.load(Ordering::Relaxed) < seq + SLOTS;
        (tag, read_if_current.then_some(found))
    }
}

/// The words of a process's bell. Whoever publishes something rings it if anybody may sleep there.
pub(crate) struct Doorbell<'a> {
    /// How often it rang.
    pub(crate) flag: &'a AtomicU32,
    /// Who is about to sleep, or does.
    pub(crate) sleepers: &'a AtomicU32,
    /// Those who sleep on descriptors, too: they need another call.
    pub(crate) pollers: &'a AtomicU32,
}

impl Doorbell<'_> {
    /// I am about to sleep: what is published from here on rings, what was published before is seen by my last look, which
    /// comes now. Returns the ticket that `sleep` takes.
    pub(crate) fn prepare_wait(&self) -> u32 {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence before `has_waiters`: either the ringer sees this sleeper, or the last look sees what was published.
        fence(Ordering::SeqCst);
        self.flag.load(Ordering::Acquire)
    }

    /// Up again, having slept or not.
    pub(crate) fn cancel_wait(&self) {
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Polls descriptors, unless it has rung since the ticket was taken.
    pub(crate) fn poll(&self, ticket: u32, poll: impl FnOnce()) {
        self.pollers.fetch_add(1, Ordering::Relaxed);
        // Pairs with the one in `notify`: either the ringer sees this poller, or this poller that it rang.
        fence(Ordering::SeqCst);
        if self.flag.load(Ordering::Acquire) == ticket {
            poll();
        }
        self.pollers.fetch_sub(1, Ordering::Relaxed);
    }

    /// What was published before is seen by whoever does not ask to be woken by `has_waiters` afterwards.
    #[inline]
    pub(crate) fn publish_fence() {
        fence(Ordering::SeqCst);
    }

    /// Whether anybody may sleep there; after `publish_fence`.
    #[inline]
    pub(crate) fn has_waiters(&self) -> bool {
        self.sleepers.load(Ordering::Relaxed) != 0
    }

    /// `wake` wakes who waits for the word to change, `call` who polls.
    pub(crate) fn notify(&self, wake: impl FnOnce(&AtomicU32), call: impl FnOnce()) {
        // Release: whoever sees that it rang sees what was published.
        self.flag.fetch_add(1, Ordering::Release);
        wake(self.flag);
        fence(Ordering::SeqCst);
        if self.pollers.load(Ordering::Relaxed) != 0 {
            call();
        }
    }
}
