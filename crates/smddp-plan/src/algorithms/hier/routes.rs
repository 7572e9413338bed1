//! Parts, their homes, and the tree of nodes along which each travels.

use super::{mesh, recursive, ring, tree};
use crate::ir::{Buffer, Span};
use crate::topology::Topology;

/// Lanes of one role: parts of homes in different nodes wait for each other only where these are congruent.
pub(super) const LANES: usize = 4;

/// The tree of nodes under a home's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// All other nodes right below.
    Star,
    /// One below the other.
    Chain,
    Binomial,
    /// The first or second of two binary trees.
    Pair,
    /// One node below, all others below that.
    Through,
}

/// A node's place in the tree of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) parent: Option<usize>,
    pub(super) children: Vec<usize>,
    pub(super) depth: usize,
}

/// What moves as one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// First block, and how many.
    blocks: (usize, usize),
    pub(super) home: usize,
    /// Its entry has this local index, modulo the ranks of the node.
    pub(super) rail: usize,
    /// `Pair`: travels the second tree.
    second: bool,
    /// `Through`: the node below the home's.
    middle: usize,
}

/// All parts of a collective, the same at every rank.
pub(super) struct Routes<'a> {
    pub(super) topology: &'a Topology,
    pub(super) shape: Shape,
    pub(super) parts: Vec<Part>,
    /// Whether there are parts for each node (or all but one): for its first rank, its second, and so on, each with
    /// the rank's local index as its rail. Otherwise they are few.
    pub(super) by_rank: bool,
    /// `by_rank`: the first part of each node, and the number of parts.
    starts: Vec<usize>,
}

impl<'a> Routes<'a> {
    /// Each rank is the home of its own block.
    pub(super) fn each(topology: &'a Topology, shape: Shape) -> Self {
        Self::by_rank(
            topology,
            shape,
            |node| topology.ranks_of(node).len(),
            |node, local| {
                let home = topology.ranks_of(node)[local];
                Part { blocks: (home, 1), home, rail: local, second: false, middle: node }
            },
        )
    }

    /// Every node gets an equal share, however many ranks it has: a part for each of its ranks, which are their homes.
    pub(super) fn spread(topology: &'a Topology, shape: Shape) -> Self {
        Self::shares(topology, shape, None, |node, rail| topology.rank_at(node, rail))
    }

    /// Every node but the root's gets an equal share. A part goes from the root's node to one rank of that node, and
    /// from there to the other nodes.
    pub(super) fn through(topology: &'a Topology, root: usize) -> Self {
        let node = topology.node_of(root);
        Self::shares(topology, Shape::Through, Some(node), |_, rail| topology.rank_at(node, rail))
    }

    /// The same parts; that rank is the home.
    pub(super) fn away(topology: &'a Topology, root: usize) -> Self {
        let home = |node, rail| topology.rank_at(node, rail);
        Self::shares(topology, Shape::Star, Some(topology.node_of(root)), home)
    }

    fn shares(
        topology: &'a Topology,
        shape: Shape,
        without: Option<usize>,
        home: impl Fn(usize, usize) -> usize,
    ) -> Self {
        let nodes = topology.nodes() - usize::from(without.is_some());
        // There are at least as many blocks as nodes, but maybe fewer than would do for all ranks of a node.
        let blocks = |node: usize| {
            let place = node - usize::from(without.is_some_and(|gone| gone < node));
            share(place, nodes, topology.size())
        };
        let count = |node: usize| match without == Some(node) {
            true => 0,
            false => topology.ranks_of(node).len().min(blocks(node).1),
        };
        Self::by_rank(topology, shape, count, |node, rail| {
            let (first, all) = blocks(node);
            let (skipped, mine) = share(rail, count(node), all);
            let home = home(node, rail);
            Part { blocks: (first + skipped, mine), home, rail, second: false, middle: node }
        })
    }

    /// A part for each rail, all with homes in one node; `first` is the rail of the first.
    pub(super) fn rails(topology: &'a Topology, shape: Shape, node: usize, first: usize) -> Self {
        let rails = topology.node_sizes().0;
        Self::few(topology, shape, rails, first, |_| node)
    }

