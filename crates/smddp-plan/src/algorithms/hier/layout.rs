//! Channel numbers of this rank, and of the channels that it reads.
//!
//! The channels of a rank are in this order: up, down (or to the root), local, give, share. The first two
//! leave the node ([`Numbers`]). The others are inside it, and all ranks of the node use the same numbers for
//! them.

use super::numbers::Numbers;
use super::routes::{PIPELINES, Routes};
use crate::algorithms::draft::Draft;
use std::cell::RefCell;
use std::collections::HashMap;

/// Channels of a collective.
#[derive(Clone, Copy, Default)]
pub(super) struct Uses {
    /// To the parents of parts, and from ranks to the entries of their node.
    pub(super) up: bool,
    /// To the children of parts, and from entries to their local peers.
    pub(super) down: bool,
    /// From homes to their local peers.
    pub(super) local: bool,
    /// From this rank to its local peers, in place of the homes.
    pub(super) root_to_peers: Option<usize>,
    /// From homes to this rank.
    pub(super) to_root: Option<usize>,
}

/// Pipeline and lag.
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
        Self { lags, ranks, numbers: vec![None; PIPELINES * lags * ranks] }
    }

    fn at(&mut self, (pipeline, lag): Slot, entry: usize) -> &mut Option<usize> {
        &mut self.numbers[(pipeline * self.lags + lag) * self.ranks + entry]
    }

    fn get(&self, (pipeline, lag): Slot, entry: usize) -> Option<usize> {
        self.numbers.get((pipeline * self.lags + lag) * self.ranks + entry).copied().flatten()
    }
}

pub(super) struct Layout<'r, 't> {
    pub(super) routes: &'r Routes<'t>,
    pub(super) me: usize,
    pub(super) node: usize,
    /// Other ranks of the node, ascending.
    pub(super) peers: Vec<usize>,
    uses: Uses,
    numbers: RefCell<Numbers<'r, 't>>,
    /// Channels of this rank by part.
    up: HashMap<usize, usize>,
    outgoing: HashMap<usize, usize>,
    to_peers: HashMap<usize, usize>,
    /// By part: the channel of its home to the peers of that home.
    to_peers_of: HashMap<usize, usize>,
    root_to_peers: usize,
    /// Channels of this rank to entries, and channels of the local peers to this rank, in peer order.
    give: Table,
    given: HashMap<Slot, Vec<usize>>,
    /// Channels of each entry to its local peers.
    share: Table,
}

