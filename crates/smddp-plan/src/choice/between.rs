//! Cost model of algorithms for several nodes.

use super::need::{Traffic, TrafficTotal};
use super::shape::Case;
use super::{Choice, Memory, Network};
use crate::algorithms::{Algorithm, LOG_IN_PARTS};
use crate::ir::Collective;
use crate::topology::Topology;

/// Cost of one step of a program, also of a step without payload: planning, binding and polling the header of
/// the peer.
const STEP_NS: f64 = 10.0;

/// Costs inside a node.
struct LocalCosts {
    /// Bytes per nanosecond, each way.
    rate: f64,
    /// Reduction rate in bytes per nanosecond.
    reduce_rate: f64,
    /// Cost per message written and per message read.
    write_ns: f64,
    read_ns: f64,
    hop_ns: f64,
}

impl LocalCosts {
    const HOST: Self = Self { rate: 10.0, reduce_rate: 10.0, write_ns: 250.0, read_ns: 250.0, hop_ns: 150.0 };
    /// Over NVLink a write costs the receiving rank nothing.
    const DEVICE: Self =
        Self { rate: 300.0, reduce_rate: 1_000.0, write_ns: 300.0, read_ns: 0.0, hop_ns: 2_000.0 };

    const fn of(memory: Memory) -> Self {
        match memory {
            Memory::Host => Self::HOST,
            Memory::Bounced | Memory::Reference => Self::DEVICE,
        }
    }
}

/// Inter-node properties of a plan; assumes blocks of equal size.
struct Path {
    /// Sequential hops between nodes.
    hops: f64,
    /// Volume that the busiest node link carries one way, as a multiple of the whole buffer.
    crossings: f64,
    /// True if several nodes write to one node at the same time.
    incast: bool,
    /// True if one rank of each node does all the work.
    by_leaders: bool,
}

/// Returns modelled nanoseconds: the hops, plus the slowest of the busiest node link, its busiest rank, and
/// the work of a rank inside the node. `None` if the algorithm does not support the collective.
pub(super) fn cost(choice: &Choice, traffic: &Traffic, case: &Case<'_>, network: &Network) -> Option<f64> {
    use Collective::*;
    let topology = case.topology;
    let (each, nodes) = (topology.node_sizes().1 as f64, topology.nodes() as f64);
    let path = path(choice.algorithm, case.collective, topology)?;
    let Path { hops, crossings, incast, by_leaders } = path;
    let (bytes, local) = (case.bytes as f64, LocalCosts::of(case.memory));
    let segments = case.block.div_ceil(choice.segment).max(1) as f64;
    // Ranks of a node that send at the same time, and ranks that share a device. With paced senders each rank
    // has its own share of the devices.
    let active = if by_leaders { 1.0 } else { each.min(case.filled.max(1) as f64) };
    let devices = if network.incast > 1.0 { 1.0 } else { each };
    let rate = network.bytes_per_ns / devices;
    let sharing = (active / devices).max(1.0);

    // Time of the busiest device.
    let messages = traffic.remote_out.messages.max(traffic.remote_in.messages) as f64 * sharing;
    let slowdown = match (choice.algorithm, case.collective) {
        // In these collectives the node that sends most is not the node that receives most.
        (Algorithm::HierMesh, Broadcast | Reduce) if incast => {
            (network.incast_slowdown() / crossings).max(1.0)
        }
        _ if incast => network.incast_slowdown(),
        _ => 1.0,
    };
    let link = (bytes * crossings / network.bytes_per_ns)
        .max(traffic.remote_out.bytes.max(traffic.remote_in.bytes) as f64 / rate);
    let link = link * slowdown + segments * messages * network.message_ns;

    let local_ns = local_ns(choice.algorithm, &path, traffic, case, segments);

    // Latency of one piece: its transfers over successive links and its reductions.
    let piece = (choice.segment.min(case.block) * traffic.message).min(case.bytes) as f64;
    let transfer_ns = piece / rate + network.message_ns;
    let reduce_ns = match case.collective {
        AllReduce | Reduce | ReduceScatter => (each + 1.0) * piece / local.reduce_rate,
        _ => 0.0,
    };
    let local_hops = match case.collective {
        AllReduce => 2.0,
        Broadcast | Reduce if !by_leaders && each > 1.0 => 2.0,
        _ => 1.0,
    };
    // The root first announces its parts to its local peers, one message per part.
    let announce_ns =
        if case.collective == Broadcast { traffic.local_out.messages as f64 * local.write_ns } else { 0.0 };
    // This algorithm runs all rounds in one loop, and each iteration waits for data sent in the previous one.
    let round_trips_ns = match (choice.algorithm, case.collective) {
        (Algorithm::HierLog, AllGather) => (segments - 1.0) * network.latency_ns,
        _ => 0.0,
    };
    let overhead_ns =
        local_hops * local.hop_ns + announce_ns + round_trips_ns + traffic.steps as f64 * STEP_NS;
    let (latency, hop) = (network.latency_ns, network.latency_ns + transfer_ns + reduce_ns);
    // Imperfect overlap adds 10 % of the shorter time.
    let busy = link.max(local_ns) + 0.1 * link.min(local_ns);
    let is_pipelined = match choice.algorithm {
        Algorithm::HierRing => nodes > 2.0 && !case.collective.has_root(),
        // With many nodes its rounds are divided into parts, so that a link does not wait for the previous
        // round.
        Algorithm::HierLog => case.collective == AllGather && topology.nodes() >= LOG_IN_PARTS,
        _ => false,
    };
    Some(
        overhead_ns
            + if is_pipelined {
                // Every node sends its own blocks before the first remote block arrives. A block that another
                // rank of the node forwards passes through the node's memory.
                let chain = match choice.algorithm {
                    Algorithm::HierLog => hops * (hop + local.hop_ns),
                    _ => (hops - 1.0) * hop,
                };
                busy.max(chain) + latency + transfer_ns
            } else if by_leaders {
                // All steps are in one pipeline.
                hops * latency + (hops - 1.0) * transfer_ns + link + local_ns
            } else {
                // Time that a piece waits for on the links before the last one. If every hop carries its own
                // bytes, the link time includes them. If one node relays to all others, its link carries a
                // piece for each of them.
                let before = match (choice.algorithm, case.collective) {
                    (Algorithm::HierMesh, Broadcast | Reduce) => (nodes - 2.0).max(1.0),
                    (Algorithm::HierLog, AllGather) if segments > 1.0 => hops - 1.0,
                    (
                        Algorithm::HierMesh | Algorithm::HierRecursive | Algorithm::HierLog,
                        AllGather | ReduceScatter | AllReduce,
                    ) => 0.0,
                    _ => hops - 1.0,
                };
                hops * (latency + reduce_ns) + before * transfer_ns + busy
            },
    )
}

