//! Allocations that were asked about before: whether one is still there takes one question, and what it is takes ten.

use crate::device::{Address, Kind, Region};

/// So many are kept.
const MOST: usize = 4096;

/// In the order of their addresses.
#[derive(Debug, Default)]
pub(super) struct Known(Vec<Region>);

impl Known {
    /// The region in which `address` lies, if `is` says that the allocation there still has this generation.
    pub(super) fn find(&mut self, address: Address, is: impl FnOnce(u64) -> bool) -> Option<Region> {
        let at = self.0.partition_point(|region| region.base <= address).checked_sub(1)?;
        let region = self.0[at];
        if address - region.base >= region.bytes as u64 {
            return None;
        }
        if is(region.generation) {
            return Some(region);
        }
        self.0.remove(at);
        None
    }

    /// Of mapped memory each chunk has a number of its own, which the one question does not tell.
    pub(super) fn learn(&mut self, region: Region) {
        if region.kind != Kind::Legacy {
            return;
        }
        if self.0.len() >= MOST {
            self.0.clear();
        }
        let at = self.0.partition_point(|known| known.base < region.base);
        if self.0.get(at).is_some_and(|known| known.base == region.base) {
            self.0[at] = region;
        } else {
            self.0.insert(at, region);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(base: Address, bytes: usize, generation: u64) -> Region {
        Region { base, bytes, generation, kind: Kind::Legacy }
    }

    #[test]
    fn what_is_known_holds_as_long_as_its_generation_does() {
        let mut known = Known::default();
        assert_eq!(known.find(4096, |_| true), None);
        let first = region(4096, 8192, 1);
        known.learn(first);
        assert_eq!(known.find(4096, |generation| generation == 1), Some(first));
        assert_eq!(known.find(4096 + 8191, |generation| generation == 1), Some(first));
        assert_eq!(known.find(4095, |_| true), None);
        assert_eq!(known.find(4096 + 8192, |_| true), None);
        // Freed, and a larger one made that begins before it: the old one is not in the way of the new one.
        assert_eq!(known.find(5000, |generation| generation == 2), None);
        let second = region(1024, 1 << 20, 2);
        known.learn(second);
        assert_eq!(known.find(5000, |generation| generation == 2), Some(second));
        // Memory whose chunks have numbers of their own is asked about each time.
        known.learn(Region { kind: Kind::Mapped, ..region(1 << 30, 4096, 3) });
        assert_eq!(known.find(1 << 30, |_| true), None);
    }
}
