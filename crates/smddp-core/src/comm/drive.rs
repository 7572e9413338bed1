//! Driving: whoever waits for something in a group moves the group on until it is there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use smddp_transport::fork;

use super::{Inner, progress};
use crate::device::Completion;
use crate::driver::{Driver, Item};
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::p2p::Request;
use crate::recorder;
use crate::sync::lock;
use crate::wait::{AboutToSleep, Backoff, Rounds};
use crate::work::{Shared, interrupted};

/// What is driven for.
pub(crate) enum Target<'a> {
    Number(u64),
    Work(&'a Shared),
    /// All of it is on the device, or it is over.
    Enqueued(&'a Shared, &'a Completion),
    /// Devices have nothing to end any more.
    Landed,
    /// No call is waited for.
    Delivered,
}

impl Target<'_> {
    /// Its call, where others may end it meanwhile.
    fn work(&self) -> Option<&Shared> {
        match self {
            Self::Work(work) | Self::Enqueued(work, _) => Some(work),
            _ => None,
        }
    }

    /// Whether it is reached as far as can be seen without driving.
    fn is_seen(&self) -> bool {
        let enqueued = matches!(self, Self::Enqueued(_, completion) if completion.enqueued());
        enqueued || self.work().is_some_and(Shared::is_done)
    }
}

/// Time between two checks for a signal.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Each takes some 30 ns.
const BRIEF_LOOKS: u32 = 24;

/// When a wait gives up.
pub(crate) struct Limit {
    until: Option<Instant>,
    /// A signal ends the wait, too.
    interruptible: bool,
    /// Time of the last check for a signal.
    asked: Option<Instant>,
}

/// Tries for the driver before a wait sleeps.
const LOOKS: u32 = 50;

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
    fn new(inner: &'a Inner) -> Self {
        inner.long_waits.fetch_add(1, Ordering::Relaxed);
        Self(&inner.long_waits)
    }
}

impl Drop for LongWait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Inner {
    /// The driver, if nobody drives. A driver that panicked left the mutex poisoned; it must still be had, or whoever
    /// waits would wait for ever.
    pub(crate) fn try_drive(&self) -> Option<MutexGuard<'_, Driver>> {
        match self.driver.try_lock() {
            Ok(driver) => Some(driver),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Does something as the driver's owner. A panic there is a bug, and what it left behind is not to be trusted: it ends
    /// the group once and for all, as any other failure does, and nobody else's. `None`: that is what happened.
    pub(crate) fn guard<T>(&self, driver: &mut Driver, what: impl FnOnce(&mut Driver) -> T) -> Option<T> {
        let panic = match catch_unwind(AssertUnwindSafe(|| what(driver))) {
            Ok(value) => return Some(value),
            Err(panic) => panic,
        };
        let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        let error = Error::System {
            what: format!("driving group `{}` on rank {}", self.name, self.rank),
            why: format!(
                "the library panicked: {text}; this is a bug, please report it with what stands above it in the log"
            ),
        };
        // The transport may be what is broken: then the others learn of it when this process leaves, and its callers now.
        if catch_unwind(AssertUnwindSafe(|| self.die(driver, error))).is_err()
            && let Some(first) = self.poison.get()
        {
            driver.end(first, Instant::now());
        }
        None
    }

    /// A guarded [`Self::look`], for those who do not go on looking.
    pub(crate) fn turn(&self, driver: &mut Driver) -> bool {
        self.guard(driver, |driver| self.look(driver)).unwrap_or(true)
    }

    /// Takes up what was submitted and moves things on; failures end the group. Whether anything moved.
    pub(crate) fn look(&self, driver: &mut Driver) -> bool {
        self.collect(driver);
        if let Some(error) = self.poison.get() {
            let (had, now) = (driver.waited_for(), Instant::now());
            let destroyed = matches!(error, Error::Closed { why, .. } if why == super::DESTROYED);
            if destroyed && had {
                driver.depart(error, now);
            } else if had || !destroyed && !driver.announced {
                // Also with no pending operation: `abort` leaves the notice to the thread that held the driver.
                driver.fail(error, now);
            }
            driver.keep_releasing(now);
            // What tells the others may still be in a queue that moves only when it is looked at.
            return had | (driver.group.busy() && driver.group.turn());
        }
        let outcome = driver.poll();
        self.moved(driver, outcome)
    }

    /// The same with a message, where those that are under way only set out.
    fn set_out(&self, driver: &mut Driver, message: Request) -> bool {
        self.collect(driver);
        driver.messages.post(message);
        if self.poison.get().is_some() {
            return self.look(driver);
        }
        let outcome = driver.set_out();
        self.moved(driver, outcome)
    }

    /// Failures end the group.
    fn moved(&self, driver: &mut Driver, outcome: Result<bool>) -> bool {
        outcome.unwrap_or_else(|error| {
            self.die(driver, error);
            true
        })
    }

    /// Puts an item, made while no other can come before it, where the driver finds it.
    pub(super) fn submit(&self, item: impl FnOnce() -> Item) {
        let mut inbox = lock(&self.inbox);
        let item = item();
        inbox.push(item);
        self.filled.store(true, Ordering::Release);
    }

    /// Gets a submitted collective going, here if nobody drives.
    pub(super) fn get_going(self: &Arc<Self>) {
        match self.try_drive() {
            Some(driver) => self.nudge(driver, Self::look),
            None => self.hand_over(),
        }
    }

    /// Gets a message going, here if nobody drives: behind what was submitted before.
    pub(super) fn get_message_going(self: &Arc<Self>, message: Request) {
        match self.try_drive() {
            Some(driver) => self.nudge(driver, |inner, driver| inner.set_out(driver, message)),
            None => {
                self.submit(|| Item::Request(message));
                self.hand_over();
            }
        }
    }

    fn nudge(
        self: &Arc<Self>,
        mut driver: MutexGuard<'_, Driver>,
        how: impl FnOnce(&Self, &mut Driver) -> bool,
    ) {
        // Where it panics, the group is dead.
        let _ = self.guard(&mut driver, |driver| how(self, driver));
        driver.group.flush();
        self.leave(driver);
    }

    /// The one who drives sleeps perhaps; and if it leaves now, the progress thread takes over.
    fn hand_over(self: &Arc<Self>) {
        progress::register(self);
        self.sleeper.ring();
    }

    /// Hands what was submitted to the driver, in its order.
    pub(crate) fn collect(&self, driver: &mut Driver) {
        if self.filled.load(Ordering::Acquire) {
            let mut inbox = lock(&self.inbox);
            self.filled.store(false, Ordering::Relaxed);
            for item in inbox.drain(..) {
                driver.take_up(item);
            }
        }
    }

    /// The driver, once another thread that moves the group on for a moment has released it. `None` where a thread waits in
    /// this group, also where a signal handler interrupted that wait.
    pub(crate) fn drive_soon(&self) -> Option<MutexGuard<'_, Driver>> {
        let begun = Instant::now();
        loop {
            if self.long_waits.load(Ordering::Relaxed) > 0 {
                return None;
            }
            let driver = self.try_drive();
            if driver.is_some() || begun.elapsed() > Duration::from_millis(50) {
                return driver;
            }
            std::thread::yield_now();
        }
    }

