//! Parts, their homes, and the tree of nodes for each part.

use super::trees::{Tree, TreeNode};
use crate::ir::{Buffer, Span};
use crate::topology::Topology;

/// Pipelines per role. Parts of homes in different nodes wait for each other only if the nodes are congruent
/// modulo this number.
pub(super) const PIPELINES: usize = 4;

/// Unit of transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// First block, and the number of blocks.
    blocks: (usize, usize),
    pub(super) home: usize,
    /// Local index of its entries, modulo the ranks of the node.
    pub(super) rail: usize,
    /// Tree of nodes, rooted at the node of the home.
    pub(super) tree: Tree,
}

/// All parts of a collective, the same at every rank.
pub(super) struct Routes<'a> {
    pub(super) topology: &'a Topology,
    pub(super) parts: Vec<Part>,
    /// True if every node (or all but one) has one part for each of its first ranks. The rail is then the
    /// local index of the rank. Otherwise there are few parts.
    pub(super) by_rank: bool,
    /// With `by_rank`: the first part of each node, and the number of parts.
    starts: Vec<usize>,
}

impl<'a> Routes<'a> {
    /// Each rank is the home of the block with its number.
    pub(super) fn each(topology: &'a Topology, tree: Tree) -> Self {
        let part = |node, local| {
            let home = topology.rank_at(node, local);
            Part { blocks: (home, 1), home, rail: local, tree }
        };
        Self::by_rank(topology, |node| topology.ranks_of(node).len(), part)
    }

    /// Each node gets an equal share, independent of its ranks. It has one part for each of its ranks, which
    /// are the homes.
    pub(super) fn spread(topology: &'a Topology, tree: Tree) -> Self {
        Self::shares(topology, None, |node, rail| (topology.rank_at(node, rail), tree))
    }

    /// Each node except the root's gets an equal share. A part goes from the root's node to one rank of that
    /// node, and from there to the other nodes.
    pub(super) fn through(topology: &'a Topology, root: usize) -> Self {
        let node = topology.node_of(root);
        let part = |middle, rail| (topology.rank_at(node, rail), Tree::Through { middle });
        Self::shares(topology, Some(node), part)
    }

    /// The same parts as `through`, with the receiving rank as the home.
    pub(super) fn away(topology: &'a Topology, root: usize) -> Self {
        let part = |node, rail| (topology.rank_at(node, rail), Tree::Star);
        Self::shares(topology, Some(topology.node_of(root)), part)
    }

    /// `part` returns the home of a node's part on a rail, and the tree below it.
    fn shares(
        topology: &'a Topology,
        without: Option<usize>,
        part: impl Fn(usize, usize) -> (usize, Tree),
    ) -> Self {
        let nodes = topology.nodes() - usize::from(without.is_some());
        // There are at least as many blocks as nodes, but possibly fewer than ranks of a node.
        let blocks = |node: usize| {
            let place = node - usize::from(without.is_some_and(|skipped_node| skipped_node < node));
            share(place, nodes, topology.size())
        };
        let count = |node: usize| match without == Some(node) {
            true => 0,
            false => topology.ranks_of(node).len().min(blocks(node).1),
        };
        Self::by_rank(topology, count, |node, rail| {
            let (first, all) = blocks(node);
            let (skipped, mine) = share(rail, count(node), all);
            let (home, tree) = part(node, rail);
            Part { blocks: (first + skipped, mine), home, rail, tree }
        })
    }

    /// One part for each rail, all with homes in one node; `first` is the rail of the first part.
    pub(super) fn rails(topology: &'a Topology, tree: Tree, node: usize, first: usize) -> Self {
        Self::few(topology, topology.node_sizes().0, |i| (node, first + i, tree))
    }

    /// Two parts for each rail, one for each of two trees.
    pub(super) fn doubled(topology: &'a Topology, top: impl Fn(usize) -> usize, first: usize) -> Self {
        let part = |i| (top(i / 2), first + i / 2, Tree::Double { second: i % 2 == 1 });
        Self::few(topology, 2 * topology.node_sizes().0, part)
    }

    /// All data as one part.
    pub(super) fn whole(topology: &'a Topology, tree: Tree, home: usize) -> Self {
        Self::few(topology, 1, |_| (topology.node_of(home), topology.local(home), tree))
    }

    /// `part` returns the node of the home, the rail, and the tree.
    fn few(topology: &'a Topology, count: usize, part: impl Fn(usize) -> (usize, usize, Tree)) -> Self {
        let part = |i| {
            let (node, rail, tree) = part(i);
            let blocks = share(i, count, topology.size());
            Part { blocks, home: topology.rank_at(node, rail), rail, tree }
        };
        Self { topology, parts: (0..count).map(part).collect(), by_rank: false, starts: Vec::new() }
    }

    fn by_rank(
        topology: &'a Topology,
        count: impl Fn(usize) -> usize,
        part: impl Fn(usize, usize) -> Part,
    ) -> Self {
        let (mut parts, mut starts) = (Vec::with_capacity(topology.size()), vec![0]);
        for node in 0..topology.nodes() {
            parts.extend((0..count(node)).map(|local| part(node, local)));
            starts.push(parts.len());
        }
        Self { topology, parts, by_rank: true, starts }
    }

    pub(super) fn span(&self, part: usize, buffer: Buffer) -> Span {
        let (block, blocks) = self.parts[part].blocks;
        Span::new(buffer, block, blocks)
    }

