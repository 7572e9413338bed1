//! Time of an algorithm where there are several nodes.

use super::need::{Moved, Need};
use super::shape::Case;
use super::{Choice, Memory, Network};
use crate::algorithms::{Algorithm, LOG_IN_PARTS};
use crate::ir::Collective;
use crate::topology::Topology;

/// For each step of a rank's program, also one that moves nothing: it was planned and bound, and its peer's header is looked for.
const STEP_NS: f64 = 10.0;

/// What a rank reads, writes and adds up inside its node.
struct Inside {
    /// Bytes per nanosecond, in and out.
    rate: f64,
    /// Bytes per nanosecond that are added up.
    adding: f64,
    /// For a message that is written, and for one that is read.
    writing_ns: f64,
    reading_ns: f64,
    hop_ns: f64,
}

impl Inside {
    const HOST: Self = Self { rate: 10.0, adding: 10.0, writing_ns: 250.0, reading_ns: 250.0, hop_ns: 150.0 };
    /// Over NVLink: what is written to a rank costs it nothing.
    const DEVICE: Self =
        Self { rate: 300.0, adding: 1_000.0, writing_ns: 300.0, reading_ns: 0.0, hop_ns: 2_000.0 };

    const fn of(memory: Memory) -> Self {
        match memory {
            Memory::Host => Self::HOST,
            Memory::Bounced | Memory::Reference => Self::DEVICE,
        }
    }
}

/// How a plan goes between nodes; blocks are taken to be alike.
struct Path {
    /// Between nodes, one after the other.
    hops: f64,
    /// How often the busiest node's link carries the whole buffer one way.
    crossings: f64,
    /// Several nodes write to one at the same time.
    crowded: bool,
    /// One rank of each node does it all.
    by_leaders: bool,
}

/// Modelled nanoseconds: hops, and whatever takes longest of the busiest node's link, the busiest rank's part of it, and
/// what a rank does inside its node. `None` where the algorithm does not do the collective.
pub(super) fn cost(choice: &Choice, need: &Need, case: &Case<'_>, network: &Network) -> Option<f64> {
    use Collective::*;
    let topology = case.topology;
    let (each, nodes, all) = (topology.node_sizes().1 as f64, topology.nodes() as f64, case.size as f64);
    let Path { hops, crossings, crowded, by_leaders } = path(choice.algorithm, case.collective, topology)?;
    let (bytes, inside) = (case.bytes as f64, Inside::of(case.memory));
    let segments = case.block.div_ceil(choice.segment).max(1) as f64;
    // Ranks of a node that send at the same time, and how many share a device: where senders are paced devices are
    // dealt to the ranks.
    let active = if by_leaders { 1.0 } else { each.min(case.filled.max(1) as f64) };
    let devices = if network.incast > 1.0 { 1.0 } else { each };
    let rate = network.bytes_per_ns / devices;
    let sharing = (active / devices).max(1.0);

    // The busiest device.
    let messages = need.out.messages.max(need.inward.messages) as f64 * sharing;
    let crowd = match (choice.algorithm, case.collective) {
        // The one that has most to tell is not the one that hears most.
        (Algorithm::HierMesh, Broadcast | Reduce) if crowded => (network.crowd() / crossings).max(1.0),
        _ if crowded => network.crowd(),
        _ => 1.0,
    };
    let link =
        (bytes * crossings / network.bytes_per_ns).max(need.out.bytes.max(need.inward.bytes) as f64 / rate);
    let link = link * crowd + segments * messages * network.message_ns;

    // The busiest rank, inside its node.
    let adds = match case.collective {
        AllReduce | Reduce if by_leaders => (if each > 1.0 { each } else { 0.0 }) + crossings + 1.0,
        // Where ranks have mates, every one adds those up for its share of the blocks, and what comes from other nodes.
        AllReduce | Reduce | ReduceScatter if each > 1.0 => (each * nodes + nodes - 1.0) / all,
        AllReduce | Reduce | ReduceScatter if choice.algorithm == Algorithm::HierMesh => 1.0,
        AllReduce | Reduce | ReduceScatter => 2.0 * (nodes - 1.0) / nodes,
        _ => 0.0,
    };
    let near = |moved: Moved, message_ns: f64| {
        moved.bytes as f64 / inside.rate + segments * moved.messages as f64 * message_ns
    };
    let adding = adds * bytes / inside.adding;
    let within =
        near(need.near_in, inside.reading_ns).max(near(need.near_out, inside.writing_ns)).max(adding);

    // A piece on its way: over the links one after the other, and added to what it meets.
    let piece = (choice.segment.min(case.block) * need.message).min(case.bytes) as f64;
    let passing = piece / rate + network.message_ns;
    let meeting = match case.collective {
        AllReduce | Reduce | ReduceScatter => (each + 1.0) * piece / inside.adding,
        _ => 0.0,
    };
    let near_hops = match case.collective {
        AllReduce => 2.0,
        Broadcast | Reduce if !by_leaders && each > 1.0 => 2.0,
        _ => 1.0,
    };
    // What begins at one rank is told to its mates first, part by part.
    let told =
        if case.collective == Broadcast { need.near_out.messages as f64 * inside.writing_ns } else { 0.0 };
    // All rounds of this one are one loop, whose every turn waits for what was sent in the turn before.
    let turns = match (choice.algorithm, case.collective) {
        (Algorithm::HierLog, AllGather) => (segments - 1.0) * network.latency_ns,
        _ => 0.0,
    };
    let near_ns = near_hops * inside.hop_ns + told + turns + need.steps as f64 * STEP_NS;
    let (latency, hop) = (network.latency_ns, network.latency_ns + passing + meeting);
    // Overlap is imperfect: 10 % of the shorter time is added.
    let busy = link.max(within) + 0.1 * link.min(within);
    let goes_on = match choice.algorithm {
        Algorithm::HierRing => nodes > 2.0 && !case.collective.has_root(),
        // Its rounds go in parts there, so that a link need not wait for the round before.
        Algorithm::HierLog => case.collective == AllGather && topology.nodes() >= LOG_IN_PARTS,
        _ => false,
    };
    Some(
        near_ns
            + if goes_on {
                // Every node has blocks of its own to send before the first one reaches it. What goes on by another rank
                // of the node goes through its memory.
                let chain = match choice.algorithm {
                    Algorithm::HierLog => hops * (hop + inside.hop_ns),
                    _ => (hops - 1.0) * hop,
                };
                busy.max(chain) + latency + passing
            } else if by_leaders {
                // In one lane.
                hops * latency + (hops - 1.0) * passing + link + within
            } else {
                // What a piece waits for on the links before the last one. Where every hop has bytes of its own to carry, those
                // are in the link's share; through one node to all others, its link carries a piece for each of them.
                let before = match (choice.algorithm, case.collective) {
                    (Algorithm::HierMesh, Broadcast | Reduce) => (nodes - 2.0).max(1.0),
                    (Algorithm::HierLog, AllGather) if segments > 1.0 => hops - 1.0,
                    (
                        Algorithm::HierMesh | Algorithm::HierRecursive | Algorithm::HierLog,
                        AllGather | ReduceScatter | AllReduce,
                    ) => 0.0,
                    _ => hops - 1.0,
                };
                hops * (latency + meeting) + before * passing + busy
            },
    )
}

