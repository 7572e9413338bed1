//! Waits of calling threads. A waiting thread owns the engine of its group and advances it until the operation
//! completes.

use std::any::Any;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use smddp_base::fork;

use crate::device::DeviceCompletion;
use crate::engine::deadlock::{WaitWatch, stored_error};
use crate::engine::fail::Phase;
use crate::engine::messages::Request;
use crate::engine::owned_engine::OwnedEngine;
use crate::engine::progress_loop::{Exit, Groups, progress};
use crate::engine::shared::SharedState;
use crate::engine::wait_limit::Limit;
use crate::engine::wait_plan::{Check, MAX_SLEEP, Pass, UNSIGNALED_SLEEP, WaitPlan};
use crate::engine::{Command, Engine};
use crate::error::{Error, Result};
use crate::sync::completion::Completion;
use crate::sync::lock;
use crate::sync::ownership::Submitted;

/// Condition that ends a progress loop.
pub(crate) enum Until<'a> {
    /// The collective with this sequence number is over.
    Over(u64),
    /// The call is done. With a device: or all its work is on the device.
    Work(&'a Completion, Option<&'a DeviceCompletion>),
    /// No operation is on a device.
    DevicesIdle,
    /// No call is pending.
    Idle,
    /// The group has failed or is closed, and its report is sent.
    Failed,
    /// This rank has left the group.
    Left,
}

impl Until<'_> {
    /// Returns true if the condition is met, as visible without the engine.
    fn is_seen(&self) -> bool {
        matches!(self, Self::Work(work, device) if work.is_done() || device.is_some_and(DeviceCompletion::enqueued))
    }

    /// Sleeps until the owner of the engine signals the condition, or `at_most`.
    fn sleep(&self, at_most: Duration) {
        if let Self::Work(work, device) = self {
            work.sleep(at_most, device.is_some());
        }
    }
}

/// The group of a thread that waits for `until`.
struct Waiting<'a, 'e> {
    engine: &'a mut OwnedEngine<'e>,
    until: &'a Until<'a>,
}

impl Groups for Waiting<'_, '_> {
    #[inline]
    fn pass(&mut self, check: Option<Check>, fds: &mut Vec<(RawFd, i16)>) -> Pass {
        self.engine.pass(check, fds)
    }

    #[inline]
    fn exit(&self) -> Option<Exit> {
        let outcome = self.engine.outcome_of(self.until).map(Exit::Reached);
        // The thread that ended the group completes its calls after it has released the engine.
        let ends = self.engine.ended.is_some() || matches!(self.until, Until::Work(..));
        outcome.or_else(|| (ends && self.engine.has_failed()).then_some(Exit::Interrupted))
    }
}

/// Polls in [`OwnedEngine::poll_briefly`]; each takes about 30 ns.
const BRIEF_POLLS: u32 = 24;

/// Attempts to own the engine before a wait sleeps.
const OWNERSHIP_TRIES: u32 = 50;

/// Counts a wait that has released the engine for a signal check. While one exists, `try_own_for` returns `None`.
struct LongWait<'a>(&'a AtomicUsize);

impl<'a> LongWait<'a> {
    fn new(state: &'a SharedState) -> Self {
        state.long_waits.fetch_add(1, Ordering::Relaxed);
        Self(&state.long_waits)
    }
}