    /// Returns the rank through which a part enters or leaves a node.
    pub(super) fn entry(&self, part: usize, node: usize) -> usize {
        self.topology.rank_at(node, self.parts[part].rail)
    }

    pub(super) fn home_node(&self, part: usize) -> usize {
        self.topology.node_of(self.parts[part].home)
    }

    pub(super) fn homed_at(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.parts.len()).filter(move |&part| self.parts[part].home == rank)
    }

    /// Returns the node to which a part belongs: the node of its home, or the relaying node.
    pub(super) fn owner_node(&self, part: usize) -> usize {
        match self.parts[part].tree {
            Tree::Through { middle } => middle,
            _ => self.home_node(part),
        }
    }

    /// With `by_rank`: returns the parts that belong to a node.
    pub(super) fn parts_of(&self, node: usize) -> std::ops::Range<usize> {
        self.starts[node]..self.starts[node + 1]
    }

    /// Returns the pipeline of a part at `node`, among those of one role. The executor polls pipelines in
    /// order, so they are numbered from the next node on (or from the last, if `backwards`), as in
    /// [`Self::rotated`].
    pub(super) fn pipeline(&self, part: usize, node: usize, backwards: bool) -> usize {
        if self.by_rank { pipeline_of(self.owner_node(part), node, backwards) } else { part % PIPELINES }
    }

    /// Returns the parts in processing order of a node: those of the next node first (or of the last, if
    /// `backwards`), its own last. No two nodes therefore start with the same node.
    pub(super) fn rotated(&self, node: usize, backwards: bool) -> Vec<usize> {
        if !self.by_rank {
            return (0..self.parts.len()).collect();
        }
        let nodes = self.topology.nodes();
        let ordered = (1..=nodes).map(|k| (if backwards { node + nodes - k } else { node + k }) % nodes);
        ordered.flat_map(|n| self.parts_of(n)).collect()
    }

    /// Returns the position of `node` in the tree of `part`.
    pub(super) fn node(&self, part: usize, node: usize) -> TreeNode {
        self.parts[part].tree.node(self.home_node(part), node, self.topology.nodes())
    }

    /// Returns true if `node` forwards `part` to other nodes.
    pub(super) fn forwards(&self, part: usize, node: usize) -> bool {
        self.parts[part].tree.has_children(self.home_node(part), node, self.topology.nodes())
    }

    /// Returns the number of nodes above `node` in the tree of `part`.
    pub(super) fn depth(&self, part: usize, node: usize) -> usize {
        self.parts[part].tree.depth(self.home_node(part), node, self.topology.nodes())
    }

    /// Returns the largest depth of any node; all trees have the same height.
    pub(super) fn height(&self) -> usize {
        self.parts.first().map_or(0, |part| part.tree.height(self.topology.nodes()))
    }

    /// Returns the readers of the down channel of `node`, ascending.
    pub(super) fn readers(&self, part: usize, node: usize) -> Vec<usize> {
        let children = self.node(part, node).children;
        let mut readers: Vec<usize> = children.iter().map(|&n| self.entry(part, n)).collect();
        readers.sort_unstable();
        readers
    }
}

/// Returns the pipeline at `node` for data to node `other` (or from it, with `backwards`).
pub(super) fn pipeline_of(other: usize, node: usize, backwards: bool) -> usize {
    let (other, node) = (other % PIPELINES, node % PIPELINES);
    (if backwards { node + PIPELINES - 1 - other } else { other + 2 * PIPELINES - 1 - node }) % PIPELINES
}

/// Returns the `i`-th of `count` runs of `size` blocks: first block and length.
fn share(i: usize, count: usize, size: usize) -> (usize, usize) {
    let (start, end) = (i * size / count, (i + 1) * size / count);
    (start, end - start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_pipeline_serves_the_next_node() {
        for node in 0..10 {
            for k in 0..8 {
                assert_eq!(pipeline_of(node + 1 + k, node, false), k % PIPELINES);
                assert_eq!(pipeline_of(node + 16 - 1 - k, node, true), k % PIPELINES);
            }
        }
    }

    /// Checks roots, parent and child relations, and depths.
    #[test]
    fn every_tree_spans_all_nodes() {
        for nodes in 2..40 {
            let topology = Topology::blocks(nodes, 2);
            let mut all: Vec<Routes<'_>> = [Tree::Star, Tree::Chain, Tree::Binomial]
                .map(|tree| Routes::each(&topology, tree))
                .into_iter()
                .chain([Routes::spread(&topology, Tree::Binomial)])
                .collect();
            all.push(Routes::through(&topology, nodes));
            all.push(Routes::away(&topology, 1));
            all.push(Routes::doubled(&topology, |rail| rail % nodes, 0));
            for routes in all {
                for part in 0..routes.parts.len() {
                    for node in 0..nodes {
                        let at = routes.node(part, node);
                        assert_eq!(at.parent.is_none(), node == routes.home_node(part));
                        assert_eq!(routes.forwards(part, node), !at.children.is_empty());
                        assert!(at.depth <= routes.height());
                        assert_eq!(routes.depth(part, node), at.depth);
                        for child in at.children {
                            let below = routes.node(part, child);
                            assert_eq!((below.parent, below.depth), (Some(node), at.depth + 1));
                        }
                    }
                }
            }
        }
    }
}
