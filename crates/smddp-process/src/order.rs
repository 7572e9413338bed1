//! Memory orders of the fields in shared memory that one process writes and others read. `models/` checks this file
//! against all executions that the memory model allows.

use super::layout::{CALL, COUNT, HEADER_FIELDS, HEADERS, STAGE, TAG};
use super::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Monotonic counter that one rank writes and others read: messages published, messages read, operations finished.
#[derive(Clone, Copy)]
pub struct Counter<'a>(pub &'a AtomicU64);

impl Counter<'_> {
    /// Release: a reader of this value observes all earlier writes, and may overwrite what was read before.
    #[inline]
    pub fn publish(self, count: u64) {
        self.0.store(count, Ordering::Release);
    }

    /// Acquire: pairs with `publish`.
    #[inline]
    pub fn read(self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// Header of an operation, in memory that later operations reuse.
#[derive(Clone, Copy)]
pub struct OperationHeader<'a>(pub &'a [AtomicU64; HEADER_FIELDS / 8]);

impl<'a> OperationHeader<'a> {
    /// Sequence number of the header's operation, plus one.
    #[inline]
    pub fn tag(self) -> Counter<'a> {
        Counter(self.field(TAG))
    }

    #[inline]
    fn field(self, offset: usize) -> &'a AtomicU64 {
        &self.0[offset / 8]
    }

    /// Writes a header (call, count, stage). It becomes valid with `publish`.
    #[inline]
    pub fn write(self, header: (u64, u64, u64)) {
        // A reader that observes this header observes that all earlier operations are finished (`read_if_current`).
        fence(Ordering::Release);
        self.field(CALL).store(header.0, Ordering::Relaxed);
        self.field(COUNT).store(header.1, Ordering::Relaxed);
        self.field(STAGE).store(header.2, Ordering::Relaxed);
    }

    /// Marks the header as that of operation `seq`. A reader of the tag also observes the region's table or the
    /// inline payload.
    #[inline]
    pub fn publish(self, seq: u64) {
        self.tag().publish(seq + 1);
    }

    /// Returns (call, count, stage) of operation `seq` once it is published. The operation must be unfinished at this
    /// rank, because its memory is not reused until then.
    #[inline]
    pub fn read(self, seq: u64) -> Option<(u64, u64, u64)> {
        if self.tag().read() != seq + 1 {
            return None;
        }
        let of = |at| self.field(at).load(Ordering::Relaxed);
        Some((of(CALL), of(COUNT), of(STAGE)))
    }

    /// Returns the tag and (call, count) of operation `seq`, which is finished at this rank. The header may be reused
    /// during the call; then the header is `None`. `done`: operations that the writer has finished.
    pub fn read_if_current(self, seq: u64, done: Counter<'_>) -> (u64, Option<(u64, u64)>) {
        let tag = self.tag().read();
        if tag != seq + 1 {
            return (tag, None);
        }
        let found = (self.field(CALL).load(Ordering::Acquire), self.field(COUNT).load(Ordering::Acquire));
        // The writer does not reuse the header before it has finished `seq + HEADERS` operations.
        let current = done.0.load(Ordering::Relaxed) < seq + HEADERS;
        (tag, current.then_some(found))
    }
}

/// Fields of a process's doorbell. A publisher notifies it if a thread may be waiting.
pub struct Doorbell<'a> {
    /// Number of notifications; the futex.
    pub flag: &'a AtomicU32,
    /// Number of threads that wait or are about to wait.
    pub sleepers: &'a AtomicU32,
    /// Number of threads that wait for descriptors too; they are woken through the eventfd.
    pub pollers: &'a AtomicU32,
}

impl Doorbell<'_> {
    /// Announces a wait. Later publications notify this thread; earlier ones are visible to the final poll, which
    /// follows this call. Returns the ticket that `sleep` takes.
    pub fn prepare_wait(&self) -> u32 {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // Pairs with `publish_fence`: either the publisher observes this waiter, or the final poll observes the
        // publication.
        fence(Ordering::SeqCst);
        self.flag.load(Ordering::Acquire)
    }

    /// Ends the wait, whether the thread slept or not.
    pub fn cancel_wait(&self) {
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Polls descriptors, unless a notification followed the ticket.
    pub fn poll(&self, ticket: u32, poll: impl FnOnce()) {
        self.pollers.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `notify`: either the publisher observes this poller, or this poller observes the
        // notification.
        fence(Ordering::SeqCst);
        if self.flag.load(Ordering::Acquire) == ticket {
            poll();
        }
        self.pollers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Orders earlier publications before the check `has_waiters`: a thread that announces its wait after the check
    /// observes them in its final poll.
    #[inline]
    pub fn publish_fence() {
        fence(Ordering::SeqCst);
    }

    /// Returns true if a thread may be waiting; called after `publish_fence`.
    #[inline]
    pub fn has_waiters(&self) -> bool {
        self.sleepers.load(Ordering::Relaxed) != 0
    }

    /// Notifies all waiters: `wake` wakes the futex waiters, `call` the pollers.
    pub fn notify(&self, wake: impl FnOnce(&AtomicU32), call: impl FnOnce()) {
        // Release: a thread that observes the notification observes the publication.
        self.flag.fetch_add(1, Ordering::Release);
        wake(self.flag);
        fence(Ordering::SeqCst);
        if self.pollers.load(Ordering::Relaxed) != 0 {
            call();
        }
    }
}
