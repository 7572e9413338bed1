//! How a thread waits: spin briefly, yield, then sleep on the bell. One policy, one place.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use smddp_transport::{Group, Sleeper};

use crate::config::cores::{cores, local_ranks};

/// Maximum sleep before the next poll, in case a wakeup is lost. It doubles after each sleep that no wakeup ended, up to
/// `MOST_DOUBLINGS` times, because many ranks may wait for minutes on few cores.
const NAP: Duration = Duration::from_millis(20);
const MOST_DOUBLINGS: u32 = 2;
const YIELDS: u32 = 50;
/// `YIELDS` where polling is a system call.
const COSTLY_YIELDS: u32 = 6;
/// Looks without asking the clock.
const FREE_LOOKS: u32 = 128;
/// Looks without a pause: a rank that is on time comes within them.
const QUICK_LOOKS: u32 = 32;
/// The spin budget moves between these, in microseconds: doubled by a wait that the longest would have covered, however it was
/// spent, halved by a longer one, so that ranks whose cores are taken by others soon stop burning their turns.
const LONGEST_SPIN: u32 = 50;
const SHORTEST_SPIN: u32 = 1;

/// Looks at the clock now and then where looks follow each other without a pause: the clock costs as much as a look.
#[derive(Default)]
pub(crate) struct Rounds {
    count: u32,
    last: Option<Instant>,
}

/// Rounds between two looks at the clock, and the time after which it is due.
const BLIND: u32 = 256;
const DUE: Duration = Duration::from_millis(50);

impl Rounds {
    /// Counts a round; whether it has been so long that other things are to be looked after.
    #[inline]
    pub(crate) fn due(&mut self) -> bool {
        self.count = self.count.wrapping_add(1);
        self.count.is_multiple_of(BLIND) && self.late()
    }

    #[cold]
    fn late(&mut self) -> bool {
        let now = Instant::now();
        let late = now.duration_since(*self.last.get_or_insert(now)) >= DUE;
        if late {
            self.last = Some(now);
        }
        late
    }
}

/// How long the threads of one communicator spin.
pub(crate) struct SpinPolicy {
    fixed: Option<Duration>,
    budget: AtomicU32,
    yields: u32,
}

impl SpinPolicy {
    /// `setting`: a fixed time, where the user gave one.
    /// `costly`: a look asks the kernel.
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

    /// `waited`: how long something took to come. What ended a spin that was too short says nothing: a budget that shrank
    /// by it below the way to the other rank and back would never grow again.
    fn learn(&self, waited: Duration) {
        let budget = self.budget.load(Ordering::Relaxed);
        let enough = waited <= Duration::from_micros(u64::from(LONGEST_SPIN));
        let next = if enough { budget * 2 } else { budget / 2 };
        self.budget.store(next.clamp(SHORTEST_SPIN, LONGEST_SPIN), Ordering::Relaxed);
    }
}

/// One wait, from the first look in vain to the end.
pub(crate) struct Backoff<'a> {
    spin_policy: &'a SpinPolicy,
    spin: Duration,
    looks: u32,
    yields: u32,
    /// Naps that nothing ended, one after the other.
    slept: u32,
    since: Option<Instant>,
}

impl<'a> Backoff<'a> {
    pub(crate) fn new(spin_policy: &'a SpinPolicy) -> Self {
        Self { spin_policy, spin: spin_policy.spin(), looks: 0, yields: 0, slept: 0, since: None }
    }

    /// Something moved: start anew.
    #[inline]
    pub(crate) fn reset(&mut self) {
        if let Some(since) = self.since.take() {
            self.spin_policy.learn(since.elapsed());
            self.spin = self.spin_policy.spin();
        }
        self.looks = 0;
        self.yields = 0;
        self.slept = 0;
    }

    /// One wait after a look in vain. `true`: the caller should look once more and then call [`Backoff::max_sleep`].
    #[inline]
    pub(crate) fn wait(&mut self) -> bool {
        if !self.spin.is_zero() {
            // Where spinning has not been enough lately, the other rank may well need this core.
            let free = if self.spin <= Duration::from_micros(2) { FREE_LOOKS / 8 } else { FREE_LOOKS };
            if self.looks < free {
                self.looks += 1;
                if self.looks > QUICK_LOOKS {
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

    pub(crate) fn max_sleep(&mut self, about_to_sleep: &AboutToSleep<'_>, group: &Group, at_most: Duration) {
        let mut fds = Vec::new();
        let sleep_limit = longest(group, &mut fds);
        let most = sleep_limit * (1 << self.slept.min(MOST_DOUBLINGS));
        let begun = Instant::now();
        about_to_sleep.sleep(&fds, most.min(at_most));
        if sleep_limit == NAP && begun.elapsed() >= NAP {
            self.slept += 1;
        } else {
            // Woken by somebody: the next message is often close behind.
            self.slept = 0;
            self.yields = self.spin_policy.yields / 2;
        }
    }
}

/// Between two looks at wires that do not tell when something comes.
const BLIND_NAP: Duration = Duration::from_micros(100);

/// How long nobody looks at that group at most, and the descriptors that are to end it sooner.
pub(crate) fn longest(group: &Group, fds: &mut Vec<(RawFd, i16)>) -> Duration {
    if group.interest(fds) { NAP } else { BLIND_NAP }
}

/// Somebody who is about to sleep, and looks once more before.
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
    fn a_spin_that_became_too_short_grows_again_where_the_waits_are_short() {
        let policy = SpinPolicy::new(None, true);
        let budget = |waited: u64, times: usize| {
            (0..times).for_each(|_| policy.learn(Duration::from_micros(waited)));
            policy.budget.load(Ordering::Relaxed)
        };
        assert_eq!(budget(50, 1), LONGEST_SPIN);
        assert_eq!(budget(51, 10), SHORTEST_SPIN, "others need the core");
        // Longer than the spin of then, which ended in a sleep.
        assert_eq!(budget(30, 10), LONGEST_SPIN);
    }
}
