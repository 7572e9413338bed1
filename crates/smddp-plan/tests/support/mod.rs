//! Node splits.
#![allow(dead_code, reason = "each test file uses a part")]

use smddp_plan::Topology;

/// Returns all partitions of `n`, the largest first.
pub(crate) fn partitions(n: usize) -> Vec<Vec<usize>> {
    fn below(n: usize, most: usize) -> Vec<Vec<usize>> {
        if n == 0 {
            return vec![Vec::new()];
        }
        let first = (1..=most.min(n)).rev();
        first
            .flat_map(|k| {
                below(n - k, k).into_iter().map(move |mut rest| {
                    rest.insert(0, k);
                    rest
                })
            })
            .collect()
    }
    below(n, n)
}

/// Returns nodes of these sizes with ranks numbered node by node.
pub(crate) fn in_blocks(sizes: &[usize]) -> Topology {
    let labels = sizes.iter().enumerate().flat_map(|(node, &size)| std::iter::repeat_n(node, size));
    Topology::from_labels(&labels.collect::<Vec<_>>())
}

/// Returns nodes of these sizes with ranks assigned round-robin until each node is full.
pub(crate) fn round_robin(sizes: &[usize]) -> Topology {
    let most = sizes.iter().max().copied().unwrap_or(0);
    let ranks = (0..most).flat_map(|round| (0..sizes.len()).filter(move |&node| sizes[node] > round));
    Topology::from_labels(&ranks.collect::<Vec<_>>())
}

/// Deterministic pseudo-random numbers.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        // The generator is splitmix64 (Steele, Lea and Flood; Vigna).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }

    /// Returns an item of a list that is not empty.
    pub(crate) fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    /// Returns nodes of these sizes with ranks assigned at random.
    pub(crate) fn shuffled(&mut self, sizes: &[usize]) -> Topology {
        let labels = sizes.iter().enumerate().flat_map(|(node, &size)| std::iter::repeat_n(node, size));
        let mut labels: Vec<usize> = labels.collect();
        for i in (1..labels.len()).rev() {
            let other = self.below(i + 1);
            labels.swap(i, other);
        }
        Topology::from_labels(&labels)
    }
}
