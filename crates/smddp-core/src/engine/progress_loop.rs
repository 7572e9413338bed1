//! The progress loop. A waiting thread owns the engine of its group and polls it until the operation completes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use smddp_transport::fork;

use crate::device::DeviceCompletion;
use crate::engine::messages::Request;
use crate::engine::progress_thread;
use crate::engine::shared::{DESTROYED, SharedState};
use crate::engine::wait_plan::{AboutToSleep, Backoff, CheckTimer};
use crate::engine::{Command, Engine};
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::observe::recorder;
use crate::sync::completion::{Completion, interrupted};
use crate::sync::lock;

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

/// Interval between two signal checks.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Polls in [`SharedState::poll_briefly`]; each takes about 30 ns.
const BRIEF_POLLS: u32 = 24;

/// Deadline and interruption of a wait.
pub(crate) struct Limit {
    until: Option<Instant>,
    /// True if a signal ends the wait.
    interruptible: bool,
    /// Time of the last signal check.
    last_check: Option<Instant>,
}

/// Attempts to own the engine before a wait sleeps.
const OWNERSHIP_TRIES: u32 = 50;

impl Limit {
    /// Creates a limit; `None` waits forever.
    pub(crate) fn new(until: Option<Instant>) -> Self {
        Self { until, interruptible: true, last_check: None }
    }

    /// Creates a limit that no signal ends. The handler of a pending signal runs afterwards.
    fn uninterrupted(until: Option<Instant>) -> Self {
        Self { until, interruptible: false, last_check: None }
    }

