//! Wait policy: spin briefly, yield, then sleep on the doorbell.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use smddp_process::Sleeper;

use crate::config::cores::{cores, local_ranks};

/// Maximum sleep before the next poll, in case a wakeup is lost. It doubles after each sleep that no wakeup ended,
/// up to `MAX_DOUBLINGS` times, because many ranks may wait for minutes on few cores.
pub(super) const MAX_SLEEP: Duration = Duration::from_millis(20);
const MAX_DOUBLINGS: u32 = 2;
/// Interval between two polls of transports that cannot signal incoming data.
pub(super) const UNSIGNALED_SLEEP: Duration = Duration::from_micros(100);
/// Number of yields before a wait announces its sleep, if polling needs no system call.
const YIELDS: u32 = 50;
/// Number of yields if polling is a system call.
const COSTLY_YIELDS: u32 = 6;
/// Polls without reading the clock.
const FREE_POLLS: u32 = 128;
/// Polls without a pause, enough for a rank that is on time.
const QUICK_POLLS: u32 = 32;
/// Bounds of the spin budget, in microseconds. A wait within the upper bound doubles the budget, even if part of it
/// was not spent spinning. A longer wait halves the budget, so ranks that share their cores soon stop spinning.
const LONGEST_SPIN: u32 = 50;
const SHORTEST_SPIN: u32 = 1;

/// Passes between two readings of the clock, which costs as much as a pass.
const UNCHECKED_PASSES: u32 = 256;
/// Interval between two failure checks during continuous progress.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Spin time of the threads of one communicator.
pub(crate) struct SpinPolicy {
    fixed: Option<Duration>,
    budget: AtomicU32,
    yields: u32,
}

impl SpinPolicy {
    /// `setting`: a fixed spin time, if configured. `costly`: a poll is a system call.
    pub(crate) fn new(setting: Option<Duration>, costly: bool) -> Self {
        let yields = if costly { COSTLY_YIELDS } else { YIELDS };
        Self { fixed: setting, budget: AtomicU32::new(LONGEST_SPIN), yields }
    }

    fn spin(&self) -> Duration {
        self.fixed.unwrap_or_else(|| {
            static CORES: OnceLock<usize> = OnceLock::new();
            if local_ranks() <= *CORES.get_or_init(cores) {
                Duration::from_micros(u64::from(self.budget.load(Ordering::Relaxed)))
            } else {
                Duration::ZERO
            }
        })
    }

    /// Adapts the budget to a wait of `waited`. The whole wait counts, not only its spin. Otherwise a budget below
    /// the round trip to the other rank could never grow again.
    fn learn(&self, waited: Duration) {
        let budget = self.budget.load(Ordering::Relaxed);
        let enough = waited <= Duration::from_micros(u64::from(LONGEST_SPIN));
        let next = if enough { budget * 2 } else { budget / 2 };
        self.budget.store(next.clamp(SHORTEST_SPIN, LONGEST_SPIN), Ordering::Relaxed);
    }
}

/// Source of the time; tests use their own.
pub(crate) trait Clock {
    fn now(&self) -> Instant;
}

/// The system's monotonic clock.
pub(crate) struct Monotonic;

impl Clock for Monotonic {
    #[inline]
    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// Result of one pass over the groups of a loop.
pub(crate) struct Pass {
    /// Something made progress.
    pub(crate) moved: bool,
    /// No message has to end a sleep: nothing is pending here, or only operations on devices.
    pub(crate) rests: bool,
    /// Longest time without a poll for data. This and `max_sleep` come from a pass with a check.
    pub(crate) poll_interval: Duration,
    /// Longest sleep before the next pass.
    pub(crate) max_sleep: Duration,
}

impl Pass {
    /// Pass over no group.
    pub(super) const EMPTY: Self =
        Self { moved: false, rests: true, poll_interval: Duration::MAX, max_sleep: Duration::MAX };
}

/// Check for failures and deadlines in a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Check {
    /// Time of the check.
    pub(crate) now: Instant,
    /// A sleep follows. The check is not needed if the pass makes progress, because then none follows.
    pub(crate) before_sleep: bool,
}

/// Next action of a loop after a pass without progress.
#[derive(Debug, PartialEq)]
enum Step {
    /// Runs another pass after this number of spin hints.
    Spin(u32),
    Yield,
    /// Announces the sleep. One more pass with a check precedes it.
    Announce,
}

