//! My channels, and those that I read.
//!
//! The order of a rank's channels: up, down (or to the root), near, give, share. The first two leave the node
//! ([`Numbers`]); the others stay in it, and all ranks of a node count each other's alike.

use super::numbers::Numbers;
use super::routes::{LANES, Routes};
use crate::algorithms::draft::Draft;
use std::cell::RefCell;
use std::collections::HashMap;

/// Which channels a collective has.
#[derive(Clone, Copy, Default)]
pub(super) struct Uses {
    /// To the parents of parts, and from mates to entries.
    pub(super) up: bool,
    /// To the children of parts, and from entries to mates.
    pub(super) down: bool,
    /// From homes to their mates.
    pub(super) near: bool,
    /// From this rank to its mates, instead.
    pub(super) near_root: Option<usize>,
    /// From homes to this rank.
    pub(super) to_root: Option<usize>,
}

/// Lane and lag.
type Slot = (usize, usize);

/// Channel numbers by slot and local index of the entry.
struct Table {
    lags: usize,
    ranks: usize,
    numbers: Vec<Option<usize>>,
}

impl Table {
    fn new(routes: &Routes<'_>, ranks: usize) -> Self {
        let lags = routes.height() + 1;
        Self { lags, ranks, numbers: vec![None; LANES * lags * ranks] }
    }

    fn at(&mut self, (lane, lag): Slot, entry: usize) -> &mut Option<usize> {
        &mut self.numbers[(lane * self.lags + lag) * self.ranks + entry]
    }

    fn get(&self, (lane, lag): Slot, entry: usize) -> Option<usize> {
        self.numbers.get((lane * self.lags + lag) * self.ranks + entry).copied().flatten()
    }
}

pub(super) struct Layout<'r, 't> {
    pub(super) routes: &'r Routes<'t>,
    pub(super) me: usize,
    pub(super) node: usize,
    /// My node's other ranks, ascending.
    pub(super) mates: Vec<usize>,
    uses: Uses,
    numbers: RefCell<Numbers<'r, 't>>,
    /// By part: my channels.
    up: HashMap<usize, usize>,
    leaving: HashMap<usize, usize>,
    near: HashMap<usize, usize>,
    /// By part: the channel of its home.
    near_of: HashMap<usize, usize>,
    near_root: usize,
    /// My channels to entries, and those of my mates to me, in their order.
    give: Table,
    given: HashMap<Slot, Vec<usize>>,
    /// Of each entry, to its mates.
    share: Table,
}

impl<'r, 't> Layout<'r, 't> {
    /// Makes all my channels.
    pub(super) fn new(routes: &'r Routes<'t>, me: usize, uses: Uses, draft: &mut Draft) -> Self {
        let topology = routes.topology;
        let node = topology.node_of(me);
        let ranks = topology.ranks_of(node).len();
        let mut layout = Self {
            routes,
            me,
            node,
            mates: topology.ranks_of(node).iter().copied().filter(|&rank| rank != me).collect(),
            uses,
            numbers: RefCell::new(Numbers::new(routes, me)),
            up: HashMap::new(),
            leaving: HashMap::new(),
            near: HashMap::new(),
            near_of: HashMap::new(),
            near_root: 0,
            give: Table::new(routes, if uses.up { ranks } else { 0 }),
            given: HashMap::new(),
            share: Table::new(routes, if uses.down { ranks } else { 0 }),
        };
        // Channels that each rank of my node has so far.
        let mut counts = vec![0; ranks];
        layout.between_nodes(&mut counts, draft);
        layout.near_channels(&mut counts, draft);
        if uses.up && ranks > 1 {
            layout.give_channels(&mut counts, draft);
        }
        if uses.down && ranks > 1 {
            layout.share_channels(&mut counts, draft);
        }
        layout
    }

    fn between_nodes(&mut self, counts: &mut [usize], draft: &mut Draft) {
        let Self { routes, me, node, uses, .. } = *self;
        for part in 0..routes.parts.len() {
            let entry = routes.entry(part, node);
            if uses.up && routes.home_node(part) != node {
                counts[routes.topology.local(entry)] += 1;
                if let (true, Some(parent)) = (entry == me, routes.node(part, node).parent) {
                    self.up.insert(part, draft.channel(vec![routes.entry(part, parent)]));
                }
            }
        }
        for part in 0..routes.parts.len() {
            let entry = routes.entry(part, node);
            let readers = if let Some(root) = uses.to_root {
                let sends = routes.parts[part].home == entry && entry != root;
                sends.then(|| vec![root])
            } else if uses.down && routes.hands_on(part, node) {
                Some(if entry == me { routes.readers(part, node) } else { Vec::new() })
            } else {
                None
            };
            if let Some(readers) = readers {
                counts[routes.topology.local(entry)] += 1;
                if entry == me {
                    self.leaving.insert(part, draft.channel(readers));
                }
            }
        }
    }

