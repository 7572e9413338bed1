//! Deadline and signal checks of a wait.

use std::time::{Duration, Instant};

use crate::sync::completion::interrupted;

/// Interval between two signal checks.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Deadline and interruption of a wait.
pub(crate) struct Limit {
    until: Option<Instant>,
    /// True if a signal ends the wait.
    interruptible: bool,
    /// Time of the last signal check.
    last_check: Option<Instant>,
}

impl Limit {
    /// Creates a limit; `None` waits forever.
    pub(crate) fn new(until: Option<Instant>) -> Self {
        Self { until, interruptible: true, last_check: None }
    }

    /// Creates a limit that no signal ends. The handler of a pending signal runs afterwards.
    pub(crate) fn uninterrupted(until: Option<Instant>) -> Self {
        Self { until, interruptible: false, last_check: None }
    }

    /// Returns true if the deadline has passed.
    pub(super) fn has_expired(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now >= until)
    }

    /// Returns true if the next signal check is due.
    pub(super) fn check_due(&mut self, now: Instant) -> bool {
        self.interruptible && now.duration_since(*self.last_check.get_or_insert(now)) > SIGNAL_INTERVAL
    }

    /// Returns true if a signal ends the wait. Signal handlers of the program run here and may call this group, so the
    /// calling thread must not own the engine.
    pub(super) fn is_interrupted(&mut self) -> bool {
        self.last_check = Some(Instant::now());
        interrupted()
    }

    /// Returns true if only the call itself or a signal ends the wait.
    pub(super) fn is_unbounded(&self) -> bool {
        self.interruptible && self.until.is_none()
    }

    pub(super) fn remaining(&self, now: Instant) -> Duration {
        self.until.map_or(Duration::MAX, |until| until - now)
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