    pub(crate) fn has_items(&self) -> bool {
        self.filled.load(Ordering::Acquire)
    }

    /// Looks for reasons why nothing moves.
    pub(crate) fn examine(&self, driver: &mut Driver, now: Instant) {
        if let Err(error) = driver.examine(now) {
            self.die(driver, error);
        }
    }

    pub(crate) fn die(&self, driver: &mut Driver, error: Error) {
        let _ = self.poison.set(error);
        // A dead group does not continue, so a new process may take the rank.
        *lock(&self.claim) = None;
        if let Some(first) = self.poison.get() {
            log::say(Level::Info, &format!("group `{}` failed: {first}", self.name));
            driver.leave_error(first);
            driver.fail(first, Instant::now());
            if let Some(folder) = &self.config.dump_dir {
                recorder::write(folder);
            }
        }
    }

    pub(super) fn reached(&self, driver: &Driver, target: &Target<'_>) -> Option<Result<()>> {
        let dead = self.poison.get();
        match target {
            Target::Number(number) if driver.finished > *number => Some(Ok(())),
            // The failed operation may still be queued: then its buffers are in use until the next look.
            Target::Number(number) => {
                dead.filter(|_| !driver.holds(*number)).map(|error| Err(self.tell(error)))
            }
            Target::Work(work) => work.is_done().then(|| work.outcome()),
            Target::Enqueued(work, _) if work.is_done() => Some(work.outcome()),
            Target::Enqueued(_, completion) => completion.enqueued().then_some(Ok(())),
            Target::Landed => (dead.is_some() || !driver.in_flight()).then_some(Ok(())),
            Target::Delivered => (dead.is_some() || !driver.waited_for()).then_some(Ok(())),
        }
    }

    /// The caller owns the driver and drives until `target` is reached. `None`: the time is up, or the caller has to release
    /// the driver for a signal check.
    pub(crate) fn drive(
        &self,
        driver: &mut Driver,
        target: &Target<'_>,
        limit: &mut Limit,
    ) -> Option<Result<()>> {
        // Where it panics the group is dead, and that is the outcome.
        self.guard(driver, |driver| self.drive_on(driver, target, limit))
            .unwrap_or_else(|| self.reached(driver, target))
    }

    /// Drives for less than a microsecond.
    pub(crate) fn drive_briefly(&self, driver: &mut Driver, target: &Target<'_>) -> Option<Result<()>> {
        let looks = |driver: &mut Driver| {
            for _ in 0..BRIEF_LOOKS {
                self.look(driver);
                if let Some(outcome) = self.reached(driver, target) {
                    driver.group.flush();
                    return Some(outcome);
                }
            }
            None
        };
        self.guard(driver, looks).unwrap_or_else(|| self.reached(driver, target))
    }

