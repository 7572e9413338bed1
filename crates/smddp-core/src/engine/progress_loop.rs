//! Driving: whoever waits for something in a group moves the group on until it is there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use smddp_transport::fork;

use crate::device::DeviceCompletion;
use crate::engine::messages::Request;
use crate::engine::progress_thread;
use crate::engine::shared::{DESTROYED, SharedState};
use crate::engine::wait_plan::{AboutToSleep, Backoff, Rounds};
use crate::engine::{Command, Engine};
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::observe::recorder;
use crate::sync::completion::{Completion, interrupted};
use crate::sync::lock;

/// What is driven for.
pub(crate) enum Until<'a> {
    Over(u64),
    Done(&'a Completion),
    /// All of it is on the device, or it is over.
    Enqueued(&'a Completion, &'a DeviceCompletion),
    /// Devices have nothing to end any more.
    DevicesIdle,
    /// No call is waited for.
    Idle,
}

impl Until<'_> {
    /// Its call, where others may end it meanwhile.
    fn work(&self) -> Option<&Completion> {
        match self {
            Self::Done(work) | Self::Enqueued(work, _) => Some(work),
            _ => None,
        }
    }

    /// Whether it is reached as far as can be seen without driving.
    fn is_seen(&self) -> bool {
        let enqueued = matches!(self, Self::Enqueued(_, completion) if completion.enqueued());
        enqueued || self.work().is_some_and(Completion::is_done)
    }
}

/// Time between two checks for a signal.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Each takes some 30 ns.
const BRIEF_POLLS: u32 = 24;

/// When a wait gives up.
pub(crate) struct Limit {
    until: Option<Instant>,
    /// A signal ends the wait, too.
    interruptible: bool,
    /// Time of the last check for a signal.
    asked: Option<Instant>,
}

/// Tries for the driver before a wait sleeps.
const OWNERSHIP_TRIES: u32 = 50;

impl Limit {
    /// `None`: never.
    pub(crate) fn new(until: Option<Instant>) -> Self {
        Self { until, interruptible: true, asked: None }
    }

    /// The same for a wait that no signal ends: a pending signal's handler runs afterwards.
    fn uninterrupted(until: Option<Instant>) -> Self {
        Self { until, interruptible: false, asked: None }
    }