/// Plan of one loop: its next step, and the passes that check for failures and deadlines.
pub(crate) struct WaitPlan<'a, C = Monotonic> {
    clock: C,
    spin_policy: &'a SpinPolicy,
    /// `None`: no message can end a sleep, so the loop rests.
    sleeper: Option<&'a Sleeper>,
    /// `Some(None)`: a rest, which no message ends. One more pass with a check precedes a sleep or rest.
    announced: Option<Option<AboutToSleep<'a>>>,
    spin: Duration,
    polls: u32,
    yields: u32,
    /// Consecutive sleeps that no wakeup ended.
    slept: u32,
    /// Time of the first unsuccessful poll that read the clock.
    since: Option<Instant>,
    passes: u32,
    last_check: Option<Instant>,
}

impl<'a> WaitPlan<'a> {
    pub(crate) fn new(spin_policy: &'a SpinPolicy, sleeper: Option<&'a Sleeper>) -> Self {
        Self::with_clock(Monotonic, spin_policy, sleeper)
    }
}

impl<'a, C: Clock> WaitPlan<'a, C> {
    fn with_clock(clock: C, spin_policy: &'a SpinPolicy, sleeper: Option<&'a Sleeper>) -> Self {
        let spin = spin_policy.spin();
        Self {
            clock,
            spin_policy,
            sleeper,
            announced: None,
            spin,
            polls: 0,
            yields: 0,
            slept: 0,
            since: None,
            passes: 0,
            last_check: None,
        }
    }

    /// Returns the check that the next pass must contain: the last pass before a sleep has one, and one pass every
    /// 50 ms of continuous progress. Called once per pass.
    #[inline]
    pub(crate) fn check_due(&mut self) -> Option<Check> {
        if self.announced.is_some() {
            return Some(Check { now: self.clock.now(), before_sleep: true });
        }
        self.passes = self.passes.wrapping_add(1);
        if self.passes.is_multiple_of(UNCHECKED_PASSES) { self.overdue_check() } else { None }
    }

    #[cold]
    fn overdue_check(&mut self) -> Option<Check> {
        let now = self.clock.now();
        let is_overdue = now.duration_since(*self.last_check.get_or_insert(now)) >= CHECK_INTERVAL;
        is_overdue.then(|| Check { now: *self.last_check.insert(now), before_sleep: false })
    }

    /// Restarts the plan after progress.
    #[inline]
    pub(crate) fn restart(&mut self) {
        if let Some(since) = self.since.take() {
            self.spin_policy.learn(self.clock.now().duration_since(since));
            self.spin = self.spin_policy.spin();
        }
        self.polls = 0;
        self.yields = 0;
        self.slept = 0;
        self.announced = None;
    }

    /// Waits once after a pass without progress: spins, yields, announces the sleep, or sleeps for at most `at_most`
    /// after the announcement. `rest` sleeps where no message has to end the sleep.
    #[inline]
    pub(crate) fn pause(
        &mut self,
        pass: &Pass,
        fds: &[(RawFd, i16)],
        at_most: Duration,
        rest: impl FnOnce(Duration),
    ) {
        let sleeper = self.sleeper.filter(|_| !pass.rests);
        match (self.announced.take(), sleeper) {
            (Some(Some(announced)), Some(_)) => {
                let most = pass.poll_interval.saturating_mul(1 << self.slept.min(MAX_DOUBLINGS));
                let begun = self.clock.now();
                announced.sleep(fds, most.min(at_most));
                let lasted = self.clock.now().duration_since(begun);
                return self.after_sleep(pass.poll_interval, lasted);
            }
            (announced, None) => {
                if let Some(None) = announced {
                    rest(at_most.min(pass.poll_interval));
                }
                self.announced = Some(None);
                return;
            }
            _ => {}
        }
        match self.step() {
            Step::Spin(hints) => (0..hints).for_each(|_| std::hint::spin_loop()),
            Step::Yield => std::thread::yield_now(),
            Step::Announce => self.announced = sleeper.map(|sleeper| Some(AboutToSleep::new(sleeper))),
        }
    }

    #[inline]
    fn step(&mut self) -> Step {
        if !self.spin.is_zero() {
            // If recent spins were too short, the other rank may need this core.
            let free = if self.spin <= Duration::from_micros(2) { FREE_POLLS / 8 } else { FREE_POLLS };
            if self.polls < free {
                self.polls += 1;
                return Step::Spin(u32::from(self.polls > QUICK_POLLS));
            }
            if self.yields == 0 {
                let now = self.clock.now();
                if now.duration_since(*self.since.get_or_insert(now)) < self.spin {
                    return Step::Spin(8);
                }
            }
        }
        if self.yields < self.spin_policy.yields {
            self.yields += 1;
            return Step::Yield;
        }
        Step::Announce
    }

