//! Channel numbers of other ranks between nodes, without their programs.
//!
//! The first channels of a rank go to other nodes. First comes one up channel for each part of which the rank
//! is the entry, except at the node of the home. Then comes one down channel for each part that it forwards.
//! Both are in part order. With one part per rank these are counted node by node, from a table by local
//! index.

use super::routes::Routes;
use super::trees::Tree;
use std::collections::HashMap;

pub(super) struct Numbers<'r, 't> {
    routes: &'r Routes<'t>,
    me: usize,
    /// By node size and local index: the number of parts before each node of which such a rank is the entry.
    entries: HashMap<(usize, usize), Vec<usize>>,
    /// By writer: the number of parts before each node that it forwards.
    forwarded: HashMap<usize, Vec<usize>>,
    /// By rail: entries of other nodes with a smaller rank than this one.
    before: HashMap<usize, usize>,
}

impl<'r, 't> Numbers<'r, 't> {
    pub(super) fn new(routes: &'r Routes<'t>, me: usize) -> Self {
        Self { routes, me, entries: HashMap::new(), forwarded: HashMap::new(), before: HashMap::new() }
    }

    /// Returns the size of the writer's node and its local index there.
    fn seat(&self, writer: usize) -> (usize, usize) {
        let topology = self.routes.topology;
        (topology.ranks_of(topology.node_of(writer)).len(), topology.local(writer))
    }

    /// Returns the number of parts of a node of which a rank with the given seat is the entry.
    fn parts_at(&self, node: usize, (size, local): (usize, usize)) -> usize {
        self.routes.parts_of(node).len().saturating_sub(local).div_ceil(size)
    }

    /// Returns the number of parts before `node` of which the writer is the entry.
    fn entered_before(&mut self, writer: usize, node: usize) -> usize {
        let seat = self.seat(writer);
        if !self.entries.contains_key(&seat) {
            let nodes = self.routes.topology.nodes();
            let table = sums((0..nodes).map(|n| self.parts_at(n, seat)));
            self.entries.insert(seat, table);
        }
        self.entries[&seat][node]
    }

    /// Returns the number of up channels of a rank.
    pub(super) fn ups(&mut self, writer: usize) -> usize {
        let routes = self.routes;
        let node = routes.topology.node_of(writer);
        if routes.by_rank {
            let all = self.entered_before(writer, routes.topology.nodes());
            return all - self.parts_at(node, self.seat(writer));
        }
        self.count_before(routes.parts.len(), writer, |part| routes.home_node(part) != node)
    }

    /// Returns the up channel of the writer for `part`, of which it is the entry outside the node of its
    /// home.
    pub(super) fn up(&mut self, writer: usize, part: usize) -> usize {
        let routes = self.routes;
        let (node, home) = (routes.topology.node_of(writer), routes.home_node(part));
        if !routes.by_rank {
            return self.count_before(part, writer, |part| routes.home_node(part) != node);
        }
        let seat = self.seat(writer);
        let own = if node < home { self.parts_at(node, seat) } else { 0 };
        self.entered_before(writer, home) - own + routes.parts[part].rail / seat.0
    }

    /// Returns the down channel of the writer for `part`, which it forwards, counted from its first down
    /// channel.
    pub(super) fn down(&mut self, writer: usize, part: usize) -> usize {
        let routes = self.routes;
        let node = routes.topology.node_of(writer);
        if !routes.by_rank {
            return self.count_before(part, writer, |part| routes.forwards(part, node));
        }
        let index = routes.parts[part].rail / self.seat(writer).0;
        match routes.parts[part].tree {
            // This rank forwards no other part.
            Tree::Star => 0,
            Tree::Through { .. } if node != routes.home_node(part) => 0,
            Tree::Through { .. } => self.entered_before(writer, routes.owner_node(part)) + index,
            Tree::Chain | Tree::Binomial | Tree::Double { .. } => {
                self.forwarded_before(writer, routes.home_node(part)) + index
            }
        }
    }

    fn forwarded_before(&mut self, writer: usize, node: usize) -> usize {
        if !self.forwarded.contains_key(&writer) {
            let (routes, seat) = (self.routes, self.seat(writer));
            let at = routes.topology.node_of(writer);
            let forwarded = |n| routes.parts_of(n).next().is_some_and(|part| routes.forwards(part, at));
            let nodes = 0..routes.topology.nodes();
            let table = sums(nodes.map(|n| if forwarded(n) { self.parts_at(n, seat) } else { 0 }));
            self.forwarded.insert(writer, table);
        }
        self.forwarded[&writer][node]
    }

    /// Counts parts before `end` of which the writer is the entry and that satisfy `counts`.
    fn count_before(&self, end: usize, writer: usize, counts: impl Fn(usize) -> bool) -> usize {
        let node = self.routes.topology.node_of(writer);
        (0..end).filter(|&part| self.routes.entry(part, node) == writer && counts(part)).count()
    }

    /// Returns this rank's index among the readers of its parent's down channel in the tree of `part`.
    pub(super) fn reader(&mut self, part: usize, parent: usize) -> usize {
        let (routes, me) = (self.routes, self.me);
        let rail = routes.parts[part].rail;
        // Entries of all nodes, without the own node and nodes that already have the part.
        let above = match routes.parts[part].tree {
            Tree::Star => vec![parent],
            Tree::Through { .. } if parent != routes.home_node(part) => vec![parent, routes.home_node(part)],
            _ => {
                let children = routes.node(part, parent).children;
                return children.into_iter().filter(|&n| routes.entry(part, n) < me).count();
            }
        };
        let topology = routes.topology;
        let before = *self
            .before
            .entry(rail)
            .or_insert_with(|| (0..topology.nodes()).filter(|&n| topology.rank_at(n, rail) < me).count());
        before - above.into_iter().filter(|&n| routes.entry(part, n) < me).count()
    }
}

/// Returns the prefix sums, from zero to the total.
fn sums(counts: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut sum = 0;
    let mut sums = vec![0];
    sums.extend(counts.map(|count| {
        sum += count;
        sum
    }));
    sums
}
