//! Distance to the caches of the other ranks.
//!
//! Between cores that share a last-level cache an ordinary store to a slot is fastest: the reader finds the data in that cache.
//! Other cores are in another core complex, on another socket, or in a virtual machine whose processors were moved apart.
//! There, taking a line back from the reader's cache costs several times the copy. Streaming stores only invalidate the line
//! and are up to four times faster.
//!
//! The distance may change while a job runs, so it is measured repeatedly. The measure is the time until the store to a
//! channel's counter is visible to all. The caches of waiting readers hold the line of that counter.

use std::time::Duration;

/// Threshold between the measured times, which include the clock.
///
/// - Local caches on Zen 4: 30 to 50 ns (round trip 55 ns).
/// - Local caches on Cascade Lake, whose cores share the last level over a mesh: 30 to 110 ns (round trip 205 to 235 ns).
/// - Remote caches on Zen 4: 130 to 160 ns (round trip 330 ns).
const REMOTE_STORE_TIME: Duration = Duration::from_nanos(115);

/// The last eight measurements, one bit each.
#[derive(Default)]
pub(super) struct CacheDistance {
    history: u8,
    remote: bool,
    /// Set if measurements are ignored.
    fixed: bool,
}

impl CacheDistance {
    pub(super) fn assume_remote(&mut self) {
        (self.remote, self.fixed) = (true, true);
    }

    pub(super) fn record(&mut self, took: Duration) {
        if self.fixed {
            return;
        }
        self.history = self.history << 1 | u8::from(took > REMOTE_STORE_TIME);
        // A remote reader that has not polled yet appears local, but a local one never appears remote. Few slow stores are therefore
        // stronger evidence than many fast ones.
        match self.history.count_ones() {
            3.. => self.remote = true,
            0 => self.remote = false,
            _ => {}
        }
    }

    #[inline]
    pub(super) fn is_remote(&self) -> bool {
        self.remote
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_slow_stores_mean_remote_readers() {
        let mut distance = CacheDistance::default();
        distance.record(Duration::from_millis(1));
        assert!(!distance.is_remote());
        (0..2).for_each(|_| distance.record(Duration::from_nanos(140)));
        assert!(distance.is_remote());
        (0..7).for_each(|_| distance.record(Duration::from_nanos(40)));
        assert!(distance.is_remote(), "fast stores are weak evidence");
        distance.record(Duration::from_nanos(40));
        assert!(!distance.is_remote());
    }
}