    /// Returns whether the time is up.
    fn over(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now >= until)
    }

    /// Returns whether the next check for a signal is due.
    fn check_due(&mut self, now: Instant) -> bool {
        self.interruptible && now.duration_since(*self.asked.get_or_insert(now)) > SIGNAL_INTERVAL
    }

    /// Checks for a signal where that is due. Handlers of the program run here and may call this group, so the calling
    /// thread must not own the driver.
    fn check_signals(&mut self) -> Result<()> {
        let now = Instant::now();
        if self.check_due(now) {
            self.asked = Some(now);
            if interrupted() {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    fn left(&self, now: Instant) -> Duration {
        self.until.map_or(Duration::MAX, |until| until - now)
    }
}

/// A wait that releases the driver for signal checks; closing the group then does not wait for the pending call.
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
    /// The driver, if nobody drives. A driver that panicked left the mutex poisoned; it must still be had, or whoever
    /// waits would wait for ever.
    pub(crate) fn try_own(&self) -> Option<MutexGuard<'_, Engine>> {
        match self.engine.try_lock() {
            Ok(engine) => Some(engine),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Does something as the driver's owner. A panic there is a bug, and what it left behind is not to be trusted: it ends
    /// the group once and for all, as any other failure does, and nobody else's. `None`: that is what happened.
    pub(crate) fn guard<T>(&self, engine: &mut Engine, what: impl FnOnce(&mut Engine) -> T) -> Option<T> {
        let panic = match catch_unwind(AssertUnwindSafe(|| what(engine))) {
            Ok(value) => return Some(value),
            Err(panic) => panic,
        };
        let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        let error = Error::System {
            what: format!("driving group `{}` on rank {}", self.name, self.rank),
            reason: format!(
                "the library panicked: {text}; this is a bug, please report it with what stands above it in the log"
            ),
        };
        // The transport may be what is broken: then the others learn of it when this process leaves, and its callers now.
        if catch_unwind(AssertUnwindSafe(|| self.fail_group(engine, error))).is_err()
            && let Some(first) = self.failure.get()
        {
            engine.end_all(first, Instant::now());
        }
        None
    }

    /// A guarded [`Self::poll`], for those who do not go on looking.
    pub(crate) fn guarded_poll(&self, engine: &mut Engine) -> bool {
        self.guard(engine, |engine| self.poll(engine)).unwrap_or(true)
    }

    /// Takes up what was submitted and moves things on; failures end the group. Whether anything moved.
    pub(crate) fn poll(&self, engine: &mut Engine) -> bool {
        self.take_commands(engine);
        if let Some(error) = self.failure.get() {
            let (had, now) = (engine.has_calls(), Instant::now());
            match error {
                Error::Closed { reason, .. } if had && reason == DESTROYED => engine.depart(error, now),
                _ if had => engine.fail(error, now),
                _ => {}
            }
            engine.keep_releasing(now);
            // What tells the others may still be in a queue that moves only when it is looked at.
            return had | (engine.group.busy() && engine.group.turn());
        }
        let outcome = engine.poll();
        self.fail_on_error(engine, outcome)
    }

    /// The same with a message, where those that are under way only set out.
    fn set_out(&self, engine: &mut Engine, message: Request) -> bool {
        self.take_commands(engine);
        engine.messages.post(message);
        if self.failure.get().is_some() {
            return self.poll(engine);
        }
        let outcome = engine.set_out();
        self.fail_on_error(engine, outcome)
    }

    /// Failures end the group.
    fn fail_on_error(&self, engine: &mut Engine, outcome: Result<bool>) -> bool {
        outcome.unwrap_or_else(|error| {
            self.fail_group(engine, error);
            true
        })
    }

    /// Puts an item, made while no other can come before it, where the driver finds it.
    pub(crate) fn submit(&self, command: impl FnOnce() -> Command) {
        let mut commands = lock(&self.commands);
        let command = command();
        commands.push(command);
        self.has_commands.store(true, Ordering::Release);
    }

    /// Gets a submitted collective going, here if nobody drives.
    pub(crate) fn start_progress(self: &Arc<Self>) {
        match self.try_own() {
            Some(engine) => self.poll_once(engine, Self::poll),
            None => self.notify_owner(),
        }
    }

    /// Gets a message going, here if nobody drives: behind what was submitted before.
    pub(crate) fn start_message(self: &Arc<Self>, message: Request) {
        match self.try_own() {
            Some(engine) => self.poll_once(engine, |state, engine| state.set_out(engine, message)),
            None => {
                self.submit(|| Command::Request(message));
                self.notify_owner();
            }
        }
    }

    fn poll_once(
        self: &Arc<Self>,
        mut engine: MutexGuard<'_, Engine>,
        how: impl FnOnce(&Self, &mut Engine) -> bool,
    ) {
        // Where it panics, the group is dead.
        let _ = self.guard(&mut engine, |engine| how(self, engine));
        engine.group.flush();
        self.release(engine);
    }

    /// The one who drives sleeps perhaps; and if it leaves now, the progress thread takes over.
    fn notify_owner(self: &Arc<Self>) {
        progress_thread::register(self);
        self.sleeper.ring();
    }

    /// Hands what was submitted to the driver, in its order.
    pub(crate) fn take_commands(&self, engine: &mut Engine) {
        if self.has_commands.load(Ordering::Acquire) {
            let mut commands = lock(&self.commands);
            self.has_commands.store(false, Ordering::Relaxed);
            for command in commands.drain(..) {
                engine.apply(command);
            }
        }
    }

    /// The driver, once another thread that moves the group on for a moment has released it. `None` where a thread waits in
    /// this group, also where a signal handler interrupted that wait.
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

    /// Looks for reasons why nothing moves.
    pub(crate) fn examine(&self, engine: &mut Engine, now: Instant) {
        if let Err(error) = engine.examine(now) {
            self.fail_group(engine, error);
        }
    }

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

    pub(crate) fn outcome_of(&self, engine: &Engine, until: &Until<'_>) -> Option<Result<()>> {
        let dead = self.failure.get();
        match until {
            Until::Over(number) if engine.finished > *number => Some(Ok(())),
            // The failed operation may still be queued: then its buffers are in use until the next look.
            Until::Over(number) => {
                dead.filter(|_| !engine.holds(*number)).map(|error| Err(self.report(error)))
            }
            Until::Done(work) => work.is_done().then(|| work.outcome()),
            Until::Enqueued(work, _) if work.is_done() => Some(work.outcome()),
            Until::Enqueued(_, completion) => completion.enqueued().then_some(Ok(())),
            Until::DevicesIdle => (dead.is_some() || !engine.has_device_calls()).then_some(Ok(())),
            Until::Idle => (dead.is_some() || !engine.has_calls()).then_some(Ok(())),
        }
    }

    /// The caller owns the driver and drives until `until` is reached. `None`: the time is up, or the caller has to release
    /// the driver for a signal check.
    pub(crate) fn run_until(
        &self,
        engine: &mut Engine,
        until: &Until<'_>,
        limit: &mut Limit,
    ) -> Option<Result<()>> {
        // Where it panics the group is dead, and that is the outcome.
        self.guard(engine, |engine| self.run_loop(engine, until, limit))
            .unwrap_or_else(|| self.outcome_of(engine, until))
    }

    /// Drives for less than a microsecond.
    pub(crate) fn poll_briefly(&self, engine: &mut Engine, until: &Until<'_>) -> Option<Result<()>> {
        let looks = |engine: &mut Engine| {
            for _ in 0..BRIEF_POLLS {
                self.poll(engine);
                if let Some(outcome) = self.outcome_of(engine, until) {
                    engine.group.flush();
                    return Some(outcome);
                }
            }
            None
        };
        self.guard(engine, looks).unwrap_or_else(|| self.outcome_of(engine, until))
    }

    fn run_loop(&self, engine: &mut Engine, until: &Until<'_>, limit: &mut Limit) -> Option<Result<()>> {
        let mut backoff = Backoff::new(&self.spin_policy);
        let mut rounds = Rounds::default();
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
            // Blocked; or other things go on and on, behind which a call must not wait longer than it may.
            if about_to_sleep.is_some() || rounds.due() {
                self.examine(engine, Instant::now());
                if let Some(outcome) = self.outcome_of(engine, until) {
                    return Some(outcome);
                }
                let now = Instant::now();
                if limit.over(now) || limit.check_due(now) {
                    return None;
                }
                if let Some(about_to_sleep) = about_to_sleep.take() {
                    backoff.max_sleep(
                        &about_to_sleep,
                        &engine.group,
                        limit.left(now).min(engine.max_sleep(now)),
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

    /// Drives until collective `number`, which this thread has entered, is over. After an interrupt the collective goes on
    /// with copies of its buffers.
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
            // Without the driver, only a work shows that the collective is over.
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

    /// Drives, or sleeps while another thread does, until `until`, a work, is reached; false if the time was up first.
    pub(crate) fn wait_until(self: &Arc<Self>, until: &Until<'_>, timeout: Option<Duration>) -> Result<bool> {
        if self.forks != fork::generation() {
            return Err(Error::Forked { group: self.name.clone() });
        }
        let mut limit = Limit::new(timeout.and_then(|timeout| Instant::now().checked_add(timeout)));
        self.wait_within(until, &mut limit)
    }

    fn wait_within(self: &Arc<Self>, until: &Until<'_>, limit: &mut Limit) -> Result<bool> {
        // The progress thread has the driver for one look as a rule: far shorter than a sleep.
        let (mut looks, mut max_sleep) = (OWNERSHIP_TRIES, Duration::from_micros(50));
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
                // A handler may have made calls of this group, and may have taken longer than the wait.
                continue;
            }
            if let Some(mut engine) = self.try_own() {
                if self.run_until(&mut engine, until, limit).is_some() {
                    self.release(engine);
                    return Ok(true);
                }
                unregistered = true;
            } else if looks > 0 {
                looks -= 1;
                std::thread::yield_now();
            } else if let Some(work) = until.work() {
                if self.has_commands() {
                    // Whoever drives sleeps, and has not seen what this thread waits for.
                    self.sleeper.ring();
                }
                work.sleep(max_sleep, matches!(until, Until::Enqueued(..)));
                max_sleep = (max_sleep * 2).min(Duration::from_millis(5));
            }
            if limit.over(Instant::now()) && !until.is_seen() {
                break Ok(false);
            }
        };
        // Another owner of the driver registers what is pending when it leaves.
        if unregistered && let Some(engine) = self.try_own() {
            self.release(engine);
        }
        outcome
    }

    /// Drives for at most `limit`, and only where no other thread waits in this group. No signal ends it.
    pub(crate) fn run_for(self: &Arc<Self>, until: &Until<'_>, limit: Duration) {
        let mut limit = Limit::uninterrupted(Instant::now().checked_add(limit));
        if let Some(mut engine) = self.try_own_for() {
            self.run_until(&mut engine, until, &mut limit);
            self.release(engine);
        }
    }

    /// Returns when the buffers of an interrupted collective are its caller's again: at the next step of the thread that drives,
    /// which `ring` wakes.
    pub(crate) fn detach(self: &Arc<Self>, work: &Arc<Completion>) {
        self.submit(|| Command::Detach(work.clone()));
        while !work.is_released() {
            match self.try_own() {
                Some(mut engine) => {
                    self.guarded_poll(&mut engine);
                    self.release(engine);
                }
                None => {
                    self.sleeper.ring();
                    work.sleep(Duration::from_millis(1), false);
                }
            }
        }
    }

    /// What is left behind is the progress thread's.
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
    fn a_wait_gives_up_once_its_time_is_up_and_no_moment_earlier() {
        let (now, time) = (Instant::now(), Duration::from_secs(9));
        let limit = Limit::new(Some(now + time));
        for (waited, over) in [(Duration::ZERO, false), (time - Duration::from_nanos(1), false), (time, true)]
        {
            assert_eq!(limit.over(now + waited), over, "{waited:?}");
            assert_eq!(limit.left(now + waited), time - waited);
        }
        assert!(!Limit::new(None).over(now + 1000 * time));
    }
}
