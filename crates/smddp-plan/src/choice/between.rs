//! Time of an algorithm where there are several nodes.

use super::need::Need;
use super::{Choice, Network, Shape};
use crate::algorithms::Algorithm;
use crate::ir::Collective;
use crate::topology::Topology;

/// Bytes per nanosecond through the memory of a node.
const MEMORY_RATE: f64 = 10.0;

/// Hops between nodes one after the other, and how often the busiest node's link carries the whole buffer one way.
struct Path {
    hops: f64,
    crossings: f64,
}

/// Modelled nanoseconds: hops, and the busiest rank's messages, the link or the node's memory, whichever takes
/// longest. `None` where the algorithm does not do the collective.
pub(super) fn cost(
    choice: &Choice,
    need: &Need,
    shape: &Shape,
    topology: &Topology,
    network: &Network,
) -> Option<f64> {
    let each = topology.node_sizes().1 as f64;
    let Path { hops, crossings } = path(choice.algorithm, shape.collective, topology.nodes(), each)?;
    let segments = shape.block.div_ceil(choice.segment).max(1) as f64;
    let bytes = shape.bytes as f64;
    // Until the last node has the first segment; all ranks of a node share its link.
    let piece = (choice.segment.min(shape.block) * need.message) as f64;
    let fill = (hops - 1.0).max(0.0) * piece * each / network.bytes_per_ns;
    // In and out of cells at every rank of the node; a leader that reduces everything alone does so while the link
    // waits.
    let memory = 2.0 * bytes * each / MEMORY_RATE;
    let alone = match (choice.algorithm, shape.collective.reduces()) {
        (Algorithm::HierPublish | Algorithm::HierLog, true) => bytes * (each + crossings) / MEMORY_RATE,
        _ => 0.0,
    };
    // The first segment's messages are what a small call waits for; later ones are made while the link is busy.
    let messages = need.remote as f64 * network.message_ns;
    let link = bytes * crossings / network.bytes_per_ns;
    let busy = (segments * messages).max(link).max(memory);
    Some(hops * network.latency_ns + messages + fill + alone + busy)
}

fn path(algorithm: Algorithm, collective: Collective, nodes: usize, each: f64) -> Option<Path> {
    use Algorithm::*;
    use Collective::*;
    let h = nodes as f64;
    let (others, rounds) = (h - 1.0, h.log2().ceil());
    let share = others / h;
    let (hops, crossings) = match (algorithm, collective) {
        (HierMesh, Barrier | AllGather | ReduceScatter | Gather | Scatter) => (1.0, share),
        (HierMesh, AllToAll) => (1.0, share * each),
        (HierMesh, AllReduce) => (2.0, 2.0 * share),
        (HierMesh, Broadcast | Reduce) => (if nodes > 2 { 2.0 } else { 1.0 }, 1.0),

        (HierRing, AllGather | ReduceScatter) => (others, share),
        (HierRing, AllReduce) => (2.0 * others, 2.0 * share),
        (HierRing, Broadcast | Reduce) => (others, 1.0),

        (HierRecursive, AllGather | ReduceScatter) => (rounds, share),
        (HierRecursive, AllReduce) => (2.0 * rounds, 2.0 * share),

        (HierTree, Broadcast | Reduce) => (rounds + 1.0, 1.0),
        (HierTree, AllReduce) => (2.0 * rounds + 2.0, 2.0),

        (HierLog, AllGather | Barrier) => (rounds, share),
        (HierLog, Broadcast | Reduce) => (rounds, rounds),
        (HierLog, AllReduce) => (2.0 * rounds, 2.0 * rounds),

        (HierPublish, AllReduce | Broadcast | Reduce) => (1.0, others),
        _ => return None,
    };
    Some(Path { hops, crossings })
}
