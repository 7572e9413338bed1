//! Numbers of other ranks' channels between nodes, without their programs.
//!
//! A rank's channels to other nodes are its first: for each part of which it is the entry, in the parts' order, one up
//! (unless it is the home's node), then for each that it hands on one down. Where there is a part for each rank
//! these are counted node by node, from a table of what each local index is the entry for.

use super::routes::Routes;
use super::trees::Tree;
use std::collections::HashMap;

pub(super) struct Numbers<'r, 't> {
    routes: &'r Routes<'t>,
    me: usize,
    /// By ranks of a node and local index: parts before each node, of which such a rank is the entry.
    entries: HashMap<(usize, usize), Vec<usize>>,
    /// By writer: parts before each node that it hands on.
    handed: HashMap<usize, Vec<usize>>,
    /// By rail: entries of nodes other than mine that are ranks before me.
    before: HashMap<usize, usize>,
}

impl<'r, 't> Numbers<'r, 't> {
    pub(super) fn new(routes: &'r Routes<'t>, me: usize) -> Self {
        Self { routes, me, entries: HashMap::new(), handed: HashMap::new(), before: HashMap::new() }
    }

    /// Size of the writer's node and its local index there.
    fn seat(&self, writer: usize) -> (usize, usize) {
        let topology = self.routes.topology;
        (topology.ranks_of(topology.node_of(writer)).len(), topology.local(writer))
    }

    /// Parts of a node of which a rank is the entry, whose seat is given.
    fn parts_at(&self, node: usize, (size, local): (usize, usize)) -> usize {
        self.routes.parts_of(node).len().saturating_sub(local).div_ceil(size)
    }

    /// Parts before `node` of which the writer is the entry.
    fn entered_before(&mut self, writer: usize, node: usize) -> usize {
        let seat = self.seat(writer);
        if !self.entries.contains_key(&seat) {
            let nodes = self.routes.topology.nodes();
            let table = sums((0..nodes).map(|n| self.parts_at(n, seat)));
            self.entries.insert(seat, table);
        }
        self.entries[&seat][node]
    }

    /// Channels up of a rank.
    pub(super) fn ups(&mut self, writer: usize) -> usize {
        let routes = self.routes;
        let node = routes.topology.node_of(writer);
        if routes.by_rank {
            let all = self.entered_before(writer, routes.topology.nodes());
            return all - self.parts_at(node, self.seat(writer));
        }
        self.few_before(routes.parts.len(), writer, |part| routes.home_node(part) != node)
    }

    /// The writer's channel up for `part`, of which it is the entry, away from its home.
    pub(super) fn up(&mut self, writer: usize, part: usize) -> usize {
        let routes = self.routes;
        let (node, home) = (routes.topology.node_of(writer), routes.home_node(part));
        if !routes.by_rank {
            return self.few_before(part, writer, |part| routes.home_node(part) != node);
        }
        let seat = self.seat(writer);
        let own = if node < home { self.parts_at(node, seat) } else { 0 };
        self.entered_before(writer, home) - own + routes.parts[part].rail / seat.0
    }

    /// The writer's channel down for `part`, which it hands on; counted from its first down.
    pub(super) fn down(&mut self, writer: usize, part: usize) -> usize {
        let routes = self.routes;
        let node = routes.topology.node_of(writer);
        if !routes.by_rank {
            return self.few_before(part, writer, |part| routes.hands_on(part, node));
        }
        let index = routes.parts[part].rail / self.seat(writer).0;
        match routes.parts[part].tree {
            // The only part that it hands on.
            Tree::Star => 0,
            Tree::Through { .. } if node != routes.home_node(part) => 0,
            Tree::Through { .. } => self.entered_before(writer, routes.counted_at(part)) + index,
            Tree::Chain | Tree::Binomial | Tree::Double { .. } => {
                self.handed_before(writer, routes.home_node(part)) + index
            }
        }
    }

    fn handed_before(&mut self, writer: usize, node: usize) -> usize {
        if !self.handed.contains_key(&writer) {
            let (routes, seat) = (self.routes, self.seat(writer));
            let at = routes.topology.node_of(writer);
            let handed = |n| routes.parts_of(n).next().is_some_and(|part| routes.hands_on(part, at));
            let nodes = 0..routes.topology.nodes();
            let table = sums(nodes.map(|n| if handed(n) { self.parts_at(n, seat) } else { 0 }));
            self.handed.insert(writer, table);
        }
        self.handed[&writer][node]
    }

    /// Parts before `end` of which the writer is the entry and that count, one by one.
    fn few_before(&self, end: usize, writer: usize, counts: impl Fn(usize) -> bool) -> usize {
        let node = self.routes.topology.node_of(writer);
        (0..end).filter(|&part| self.routes.entry(part, node) == writer && counts(part)).count()
    }

    /// My index among the readers of what my parent in the tree of `part` sends down.
    pub(super) fn reader(&mut self, part: usize, parent: usize) -> usize {
        let (routes, me) = (self.routes, self.me);
        let rail = routes.parts[part].rail;
        // Entries of all nodes but mine and those that have it already.
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

/// Sums of what comes before each, and of all.
fn sums(counts: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut sum = 0;
    let mut sums = vec![0];
    sums.extend(counts.map(|count| {
        sum += count;
        sum
    }));
    sums
}
