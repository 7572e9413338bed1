//! Assignment of ranks to nodes.

use std::collections::HashMap;
use std::hash::Hash;

/// Nodes of a group, numbered by first appearance. Supports any rank order (block, cyclic, random) and any
/// number of ranks per node. Lookups use precomputed tables.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    /// Node of each rank.
    node: Vec<usize>,
    /// Index of each rank among the ranks of its node.
    local: Vec<usize>,
    /// Ranks of each node, ascending.
    ranks: Vec<Vec<usize>>,
}

impl Topology {
    /// Returns a topology with all ranks on one node.
    pub fn single(size: usize) -> Self {
        Self::from_labels(&vec![(); size])
    }

    /// Returns `nodes` nodes of `each` ranks, numbered node by node.
    pub fn blocks(nodes: usize, each: usize) -> Self {
        Self::from_labels(&(0..nodes * each).map(|r| r / each).collect::<Vec<_>>())
    }

    /// Builds a topology from one label per rank; ranks with equal labels share a node.
    pub fn from_labels<T: Eq + Hash>(labels: &[T]) -> Self {
        let mut numbers = HashMap::new();
        let (mut node, mut local, mut ranks) = (Vec::new(), Vec::new(), Vec::<Vec<usize>>::new());
        for (rank, label) in labels.iter().enumerate() {
            let new = numbers.len();
            let number = *numbers.entry(label).or_insert(new);
            if number == new {
                ranks.push(Vec::new());
            }
            node.push(number);
            local.push(ranks[number].len());
            ranks[number].push(rank);
        }
        Self { node, local, ranks }
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.node.len()
    }

    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the node of a rank.
    pub fn node_of(&self, rank: usize) -> usize {
        self.node[rank]
    }

    /// Returns the index of `rank` among the ranks of its node.
    pub fn local(&self, rank: usize) -> usize {
        self.local[rank]
    }

    /// Returns the ranks of a node in ascending order; the first is the leader.
    pub fn ranks_of(&self, node: usize) -> &[usize] {
        &self.ranks[node]
    }

    /// Returns the rank with local index `local` of a node. Larger indices wrap around.
    pub fn rank_at(&self, node: usize, local: usize) -> usize {
        let ranks = &self.ranks[node];
        ranks[local % ranks.len()]
    }

    /// Returns true if two ranks are on the same node.
    pub fn share_node(&self, a: usize, b: usize) -> bool {
        self.node[a] == self.node[b]
    }

    /// Returns the smallest and largest number of ranks per node; zeros for an empty group.
    pub fn node_sizes(&self) -> (usize, usize) {
        let sizes = || self.ranks.iter().map(Vec::len);
        (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_numbered_by_first_appearance() {
        let topology = Topology::from_labels(&["b", "a", "b", "c", "a", "b"]);
        assert_eq!(topology.nodes(), 3);
        assert_eq!([0, 1, 2, 3, 4, 5].map(|r| topology.node_of(r)), [0, 1, 0, 2, 1, 0]);
        assert_eq!([0, 1, 2, 3, 4, 5].map(|r| topology.local(r)), [0, 0, 1, 0, 1, 2]);
        assert_eq!(topology.ranks_of(0), [0, 2, 5]);
        assert_eq!(topology.rank_at(1, 3), 4);
        assert_eq!(topology.node_sizes(), (1, 3));
        assert!(topology.share_node(0, 5) && !topology.share_node(0, 1));
    }

    #[test]
    fn single_node_and_empty_groups() {
        assert_eq!((Topology::single(4).nodes(), Topology::single(4).size()), (1, 4));
        assert_eq!((Topology::single(0).nodes(), Topology::single(0).node_sizes()), (0, (0, 0)));
        assert_eq!(Topology::blocks(3, 2), Topology::from_labels(&[0, 0, 1, 1, 2, 2]));
    }
}
