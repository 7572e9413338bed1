//! Pending calls of a group in which threads of this process wait.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use crate::sync::lock;

/// A recorded call: its sequence number among the collectives, or among the sends and recvs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordedCall {
    Collective(u64),
    Message(u64),
}

/// Long waits of the threads of this process in one group.
#[derive(Default)]
pub(crate) struct WaitedCalls {
    /// Number of registered waits. Without any, no reader takes the lock.
    count: AtomicUsize,
    waits: Mutex<Vec<Wait>>,
    /// Other code may wait for collectives and for messages: a callback, or a stream of a device.
    is_uncertain: [AtomicBool; 2],
}

struct Wait {
    id: u64,
    since: Instant,
    /// `None` until a thread has read the call from the engine.
    call: Option<RecordedCall>,
}

/// Knowledge about the threads that wait in a pending call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    /// A thread waits since this time.
    Since(Instant),
    No,
    Unknown,
}

impl WaitedCalls {
    /// Registers a wait that began at `since`.
    pub(crate) fn begin(&self, id: u64, since: Instant) {
        let mut waits = lock(&self.waits);
        waits.push(Wait { id, since, call: None });
        self.count.store(waits.len(), Ordering::Relaxed);
    }

    /// Sets the call of a registered wait.
    pub(crate) fn identify(&self, id: u64, call: RecordedCall) {
        if let Some(wait) = lock(&self.waits).iter_mut().find(|wait| wait.id == id) {
            wait.call = Some(call);
        }
    }

    pub(crate) fn end(&self, id: u64) {
        let mut waits = lock(&self.waits);
        waits.retain(|wait| wait.id != id);
        self.count.store(waits.len(), Ordering::Relaxed);
    }

    /// Records that other code may wait for collectives (or messages) of this group.
    pub(crate) fn set_uncertain(&self, is_message: bool) {
        self.is_uncertain[usize::from(is_message)].store(true, Ordering::Relaxed);
    }

    /// Returns the sends and recvs in which threads wait, with the begin of the wait.
    pub(crate) fn messages(&self) -> Vec<(u64, Instant)> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let message = |wait: &Wait| match wait.call {
            Some(RecordedCall::Message(seq)) => Some((seq, wait.since)),
            _ => None,
        };
        lock(&self.waits).iter().filter_map(message).collect()
    }

    /// Returns whether a thread waits in a pending call.
    pub(super) fn of(&self, call: RecordedCall) -> Waited {
        let waits = lock(&self.waits);
        let since = waits.iter().filter(|wait| wait.call == Some(call)).map(|wait| wait.since).min();
        let is_message = matches!(call, RecordedCall::Message(_));
        let is_uncertain = self.is_uncertain[usize::from(is_message)].load(Ordering::Relaxed)
            || waits.iter().any(|wait| wait.call.is_none());
        match since {
            Some(since) => Waited::Since(since),
            None if is_uncertain => Waited::Unknown,
            None => Waited::No,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_without_a_waiting_thread_is_certain_only_if_no_other_code_may_wait() {
        let (waited, now) = (WaitedCalls::default(), Instant::now());
        let (first, second) = (RecordedCall::Message(1), RecordedCall::Message(2));
        assert_eq!(waited.of(first), Waited::No);
        waited.begin(7, now);
        assert_eq!(waited.of(first), Waited::Unknown, "the call of the wait is not known");
        waited.identify(7, first);
        assert_eq!((waited.of(first), waited.of(second)), (Waited::Since(now), Waited::No));
        assert_eq!(waited.messages(), [(1, now)]);
        waited.set_uncertain(true);
        assert_eq!((waited.of(first), waited.of(second)), (Waited::Since(now), Waited::Unknown));
        assert_eq!(waited.of(RecordedCall::Collective(2)), Waited::No);
        waited.end(7);
        assert_eq!((waited.of(first), waited.messages()), (Waited::Unknown, Vec::new()));
    }
}