/// Returns the modelled nanoseconds that the busiest rank spends inside its node.
fn local_ns(algorithm: Algorithm, path: &Path, traffic: &Traffic, case: &Case<'_>, segments: f64) -> f64 {
    use Collective::*;
    let Path { crossings, by_leaders, .. } = *path;
    let topology = case.topology;
    let (each, nodes, all) = (topology.node_sizes().1 as f64, topology.nodes() as f64, case.size as f64);
    let (bytes, local) = (case.bytes as f64, LocalCosts::of(case.memory));
    let adds = match case.collective {
        AllReduce | Reduce if by_leaders => (if each > 1.0 { each } else { 0.0 }) + crossings + 1.0,
        // With local peers, a rank reduces their contributions for its share of the blocks, and the data from
        // other nodes.
        AllReduce | Reduce | ReduceScatter if each > 1.0 => (each * nodes + nodes - 1.0) / all,
        AllReduce | Reduce | ReduceScatter if algorithm == Algorithm::HierMesh => 1.0,
        AllReduce | Reduce | ReduceScatter => 2.0 * (nodes - 1.0) / nodes,
        _ => 0.0,
    };
    let local_time = |total: TrafficTotal, message_ns: f64| {
        total.bytes as f64 / local.rate + segments * total.messages as f64 * message_ns
    };
    let reduction_ns = adds * bytes / local.reduce_rate;
    local_time(traffic.local_in, local.read_ns)
        .max(local_time(traffic.local_out, local.write_ns))
        .max(reduction_ns)
}