impl Drop for LongWait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl OwnedEngine<'_> {
    /// Runs `action` as the owner of the engine. A panic in it is a bug that leaves undefined state, so it fails
    /// this group, and only this group. Returns `None` in that case.
    #[inline]
    pub(crate) fn guard<T>(&mut self, action: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let outcome = catch_unwind(AssertUnwindSafe(|| action(self)));
        outcome.map_err(|panic| self.fail_after_panic(&*panic)).ok()
    }

    #[cold]
    fn fail_after_panic(&mut self, panic: &(dyn Any + Send)) {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or_default();
        let state = self.state();
        let error = Error::System {
            operation: format!("progress of group `{}` on rank {}", state.name, state.rank),
            reason: format!(
                "the library panicked: {text}; this is a bug, please report it with the preceding log lines"
            ),
        };
        // The transport itself may be broken. The other ranks then find out when this process exits; the local
        // callers are notified here.
        let is_second = !self.is_running();
        if catch_unwind(AssertUnwindSafe(|| self.fail_group(error))).is_err() || is_second {
            self.abandon(Instant::now());
        }
    }

    /// Runs one round of all steps: takes commands, advances the operations, and with `check` observes failures and
    /// deadlines, notifies the other ranks, and adds the descriptors that end a sleep to `fds`. Does not block. An
    /// error or a panic ends the group.
    #[inline]
    pub(crate) fn pass(&mut self, check: Option<Check>, fds: &mut Vec<(RawFd, i16)>) -> Pass {
        let mut pass = Pass { rests: false, ..Pass::EMPTY };
        let round = self.guard(|engine| {
            engine.take_commands();
            let outcome = match engine.is_running() {
                true => engine.poll(),
                false => Ok(engine.poll_failed(Instant::now())),
            };
            pass.moved = engine.fail_on_error(outcome);
            let Some(Check { now, before_sleep }) = check else { return };
            if before_sleep && pass.moved {
                return;
            }
            if engine.is_running() {
                let outcome = engine.check(now);
                pass.moved |= engine.fail_on_error(outcome);
                engine.group.flush();
            }
            pass.poll_interval = if engine.group.wait_sources(fds) { MAX_SLEEP } else { UNSIGNALED_SLEEP };
            pass.max_sleep = engine.max_sleep(now);
        });
        // A panic has failed the group.
        pass.moved |= round.is_none();
        pass
    }

    /// Runs one pass without a check. Returns true if anything moved.
    pub(crate) fn poll_once(&mut self) -> bool {
        self.pass(None, &mut Vec::new()).moved
    }

    /// Polls up to `BRIEF_POLLS` times: less than a microsecond inside a node.
    pub(crate) fn poll_briefly(&mut self, until: &Until<'_>) -> Option<Result<()>> {
        (0..BRIEF_POLLS).find_map(|_| {
            self.poll_once();
            self.outcome_of(until)
        })
    }

    /// Advances the group until `until` is met, or the caller has to act.
    pub(crate) fn progress(&mut self, until: &Until<'_>, limit: &mut Limit) -> Exit {
        let SharedState { spin_policy, sleeper, .. } = &**self.state();
        let mut wait = WaitPlan::new(spin_policy, Some(sleeper).filter(|sleeper| sleeper.can_sleep()));
        progress(&mut Waiting { engine: self, until }, limit, &mut wait)
    }

    /// Fails the group after an error.
    pub(crate) fn fail_on_error(&mut self, outcome: Result<bool>) -> bool {
        outcome.unwrap_or_else(|error| {
            self.fail_group(error);
            true
        })
    }

    /// Ends the group with `error`, unless it has failed already, and notifies the other ranks.
    pub(crate) fn fail_group(&mut self, error: Error) {
        if !self.is_running() {
            return;
        }
        let state = self.state();
        // An abort may have set another reason, whose command follows.
        // A rank of a deadlock reports it, even if another rank of the cycle has ended first. Other failures keep their reason.
        let is_end = matches!(error, Error::Deadlock { .. } | Error::Closed { .. });
        let first = state.failure.get_or_init(|| {
            let stored = if is_end { stored_error(state) } else { None };
            stored.unwrap_or(error)
        });
        // A dead group does not continue, so a new process may take the rank.
        *lock(&state.claim) = None;
        self.record_failure(first);
        self.fail(first, Instant::now());
    }

    /// Returns the outcome if `until` is met or the call of `until` ended with the group.
    pub(crate) fn outcome_of(&self, until: &Until<'_>) -> Option<Result<()>> {
        let reached = match until {
            Until::Over(number) if self.finished > *number => true,
            // A call that was submitted while the group failed is queued until the next poll.
            Until::Over(number) if self.has_failed() && !self.holds(*number) => {
                let state = self.state();
                return state.failure.get().map(|error| Err(state.report(error)));
            }
            Until::Over(_) => false,
            Until::Work(work, _) if work.is_done() => return Some(work.outcome()),
            Until::Work(..) => until.is_seen(),
            Until::DevicesIdle => !self.has_device_calls(),
            Until::Idle => !self.has_calls(),
            Until::Failed => self.has_failed(),
            Until::Left => self.phase == Phase::Left,
        };
        reached.then_some(Ok(()))
    }
}

