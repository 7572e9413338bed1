//! Who of a group shares this rank's node, and so which of a call's channels go through shared memory, which over the wire,
//! which both ways.

use std::sync::Arc;

use crate::net::wiring::NetWiring;
use crate::{Inlet, Outlet, Wiring};

/// Where each rank of a group is, as one of them reaches it.
#[derive(Debug)]
pub struct Reach {
    pub(super) me: usize,
    /// Index in this node, for ranks that share it.
    local: Vec<Option<usize>>,
    /// Ranks of this node, ascending.
    ranks: Vec<usize>,
    /// Something on the way to other nodes keeps a copy of what is sent.
    copies: bool,
}

impl Reach {
    /// All ranks are on one node.
    pub fn near(me: usize, size: usize) -> Self {
        Self::new(me, size, (0..size).collect(), false)
    }

    pub(super) fn new(me: usize, size: usize, ranks: Vec<usize>, copies: bool) -> Self {
        let mut local = vec![None; size];
        for (index, &rank) in ranks.iter().enumerate() {
            local[rank] = Some(index);
        }
        Self { me, local, ranks, copies }
    }

    /// Its place in this node; `None` for a rank that is not here.
    pub(crate) fn local(&self, rank: usize) -> Option<usize> {
        self.local.get(rank).copied().flatten()
    }

    pub(super) fn places(&self) -> Vec<Option<usize>> {
        self.local.clone()
    }

    pub(super) fn rank(&self, local: usize) -> usize {
        self.ranks.get(local).copied().unwrap_or(local)
    }

    pub(super) fn size(&self) -> usize {
        self.local.len()
    }

    /// Ranks of other nodes.
    pub(super) fn elsewhere(&self) -> Vec<usize> {
        (0..self.size()).filter(|&rank| self.local[rank].is_none()).collect()
    }

    /// The ways of a call's channels: found once, when the call is bound.
    pub fn wire(&self, wiring: &Arc<Wiring>) -> Wired {
        if self.ranks.len() == self.size() {
            return Wired { near: wiring.clone(), far: None, untold: false };
        }
        let mut near = Wiring { depth: wiring.depth, ..Wiring::default() };
        let (mut outs, mut ins) = (Vec::new(), Vec::new());
        let (mut net_outlets, mut net_inlets) = (Vec::new(), Vec::new());
        for (channel, outlet) in wiring.outlets.iter().enumerate() {
            let remote: Vec<usize> =
                outlet.readers.iter().copied().filter(|&r| self.local[r].is_none()).collect();
            let shm = remote.len() < outlet.readers.len();
            // A reader finds its line by its number among all readers.
            let readers = outlet.readers.iter().map(|&r| self.local[r].unwrap_or(Outlet::ELSEWHERE));
            near.outlets.push(if shm {
                Outlet { readers: readers.collect(), ..outlet.clone() }
            } else {
                Outlet { readers: Vec::new(), cell: 0, messages: 0, bytes: 0 }
            });
            let net = (!remote.is_empty()).then_some(net_outlets.len());
            if net.is_some() {
                net_outlets.push((channel, Outlet { readers: remote, ..outlet.clone() }));
            }
            outs.push(OutletRoute { shm, net });
        }
        for inlet in &wiring.inlets {
            ins.push(match self.local[inlet.rank] {
                Some(rank) => {
                    near.inlets.push(Inlet { rank, ..*inlet });
                    InletRoute::Near(near.inlets.len() - 1)
                }
                None => {
                    net_inlets.push(*inlet);
                    InletRoute::Far(net_inlets.len() - 1)
                }
            });
        }
        // A writer needs cells for its own work alone where the wire copies what is on its way.
        let written = if self.copies { wiring.window.min(wiring.depth.0) } else { wiring.window };
        let net = Arc::new(NetWiring::new(self.me, net_outlets, &net_inlets, wiring.window, written));
        let far = Some(Arc::new(Routes { outs, ins, net, direct: self.copies }));
        Wired { near: Arc::new(near), far, untold: false }
    }
}

#[derive(Clone, Copy)]
pub(super) enum InletRoute {
    Near(usize),
    Far(usize),
}

#[derive(Clone, Copy)]
pub(super) struct OutletRoute {
    pub(super) shm: bool,
    pub(super) net: Option<usize>,
}

/// Where a call's channels go, in a group that spans nodes.
#[derive(Default)]
pub(super) struct Routes {
    pub(super) outs: Vec<OutletRoute>,
    pub(super) ins: Vec<InletRoute>,
    pub(super) net: Arc<NetWiring>,
    /// The wire takes messages from any memory and brings them to any.
    direct: bool,
}

/// A call's channels with their ways; kept with the bound call.
#[derive(Clone, Default)]
pub struct Wired {
    /// Ranks by their places in this node. Channels keep their numbers; those without a reader here are empty.
    pub(super) near: Arc<Wiring>,
    pub(super) far: Option<Arc<Routes>>,
    /// Who asks this rank how far it is is not told that it has begun this call.
    pub(super) untold: bool,
}

impl Wired {
    /// The same for a call that only ends what this rank does in the group: to the others it is in none of theirs.
    #[must_use]
    pub fn untold(self) -> Self {
        Self { untold: true, ..self }
    }

    /// Whether messages of that outlet may leave from the call's own memory: all its readers are beyond such a wire.
    pub fn leaves_directly(&self, channel: usize) -> bool {
        let routes = self.far.as_ref().filter(|routes| routes.direct);
        routes.is_some_and(|routes| matches!(routes.outs[channel], OutletRoute { shm: false, net: Some(_) }))
    }

    /// Whether messages of that outlet may stay where they lie: all its readers map this process's memory.
    pub fn may_stay(&self, channel: usize) -> bool {
        let near =
            |routes: &Arc<Routes>| matches!(routes.outs[channel], OutletRoute { shm: true, net: None });
        !self.near.inline && self.far.as_ref().is_none_or(near)
    }

    /// Whether messages of that inlet may lie in their writer's own memory: it is of this node.
    pub fn may_be_fetched(&self, inlet: usize) -> bool {
        let near = |routes: &Arc<Routes>| matches!(routes.ins[inlet], InletRoute::Near(_));
        !self.near.inline && self.far.as_ref().is_none_or(near)
    }

    /// Whether messages of that inlet may arrive in the call's own memory.
    pub fn arrives_directly(&self, inlet: usize) -> bool {
        let routes = self.far.as_ref().filter(|routes| routes.direct);
        routes.is_some_and(|routes| matches!(routes.ins[inlet], InletRoute::Far(_)))
    }
}

impl std::fmt::Debug for Wired {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.far.is_some() { "Wired(near and far)" } else { "Wired(near)" })
    }
}