fn path(algorithm: Algorithm, collective: Collective, topology: &Topology) -> Option<Path> {
    use Algorithm::*;
    use Collective::*;
    let (h, n) = (topology.nodes() as f64, topology.size() as f64);
    let (fewest, most) = topology.node_sizes();
    let (fewest, most) = (fewest as f64, most as f64);
    let (others, rounds) = (h - 1.0, h.log2().ceil());
    let share = others / h;
    // Each rank contributes its own block: the smallest node misses most, and the largest node sends most.
    let missing = (n - fewest) / n;
    let sent = |copies: f64| missing.max((most * copies + (n - most) * (others - copies) / others) / n);
    let (hops, crossings) = match (algorithm, collective) {
        (HierMesh, AllGather | ReduceScatter) => (1.0, sent(others)),
        (HierMesh, Barrier | Gather | Scatter) => (1.0, missing),
        (HierMesh, AllToAll) => {
            let pairs = (0..topology.nodes()).map(|node| {
                let ranks = topology.ranks_of(node).len();
                ranks * (topology.size() - ranks)
            });
            (1.0, pairs.max().unwrap_or(0) as f64 / n)
        }
        (HierMesh, AllReduce) => (2.0, 2.0 * share),
        (HierMesh, Broadcast | Reduce) if others < 2.0 => (1.0, 1.0),
        // All nodes except the root's get blocks; one of them has the most.
        (HierMesh, Broadcast | Reduce) => (2.0, ((n / others).ceil() * (others - 1.0) / n).max(1.0)),

        (HierRing, AllGather | ReduceScatter) => (others, missing),
        (HierRing, AllReduce) => (2.0 * others, 2.0 * share),
        (HierRing, Broadcast | Reduce) => (others, 1.0),

        (HierRecursive, AllGather | ReduceScatter) => (rounds, sent(rounds)),
        (HierRecursive, AllReduce) => (2.0 * rounds, 2.0 * share),

        (HierTree, Broadcast | Reduce) => (rounds + 1.0, 1.0),
        (HierTree, AllReduce) => (2.0 * rounds + 2.0, 2.0 * share),

        (HierLog, AllGather | Barrier) => (rounds, missing),
        (HierLog, Broadcast | Reduce) => (rounds, rounds),
        (HierLog, AllReduce) => (2.0 * rounds, rounds),

        (HierPublish, AllReduce | Broadcast | Reduce) => (1.0, others),
        _ => return None,
    };
    let by_leaders = match algorithm {
        HierPublish => true,
        HierLog => collective != AllGather,
        HierMesh => collective == Barrier,
        _ => false,
    };
    let incast = others > 1.0
        && match algorithm {
            HierMesh => true,
            HierRecursive => true,
            HierTree => true,
            HierLog => matches!(collective, Reduce | AllReduce),
            HierPublish => collective != Broadcast,
            _ => false,
        };
    Some(Path { hops, crossings, incast, by_leaders })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Operation, Sizes, programs, traffic};

    /// Compares the modelled load of the busiest link with the plans: exactly, or roughly for uneven nodes,
    /// trees and shares of whole blocks.
    #[test]
    fn modelled_link_load_matches_the_plans() {
        let splits: [&[usize]; 8] =
            [&[2, 2], &[1, 1, 1], &[2, 2, 2, 2], &[4; 8], &[1; 16], &[1, 2, 3], &[1, 1, 4], &[3, 5, 2, 6]];
        for split in splits {
            let labels = split.iter().enumerate().flat_map(|(n, &ranks)| std::iter::repeat_n(n, ranks));
            let topology = Topology::from_labels(&labels.collect::<Vec<_>>());
            let even = topology.node_sizes().0 == topology.node_sizes().1;
            for algorithm in Algorithm::ALL.into_iter().filter(|a| a.is_hierarchical()) {
                for collective in Collective::ALL.into_iter().filter(|&c| c != Collective::Barrier) {
                    let Some(programs) = programs(algorithm, collective, &topology, 0, false) else {
                        assert!(path(algorithm, collective, &topology).is_none());
                        continue;
                    };
                    let sizes = Sizes::Blocks(vec![100; topology.size()]);
                    let op = Operation {
                        collective,
                        root: 0,
                        programs: &programs,
                        sizes: &sizes,
                        in_place: false,
                    };
                    let busiest = traffic(&op, &topology).unwrap().into_iter();
                    let busiest = busiest.map(|link| link.bytes_in.max(link.bytes_out)).max().unwrap();
                    let found = busiest as f64 / (100 * topology.size()) as f64;
                    let Path { crossings, .. } = path(algorithm, collective, &topology).unwrap();
                    let shares = matches!(collective, Collective::Broadcast | Collective::Reduce);
                    let exact =
                        even && !shares && !matches!(algorithm, Algorithm::HierTree | Algorithm::HierLog);
                    let error = if exact { 1e-9 } else { 0.5 };
                    assert!(
                        (crossings / found - 1.0).abs() <= error,
                        "{algorithm:?} {collective:?} {split:?}: {crossings}, but {found}"
                    );
                }
            }
        }
    }
}
