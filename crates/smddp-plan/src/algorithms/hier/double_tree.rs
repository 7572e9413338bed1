//! Inter-node algorithm with two binary trees, each for half of the parts. An inner node of one tree is a
//! leaf of the other.
//!
//! ```text
//! 7 nodes:  first half             second half
//!               0                    0           the root; below it an in-order tree over 1..7,
//!               |                    |           and the same tree mirrored (odd numbers) or shifted by one:
//!               4                    3           the leaves of one are the inner nodes of the other
//!             /   \                /   \
//!            2     6              1     5
//!           / \   /                \   / \
//!          1   3 5                  2 4   6
//! ```
//!
//! Logarithmic latency, and every node link is used both ways: Sanders, Speck and Traeff, "Two-tree
//! Algorithms for Full Bandwidth Broadcast, Reduction and Scan", 2009. Nodes are counted from the root (`node
//! - root mod nodes`).

/// One of the two trees.
pub(super) struct DoubleTree {
    pub(super) size: usize,
    pub(super) root: usize,
    pub(super) second: bool,
}

impl DoubleTree {
    /// Returns the parent of `node`, or `None` at the root.
    pub(super) fn parent(&self, node: usize) -> Option<usize> {
        let n = self.size;
        let place = self.relabel((node + n - self.root) % n, true);
        let bit = place & place.wrapping_neg();
        if bit == 0 {
            return None;
        }
        let above = (place ^ bit) | (bit << 1);
        let above = if above < n { above } else { place ^ bit };
        Some((self.relabel(above, false) + self.root) % n)
    }

    /// Maps a position counted from the root to the equivalent position in the first tree, or back. Parity
    /// changes, so leaves (odd) become inner nodes (even). If N is even, one node is a leaf in both trees.
    fn relabel(&self, place: usize, to_first: bool) -> usize {
        let last = self.size - 1;
        match place {
            0 => 0,
            p if !self.second => p,
            p if last.is_multiple_of(2) => self.size - p,
            p if to_first => (p + last - 2) % last + 1,
            p => p % last + 1,
        }
    }

    /// Returns the children in ascending order.
    pub(super) fn children(&self, node: usize) -> Vec<usize> {
        let n = self.size;
        let place = self.relabel((node + n - self.root) % n, true);
        // A child has a lower lowest bit, and differs from its parent by that bit.
        let lowest = if place == 0 { n.next_power_of_two() } else { place & place.wrapping_neg() };
        let bits = std::iter::successors(Some(1), |bit| Some(2 * bit)).take_while(|&bit| bit < lowest);
        let mut children: Vec<usize> = bits
            .flat_map(|bit| [place.wrapping_sub(bit), place + bit])
            .filter(|&child| child < n)
            .map(|child| (self.relabel(child, false) + self.root) % n)
            .filter(|&child| self.parent(child) == Some(node))
            .collect();
        children.sort_unstable();
        children
    }

    pub(super) fn depth(&self, node: usize) -> usize {
        std::iter::successors(self.parent(node), |&r| self.parent(r)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_reaches_the_root_and_is_inner_at_most_once() {
        for size in 2..70 {
            for root in [0, size / 2, size - 1] {
                let trees = [false, true].map(|second| DoubleTree { size, root, second });
                for node in 0..size {
                    for tree in &trees {
                        assert!(tree.depth(node) <= size.ilog2() as usize + 1, "{size} {root} {node}");
                        let children: Vec<_> = (0..size).filter(|&r| tree.parent(r) == Some(node)).collect();
                        assert_eq!(tree.children(node), children);
                        assert!(children.len() <= 2);
                        assert_eq!(tree.parent(node).is_none(), node == root);
                    }
                    let inner = trees.iter().filter(|t| !t.children(node).is_empty()).count();
                    assert!(node == root || inner <= 1, "{size} {root} {node}");
                }
            }
        }
    }
}