impl SharedState {
    /// Starts progress on a submitted command: on this thread if the engine is free, else by waking its owner. An
    /// owner since the submission takes the command, or registers the group when it releases the engine.
    pub(crate) fn start_progress(self: &Arc<Self>) {
        match self.try_own() {
            Some(mut engine) => drop(engine.poll_once()),
            None => self.sleeper.notify_if_waiting(),
        }
    }

    /// Starts a message after all earlier submissions, on this thread if the engine is free. Between nodes the waiting
    /// thread receives, because that costs a system call per poll; a group of one node polls fully.
    pub(crate) fn start_message(self: &Arc<Self>, message: Request) {
        if let Some(mut engine) = self.try_own() {
            engine.guard(|owned| {
                owned.take_commands();
                let engine: &mut Engine = owned;
                engine.messages.post(message);
                if engine.is_running() && engine.group.info().spans_nodes {
                    engine.messages.send(&mut engine.group);
                } else {
                    owned.poll_once();
                }
            });
        } else if self.engine.submit(|| Command::Request(message)) == Submitted::Accepted {
            self.sleeper.notify_if_waiting();
        } else {
            self.start_progress();
        }
    }

    /// Ends the group with `error`, unless it has ended, and sends the report for at most 50 ms.
    pub(crate) fn abort(self: &Arc<Self>, error: Error) {
        let error = self.failure.get_or_init(|| error).clone();
        if self.engine.submit(|| Command::Abort(error)) == Submitted::Orphaned
            && let Some(mut engine) = self.try_own()
        {
            engine.progress(&Until::Failed, &mut Limit::uninterrupted(None));
        }
        self.sleeper.notify();
    }

