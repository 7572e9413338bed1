//! Cache of bound calls.

use std::sync::Arc;

use super::BoundCall;
use crate::call::key::Key;
use crate::error::Result;

/// Bound calls of one communicator, limited by count and by bytes: a call on thousands of ranks takes megabytes.
pub(crate) struct Cache {
    kept: Vec<Kept>,
    bytes: usize,
    budget: usize,
    /// Number of lookups.
    clock: u64,
    /// Number of calls bound, that is, of cache misses.
    pub(crate) made: u64,
}

struct Kept {
    key: Key,
    bound: Arc<BoundCall>,
    bytes: usize,
    used: u64,
}

/// Maximum number of entries. A longer linear search would cost more than it saves.
const MOST: usize = 64;
const BUDGET: usize = 64 << 20;

impl Default for Cache {
    fn default() -> Self {
        Self { kept: Vec::new(), bytes: 0, budget: BUDGET, clock: 0, made: 0 }
    }
}

impl Cache {
    /// Returns the bound call for `key`. Binds it with `bind` on a miss.
    pub(crate) fn get_or_bind(
        &mut self,
        key: Key,
        bind: impl FnOnce(&Key) -> Result<BoundCall>,
    ) -> Result<&Arc<BoundCall>> {
        self.clock += 1;
        let at = match self.kept.iter().position(|kept| kept.key == key) {
            Some(found) => {
                // Moves halfway to the front, so that frequent calls are found early and two alternating calls do not
                // displace each other.
                self.kept.swap(found, found / 2);
                found / 2
            }
            None => {
                let bound = bind(&key)?;
                self.made += 1;
                let bytes = bound.memory_bytes();
                self.make_room(bytes);
                self.bytes += bytes;
                self.kept.insert(0, Kept { key, bound: Arc::new(bound), bytes, used: 0 });
                0
            }
        };
        self.kept[at].used = self.clock;
        Ok(&self.kept[at].bound)
    }

    /// Evicts the least recently used entries until `bytes` fit. An entry larger than the whole budget is still kept,
    /// since its call is usually repeated.
    fn make_room(&mut self, bytes: usize) {
        while self.kept.len() >= MOST || self.bytes + bytes > self.budget {
            let oldest = (0..self.kept.len()).min_by_key(|&at| self.kept[at].used);
            let Some(oldest) = oldest else { return };
            self.bytes -= self.kept.remove(oldest).bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use smddp_group::Routes;
    use smddp_plan::{Collective, Counts, Memory, Topology};

    use super::*;
    use crate::bind::{GroupFacts, bind};
    use crate::call::types::DType;
    use crate::config::Config;

    #[test]
    fn least_recently_used_calls_are_evicted_beyond_the_budget() {
        let topology = Topology::single(256);
        let routes = Arc::new(Routes::local(0, topology.size()));
        let assumed = GroupFacts::assumed("");
        let facts = GroupFacts {
            rank: 0,
            topology,
            inline_bytes: 0,
            routes,
            assumed,
            network: OnceLock::new(),
            canonical: OnceLock::new(),
        };
        let key = |count: usize| {
            let (collective, dtype, memory) = (Collective::AllToAll, DType::F32, Memory::Host);
            let counts = Counts::Even(count);
            Key { collective, dtype, redop: 0, root: 0, factor: 0, counts, memory, site: 0, lossless: false }
        };
        let config = Config::default();
        let mut cache = Cache { budget: 1 << 20, ..Cache::default() };
        let mut get = |count: usize| {
            let made = cache.made;
            cache.get_or_bind(key(count), |key| bind(key, &facts, &config)).unwrap();
            assert!(
                cache.bytes <= cache.budget || cache.kept.len() == 1,
                "{} of {}",
                cache.bytes,
                cache.kept.len()
            );
            assert_eq!(cache.bytes, cache.kept.iter().map(|kept| kept.bytes).sum::<usize>());
            (cache.made > made, cache.kept.len())
        };
        let mut most = 0;
        // Count 1 is used in every round.
        for count in 1..=40 {
            let (_, kept) = get(count);
            most = most.max(kept);
            assert!(!get(1).0 || count == 1, "the most recently used entry was evicted");
        }
        assert!((2..40).contains(&most), "{most} kept of 40");
        assert!(get(2).0, "the least recently used entry was kept");
        assert!(!get(40).0);
    }
}