    fn after_sleep(&mut self, poll_interval: Duration, lasted: Duration) {
        if poll_interval == MAX_SLEEP && lasted >= MAX_SLEEP {
            self.slept += 1;
        } else {
            // After a wakeup, the next message often follows soon.
            self.slept = 0;
            self.yields = self.spin_policy.yields / 2;
        }
    }
}

/// Registration of a thread that polls once more and then sleeps, so that no wakeup is lost.
struct AboutToSleep<'a> {
    sleeper: &'a Sleeper,
    ticket: u32,
}

impl<'a> AboutToSleep<'a> {
    fn new(sleeper: &'a Sleeper) -> Self {
        Self { sleeper, ticket: sleeper.prepare_wait() }
    }

    fn sleep(&self, fds: &[(RawFd, i16)], at_most: Duration) {
        self.sleeper.sleep(self.ticket, fds, at_most);
    }
}

impl Drop for AboutToSleep<'_> {
    fn drop(&mut self) {
        self.sleeper.cancel_wait();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Clock that each reading advances.
    struct Steps {
        now: Cell<Instant>,
        step: Duration,
    }

    impl Clock for Steps {
        fn now(&self) -> Instant {
            self.now.set(self.now.get() + self.step);
            self.now.get()
        }
    }

    fn plan(policy: &SpinPolicy, step: Duration) -> WaitPlan<'_, Steps> {
        WaitPlan::with_clock(Steps { now: Cell::new(Instant::now()), step }, policy, None)
    }

    #[test]
    fn wait_spins_then_yields_then_announces_the_sleep() {
        let policy = SpinPolicy::new(Some(Duration::from_micros(20)), true);
        let mut plan = plan(&policy, Duration::from_micros(1));
        let mut steps = Vec::new();
        while steps.last() != Some(&Step::Announce) {
            steps.push(plan.step());
        }
        let count = |wanted: Step| steps.iter().filter(|&step| *step == wanted).count();
        assert_eq!(count(Step::Spin(0)), QUICK_POLLS as usize);
        assert_eq!(count(Step::Spin(1)), (FREE_POLLS - QUICK_POLLS) as usize);
        assert_eq!(count(Step::Spin(8)), 20, "one reading per microsecond");
        assert_eq!(count(Step::Yield), COSTLY_YIELDS as usize);
        plan.restart();
        assert_eq!(plan.step(), Step::Spin(0));
    }

    #[test]
    fn sleeps_that_no_wakeup_ends_grow_to_a_limit() {
        let policy = SpinPolicy::new(Some(Duration::ZERO), false);
        let mut plan = plan(&policy, Duration::ZERO);
        for slept in 1..5 {
            plan.after_sleep(MAX_SLEEP, MAX_SLEEP);
            assert_eq!(plan.slept, slept);
        }
        plan.after_sleep(MAX_SLEEP, MAX_SLEEP - Duration::from_nanos(1));
        assert_eq!((plan.slept, plan.yields), (0, YIELDS / 2));
    }

    #[test]
    fn check_is_due_every_50_ms_of_continuous_progress() {
        let policy = SpinPolicy::new(Some(Duration::ZERO), false);
        // The clock is read once per 256 passes.
        let mut plan = plan(&policy, Duration::from_millis(10));
        let due: Vec<u32> = (1..=UNCHECKED_PASSES * 12).filter(|_| plan.check_due().is_some()).collect();
        assert_eq!(due, [6, 11].map(|readings| readings * UNCHECKED_PASSES));
    }

    #[test]
    fn check_precedes_each_rest() {
        let policy = SpinPolicy::new(Some(Duration::ZERO), false);
        let mut plan = plan(&policy, Duration::ZERO);
        let mut rests = Vec::new();
        for _ in 0..3 {
            let checks = plan.check_due().is_some();
            let mut rested = false;
            plan.pause(&Pass::EMPTY, &[], Duration::MAX, |_| rested = true);
            rests.push((checks, rested));
        }
        assert_eq!(rests, [(false, false), (true, true), (true, true)]);
        plan.restart();
        assert!(plan.check_due().is_none());
    }

    #[test]
    fn spin_budget_recovers_after_short_waits() {
        let policy = SpinPolicy::new(None, true);
        let budget = |waited: u64, times: usize| {
            (0..times).for_each(|_| policy.learn(Duration::from_micros(waited)));
            policy.budget.load(Ordering::Relaxed)
        };
        assert_eq!(budget(50, 1), LONGEST_SPIN);
        assert_eq!(budget(51, 10), SHORTEST_SPIN, "others need the core");
        // Longer than the current spin, which ended in a sleep.
        assert_eq!(budget(30, 10), LONGEST_SPIN);
    }
}
