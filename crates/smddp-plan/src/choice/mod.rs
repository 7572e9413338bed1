//! Which algorithm and segment size, by a cost model with fixed constants.
//!
//! The same shape gives the same choice on every rank. Inside a node nothing is measured. Between nodes the prices of
//! a [`Network`] may be, but they do not decide a reducing collective's algorithm, so that a reduction has the same
//! bits today and tomorrow; how large its segments are changes none.

mod between;
mod cost;
mod cut;
mod need;

pub use cost::cost;

use crate::algorithms::{Algorithm, plan};
use crate::ir::{Ask, Collective};
use crate::topology::Topology;

/// What was chosen. Every rank of the group must come to the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    pub algorithm: Algorithm,
    /// Bytes of a block that move as one piece; a multiple of 64.
    pub segment: usize,
    /// Cells a channel should have (at least 2, or 1 where every channel carries one message).
    pub depth: usize,
    /// Bytes of each block that a writer may be ahead of its readers on other nodes.
    pub ahead: usize,
}

impl Choice {
    /// Cells that a channel between nodes has at its readers: what is on its way to them has a place.
    pub fn window(&self) -> usize {
        self.depth.max(self.ahead.div_ceil(self.segment.max(1)))
    }
}

/// What a message between nodes costs. Ranks of a group must agree on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// From a rank's write to another's read.
    pub latency_ns: f64,
    /// What each message costs its writer or reader beyond its bytes.
    pub message_ns: f64,
    /// Bytes that a node's link carries in a nanosecond, each way.
    pub bytes_per_ns: f64,
    /// How much longer a link takes for its bytes when several nodes write to its node at once; a property of the
    /// transport, never measured. 1: senders are paced so that none waits in line.
    pub incast: f64,
}

impl Network {
    /// Sockets over a link of about 10 Gbit/s. Their streams share a link by chance, and the last one ends late: 4
    /// nodes of 2 ranks at 1 Gbit/s took 1.1 (16 MiB) to 1.3 times (1 MiB) as long by the mesh as round a ring.
    pub const ASSUMED: Self =
        Self { latency_ns: 15_000.0, message_ns: 1_000.0, bytes_per_ns: 1.2, incast: 1.25 };

    /// The same where the transport paces its senders (EFA).
    pub const PACED: Self = Self { incast: 1.0, ..Self::ASSUMED };

    /// Bytes that should be on their way to a node, so that its link never waits for word of free room: four times what it
    /// carries in a round trip. Twice as much stands in line in the network itself, and that word behind what goes the
    /// other way; and what was measured may be short of the rate. (all_gather of 64 MiB, 2 nodes at 1 Gbit/s and 10 ms
    /// there and back: 340 ms with 2.5 times, 302 with 6, the line 281.)
    pub fn under_way(&self) -> usize {
        let round_trip = 2.0 * self.latency_ns;
        (4.0 * round_trip * self.bytes_per_ns) as usize
    }
}

impl Default for Network {
    fn default() -> Self {
        Self::ASSUMED
    }
}

/// The shape of a call, as far as the choice may depend on it (never on the call's own timing).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub collective: Collective,
    pub size: usize,
    /// Bytes of the whole buffer, as nccl-tests counts (for all_gather the gathered output, ...).
    pub bytes: usize,
    /// Bytes of the largest block.
    pub block: usize,
    /// Blocks differ in size between pairs (all_to_all).
    pub uneven_pairs: bool,
    /// Reductions of 16-bit floats round once only: no algorithm that rounds at every hop.
    pub rounds_per_hop_forbidden: bool,
    /// Greatest payload a slot holds (publish needs the whole message to fit).
    pub slot: usize,
    /// Staging this process may use for one operation.
    pub staging: usize,
    /// May be measured, as long as all ranks have the same: the algorithm of a reducing collective does not
    /// depend on it, its segment does.
    pub network: Network,
}

impl Shape {
    /// Bytes of the one message of `publish`, at the rank that has most.
    fn whole_message(&self) -> usize {
        match self.collective {
            Collective::AllGather | Collective::Gather => self.block,
            Collective::Barrier => 0,
            _ => self.bytes,
        }
    }

    fn fits_slot(&self) -> bool {
        !self.uneven_pairs && self.whole_message() <= self.slot
    }

    /// Whether it may be used as far as rounding goes.
    fn allows(&self, algorithm: Algorithm) -> bool {
        !(self.rounds_per_hop_forbidden && self.collective.reduces() && algorithm.rounds_per_hop())
    }

    /// The question to any planner, for rank 0 and root 0.
    fn ask(&self) -> Ask {
        let Self { collective, size, uneven_pairs, .. } = *self;
        Ask { collective, rank: 0, size, root: 0, uneven_pairs }
    }
}

/// Picks algorithm, segment and depth, all by cost.
///
/// On one node: `publish` or `mesh`. `publish` is a candidate where its whole message fits a slot; with slots up to
/// 8 KiB it then always wins. The other flat algorithms are never quicker where one write reaches all readers in one
/// hop; [`choose_named`] has them.
///
/// On several: one of the hierarchical algorithms. A reducing collective's is chosen for [`Network::ASSUMED`], with
/// the transport's own [`Network::incast`].
pub fn choose(shape: &Shape, topology: &Topology) -> Choice {
    if topology.nodes() > 1 {
        return choose_between(shape, topology).unwrap_or_else(|| cut::cut(Algorithm::Mesh, shape));
    }
    let publish_wins = shape.fits_slot() && cost(Algorithm::Publish, shape) <= cost(Algorithm::Mesh, shape);
    let algorithm = if publish_wins { Algorithm::Publish } else { Algorithm::Mesh };
    cut::cut(algorithm, shape)
}

/// Of the hierarchical algorithms the quickest. `hier` does every collective, so there is one.
fn choose_between(shape: &Shape, topology: &Topology) -> Option<Choice> {
    let network = match shape.collective.reduces() {
        true => Network { incast: shape.network.incast, ..Network::ASSUMED },
        false => shape.network,
    };
    let priced = Algorithm::ALL.into_iter().filter_map(|algorithm| {
        if !algorithm.is_hierarchical() || !shape.allows(algorithm) {
            return None;
        }
        let need = need::need(algorithm, &shape.ask(), topology)?;
        let choice = cut::cut_between(algorithm, &need, &Shape { network, ..*shape });
        Some((between::cost(&choice, &need, shape, topology, &network)?, algorithm, need))
    });
    let (_, algorithm, need) = priced.min_by(|(a, ..), (b, ..)| a.total_cmp(b))?;
    Some(cut::cut_between(algorithm, &need, shape))
}

/// Segment and depth for an algorithm that the user asks for; `None` where it does not do the collective, would
/// round a 16-bit reduction more than once although that is forbidden, or needs all ranks on one node (`publish`) or
/// several (the hierarchical ones).
pub fn choose_named(algorithm: Algorithm, shape: &Shape, topology: &Topology) -> Option<Choice> {
    if !shape.allows(algorithm) {
        return None;
    }
    if topology.nodes() > 1 {
        // Slots are in shared memory.
        let need =
            need::need(algorithm, &shape.ask(), topology).filter(|_| algorithm != Algorithm::Publish)?;
        return Some(cut::cut_between(algorithm, &need, shape));
    }
    plan(algorithm, &shape.ask(), topology)?;
    Some(cut::cut(algorithm, shape))
}
