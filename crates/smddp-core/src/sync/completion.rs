//! Completion of an asynchronous call.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{OnceLock, PoisonError};
use std::time::Duration;

use super::{AtomicBool, AtomicI64, Condvar, Mutex, MutexGuard, Ordering};
use crate::error::{Error, Result};

/// Object that a caller keeps alive until its call is over.
pub type KeepAlive = Box<dyn Any + Send + Sync>;
type Callback = Box<dyn FnOnce() + Send>;

/// State of a call, shared by the engine and waiting threads.
#[derive(Default)]
pub(crate) struct Completion {
    done: AtomicBool,
    /// All work of the call is on a device.
    enqueued: AtomicBool,
    /// The operation uses private copies of its buffers.
    detached: AtomicBool,
    error: OnceLock<Error>,
    source: AtomicI64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    keep: Option<KeepAlive>,
    callbacks: Vec<Callback>,
    /// Callbacks for the time when all work is on a device.
    on_enqueued_callbacks: Vec<Callback>,
    /// Number of sleeping threads. Without any, a notification would be a needless system call.
    waiters: usize,
}

impl Completion {
    pub(crate) fn new(keep: Option<KeepAlive>) -> Self {
        Self {
            source: AtomicI64::new(-1),
            state: Mutex::new(State { keep, ..State::default() }),
            ..Self::default()
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_source(&self, rank: usize) {
        self.source.store(rank as i64, Ordering::Relaxed);
    }

    pub(crate) fn finish(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            let _ = self.error.set(error);
        }
        let mut state = self.lock();
        // Release: a thread that sees `done` sees the output.
        self.done.store(true, Ordering::Release);
        let on_enqueued_callbacks = std::mem::take(&mut state.on_enqueued_callbacks);
        let callbacks = std::mem::take(&mut state.callbacks);
        // Dropped outside the lock, because it may run code of the caller.
        let keep = state.keep.take();
        if state.waiters > 0 {
            self.changed.notify_all();
        }
        drop(state);
        on_enqueued_callbacks.into_iter().chain(callbacks).for_each(run_callback);
        run_callback(|| drop(keep));
    }

    /// Records that all work of the call is on a device.
    pub(crate) fn enqueued(&self) {
        let mut state = self.lock();
        self.enqueued.store(true, Ordering::Release);
        let on_enqueued_callbacks = std::mem::take(&mut state.on_enqueued_callbacks);
        if state.waiters > 0 {
            self.changed.notify_all();
        }
        drop(state);
        on_enqueued_callbacks.into_iter().for_each(run_callback);
    }

    /// Records that the operation uses `copies` from now on, and releases the caller's buffers.
    pub(crate) fn detach(&self, copies: KeepAlive) {
        let mut state = self.lock();
        let keep = state.keep.replace(copies);
        self.detached.store(true, Ordering::Release);
        if state.waiters > 0 {
            self.changed.notify_all();
        }
        drop(state);
        run_callback(|| drop(keep));
    }

    /// Returns true once the caller's buffers are released: the operation is over, or it uses copies of them.
    pub(crate) fn is_released(&self) -> bool {
        self.is_done() || self.detached.load(Ordering::Acquire)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(crate) fn outcome(&self) -> Result<()> {
        self.error.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    pub(crate) fn source(&self) -> Option<usize> {
        usize::try_from(self.source.load(Ordering::Relaxed)).ok()
    }

    /// Sleeps until the call is done, or `at_most`. If `enqueued`, also ends when all work of the call is on a
    /// device.
    pub(crate) fn sleep(&self, at_most: Duration, enqueued: bool) {
        let mut state = self.lock();
        let reached = enqueued && self.enqueued.load(Ordering::Acquire);
        if !self.is_done() && !reached {
            state.waiters += 1;
            let (mut state, _) =
                self.changed.wait_timeout(state, at_most).unwrap_or_else(PoisonError::into_inner);
            state.waiters -= 1;
        }
    }

    /// Calls `callback` once when the call is done; immediately if it is done already.
    pub(crate) fn on_done(&self, callback: Callback) {
        let mut state = self.lock();
        if self.is_done() {
            drop(state);
            callback();
        } else {
            state.callbacks.push(callback);
        }
    }

    /// Calls `callback` once when all work is on a device or the call is done; immediately if that is the case
    /// already.
    pub(crate) fn on_enqueued(&self, callback: Callback) {
        let mut state = self.lock();
        if self.is_done() || self.enqueued.load(Ordering::Acquire) {
            drop(state);
            callback();
        } else {
            state.on_enqueued_callbacks.push(callback);
        }
    }
}

/// Runs a callback of the caller. A panic in it is reported by the panic's own message and does not affect the
/// group.
fn run_callback(what: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(what));
}

/// Check for a pending signal (Ctrl-C), called by waiting threads a few times a second.
static INTERRUPT: OnceLock<fn() -> bool> = OnceLock::new();

/// Sets the check that interrupts waiting calls after a signal. Only the first call has an effect.
pub fn set_interrupt(check: fn() -> bool) {
    let _ = INTERRUPT.set(check);
}

thread_local! {
    /// True while this thread checks for a signal, and thus in the program's signal handlers.
    static CHECKING: Cell<bool> = const { Cell::new(false) };
}

/// Runs the program's signal handlers, which may call the core. Returns true if the wait must end, also after a
/// panic in the check, because the caller's buffers may be in use.
pub fn interrupted() -> bool {
    let outer = CHECKING.replace(true);
    let check = || INTERRUPT.get().is_some_and(|check| check());
    let interrupted = catch_unwind(check).unwrap_or(true);
    CHECKING.set(outer);
    interrupted
}

/// Returns true if the caller is a signal handler that interrupted a call of this thread.
pub(crate) fn in_handler() -> bool {
    CHECKING.get()
}
