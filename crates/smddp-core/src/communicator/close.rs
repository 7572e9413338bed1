//! Abort and close of a group.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use smddp_base::fork::{self, PerProcess};

use super::Communicator;
use crate::engine::Command;
use crate::engine::progress_loop::Exit;
use crate::engine::shared::{DESTROYED, SharedState};
use crate::engine::wait_limit::Limit;
use crate::engine::waiting::Until;
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::sync::completion::in_handler;
use crate::sync::lock;

/// Longest wait for operations on devices when their group is closed.
const DEVICE_COMPLETION_TIME: Duration = Duration::from_secs(30);

pub(super) static OPEN_GROUPS: PerProcess<Mutex<Vec<Weak<SharedState>>>> = PerProcess::new();

/// Threads that close groups.
static CLOSING: PerProcess<Mutex<Vec<JoinHandle<()>>>> = PerProcess::new();

impl Communicator {
    /// Aborts the group: all waiting calls fail, on this rank and on its peers. Waits for no rank; sends the
    /// report for at most 50 ms.
    pub fn abort(&self, reason: &str) {
        let state = &self.0;
        if state.forks != fork::generation() {
            return;
        }
        let reason = format!("aborted: {reason}");
        state.abort(Error::Closed { group: state.name.clone(), reason });
    }

    /// Leaves the group together with all other ranks. Waits up to `limit` for them and compares the calls that
    /// each rank made. Late and lost ranks are not compared; that is not an error. The group is closed in any case. In
    /// a signal handler that interrupted a call it is closed without the comparison.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the calls differ and no call has reported that, for example another root or a message
    /// without recv. [`Error::Interrupted`] if a signal ended the wait; the group is closed then, too.
    pub fn shutdown_checked(&self, limit: Duration) -> Result<()> {
        let state = &self.0;
        let mut outcome = Ok(false);
        let mut interrupted = false;
        let is_open = state.forks == fork::generation() && !state.closed.load(Ordering::Acquire);
        if is_open && state.size > 1 && !in_handler() {
            state.run_for(&Until::DevicesIdle, DEVICE_COMPLETION_TIME);
            let begun = Instant::now();
            let left = || limit.saturating_sub(begun.elapsed());
            if state.failure.get().is_none() {
                let deleted = if limit.is_zero() { Ok(()) } else { state.delete_claim() };
                outcome = deleted.and_then(|()| {
                    state.compare(|work| match state.wait_until(&Until::Work(work, None), Some(left()))? {
                        true => work.outcome(),
                        false => Err(Error::Closed {
                            group: state.name.clone(),
                            reason: "the time limit of the shutdown has passed".to_owned(),
                        }),
                    })
                });
            }
            match &outcome {
                Ok(true) => state.run_for(&Until::Idle, left()),
                Ok(false) => {}
                Err(reason) => {
                    log::say(
                        Level::Info,
                        &format!(
                            "closed group `{}` without comparing the calls of all ranks: {reason}",
                            state.name
                        ),
                    );
                    interrupted = *reason == Error::Interrupted;
                    state.cancel_leaving();
                }
            }
            // The error that ended the group, unless a call has reported it.
            outcome = match state.failure.get() {
                Some(error @ Error::Mismatch { .. }) if !state.abort_reported.load(Ordering::Relaxed) => {
                    Err(error.clone())
                }
                _ => Ok(true),
            };
        }
        self.close();
        if interrupted { Err(Error::Interrupted) } else { outcome.map(drop) }
    }

    /// Closes the group. Waits for calls on devices; other pending calls end with an error, and later calls fail.
    /// Idempotent.
    pub fn close(&self) {
        let state = &self.0;
        if state.forks != fork::generation() || state.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        *lock(&state.claim) = None;
        state.run_for(&Until::DevicesIdle, DEVICE_COMPLETION_TIME);
        let error = Error::Closed { group: state.name.clone(), reason: DESTROYED.to_owned() };
        // A group that is already dead keeps its first reason.
        let error = state.failure.get_or_init(|| error).clone();
        let _ = state.engine.submit(|| Command::Close(error));
        state.sleeper.notify();
        // Each release of the engine completes calls, before the wait for the other ranks ends.
        let sites = loop {
            let mut engine = state.own();
            if let Exit::Reached(_) = engine.progress(&Until::Left, &mut Limit::uninterrupted(None)) {
                break std::mem::take(&mut engine.sites);
            }
        };
        lock(&state.handles).clear();
        drop(sites);
    }

    /// Closes the group like [`Communicator::close`], for a caller that continues in another group immediately.
    /// Between nodes, delivering the reason of a dead group may take up to two seconds, so a separate thread waits
    /// for it. This call waits for operations on devices.
    pub fn close_in_background(&self) {
        if self.error().is_none() || !lock(&self.0.handles).is_empty() {
            return self.close();
        }
        let dead = self.clone();
        let begun = std::thread::Builder::new().name("smddp-leave".to_owned()).spawn(move || dead.close());
        let Ok(thread) = begun else { return self.close() };
        let mut closing = lock(CLOSING.get());
        closing.retain(|thread| !thread.is_finished());
        closing.push(thread);
    }
}

/// Closes all groups of this process. Called at exit, so that peers see a departure and not a death.
pub fn shutdown() {
    let open: Vec<_> = lock(OPEN_GROUPS.get()).drain(..).filter_map(|group| group.upgrade()).collect();
    for comm in open {
        Communicator(comm).close();
    }
    join_closing_threads();
}

/// Waits for the threads that close groups.
fn join_closing_threads() {
    let closing = std::mem::take(&mut *lock(CLOSING.get()));
    closing.into_iter().for_each(|thread| drop(thread.join()));
}