    /// Two parts for each rail, one for each of two trees.
    pub(super) fn pairs(topology: &'a Topology, top: impl Fn(usize) -> usize, first: usize) -> Self {
        let rails = topology.node_sizes().0;
        let mut routes = Self::few(topology, Shape::Pair, 2 * rails, first, |part| top(part / 2));
        for (i, part) in routes.parts.iter_mut().enumerate() {
            part.second = i % 2 == 1;
        }
        routes
    }

    /// Everything as one part.
    pub(super) fn whole(topology: &'a Topology, shape: Shape, home: usize) -> Self {
        Self::few(topology, shape, 1, topology.local(home), |_| topology.node_of(home))
    }

    fn few(
        topology: &'a Topology,
        shape: Shape,
        count: usize,
        first: usize,
        node: impl Fn(usize) -> usize,
    ) -> Self {
        let each = if shape == Shape::Pair { 2 } else { 1 };
        let part = |i| Part {
            blocks: share(i, count, topology.size()),
            home: topology.rank_at(node(i), first + i / each),
            rail: first + i / each,
            second: false,
            middle: 0,
        };
        let parts = (0..count).map(part).collect();
        Self { topology, shape, parts, by_rank: false, starts: Vec::new() }
    }

    fn by_rank(
        topology: &'a Topology,
        shape: Shape,
        count: impl Fn(usize) -> usize,
        part: impl Fn(usize, usize) -> Part,
    ) -> Self {
        let (mut parts, mut starts) = (Vec::with_capacity(topology.size()), vec![0]);
        for node in 0..topology.nodes() {
            parts.extend((0..count(node)).map(|local| part(node, local)));
            starts.push(parts.len());
        }
        Self { topology, shape, parts, by_rank: true, starts }
    }

    pub(super) fn span(&self, part: usize, buffer: Buffer) -> Span {
        let (block, blocks) = self.parts[part].blocks;
        Span::new(buffer, block, blocks)
    }

    /// The rank of a node through which a part enters or leaves it.
    pub(super) fn entry(&self, part: usize, node: usize) -> usize {
        self.topology.rank_at(node, self.parts[part].rail)
    }

    pub(super) fn home_node(&self, part: usize) -> usize {
        self.topology.node_of(self.parts[part].home)
    }

