//! Which of an operation's channels go through shared memory, which over the wire, which both ways.

use std::sync::Arc;

use crate::net::wiring::{NetOutlet, NetWiring};
use crate::{Inlet, Outlet, Wiring};

/// Where each rank of the group is, as this rank reaches it.
pub(super) struct Map {
    /// Index in this node, for ranks that share it.
    local: Vec<Option<usize>>,
    /// Ranks of this node, ascending.
    ranks: Vec<usize>,
}

impl Map {
    pub(super) fn new(size: usize, ranks: Vec<usize>) -> Self {
        let mut local = vec![None; size];
        for (index, &rank) in ranks.iter().enumerate() {
            local[rank] = Some(index);
        }
        Self { local, ranks }
    }
    pub(super) fn local(&self, rank: usize) -> Option<usize> {
        self.local[rank]
    }
    pub(super) fn rank(&self, local: usize) -> usize {
        self.ranks[local]
    }
    pub(super) fn size(&self) -> usize {
        self.local.len()
    }
}

#[derive(Clone, Copy)]
pub(super) enum In {
    Shm(usize),
    Net(usize),
}

#[derive(Clone, Copy)]
pub(super) struct Out {
    pub(super) shm: bool,
    pub(super) net: Option<usize>,
}

/// The ways of one bound call's channels: they are found once and kept with its wiring ([`crate::Ways`]).
#[derive(Default)]
pub(crate) struct Routes {
    pub(super) outs: Vec<Out>,
    pub(super) ins: Vec<In>,
    /// Channels keep their numbers here; those without a reader on this node are empty.
    pub(super) shm: Wiring,
    pub(super) net: Arc<NetWiring>,
}

impl Routes {
    /// As rank `me` of `map` reaches the others.
    pub(super) fn new(me: usize, map: &Map, wiring: &Wiring, written: usize) -> Self {
        #[cfg(test)]
        MADE.with(|made| made.set(made.get() + 1));
        let mut routes = Self { shm: Wiring { depth: wiring.depth, ..Wiring::default() }, ..Self::default() };
        let (mut net_outlets, mut net_inlets) = (Vec::new(), Vec::new());
        for (channel, outlet) in wiring.outlets.iter().enumerate() {
            let remote: Vec<usize> =
                outlet.readers.iter().copied().filter(|&r| map.local(r).is_none()).collect();
            let shm = remote.len() < outlet.readers.len();
            // A reader finds its line by its number among all readers.
            let readers = outlet.readers.iter().map(|&r| map.local(r).unwrap_or(Outlet::ELSEWHERE));
            routes.shm.outlets.push(if shm {
                Outlet { readers: readers.collect(), ..outlet.clone() }
            } else {
                Outlet { readers: Vec::new(), cell: 0, messages: 0, bytes: 0 }
            });
            let net = (!remote.is_empty()).then_some(net_outlets.len());
            if net.is_some() {
                net_outlets.push(NetOutlet {
                    channel,
                    readers: remote,
                    cell: outlet.cell,
                    messages: outlet.messages,
                    bytes: outlet.bytes,
                });
            }
            routes.outs.push(Out { shm, net });
        }
        for inlet in &wiring.inlets {
            routes.ins.push(match map.local(inlet.rank) {
                Some(rank) => {
                    routes.shm.inlets.push(Inlet { rank, ..*inlet });
                    In::Shm(routes.shm.inlets.len() - 1)
                }
                None => {
                    net_inlets.push(*inlet);
                    In::Net(net_inlets.len() - 1)
                }
            });
        }
        routes.net = Arc::new(NetWiring::new(me, net_outlets, &net_inlets, wiring.window, written));
        routes
    }
}

#[cfg(test)]
thread_local! {
    /// How many of them this thread has made.
    pub(super) static MADE: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
