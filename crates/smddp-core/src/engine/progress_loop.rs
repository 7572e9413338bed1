//! The progress loop. A waiting thread owns the engine of its group and polls it until the operation completes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use smddp_base::fork;

use crate::device::DeviceCompletion;
use crate::engine::messages::Request;
use crate::engine::owned_engine::OwnedEngine;
use crate::engine::shared::SharedState;
use crate::engine::wait_limit::Limit;
use crate::engine::wait_plan::{WaitPlan, max_poll_interval};
use crate::engine::{Command, Engine};
use crate::error::{Error, Result};
use crate::sync::completion::Completion;
use crate::sync::lock;
use crate::sync::ownership::Submitted;

/// Condition that ends a progress loop.
pub(crate) enum Until<'a> {
    /// The collective with this sequence number is over.
    Over(u64),
    Done(&'a Completion),
    /// All work of the call is on the device, or the call is done.
    Enqueued(&'a Completion, &'a DeviceCompletion),
    /// No operation is on a device.
    DevicesIdle,
    /// No call is pending.
    Idle,
    /// The group has failed or is closed, and its report is sent.
    Failed,
}

impl Until<'_> {
    /// Returns the completion that another thread may signal.
    fn work(&self) -> Option<&Completion> {
        match self {
            Self::Done(work) | Self::Enqueued(work, _) => Some(work),
            _ => None,
        }
    }

    /// Returns true if the condition is met, as visible without the engine.
    fn is_seen(&self) -> bool {
        let enqueued = matches!(self, Self::Enqueued(_, completion) if completion.enqueued());
        enqueued || self.work().is_some_and(Completion::is_done)
    }
}

/// Polls in [`SharedState::poll_briefly`]; each takes about 30 ns.
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