fn path(algorithm: Algorithm, collective: Collective, topology: &Topology) -> Option<Path> {
    use Algorithm::*;
    use Collective::*;
    let (h, n) = (topology.nodes() as f64, topology.size() as f64);
    let (fewest, most) = topology.node_sizes();
    let (fewest, most) = (fewest as f64, most as f64);
    let (others, rounds) = (h - 1.0, h.log2().ceil());
    let share = others / h;
    // Each rank its own block: the smallest node lacks most, and the largest has most to tell the others.
    let lacks = (n - fewest) / n;
    let tells = |copies: f64| lacks.max((most * copies + (n - most) * (others - copies) / others) / n);
    let (hops, crossings) = match (algorithm, collective) {
        (HierMesh, AllGather | ReduceScatter) => (1.0, tells(others)),
        (HierMesh, Barrier | Gather | Scatter) => (1.0, lacks),
        (HierMesh, AllToAll) => {
            let pairs = (0..topology.nodes()).map(|node| {
                let ranks = topology.ranks_of(node).len();
                ranks * (topology.size() - ranks)
            });
            (1.0, pairs.max().unwrap_or(0) as f64 / n)
        }
        (HierMesh, AllReduce) => (2.0, 2.0 * share),
        (HierMesh, Broadcast | Reduce) if others < 2.0 => (1.0, 1.0),
        // Blocks are dealt to all nodes but the root's; one has the most.
        (HierMesh, Broadcast | Reduce) => (2.0, ((n / others).ceil() * (others - 1.0) / n).max(1.0)),

        (HierRing, AllGather | ReduceScatter) => (others, lacks),
        (HierRing, AllReduce) => (2.0 * others, 2.0 * share),
        (HierRing, Broadcast | Reduce) => (others, 1.0),

        (HierRecursive, AllGather | ReduceScatter) => (rounds, tells(rounds)),
        (HierRecursive, AllReduce) => (2.0 * rounds, 2.0 * share),

        (HierTree, Broadcast | Reduce) => (rounds + 1.0, 1.0),
        (HierTree, AllReduce) => (2.0 * rounds + 2.0, 2.0 * share),

        (HierLog, AllGather | Barrier) => (rounds, lacks),
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
    let crowded = others > 1.0
        && match algorithm {
            HierMesh => true,
            HierRecursive => true,
            HierTree => true,
            HierLog => matches!(collective, Reduce | AllReduce),
            HierPublish => collective != Broadcast,
            _ => false,
        };
    Some(Path { hops, crossings, crowded, by_leaders })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Operation, Sizes, programs, traffic};

    /// What the table says of the busiest link is what the plans do to it, exactly or (uneven nodes,
    /// trees, shares of whole blocks) about.
    #[test]
    fn crossings_are_those_of_the_plans() {
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
