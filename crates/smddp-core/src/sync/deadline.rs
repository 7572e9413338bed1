//! Deadlines from user-given seconds, which may be infinite.

use std::time::{Duration, Instant};

/// Substitute for a deadline that the clock cannot represent: longer than any job.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Returns the instant `timeout` after `begun`. A timeout that the clock cannot represent becomes 100 years.
pub fn after(begun: Instant, timeout: Duration) -> Instant {
    begun.checked_add(timeout.min(FOREVER)).unwrap_or(begun)
}

/// Returns the duration of `seconds`: 0 for a negative number or NaN, and the longest duration for infinity.
pub fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_seconds_gives_a_deadline() {
        let now = Instant::now();
        for seconds in [0.0, 1e-9, 1.0, 1e9, 1e15, 1e19, 9.3e18, f64::MAX, f64::INFINITY] {
            let until = after(now, duration(seconds));
            assert!(until >= now && (seconds < 1.0 || until >= now + Duration::from_secs(1)), "{seconds}");
            // A deadline leaves room for later additions.
            assert!(until.checked_add(Duration::from_secs(3600)).is_some(), "{seconds}");
        }
        assert_eq!([duration(f64::NAN), duration(-1.0)], [Duration::ZERO; 2]);
    }
}