    pub(super) fn homed_at(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.parts.len()).filter(move |&part| self.parts[part].home == rank)
    }

    /// The node that a part is counted to: its home's, or the one that it goes through.
    pub(super) fn counted_at(&self, part: usize) -> usize {
        if self.shape == Shape::Through { self.parts[part].middle } else { self.home_node(part) }
    }

    /// `by_rank`: the parts counted to a node.
    pub(super) fn parts_of(&self, node: usize) -> std::ops::Range<usize> {
        self.starts[node]..self.starts[node + 1]
    }

    /// The lane in which a part is at `node`, of those with one role. Lanes are asked in their order, so they are
    /// numbered from the next node on (or from the last, if `backwards`), as [`Self::rotated`].
    pub(super) fn lane(&self, part: usize, node: usize, backwards: bool) -> usize {
        if self.by_rank { lane_of(self.counted_at(part), node, backwards) } else { part % LANES }
    }

    /// Parts as a node deals with them: those of the next node first (or of the last, if `backwards`), its own
    /// last. So no two nodes turn to the same one at once.
    pub(super) fn rotated(&self, node: usize, backwards: bool) -> Vec<usize> {
        if !self.by_rank {
            return (0..self.parts.len()).collect();
        }
        let nodes = self.topology.nodes();
        let turned = (1..=nodes).map(|k| (if backwards { node + nodes - k } else { node + k }) % nodes);
        turned.flat_map(|n| self.parts_of(n)).collect()
    }

    /// Where `node` is in the tree of `part`.
    pub(super) fn place(&self, part: usize, node: usize) -> Place {
        let (nodes, top) = (self.topology.nodes(), self.home_node(part));
        let Part { second, middle, .. } = self.parts[part];
        match self.shape {
            Shape::Star => mesh::star(top, node, nodes),
            Shape::Through => mesh::through(top, middle, node, nodes),
            Shape::Chain => ring::chain(top, node, nodes),
            Shape::Binomial => recursive::binomial(top, node, nodes),
            Shape::Pair => tree::pair(top, second, node, nodes),
        }
    }

    /// Whether `node` hands `part` on to other nodes.
    pub(super) fn hands_on(&self, part: usize, node: usize) -> bool {
        let (nodes, top) = (self.topology.nodes(), self.home_node(part));
        match self.shape {
            Shape::Star => node == top,
            Shape::Chain => (node + 1) % nodes != top,
            Shape::Through => node == top || (node == self.parts[part].middle && nodes > 2),
            Shape::Binomial => recursive::has_children(top, node, nodes),
            Shape::Pair => !self.place(part, node).children.is_empty(),
        }
    }

    /// Nodes above `node` in the tree of `part`.
    pub(super) fn depth(&self, part: usize, node: usize) -> usize {
        let (nodes, top) = (self.topology.nodes(), self.home_node(part));
        match self.shape {
            Shape::Star => usize::from(node != top),
            Shape::Chain => (node + nodes - top) % nodes,
            Shape::Through | Shape::Binomial | Shape::Pair => self.place(part, node).depth,
        }
    }

    /// No place is deeper.
    pub(super) fn height(&self) -> usize {
        let nodes = self.topology.nodes();
        match self.shape {
            Shape::Star => 1,
            Shape::Through => 2,
            Shape::Chain => nodes - 1,
            Shape::Binomial => recursive::height(nodes),
            Shape::Pair => tree::height(nodes),
        }
    }

    /// Readers of what `node` sends down, ascending.
    pub(super) fn readers(&self, part: usize, place: &Place) -> Vec<usize> {
        let mut readers: Vec<usize> = place.children.iter().map(|&n| self.entry(part, n)).collect();
        readers.sort_unstable();
        readers
    }
}

/// The lane at `node` for what goes to node `other` (or comes from it, `backwards`).
pub(super) fn lane_of(other: usize, node: usize, backwards: bool) -> usize {
    let (other, node) = (other % LANES, node % LANES);
    (if backwards { node + LANES - 1 - other } else { other + 2 * LANES - 1 - node }) % LANES
}

/// The `i`-th of `count` runs of `size` blocks: first and length.
fn share(i: usize, count: usize, size: usize) -> (usize, usize) {
    let (start, end) = (i * size / count, (i + 1) * size / count);
    (start, end - start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_lane_is_the_next_nodes() {
        for node in 0..10 {
            for k in 0..8 {
                assert_eq!(lane_of(node + 1 + k, node, false), k % LANES);
                assert_eq!(lane_of(node + 16 - 1 - k, node, true), k % LANES);
            }
        }
    }

    /// Every node hangs on the top one, its parent has it as a child, and depths count.
    #[test]
    fn every_shape_is_a_tree_of_all_nodes() {
        for nodes in 2..40 {
            let topology = Topology::blocks(nodes, 2);
            let mut all: Vec<Routes<'_>> = [Shape::Star, Shape::Chain, Shape::Binomial]
                .map(|shape| Routes::each(&topology, shape))
                .into_iter()
                .chain([Routes::spread(&topology, Shape::Binomial)])
                .collect();
            all.push(Routes::through(&topology, nodes));
            all.push(Routes::away(&topology, 1));
            all.push(Routes::pairs(&topology, |rail| rail % nodes, 0));
            for routes in all {
                for part in 0..routes.parts.len() {
                    for node in 0..nodes {
                        let place = routes.place(part, node);
                        assert_eq!(place.parent.is_none(), node == routes.home_node(part));
                        assert_eq!(routes.hands_on(part, node), !place.children.is_empty());
                        assert!(place.depth <= routes.height());
                        assert_eq!(routes.depth(part, node), place.depth);
                        for child in place.children {
                            let below = routes.place(part, child);
                            assert_eq!((below.parent, below.depth), (Some(node), place.depth + 1));
                        }
                    }
                }
            }
        }
    }
}
