//! Trees of nodes along which parts move.

use super::double_tree::DoubleTree;

/// Shape of the tree below the node of a home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tree {
    /// All other nodes are children of the root, the right neighbour first.
    Star,
    /// A chain from the root node to the right.
    Chain,
    /// Binomial tree: distances that halve, the farthest first, so that the largest total volume goes to the
    /// nearest node.
    ///
    /// Counted from the root, the parent of `o` is `o` without its lowest bit. All trees together are
    /// recursive doubling (down) and halving (up), for any number of nodes.
    Binomial,
    /// The first or second of two binary trees.
    Double { second: bool },
    /// One child of the root, which is the parent of all other nodes. Data of one root passes through one
    /// other node, so that the root's link carries it once.
    Through { middle: usize },
}

/// Position of a node in a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TreeNode {
    pub(super) parent: Option<usize>,
    pub(super) children: Vec<usize>,
    pub(super) depth: usize,
}

impl Tree {
    /// Returns the position of `node` in the tree of `nodes` nodes with root `top`.
    pub(super) fn node(self, top: usize, node: usize, nodes: usize) -> TreeNode {
        let others_from = |from: usize| (1..nodes).map(move |k| (from + k) % nodes);
        let offset = offset(top, node, nodes);
        match self {
            Self::Star if node == top => {
                TreeNode { parent: None, children: others_from(top).collect(), depth: 0 }
            }
            Self::Star => TreeNode { parent: Some(top), children: Vec::new(), depth: 1 },
            Self::Chain => {
                let parent = (offset > 0).then_some((node + nodes - 1) % nodes);
                let below = (offset + 1 < nodes).then_some((node + 1) % nodes);
                TreeNode { parent, children: below.into_iter().collect(), depth: offset }
            }
            Self::Binomial => {
                let lowest =
                    if offset == 0 { nodes.next_power_of_two() } else { offset & offset.wrapping_neg() };
                let distances =
                    std::iter::successors(Some(lowest / 2), |d| Some(d / 2)).take_while(|&d| d > 0);
                let children = distances.filter(|d| offset + d < nodes).map(|d| (offset + d + top) % nodes);
                let parent = (offset > 0).then(|| ((offset & (offset - 1)) + top) % nodes);
                TreeNode { parent, children: children.collect(), depth: offset.count_ones() as usize }
            }
            Self::Double { second } => {
                let tree = DoubleTree { size: nodes, root: top, second };
                let (parent, children) = (tree.parent(node), tree.children(node));
                TreeNode { parent, children, depth: tree.depth(node) }
            }
            Self::Through { middle } if node == top => {
                TreeNode { parent: None, children: vec![middle], depth: 0 }
            }
            Self::Through { middle } if node == middle => {
                let others = others_from(middle).filter(|&n| n != top);
                TreeNode { parent: Some(top), children: others.collect(), depth: 1 }
            }
            Self::Through { middle } => TreeNode { parent: Some(middle), children: Vec::new(), depth: 2 },
        }
    }

    /// Returns true if `node` has children.
    pub(super) fn has_children(self, top: usize, node: usize, nodes: usize) -> bool {
        let offset = offset(top, node, nodes);
        match self {
            Self::Star => node == top,
            Self::Chain => offset + 1 < nodes,
            Self::Through { middle } => node == top || (node == middle && nodes > 2),
            // The nearest child is at distance 1.
            Self::Binomial => offset.is_multiple_of(2) && offset + 1 < nodes,
            Self::Double { .. } => !self.node(top, node, nodes).children.is_empty(),
        }
    }

    /// Returns the number of nodes above `node`.
    pub(super) fn depth(self, top: usize, node: usize, nodes: usize) -> usize {
        match self {
            Self::Star => usize::from(node != top),
            Self::Chain => offset(top, node, nodes),
            Self::Through { .. } | Self::Binomial | Self::Double { .. } => self.node(top, node, nodes).depth,
        }
    }

    /// Returns the largest depth of any node.
    pub(super) fn height(self, nodes: usize) -> usize {
        match self {
            Self::Star => 1,
            Self::Through { .. } => 2,
            Self::Chain => nodes - 1,
            Self::Binomial => nodes.next_power_of_two().ilog2() as usize,
            Self::Double { .. } => nodes.ilog2() as usize + 1,
        }
    }
}

/// Returns the index of `node` counted from the root node.
fn offset(top: usize, node: usize, nodes: usize) -> usize {
    (node + nodes - top) % nodes
}
