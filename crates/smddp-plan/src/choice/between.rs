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
    let Path { hops, crossings } = path(choice.algorithm, shape.collective, topology)?;
    let gathers = matches!(shape.collective, Collective::AllGather | Collective::ReduceScatter);
    let segments = shape.block.div_ceil(choice.segment).max(1) as f64;
    let bytes = shape.bytes as f64;
    // Until the last node has the first segment; all ranks of a node share its link.
    let piece = (choice.segment.min(shape.block) * need.message) as f64;
    let stages = match choice.algorithm {
        // Every node has blocks of its own to send before the first one reaches it.
        Algorithm::HierRing if gathers => (hops - 1.0).min(1.0),
        _ => (hops - 1.0).max(0.0),
    };
    let fill = stages * piece * each / network.bytes_per_ns;
    // In and out of cells at every rank of the node; a leader that reduces everything alone does so while the link
    // waits.
    let memory = 2.0 * bytes * each / MEMORY_RATE;
    let alone = match (choice.algorithm, shape.collective.reduces()) {
        (Algorithm::HierPublish | Algorithm::HierLog, true) => bytes * (each + crossings) / MEMORY_RATE,
        _ => 0.0,
    };
    // The first segment's messages are what a small call waits for; later ones are made while the link is busy.
    let messages = need.remote as f64 * network.message_ns;
    let crowded =
        topology.nodes() > 2 && matches!(choice.algorithm, Algorithm::HierMesh | Algorithm::HierRecursive);
    let link = bytes * crossings / network.bytes_per_ns * if crowded { network.incast } else { 1.0 };
    let busy = (segments * messages).max(link).max(memory);
    // All rounds of this one are one loop, whose every turn waits for what was sent in the turn before.
    let turns = match (choice.algorithm, shape.collective) {
        (Algorithm::HierLog, Collective::AllGather) => (segments - 1.0) * network.latency_ns,
        _ => 0.0,
    };
    Some(hops * network.latency_ns + messages + fill + alone + busy + turns)
}

/// Blocks are taken to be alike.
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
        (HierMesh, Broadcast | Reduce) => (if others > 1.0 { 2.0 } else { 1.0 }, 1.0),

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
    Some(Path { hops, crossings })
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
