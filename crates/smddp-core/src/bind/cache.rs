//! The bindings that a communicator keeps.

use std::sync::Arc;

use super::BoundCall;
use crate::call::key::Key;
use crate::error::Result;

/// Bindings of one communicator, as many as fit a budget of bytes: one of thousands of ranks is megabytes.
pub(crate) struct Cache {
    kept: Vec<Kept>,
    bytes: usize,
    budget: usize,
    /// Looks so far.
    clock: u64,
    /// Calls that were bound so far.
    pub(crate) made: u64,
}

struct Kept {
    key: Key,
    bound: Arc<BoundCall>,
    bytes: usize,
    used: u64,
}

/// Looking through more would take longer than it saves.
const MOST: usize = 64;
const BUDGET: usize = 64 << 20;

impl Default for Cache {
    fn default() -> Self {
        Self { kept: Vec::new(), bytes: 0, budget: BUDGET, clock: 0, made: 0 }
    }
}

impl Cache {
    /// The binding of `key`; made by `bind` where it is not kept.
    pub(crate) fn get_or_bind(
        &mut self,
        key: Key,
        bind: impl FnOnce(&Key) -> Result<BoundCall>,
    ) -> Result<&Arc<BoundCall>> {
        self.clock += 1;
        let at = match self.kept.iter().position(|kept| kept.key == key) {
            Some(found) => {
                // Halfway to the front, where it is found sooner; two calls in turns do not push each other around.
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

    /// The least recently used go, until there is room. One that alone is larger is kept: its call comes again as a rule.
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

    use smddp_plan::{Collective, Counts, Memory, Topology};
    use smddp_transport::Routes;

    use super::*;
    use crate::bind::{GroupFacts, bind};
    use crate::call::types::DType;
    use crate::config::Config;

    #[test]
    fn plans_keep_to_a_budget_and_the_least_recently_used_goes() {
        let topology = Topology::single(256);
        let routes = Arc::new(Routes::local(0, topology.size()));
        let assumed = GroupFacts::assumed("");
        let facts = GroupFacts {
            rank: 0,
            topology,
            slot: 0,
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
        // The first one is used again and again.
        for count in 1..=40 {
            let (_, kept) = get(count);
            most = most.max(kept);
            assert!(!get(1).0 || count == 1, "what was used last is gone");
        }
        assert!((2..40).contains(&most), "{most} kept of 40");
        assert!(get(2).0, "what was used longest ago is kept");
        assert!(!get(40).0);
    }
}