    /// Returns the engine after waiting until no other thread owns it. Callers have reason to expect that soon.
    pub(crate) fn own(self: &Arc<Self>) -> OwnedEngine<'_> {
        loop {
            if let Some(engine) = self.try_own() {
                return engine;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Returns the engine, waiting up to 50 ms for another thread to finish a short poll. Returns `None` while a
    /// thread waits in this group, also if a signal handler interrupted that wait.
    pub(crate) fn try_own_for(self: &Arc<Self>) -> Option<OwnedEngine<'_>> {
        let begun = Instant::now();
        loop {
            if self.long_waits.load(Ordering::Relaxed) > 0 {
                return None;
            }
            let engine = self.try_own();
            if engine.is_some() || begun.elapsed() > Duration::from_millis(50) {
                return engine;
            }
            std::thread::yield_now();
        }
    }

    /// Waits until collective `number`, which this thread has started, completes. After an interrupt the collective
    /// continues with copies of its buffers.
    pub(crate) fn run_to_completion(
        self: &Arc<Self>,
        mut engine: OwnedEngine<'_>,
        number: u64,
    ) -> Result<()> {
        let mut limit = Limit::new(None);
        let until = Until::Over(number);
        let work = loop {
            if let Exit::Reached(outcome) = engine.progress(&until, &mut limit) {
                return outcome;
            }
            // Once the engine is released, only a completion shows the end of the collective.
            if let Some(work) = engine.work_of(number) {
                break work;
            }
        };
        let _ = engine.release_unregistered();
        let outcome = self.wait_within(&Until::Work(&work, None), &mut limit, true);
        if outcome == Err(Error::Interrupted) {
            self.detach(&work);
        }
        outcome?;
        work.outcome().map_err(|error| self.report(&error))
    }

    /// Waits for `until`, polling while the engine is free and sleeping while another thread owns it. Returns false
    /// on timeout.
    pub(crate) fn wait_until(self: &Arc<Self>, until: &Until<'_>, timeout: Option<Duration>) -> Result<bool> {
        if self.forks != fork::generation() {
            return Err(Error::Forked { group: self.name.clone() });
        }
        let mut limit = Limit::new(timeout.and_then(|timeout| Instant::now().checked_add(timeout)));
        self.wait_within(until, &mut limit, false)
    }

    /// Waits until the ranks have compared a result.
    pub(crate) fn wait_for_comparison(self: &Arc<Self>, comparison: &Completion) -> Result<()> {
        self.wait_until(&Until::Work(comparison, None), None)?;
        comparison.outcome().map_err(|error| self.report(&error))
    }

    /// Implements [`Self::wait_until`]. `unregistered`: this thread has released the engine without registering
    /// pending work.
    fn wait_within(
        self: &Arc<Self>,
        until: &Until<'_>,
        limit: &mut Limit,
        mut unregistered: bool,
    ) -> Result<bool> {
        // The progress thread usually owns the engine for one poll, which is much shorter than a sleep.
        let (mut attempts, mut max_sleep) = (OWNERSHIP_TRIES, Duration::from_micros(50));
        let (mut long_wait, mut watch) = (None, WaitWatch::default());
        let outcome = loop {
            if until.is_seen() {
                break Ok(true);
            }
            if limit.check_due(Instant::now()) {
                long_wait.get_or_insert_with(|| LongWait::new(self));
                if limit.is_interrupted() {
                    break Err(Error::Interrupted);
                }
                if let Until::Work(work, _) = until {
                    unregistered |= watch.observe(self, work, !limit.is_unbounded());
                }
                // A signal handler may have made calls of this group, and may have outlasted the wait.
                continue;
            }
            if let Some(mut engine) = self.try_own() {
                if let Exit::Reached(_) = engine.progress(until, limit) {
                    return Ok(true);
                }
                // This thread owns the engine again soon. Until then the progress thread does not poll.
                unregistered = true;
                let has_failed = engine.has_failed();
                let _ = engine.release_unregistered();
                if has_failed {
                    until.sleep(Duration::from_millis(1));
                }
            } else if attempts > 0 {
                attempts -= 1;
                std::thread::yield_now();
            } else {
                if self.engine.has_commands() {
                    // The owner of the engine may sleep without having seen this thread's command.
                    self.sleeper.notify();
                }
                until.sleep(max_sleep);
                max_sleep = (max_sleep * 2).min(Duration::from_millis(5));
            }
            if limit.has_expired(Instant::now()) && !until.is_seen() {
                break Ok(false);
            }
        };
        // Another owner of the engine registers pending work when it releases the engine.
        if unregistered {
            drop(self.try_own());
        }
        outcome
    }

    /// Polls for at most `limit`, unless another thread waits in this group. No signal ends the wait.
    pub(crate) fn run_for(self: &Arc<Self>, until: &Until<'_>, limit: Duration) {
        let mut limit = Limit::uninterrupted(Instant::now().checked_add(limit));
        if let Some(mut engine) = self.try_own_for() {
            engine.progress(until, &mut limit);
        }
    }

    /// Waits until the buffers of an interrupted collective are released. The owner of the engine, woken by
    /// `Sleeper::notify`, releases them at its next poll.
    pub(crate) fn detach(self: &Arc<Self>, work: &Arc<Completion>) {
        let _ = self.engine.submit(|| Command::Detach(work.clone()));
        while !work.is_released() {
            match self.try_own() {
                Some(mut engine) => drop(engine.poll_once()),
                None => self.sleeper.notify(),
            }
            if !work.is_released() {
                work.sleep(Duration::from_millis(1), false);
            }
        }
    }
}