impl<'r, 't> Layout<'r, 't> {
    /// Adds all channels of this rank.
    pub(super) fn new(routes: &'r Routes<'t>, me: usize, uses: Uses, draft: &mut Draft) -> Self {
        let topology = routes.topology;
        let node = topology.node_of(me);
        let ranks = topology.ranks_of(node).len();
        let mut layout = Self {
            routes,
            me,
            node,
            peers: topology.ranks_of(node).iter().copied().filter(|&rank| rank != me).collect(),
            uses,
            numbers: RefCell::new(Numbers::new(routes, me)),
            up: HashMap::new(),
            outgoing: HashMap::new(),
            to_peers: HashMap::new(),
            to_peers_of: HashMap::new(),
            root_to_peers: 0,
            give: Table::new(routes, if uses.up { ranks } else { 0 }),
            given: HashMap::new(),
            share: Table::new(routes, if uses.down { ranks } else { 0 }),
        };
        // Number of channels that each rank of the node already has.
        let mut counts = vec![0; ranks];
        layout.between_nodes(&mut counts, draft);
        layout.local_channels(&mut counts, draft);
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
            } else if uses.down && routes.forwards(part, node) {
                Some(if entry == me { routes.readers(part, node) } else { Vec::new() })
            } else {
                None
            };
            if let Some(readers) = readers {
                counts[routes.topology.local(entry)] += 1;
                if entry == me {
                    self.outgoing.insert(part, draft.channel(readers));
                }
            }
        }
    }

    fn local_channels(&mut self, counts: &mut [usize], draft: &mut Draft) {
        let Self { routes, me, node, uses, .. } = *self;
        if self.peers.is_empty() {
            return;
        }
        for part in (0..routes.parts.len()).filter(|&part| uses.local && routes.home_node(part) == node) {
            let home = routes.parts[part].home;
            let count = &mut counts[routes.topology.local(home)];
            self.to_peers_of.insert(part, *count);
            *count += 1;
            if home == me {
                self.to_peers.insert(part, draft.channel(self.peers.clone()));
            }
        }
        if let Some(root) = uses.root_to_peers.filter(|&root| routes.topology.node_of(root) == node) {
            let count = &mut counts[routes.topology.local(root)];
            self.root_to_peers = *count;
            *count += 1;
            if root == me {
                draft.channel(self.peers.clone());
            }
        }
    }

    /// Adds one channel for each pipeline, lag and entry that this rank contributes to.
    fn give_channels(&mut self, counts: &mut [usize], draft: &mut Draft) {
        let Self { routes, me, node, .. } = *self;
        for part in routes.rotated(node, false) {
            let (slot, entry) = (self.up_slot(part), routes.entry(part, node));
            let at = routes.topology.local(entry);
            if self.give.get(slot, at).is_some() {
                continue;
            }
            if entry == me {
                let peers = self.peers.iter().map(|&peer| counts[routes.topology.local(peer)]);
                self.given.insert(slot, peers.collect());
            }
            // This rank has no channel to itself, but the slot counts as assigned.
            let mine = if entry == me { usize::MAX } else { draft.channel(vec![entry]) };
            *self.give.at(slot, at) = Some(mine);
            for (local, count) in counts.iter_mut().enumerate() {
                *count += usize::from(local != at);
            }
        }
    }

    /// Adds one channel for each pipeline and lag of which this rank is the entry.
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
                    draft.channel(self.peers.clone());
                }
            }
        }
    }

    /// Returns pipeline and lag of the node's reduction of a part: one behind the deepest node below.
    pub(super) fn up_slot(&self, part: usize) -> Slot {
        let (routes, node) = (self.routes, self.node);
        (routes.pipeline(part, node, false), routes.height() - routes.depth(part, node))
    }

    /// Returns pipeline and lag in which a part enters the node, which is not the node of its home.
    pub(super) fn down_slot(&self, part: usize) -> Slot {
        let (routes, node) = (self.routes, self.node);
        (routes.pipeline(part, node, true), routes.depth(part, node) - 1)
    }

    /// Returns this rank's channel to the parent of `part`.
    pub(super) fn up(&self, part: usize) -> Option<usize> {
        self.up.get(&part).copied()
    }

    /// Returns this rank's channel to the children of `part`, or from its home to the root.
    pub(super) fn outgoing(&self, part: usize) -> Option<usize> {
        self.outgoing.get(&part).copied()
    }

    /// Returns this rank's channel to its local peers for a part of which it is the home.
    pub(super) fn to_peers(&self, part: usize) -> Option<usize> {
        self.to_peers.get(&part).copied()
    }

    /// Returns the channel from the home of a part to the local peers.
    pub(super) fn to_peers_of(&self, part: usize) -> usize {
        self.to_peers_of[&part]
    }

    /// Returns the channel from the root to its local peers.
    pub(super) fn root_to_peers(&self) -> usize {
        self.root_to_peers
    }

    /// Returns this rank's channel to an entry, which is another rank.
    pub(super) fn give(&self, slot: Slot, entry: usize) -> usize {
        self.give.get(slot, self.routes.topology.local(entry)).unwrap_or(usize::MAX)
    }

    /// Returns the channels of the local peers to this rank as the entry.
    pub(super) fn given(&self, slot: Slot) -> &[usize] {
        self.given.get(&slot).map_or(&[], Vec::as_slice)
    }

    /// Returns the channel of the entry to its local peers, for a part that enters the node.
    pub(super) fn share(&self, slot: Slot, entry: usize) -> Option<usize> {
        self.share.get(slot, self.routes.topology.local(entry))
    }

    /// Returns the channel of a child to its parent.
    pub(super) fn up_of(&self, child: usize, part: usize) -> usize {
        self.numbers.borrow_mut().up(child, part)
    }

    /// Returns the channel of a parent to its children, and this rank's reader index.
    pub(super) fn down_of(&self, parent: usize, part: usize) -> (usize, usize) {
        let mut numbers = self.numbers.borrow_mut();
        let ups = if self.uses.up { numbers.ups(parent) } else { 0 };
        let reader = numbers.reader(part, self.routes.topology.node_of(parent));
        (ups + numbers.down(parent, part), reader)
    }

    /// Returns the channel from the home of a part to the root.
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
