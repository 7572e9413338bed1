//! Wait policy: spin briefly, yield, then sleep on the doorbell.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use smddp_transport::{Group, Sleeper};

use crate::config::cores::{cores, local_ranks};

/// Maximum sleep before the next poll, in case a wakeup is lost. It doubles after each sleep that no wakeup ended,
/// up to `MAX_DOUBLINGS` times, because many ranks may wait for minutes on few cores.
const MAX_SLEEP: Duration = Duration::from_millis(20);
const MAX_DOUBLINGS: u32 = 2;
const YIELDS: u32 = 50;
/// `YIELDS` where polling is a system call.
const COSTLY_YIELDS: u32 = 6;
/// Polls without reading the clock.
const FREE_POLLS: u32 = 128;
/// Polls without a pause, enough for a rank that is on time.
const QUICK_POLLS: u32 = 32;
/// Bounds of the spin budget, in microseconds. A wait within the upper bound doubles the budget, even if part of it
/// was not spent spinning. A longer wait halves the budget, so ranks that share their cores soon stop spinning.
const LONGEST_SPIN: u32 = 50;
const SHORTEST_SPIN: u32 = 1;

/// Reads the clock only once per `UNCHECKED_PASSES` passes: reading it costs as much as a poll.
#[derive(Default)]
pub(crate) struct CheckTimer {
    count: u32,
    last: Option<Instant>,
}

/// Passes between two readings of the clock, and the interval between two checks.
const UNCHECKED_PASSES: u32 = 256;
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

impl CheckTimer {
    /// Counts a pass. Returns true if the next failure check is due.
    #[inline]
    pub(crate) fn due(&mut self) -> bool {
        self.count = self.count.wrapping_add(1);
        self.count.is_multiple_of(UNCHECKED_PASSES) && self.is_overdue()
    }

    #[cold]
    fn is_overdue(&mut self) -> bool {
        let now = Instant::now();
        let is_overdue = now.duration_since(*self.last.get_or_insert(now)) >= CHECK_INTERVAL;
        if is_overdue {
            self.last = Some(now);
        }
        is_overdue
    }
}

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

/// One wait, from the first unsuccessful poll to progress.
pub(crate) struct Backoff<'a> {
    spin_policy: &'a SpinPolicy,
    spin: Duration,
    polls: u32,
    yields: u32,
    /// Consecutive sleeps that no wakeup ended.
    slept: u32,
    since: Option<Instant>,
}

impl<'a> Backoff<'a> {
    pub(crate) fn new(spin_policy: &'a SpinPolicy) -> Self {
        Self { spin_policy, spin: spin_policy.spin(), polls: 0, yields: 0, slept: 0, since: None }
    }

    /// Restarts the wait after progress.
    #[inline]
    pub(crate) fn reset(&mut self) {
        if let Some(since) = self.since.take() {
            self.spin_policy.learn(since.elapsed());
            self.spin = self.spin_policy.spin();
        }
        self.polls = 0;
        self.yields = 0;
        self.slept = 0;
    }

    /// Waits once after an unsuccessful poll. Returns true if the caller should poll once more and then call
    /// [`Backoff::sleep`].
    #[inline]
    pub(crate) fn wait(&mut self) -> bool {
        if !self.spin.is_zero() {
            // If recent spins were too short, the other rank may need this core.
            let free = if self.spin <= Duration::from_micros(2) { FREE_POLLS / 8 } else { FREE_POLLS };
            if self.polls < free {
                self.polls += 1;
                if self.polls > QUICK_POLLS {
                    std::hint::spin_loop();
                }
                return false;
            }
            let since = *self.since.get_or_insert_with(Instant::now);
            if self.yields == 0 && since.elapsed() < self.spin {
                (0..8).for_each(|_| std::hint::spin_loop());
                return false;
            }
        }
        if self.yields < self.spin_policy.yields {
            self.yields += 1;
            std::thread::yield_now();
            return false;
        }
        true
    }

    pub(crate) fn sleep(&mut self, about_to_sleep: &AboutToSleep<'_>, group: &Group, at_most: Duration) {
        let mut fds = Vec::new();
        let sleep_limit = max_poll_interval(group, &mut fds);
        let most = sleep_limit * (1 << self.slept.min(MAX_DOUBLINGS));
        let begun = Instant::now();
        about_to_sleep.sleep(&fds, most.min(at_most));
        if sleep_limit == MAX_SLEEP && begun.elapsed() >= MAX_SLEEP {
            self.slept += 1;
        } else {
            // After a wakeup, the next message often follows soon.
            self.slept = 0;
            self.yields = self.spin_policy.yields / 2;
        }
    }
}

/// Interval between two polls of transports that cannot signal incoming data.
const UNSIGNALED_SLEEP: Duration = Duration::from_micros(100);

/// Returns the longest time without a poll of the group, and adds the descriptors that may end it early to `fds`.
pub(crate) fn max_poll_interval(group: &Group, fds: &mut Vec<(RawFd, i16)>) -> Duration {
    if group.wait_sources(fds) { MAX_SLEEP } else { UNSIGNALED_SLEEP }
}

/// Registration of a thread that polls once more and then sleeps, so that no wakeup is lost.
pub(crate) struct AboutToSleep<'a> {
    sleeper: &'a Sleeper,
    ticket: u32,
}

impl<'a> AboutToSleep<'a> {
    pub(crate) fn new(sleeper: &'a Sleeper) -> Self {
        Self { sleeper, ticket: sleeper.prepare_wait() }
    }

    pub(crate) fn sleep(&self, fds: &[(RawFd, i16)], at_most: Duration) {
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
    use super::*;

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
