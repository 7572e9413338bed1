//! Node splits.
#![allow(dead_code, reason = "each test file uses a part")]

use smddp_plan::Topology;

/// All ways to write `n` as a sum, greatest first.
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

/// Ranks numbered node by node.
pub(crate) fn in_blocks(sizes: &[usize]) -> Topology {
    let labels = sizes.iter().enumerate().flat_map(|(node, &size)| std::iter::repeat_n(node, size));
    Topology::from_labels(&labels.collect::<Vec<_>>())
}

/// Ranks dealt to the nodes in turns, until each is full.
pub(crate) fn in_turns(sizes: &[usize]) -> Topology {
    let most = sizes.iter().max().copied().unwrap_or(0);
    let turns = (0..most).flat_map(|turn| (0..sizes.len()).filter(move |&node| sizes[node] > turn));
    Topology::from_labels(&turns.collect::<Vec<_>>())
}

/// Numbers that look random, the same each time.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        // Steele and Vigna's splitmix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }

    /// Ranks dealt to the nodes at random.
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