    fn drive_on(&self, driver: &mut Driver, target: &Target<'_>, limit: &mut Limit) -> Option<Result<()>> {
        let mut backoff = Backoff::new(&self.spin_policy);
        let mut rounds = Rounds::default();
        let mut about_to_sleep = None;
        loop {
            if self.look(driver) {
                backoff.reset();
                about_to_sleep = None;
            }
            if let Some(outcome) = self.reached(driver, target) {
                driver.group.flush();
                return Some(outcome);
            }
            // Blocked; or other things go on and on, behind which a call must not wait longer than it may.
            if about_to_sleep.is_some() || rounds.due() {
                self.examine(driver, Instant::now());
                if let Some(outcome) = self.reached(driver, target) {
                    return Some(outcome);
                }
                let now = Instant::now();
                if limit.over(now) || limit.check_due(now) {
                    return None;
                }
                if let Some(about_to_sleep) = about_to_sleep.take() {
                    backoff.nap(&about_to_sleep, &driver.group, limit.left(now).min(driver.nap(now)));
                    continue;
                }
            }
            if backoff.wait() {
                driver.group.flush();
                about_to_sleep = Some(AboutToSleep::new(&self.sleeper));
            }
        }
    }

    /// Drives until collective `number`, which this thread has entered, is over. After an interrupt the collective goes on
    /// with copies of its buffers.
    pub(super) fn complete(self: &Arc<Self>, mut driver: MutexGuard<'_, Driver>, number: u64) -> Result<()> {
        let mut limit = Limit::new(None);
        let target = Target::Number(number);
        let work = loop {
            if let Some(outcome) = self.drive(&mut driver, &target, &mut limit) {
                if driver.pending() {
                    self.leave(driver);
                }
                return outcome;
            }
            // Without the driver, only a work shows that the collective is over.
            if let Some(work) = driver.work_of(number) {
                break work;
            }
        };
        drop(driver);
        match self.reach_within(&Target::Work(&work), &mut limit) {
            Err(Error::Interrupted) => {
                self.detach(&work);
                Err(Error::Interrupted)
            }
            Err(error) => Err(error),
            Ok(_) => work.outcome().map_err(|error| self.tell(&error)),
        }
    }

    /// Drives, or sleeps while another thread does, until `target`, a work, is reached; false if the time was up first.
    pub(crate) fn reach(self: &Arc<Self>, target: &Target<'_>, timeout: Option<Duration>) -> Result<bool> {
        if self.forks != fork::generation() {
            return Err(Error::Forked { group: self.name.clone() });
        }
        let mut limit = Limit::new(timeout.and_then(|timeout| Instant::now().checked_add(timeout)));
        self.reach_within(target, &mut limit)
    }

    fn reach_within(self: &Arc<Self>, target: &Target<'_>, limit: &mut Limit) -> Result<bool> {
        // The progress thread has the driver for one look as a rule: far shorter than a sleep.
        let (mut looks, mut nap) = (LOOKS, Duration::from_micros(50));
        let (mut long_wait, mut unregistered) = (None, false);
        let outcome = loop {
            if target.is_seen() {
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
            if let Some(mut driver) = self.try_drive() {
                if self.drive(&mut driver, target, limit).is_some() {
                    self.leave(driver);
                    return Ok(true);
                }
                unregistered = true;
            } else if looks > 0 {
                looks -= 1;
                std::thread::yield_now();
            } else if let Some(work) = target.work() {
                if self.has_items() {
                    // Whoever drives sleeps, and has not seen what this thread waits for.
                    self.sleeper.ring();
                }
                work.sleep(nap, matches!(target, Target::Enqueued(..)));
                nap = (nap * 2).min(Duration::from_millis(5));
            }
            if limit.over(Instant::now()) && !target.is_seen() {
                break Ok(false);
            }
        };
        // Another owner of the driver registers what is pending when it leaves.
        if unregistered && let Some(driver) = self.try_drive() {
            self.leave(driver);
        }
        outcome
    }

    /// Drives for at most `limit`, and only where no other thread waits in this group. No signal ends it.
    pub(super) fn drive_to(self: &Arc<Self>, target: &Target<'_>, limit: Duration) {
        let mut limit = Limit::uninterrupted(Instant::now().checked_add(limit));
        if let Some(mut driver) = self.drive_soon() {
            self.drive(&mut driver, target, &mut limit);
            self.leave(driver);
        }
    }

    /// Returns when the buffers of an interrupted collective are its caller's again: at the next step of the thread that drives,
    /// which `ring` wakes.
    pub(crate) fn detach(self: &Arc<Self>, work: &Arc<Shared>) {
        self.submit(|| Item::Detach(work.clone()));
        while !work.is_released() {
            match self.try_drive() {
                Some(mut driver) => {
                    self.turn(&mut driver);
                    self.leave(driver);
                }
                None => {
                    self.sleeper.ring();
                    work.sleep(Duration::from_millis(1), false);
                }
            }
        }
    }

    /// What is left behind is the progress thread's.
    pub(crate) fn leave(self: &Arc<Self>, driver: MutexGuard<'_, Driver>) {
        let watched = driver.watched && driver.landing();
        let pending = driver.pending() && !watched;
        drop(driver);
        if pending || self.has_items() {
            progress::register(self);
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
