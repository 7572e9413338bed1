//! Cache of regions. Validation of an entry takes one driver query; a full lookup takes ten.

use crate::device::{Address, Kind, Region};

/// Maximum number of entries.
const MAX_ENTRIES: usize = 4096;

/// Sorted by address.
#[derive(Debug, Default)]
pub(super) struct RegionCache(Vec<Region>);

impl RegionCache {
    /// Returns the region that contains `address`, if `is_valid` confirms the generation of the allocation there.
    pub(super) fn find(&mut self, address: Address, is_valid: impl FnOnce(u64) -> bool) -> Option<Region> {
        let at = self.0.partition_point(|region| region.base <= address).checked_sub(1)?;
        let region = self.0[at];
        if address - region.base >= region.bytes as u64 {
            return None;
        }
        if is_valid(region.generation) {
            return Some(region);
        }
        self.0.remove(at);
        None
    }

    /// Stores a region. Mapped memory is not cached: each physical allocation has a number that the one query cannot
    /// check.
    pub(super) fn insert(&mut self, region: Region) {
        if region.kind != Kind::Legacy {
            return;
        }
        if self.0.len() >= MAX_ENTRIES {
            self.0.clear();
        }
        let at = self.0.partition_point(|entry| entry.base < region.base);
        if self.0.get(at).is_some_and(|entry| entry.base == region.base) {
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
    fn entry_is_valid_while_its_generation_matches() {
        let mut cache = RegionCache::default();
        assert_eq!(cache.find(4096, |_| true), None);
        let first = region(4096, 8192, 1);
        cache.insert(first);
        assert_eq!(cache.find(4096, |generation| generation == 1), Some(first));
        assert_eq!(cache.find(4096 + 8191, |generation| generation == 1), Some(first));
        assert_eq!(cache.find(4095, |_| true), None);
        assert_eq!(cache.find(4096 + 8192, |_| true), None);
        // Freed, and a larger allocation that begins at a lower address: the old entry does not hide the new one.
        assert_eq!(cache.find(5000, |generation| generation == 2), None);
        let second = region(1024, 1 << 20, 2);
        cache.insert(second);
        assert_eq!(cache.find(5000, |generation| generation == 2), Some(second));
        // Mapped memory is queried each time.
        cache.insert(Region { kind: Kind::Mapped, ..region(1 << 30, 4096, 3) });
        assert_eq!(cache.find(1 << 30, |_| true), None);
    }
}