    /// Returns true if the deadline has passed.
    fn has_expired(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now >= until)
    }

    /// Returns true if the next signal check is due.
    fn check_due(&mut self, now: Instant) -> bool {
        self.interruptible && now.duration_since(*self.last_check.get_or_insert(now)) > SIGNAL_INTERVAL
    }

    /// Checks for a signal if a check is due. Signal handlers of the program run here and may call this group, so
    /// the calling thread must not own the engine.
    fn check_signals(&mut self) -> Result<()> {
        let now = Instant::now();
        if self.check_due(now) {
            self.last_check = Some(now);
            if interrupted() {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    fn remaining(&self, now: Instant) -> Duration {
        self.until.map_or(Duration::MAX, |until| until - now)
    }
}

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
    /// Returns the engine if no other thread owns it. A panic of an earlier owner poisons the mutex; that is
    /// ignored, because waiting threads would otherwise wait forever.
    pub(crate) fn try_own(&self) -> Option<MutexGuard<'_, Engine>> {
        match self.engine.try_lock() {
            Ok(engine) => Some(engine),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Runs `action` as the owner of the engine. A panic in it is a bug that leaves undefined state, so it fails
    /// this group, and only this group. Returns `None` in that case.
    pub(crate) fn guard<T>(&self, engine: &mut Engine, action: impl FnOnce(&mut Engine) -> T) -> Option<T> {
        let panic = match catch_unwind(AssertUnwindSafe(|| action(engine))) {
            Ok(value) => return Some(value),
            Err(panic) => panic,
        };
        let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        let error = Error::System {
            what: format!("progress of group `{}` on rank {}", self.name, self.rank),
            reason: format!(
                "the library panicked: {text}; this is a bug, please report it with the preceding log lines"
            ),
        };
        // The transport itself may be broken. The other ranks then find out when this process exits; the local
        // callers are notified here.
        if catch_unwind(AssertUnwindSafe(|| self.fail_group(engine, error))).is_err()
            && let Some(first) = self.failure.get()
        {
            engine.end_all(first, Instant::now());
        }
        None
    }

    /// Guarded [`Self::poll`] for callers that poll once.
    pub(crate) fn guarded_poll(&self, engine: &mut Engine) -> bool {
        self.guard(engine, |engine| self.poll(engine)).unwrap_or(true)
    }

    /// Takes submitted commands and advances the operations; an error fails the group. Returns true if anything
    /// moved.
    pub(crate) fn poll(&self, engine: &mut Engine) -> bool {
        self.take_commands(engine);
        if let Some(error) = self.failure.get() {
            let (had_calls, now) = (engine.has_calls(), Instant::now());
            let destroyed = matches!(error, Error::Closed { reason, .. } if reason == DESTROYED);
            if destroyed && had_calls {
                engine.depart(error, now);
            } else if had_calls || !destroyed && !engine.is_abort_sent {
                // Also without pending calls: an `abort` leaves the notice to the thread that owns the engine.
                engine.fail(error, now);
            }
            engine.keep_releasing(now);
            // Frames that notify the other ranks may still be queued, and only polls send them.
            return had_calls | (engine.group.busy() && engine.group.poll_network());
        }
        let outcome = engine.poll();
        self.fail_on_error(engine, outcome)
    }

    /// Posts a message and sends what can be sent.
    fn post_and_send(&self, engine: &mut Engine, message: Request) -> bool {
        self.take_commands(engine);
        engine.messages.post(message);
        if self.failure.get().is_some() {
            return self.poll(engine);
        }
        let outcome = engine.start_message();
        self.fail_on_error(engine, outcome)
    }

    /// Fails the group if a poll failed.
    fn fail_on_error(&self, engine: &mut Engine, outcome: Result<bool>) -> bool {
        outcome.unwrap_or_else(|error| {
            self.fail_group(engine, error);
            true
        })
    }

    /// Appends the command that `command` creates. It runs under the lock of the queue, so numbers that it assigns follow
    /// the order of the queue.
    pub(crate) fn submit(&self, command: impl FnOnce() -> Command) {
        let mut commands = lock(&self.commands);
        let command = command();
        commands.push(command);
        self.has_commands.store(true, Ordering::Release);
    }

    /// Starts progress on a submitted collective: on this thread if the engine is free, else by notifying its
    /// owner.
    pub(crate) fn start_progress(self: &Arc<Self>) {
        match self.try_own() {
            Some(engine) => self.poll_once(engine, Self::poll),
            None => self.notify_owner(),
        }
    }

    /// Starts a message after all earlier submissions, on this thread if the engine is free.
    pub(crate) fn start_message(self: &Arc<Self>, message: Request) {
        match self.try_own() {
            Some(engine) => self.poll_once(engine, |state, engine| state.post_and_send(engine, message)),
            None => {
                self.submit(|| Command::Request(message));
                self.notify_owner();
            }
        }
    }

    fn poll_once(
        self: &Arc<Self>,
        mut engine: MutexGuard<'_, Engine>,
        action: impl FnOnce(&Self, &mut Engine) -> bool,
    ) {
        // A panic fails the group, so its outcome needs no check.
        let _ = self.guard(&mut engine, |engine| action(self, engine));
        engine.group.flush();
        self.release(engine);
    }

    /// Wakes the owner of the engine, which may sleep. Registers the group with the progress thread in case the
    /// owner has just left.
    fn notify_owner(self: &Arc<Self>) {
        progress_thread::register(self);
        self.sleeper.notify();
    }

    /// Passes submitted commands to the engine in their order.
    pub(crate) fn take_commands(&self, engine: &mut Engine) {
        if self.has_commands.load(Ordering::Acquire) {
            let mut commands = lock(&self.commands);
            self.has_commands.store(false, Ordering::Relaxed);
            for command in commands.drain(..) {
                engine.apply(command);
            }
        }
    }

    /// Returns the engine, waiting up to 50 ms for another thread to finish a short poll. Returns `None` while a
    /// thread waits in this group, also if a signal handler interrupted that wait.
    pub(crate) fn try_own_for(&self) -> Option<MutexGuard<'_, Engine>> {
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

    pub(crate) fn has_commands(&self) -> bool {
        self.has_commands.load(Ordering::Acquire)
    }

    /// Checks for failures that explain missing progress.
    pub(crate) fn check(&self, engine: &mut Engine, now: Instant) {
        if let Err(error) = engine.check(now) {
            self.fail_group(engine, error);
        }
    }

    /// Ends the group with `error`, unless it has failed already, and notifies the other ranks.
    pub(crate) fn fail_group(&self, engine: &mut Engine, error: Error) {
        let _ = self.failure.set(error);
        // A dead group does not continue, so a new process may take the rank.
        *lock(&self.claim) = None;
        if let Some(first) = self.failure.get() {
            log::say(Level::Info, &format!("group `{}` failed: {first}", self.name));
            engine.leave_error(first);
            engine.fail(first, Instant::now());
            if let Some(folder) = &self.config.dump_dir {
                recorder::write(folder);
            }
        }
    }

    /// Returns the outcome if `until` is met or the group has failed.
    pub(crate) fn outcome_of(&self, engine: &Engine, until: &Until<'_>) -> Option<Result<()>> {
        let failure = self.failure.get();
        match until {
            Until::Over(number) if engine.finished > *number => Some(Ok(())),
            // The failed operation may still be queued; its buffers are in use until the next poll.
            Until::Over(number) => {
                failure.filter(|_| !engine.holds(*number)).map(|error| Err(self.report(error)))
            }
            Until::Done(work) => work.is_done().then(|| work.outcome()),
            Until::Enqueued(work, _) if work.is_done() => Some(work.outcome()),
            Until::Enqueued(_, completion) => completion.enqueued().then_some(Ok(())),
            Until::DevicesIdle => (failure.is_some() || !engine.has_device_calls()).then_some(Ok(())),
            Until::Idle => (failure.is_some() || !engine.has_calls()).then_some(Ok(())),
        }
    }

    /// Polls until `until` is met; the caller owns the engine. Returns `None` if the time is up or the caller has
    /// to release the engine for a signal check.
    pub(crate) fn run_until(
        &self,
        engine: &mut Engine,
        until: &Until<'_>,
        limit: &mut Limit,
    ) -> Option<Result<()>> {
        // A panic fails the group, which is the outcome.
        self.guard(engine, |engine| self.run_loop(engine, until, limit))
            .unwrap_or_else(|| self.outcome_of(engine, until))
    }

    /// Polls up to `BRIEF_POLLS` times: less than a microsecond inside a node.
    pub(crate) fn poll_briefly(&self, engine: &mut Engine, until: &Until<'_>) -> Option<Result<()>> {
        let polls = |engine: &mut Engine| {
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

    fn run_loop(&self, engine: &mut Engine, until: &Until<'_>, limit: &mut Limit) -> Option<Result<()>> {
        let mut backoff = Backoff::new(&self.spin_policy);
        let mut check_timer = CheckTimer::default();
        let mut about_to_sleep = None;
        loop {
            if self.poll(engine) {
                backoff.reset();
                about_to_sleep = None;
            }
            if let Some(outcome) = self.outcome_of(engine, until) {
                engine.group.flush();
                return Some(outcome);
            }
            // Either no progress, or continuous progress of other operations, which must not delay this call past
            // its deadline.
            if about_to_sleep.is_some() || check_timer.due() {
                self.check(engine, Instant::now());
                if let Some(outcome) = self.outcome_of(engine, until) {
                    return Some(outcome);
                }
                let now = Instant::now();
                if limit.has_expired(now) || limit.check_due(now) {
                    return None;
                }
                if let Some(about_to_sleep) = about_to_sleep.take() {
                    backoff.sleep(
                        &about_to_sleep,
                        &engine.group,
                        limit.remaining(now).min(engine.max_sleep(now)),
                    );
                    continue;
                }
            }
            if backoff.wait() {
                engine.group.flush();
                about_to_sleep = Some(AboutToSleep::new(&self.sleeper));
            }
        }
    }

    /// Waits until collective `number`, which this thread has started, completes. After an interrupt the collective
    /// continues with copies of its buffers.
    pub(crate) fn run_to_completion(
        self: &Arc<Self>,
        mut engine: MutexGuard<'_, Engine>,
        number: u64,
    ) -> Result<()> {
        let mut limit = Limit::new(None);
        let until = Until::Over(number);
        let work = loop {
            if let Some(outcome) = self.run_until(&mut engine, &until, &mut limit) {
                if engine.pending() {
                    self.release(engine);
                }
                return outcome;
            }
            // Once the engine is released, only a completion shows the end of the collective.
            if let Some(work) = engine.work_of(number) {
                break work;
            }
        };
        drop(engine);
        match self.wait_within(&Until::Done(&work), &mut limit) {
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
        self.wait_within(until, &mut limit)
    }

    fn wait_within(self: &Arc<Self>, until: &Until<'_>, limit: &mut Limit) -> Result<bool> {
        // The progress thread usually owns the engine for one poll, which is much shorter than a sleep.
        let (mut attempts, mut max_sleep) = (OWNERSHIP_TRIES, Duration::from_micros(50));
        let (mut long_wait, mut unregistered) = (None, false);
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
                    self.release(engine);
                    return Ok(true);
                }
                unregistered = true;
            } else if attempts > 0 {
                attempts -= 1;
                std::thread::yield_now();
            } else if let Some(work) = until.work() {
                if self.has_commands() {
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
            self.release(engine);
        }
        outcome
    }

    /// Polls for at most `limit`, unless another thread waits in this group. No signal ends the wait.
    pub(crate) fn run_for(self: &Arc<Self>, until: &Until<'_>, limit: Duration) {
        let mut limit = Limit::uninterrupted(Instant::now().checked_add(limit));
        if let Some(mut engine) = self.try_own_for() {
            self.run_until(&mut engine, until, &mut limit);
            self.release(engine);
        }
    }

    /// Waits until the buffers of an interrupted collective are released. The owner of the engine, woken by
    /// `Sleeper::notify`, releases them at its next poll.
    pub(crate) fn detach(self: &Arc<Self>, work: &Arc<Completion>) {
        self.submit(|| Command::Detach(work.clone()));
        while !work.is_released() {
            match self.try_own() {
                Some(mut engine) => {
                    self.guarded_poll(&mut engine);
                    self.release(engine);
                }
                None => {
                    self.sleeper.notify();
                    work.sleep(Duration::from_millis(1), false);
                }
            }
        }
    }

    /// Releases the engine and registers pending work with the progress thread.
    pub(crate) fn release(self: &Arc<Self>, engine: MutexGuard<'_, Engine>) {
        let device_only = engine.device_only && engine.only_devices();
        let pending = engine.pending() && !device_only;
        drop(engine);
        if pending || self.has_commands() {
            progress_thread::register(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_expires_exactly_at_its_deadline() {
        let (now, time) = (Instant::now(), Duration::from_secs(9));
        let limit = Limit::new(Some(now + time));
        for (waited, has_expired) in
            [(Duration::ZERO, false), (time - Duration::from_nanos(1), false), (time, true)]
        {
            assert_eq!(limit.has_expired(now + waited), has_expired, "{waited:?}");
            assert_eq!(limit.remaining(now + waited), time - waited);
        }
        assert!(!Limit::new(None).has_expired(now + 1000 * time));
    }
}
