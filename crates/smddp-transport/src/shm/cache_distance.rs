//! How far the other ranks' caches are.
//!
//! Between cores that share a last-level cache an ordinary store to a cell is best: the reader finds the data there.
//! Between cores that do not (another core complex, another socket, or a virtual machine whose processors were moved
//! apart) taking a line back from a distant reader's cache costs several times the copy, and streaming stores, which
//! only have to tell it to forget the line, are up to four times quicker. The distance may change while a job runs,
//! so it is measured again and again: the time until a channel's count, whose line waiting readers have in their
//! caches, is seen by all.

use std::time::Duration;

/// Between the measured, clock included. Near: 30 to 50 ns on Zen 4 (round trip 55 ns), 30 to 110 on Cascade Lake, where all cores
/// of a socket share the last level over a mesh (round trip 205 to 235 ns). Far: 130 to 160 ns (Zen 4, round trip 330 ns).
const FAR: Duration = Duration::from_nanos(115);

/// The last eight measurements, one bit each.
#[derive(Default)]
pub(super) struct CacheDistance {
    history: u8,
    remote: bool,
    /// Nothing is learned any more.
    fixed: bool,
}

impl CacheDistance {
    pub(super) fn assume_remote(&mut self) {
        (self.remote, self.fixed) = (true, true);
    }

    pub(super) fn learn(&mut self, took: Duration) {
        if self.fixed {
            return;
        }
        self.history = self.history << 1 | u8::from(took > FAR);
        // A reader that has not looked yet seems near, a near one never far: few late ones tell more than many early.
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
    fn one_late_store_is_no_distance_and_some_are() {
        let mut distance = CacheDistance::default();
        distance.learn(Duration::from_millis(1));
        assert!(!distance.is_remote());
        (0..2).for_each(|_| distance.learn(Duration::from_nanos(140)));
        assert!(distance.is_remote());
        (0..7).for_each(|_| distance.learn(Duration::from_nanos(40)));
        assert!(distance.is_remote(), "readers that did not look are no news");
        distance.learn(Duration::from_nanos(40));
        assert!(!distance.is_remote());
    }
}