impl SharedState {
    /// Runs `action` as the owner of the engine. A panic in it is a bug that leaves undefined state, so it fails
    /// this group, and only this group. Returns `None` in that case.
    pub(crate) fn guard<T>(
        &self,
        engine: &mut OwnedEngine<'_>,
        action: impl FnOnce(&mut OwnedEngine<'_>) -> T,
    ) -> Option<T> {
        let panic = match catch_unwind(AssertUnwindSafe(|| action(engine))) {
            Ok(value) => return Some(value),
            Err(panic) => panic,
        };
        let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        let error = Error::System {
            operation: format!("progress of group `{}` on rank {}", self.name, self.rank),
            reason: format!(
                "the library panicked: {text}; this is a bug, please report it with the preceding log lines"
            ),
        };
        // The transport itself may be broken. The other ranks then find out when this process exits; the local
        // callers are notified here.
        let is_second = !engine.is_running();
        if catch_unwind(AssertUnwindSafe(|| self.fail_group(engine, error))).is_err() || is_second {
            engine.abandon(Instant::now());
        }
        None
    }

    /// Guarded [`Self::poll`] for callers that poll once.
    pub(crate) fn guarded_poll(&self, engine: &mut OwnedEngine<'_>) -> bool {
        self.guard(engine, |engine| self.poll(engine)).unwrap_or(true)
    }

    /// Takes submitted commands and advances the operations; an error fails the group. Returns true if anything
    /// moved.
    pub(crate) fn poll(&self, engine: &mut OwnedEngine<'_>) -> bool {
        engine.take_commands();
        if !engine.is_running() {
            return engine.poll_failed(Instant::now());
        }
        let outcome = engine.poll();
        self.fail_on_error(engine, outcome)
    }

    /// Posts a message and sends what can be sent.
    fn post_and_send(&self, engine: &mut OwnedEngine<'_>, message: Request) -> bool {
        engine.take_commands();
        engine.messages.post(message);
        if !engine.is_running() {
            return engine.poll_failed(Instant::now());
        }
        let outcome = engine.start_message();
        self.fail_on_error(engine, outcome)
    }

    /// Fails the group if a poll failed.
    fn fail_on_error(&self, engine: &mut OwnedEngine<'_>, outcome: Result<bool>) -> bool {
        outcome.unwrap_or_else(|error| {
            self.fail_group(engine, error);
            true
        })
    }

    /// Starts progress on a submitted command: on this thread if the engine is free, else by waking its owner. An
    /// owner since the submission takes the command, or registers the group when it releases the engine.
    pub(crate) fn start_progress(self: &Arc<Self>) {
        match self.try_own() {
            Some(engine) => self.poll_once(engine, Self::poll),
            None => self.sleeper.notify_if_waiting(),
        }
    }

    /// Starts a message after all earlier submissions, on this thread if the engine is free.
    pub(crate) fn start_message(self: &Arc<Self>, message: Request) {
        match self.try_own() {
            Some(engine) => self.poll_once(engine, |state, engine| state.post_and_send(engine, message)),
            None => match self.engine.submit(|| Command::Request(message)) {
                Submitted::Accepted => self.sleeper.notify_if_waiting(),
                Submitted::Orphaned => self.start_progress(),
            },
        }
    }

    fn poll_once(
        self: &Arc<Self>,
        mut engine: OwnedEngine<'_>,
        action: impl FnOnce(&Self, &mut OwnedEngine<'_>) -> bool,
    ) {
        // A panic fails the group, so its outcome needs no check.
        let _ = self.guard(&mut engine, |engine| action(self, engine));
        engine.group.flush();
    }

    /// Returns the engine after waiting until no other thread owns it. Callers have reason to expect that soon.
    pub(crate) fn own(self: &Arc<Self>) -> OwnedEngine<'_> {
        let mut attempts = 0;
        loop {
            if let Some(engine) = self.try_own() {
                return engine;
            }
            attempts += 1;
            match attempts {
                ..=OWNERSHIP_TRIES => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
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

    /// Checks for failures that explain missing progress.
    pub(crate) fn check(&self, engine: &mut OwnedEngine<'_>, now: Instant) {
        if engine.is_running()
            && let Err(error) = engine.check(now)
        {
            self.fail_group(engine, error);
        }
    }

    /// Ends the group with `error`, unless it has failed already, and notifies the other ranks.
    pub(crate) fn fail_group(&self, engine: &mut OwnedEngine<'_>, error: Error) {
        if !engine.is_running() {
            return;
        }
        // An abort may have set another reason, whose command follows.
        let first = self.failure.get_or_init(|| error);
        // A dead group does not continue, so a new process may take the rank.
        *lock(&self.claim) = None;
        engine.leave_error(first);
        engine.report_failure();
        engine.fail(first, Instant::now());
    }

    /// Returns the outcome if `until` is met or the call of `until` ended with the group.
    pub(crate) fn outcome_of(&self, engine: &Engine, until: &Until<'_>) -> Option<Result<()>> {
        match until {
            Until::Over(number) if engine.finished > *number => Some(Ok(())),
            // A call that was submitted while the group failed is queued until the next poll.
            Until::Over(number) if engine.has_failed() && !engine.holds(*number) => {
                self.failure.get().map(|error| Err(self.report(error)))
            }
            Until::Over(_) => None,
            Until::Done(work) => work.is_done().then(|| work.outcome()),
            Until::Enqueued(work, _) if work.is_done() => Some(work.outcome()),
            Until::Enqueued(_, completion) => completion.enqueued().then_some(Ok(())),
            Until::DevicesIdle => (!engine.has_device_calls()).then_some(Ok(())),
            Until::Idle => (!engine.has_calls()).then_some(Ok(())),
            Until::Failed => engine.has_failed().then_some(Ok(())),
        }
    }

    /// Polls until `until` is met; the caller owns the engine. Returns `None` if the time is up or the caller has
    /// to release the engine for a signal check.
    pub(crate) fn run_until(
        &self,
        engine: &mut OwnedEngine<'_>,
        until: &Until<'_>,
        limit: &mut Limit,
    ) -> Option<Result<()>> {
        // A panic fails the group, which is the outcome.
        self.guard(engine, |engine| self.run_loop(engine, until, limit))
            .unwrap_or_else(|| self.outcome_of(engine, until))
    }

    /// Polls up to `BRIEF_POLLS` times: less than a microsecond inside a node.
    pub(crate) fn poll_briefly(&self, engine: &mut OwnedEngine<'_>, until: &Until<'_>) -> Option<Result<()>> {
        let polls = |engine: &mut OwnedEngine<'_>| {
            for _ in 0..BRIEF_POLLS {
                self.poll(engine);
                if let Some(outcome) = self.outcome_of(engine, until) {
                    engine.group.flush();
                    return Some(outcome);
                }
            }
            None
        };
        self.guard(engine, polls).unwrap_or_else(|| self.outcome_of(engine, until))
    }

    fn run_loop(
        &self,
        engine: &mut OwnedEngine<'_>,
        until: &Until<'_>,
        limit: &mut Limit,
    ) -> Option<Result<()>> {
        let mut wait = WaitPlan::new(&self.spin_policy, Some(&self.sleeper));
        loop {
            if self.poll(engine) {
                wait.restart();
            }
            if let Some(outcome) = self.outcome_of(engine, until) {
                engine.group.flush();
                return Some(outcome);
            }
            // The thread that ended the group completes the call after it has released the engine.
            if engine.has_failed() && until.work().is_some() {
                return None;
            }
            // Either no progress, or continuous progress of other operations, which must not delay this call past
            // its deadline.
            if wait.check_due() {
                let was_running = engine.is_running();
                self.check(engine, Instant::now());
                if was_running && !engine.is_running() {
                    wait.restart();
                    continue;
                }
                if let Some(outcome) = self.outcome_of(engine, until) {
                    return Some(outcome);
                }
                let now = Instant::now();
                if limit.has_expired(now) || limit.check_due(now) {
                    return None;
                }
                if wait.is_announced() {
                    let mut fds = Vec::new();
                    let poll_interval = max_poll_interval(&engine.group, &mut fds);
                    wait.sleep(&fds, poll_interval, limit.remaining(now).min(engine.max_sleep(now)));
                    continue;
                }
            }
            wait.pause(|| engine.group.flush());
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
            if let Some(outcome) = self.run_until(&mut engine, &until, &mut limit) {
                return outcome;
            }
            // Once the engine is released, only a completion shows the end of the collective.
            if let Some(work) = engine.work_of(number) {
                break work;
            }
        };
        let _ = engine.release_unregistered();
        match self.wait_within(&Until::Done(&work), &mut limit, true) {
            Err(Error::Interrupted) => {
                self.detach(&work);
                Err(Error::Interrupted)
            }
            Err(error) => Err(error),
            Ok(_) => work.outcome().map_err(|error| self.report(&error)),
        }
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
        let mut long_wait = None;
        let outcome = loop {
            if until.is_seen() {
                break Ok(true);
            }
            if limit.check_due(Instant::now()) {
                long_wait.get_or_insert_with(|| LongWait::new(self));
                if let Err(interrupted) = limit.check_signals() {
                    break Err(interrupted);
                }
                // A signal handler may have made calls of this group, and may have outlasted the wait.
                continue;
            }
            if let Some(mut engine) = self.try_own() {
                if self.run_until(&mut engine, until, limit).is_some() {
                    return Ok(true);
                }
                // This thread owns the engine again soon. Until then the progress thread does not poll.
                unregistered = true;
                let has_failed = engine.has_failed();
                let _ = engine.release_unregistered();
                if has_failed && let Some(work) = until.work() {
                    work.sleep(Duration::from_millis(1), matches!(until, Until::Enqueued(..)));
                }
            } else if attempts > 0 {
                attempts -= 1;
                std::thread::yield_now();
            } else if let Some(work) = until.work() {
                if self.engine.has_commands() {
                    // The owner of the engine may sleep without having seen this thread's command.
                    self.sleeper.notify();
                }
                work.sleep(max_sleep, matches!(until, Until::Enqueued(..)));
                max_sleep = (max_sleep * 2).min(Duration::from_millis(5));
            }
            if limit.has_expired(Instant::now()) && !until.is_seen() {
                break Ok(false);
            }
        };
        // Another owner of the engine registers pending work when it releases the engine.
        if unregistered && let Some(engine) = self.try_own() {
            drop(engine);
        }
        outcome
    }

    /// Polls for at most `limit`, unless another thread waits in this group. No signal ends the wait.
    pub(crate) fn run_for(self: &Arc<Self>, until: &Until<'_>, limit: Duration) {
        let mut limit = Limit::uninterrupted(Instant::now().checked_add(limit));
        if let Some(mut engine) = self.try_own_for() {
            self.run_until(&mut engine, until, &mut limit);
        }
    }

    /// Waits until the buffers of an interrupted collective are released. The owner of the engine, woken by
    /// `Sleeper::notify`, releases them at its next poll.
    pub(crate) fn detach(self: &Arc<Self>, work: &Arc<Completion>) {
        let _ = self.engine.submit(|| Command::Detach(work.clone()));
        while !work.is_released() {
            match self.try_own() {
                Some(mut engine) => {
                    self.guarded_poll(&mut engine);
                    if engine.is_running() {
                        continue;
                    }
                }
                None => self.sleeper.notify(),
            }
            if !work.is_released() {
                work.sleep(Duration::from_millis(1), false);
            }
        }
    }
}