    fn near_channels(&mut self, counts: &mut [usize], draft: &mut Draft) {
        let Self { routes, me, node, uses, .. } = *self;
        if self.mates.is_empty() {
            return;
        }
        for part in (0..routes.parts.len()).filter(|&part| uses.near && routes.home_node(part) == node) {
            let home = routes.parts[part].home;
            let count = &mut counts[routes.topology.local(home)];
            self.near_of.insert(part, *count);
            *count += 1;
            if home == me {
                self.near.insert(part, draft.channel(self.mates.clone()));
            }
        }
        if let Some(root) = uses.near_root.filter(|&root| routes.topology.node_of(root) == node) {
            let count = &mut counts[routes.topology.local(root)];
            self.near_root = *count;
            *count += 1;
            if root == me {
                draft.channel(self.mates.clone());
            }
        }
    }

    /// One for each lane, lag and entry that I give to.
    fn give_channels(&mut self, counts: &mut [usize], draft: &mut Draft) {
        let Self { routes, me, node, .. } = *self;
        for part in routes.rotated(node, false) {
            let (slot, entry) = (self.up_slot(part), routes.entry(part, node));
            let at = routes.topology.local(entry);
            if self.give.get(slot, at).is_some() {
                continue;
            }
            if entry == me {
                let mates = self.mates.iter().map(|&mate| counts[routes.topology.local(mate)]);
                self.given.insert(slot, mates.collect());
            }
            // Mine to myself is none, but known.
            let mine = if entry == me { usize::MAX } else { draft.channel(vec![entry]) };
            *self.give.at(slot, at) = Some(mine);
            for (local, count) in counts.iter_mut().enumerate() {
                *count += usize::from(local != at);
            }
        }
    }

    /// One for each lane and lag of mine.
    fn share_channels(&mut self, counts: &mut [usize], draft: &mut Draft) {
        let Self { routes, me, node, .. } = *self;
        for part in routes.rotated(node, true) {
            if routes.home_node(part) == node {
                continue;
            }
            let (slot, entry) = (self.down_slot(part), routes.entry(part, node));
            let at = routes.topology.local(entry);
            let number = self.share.at(slot, at);
            if number.is_none() {
                *number = Some(counts[at]);
                counts[at] += 1;
                if entry == me {
                    draft.channel(self.mates.clone());
                }
            }
        }
    }

    /// Lane and lag in which my node's contributions to a part come together: one behind the deepest below it.
    pub(super) fn up_slot(&self, part: usize) -> Slot {
        let (routes, node) = (self.routes, self.node);
        (routes.lane(part, node, false), routes.height() - routes.depth(part, node))
    }

    /// Lane and lag in which a part enters my node, which is not its home's.
    pub(super) fn down_slot(&self, part: usize) -> Slot {
        let (routes, node) = (self.routes, self.node);
        (routes.lane(part, node, true), routes.depth(part, node) - 1)
    }

    /// My channel to the parent of `part`.
    pub(super) fn up(&self, part: usize) -> Option<usize> {
        self.up.get(&part).copied()
    }

    /// My channel to its children, or of a home to the root.
    pub(super) fn leaving(&self, part: usize) -> Option<usize> {
        self.leaving.get(&part).copied()
    }

    /// My channel to my mates for a part of which I am the home.
    pub(super) fn near(&self, part: usize) -> Option<usize> {
        self.near.get(&part).copied()
    }

    /// The channel to the mates of a part's home, in my node.
    pub(super) fn near_of(&self, part: usize) -> usize {
        self.near_of[&part]
    }

    /// The root's channel to its mates.
    pub(super) fn near_root(&self) -> usize {
        self.near_root
    }

    /// My channel to an entry, another rank.
    pub(super) fn give(&self, slot: Slot, entry: usize) -> usize {
        self.give.get(slot, self.routes.topology.local(entry)).unwrap_or(usize::MAX)
    }

    /// My mates' channels to me, where I am the entry.
    pub(super) fn given(&self, slot: Slot) -> &[usize] {
        self.given.get(&slot).map_or(&[], Vec::as_slice)
    }

    /// The entry's channel to its mates, for a part that entered my node.
    pub(super) fn share(&self, slot: Slot, entry: usize) -> Option<usize> {
        self.share.get(slot, self.routes.topology.local(entry))
    }

    /// A child's channel up.
    pub(super) fn up_of(&self, child: usize, part: usize) -> usize {
        self.numbers.borrow_mut().up(child, part)
    }

    /// A parent's channel down, and my number among its readers.
    pub(super) fn down_of(&self, parent: usize, part: usize) -> (usize, usize) {
        let mut numbers = self.numbers.borrow_mut();
        let ups = if self.uses.up { numbers.ups(parent) } else { 0 };
        let reader = numbers.reader(part, self.routes.topology.node_of(parent));
        (ups + numbers.down(parent, part), reader)
    }

    /// The channel to the root of a part's home.
    pub(super) fn to_root_of(&self, part: usize) -> usize {
        let home = self.routes.parts[part].home;
        let earlier = if self.routes.by_rank {
            0
        } else {
            self.routes.homed_at(home).take_while(|&p| p < part).count()
        };
        self.numbers.borrow_mut().ups(home) + earlier
    }
}
