//! Reductions in canonical order, independent of the layout.

mod support;

use smddp_plan::check::{Operation, Sizes, check, programs_for};
use smddp_plan::{
    Algorithm, Collective, Counts, GroupShape, Memory, Network, PlanRequest, Settings, Shape, Topology,
    decide,
};
use support::{Rng, in_blocks, partitions, round_robin};

const REDUCING: [Collective; 3] = [Collective::ReduceScatter, Collective::AllReduce, Collective::Reduce];

/// Returns true if the ranks of every node are a subtree of the tree.
fn aligned(topology: &Topology) -> bool {
    let size = topology.size();
    (0..topology.nodes()).all(|node| {
        let ranks = topology.ranks_of(node);
        let (first, end) = (ranks[0], ranks[ranks.len() - 1] + 1);
        let subtree = (0..5)
            .map(|k| 1 << k)
            .any(|whole: usize| first.is_multiple_of(whole) && end == (first + whole).min(size));
        end - first == ranks.len() && subtree
    })
}

/// Compares the order of every element with the tree, for every split of up to 12 ranks.
#[test]
fn canonical_plans_exist_where_possible_and_keep_the_order() {
    let mut rng = Rng(3);
    let (mut checked, mut by_nodes) = (0, 0);
    for size in 1..=12 {
        for split in partitions(size) {
            let mut backwards = split.clone();
            backwards.reverse();
            for topology in
                [in_blocks(&split), in_blocks(&backwards), round_robin(&split), rng.shuffled(&split)]
            {
                for (algorithm, collective) in
                    Algorithm::ALL.into_iter().flat_map(|a| REDUCING.map(|collective| (a, collective)))
                {
                    let root = if collective.has_root() { rng.below(size) } else { 0 };
                    let request =
                        PlanRequest { collective, rank: 0, size, root, uneven_pairs: false, canonical: true };
                    let default =
                        programs_for(algorithm, &PlanRequest { canonical: false, ..request }, &topology);
                    let programs = programs_for(algorithm, &request, &topology);
                    let keeps = size == 1
                        || match algorithm {
                            Algorithm::Mesh | Algorithm::Publish => true,
                            Algorithm::HierMesh | Algorithm::HierPublish => aligned(&topology),
                            _ => false,
                        };
                    assert_eq!(programs.is_some(), keeps && default.is_some(), "{algorithm:?} {topology:?}");
                    let Some(programs) = programs else { continue };
                    let blocks = (0..size).map(|_| rng.below(4)).collect();
                    let (sizes, in_place) = (Sizes::Blocks(blocks), rng.below(2) == 0);
                    let op = Operation { collective, root, programs: &programs, sizes: &sizes, in_place };
                    if let Err(error) = check(&op, 2) {
                        panic!("{algorithm:?} {collective:?} {topology:?} root={root} {sizes:?}: {error}");
                    }
                    checked += 1;
                    by_nodes += usize::from(algorithm.is_hierarchical() && size > 1);
                }
            }
        }
    }
    assert!(checked > 6_000 && by_nodes > 300, "{checked} {by_nodes}");
}

/// Node sums travel if the layout allows it, single contributions otherwise. The order overrides a forced
/// algorithm.
#[test]
fn choice_keeps_the_order_for_every_size() {
    let cases = [
        (Topology::blocks(4, 2), true),
        (Topology::blocks(5, 4), true),
        (Topology::blocks(16, 8), true),
        (in_blocks(&[4, 4, 3]), true),
        (Topology::blocks(2, 3), false),
        (round_robin(&[2, 2]), false),
    ];
    for (topology, sums_travel) in cases {
        for collective in REDUCING {
            for algorithm in
                [None, Some(Algorithm::HierRing), Some(Algorithm::HierTree), Some(Algorithm::Mesh)]
            {
                for bytes in [4, 4 << 10, 1 << 20, 256 << 20] {
                    let counts = Counts::of_buffer(collective, bytes / 4, topology.size());
                    let shape = Shape {
                        collective,
                        element: 4,
                        half: false,
                        single: false,
                        counts,
                        memory: Memory::Host,
                    };
                    let group =
                        GroupShape { topology: &topology, inline_bytes: 0, network: Network::ASSUMED };
                    let settings = Settings { canonical: true, algorithm, ..Settings::default() };
                    let decision = decide(&shape, &group, &settings);
                    let chosen = decision.choice.algorithm;
                    let expected = if algorithm == Some(Algorithm::Mesh) || !sums_travel {
                        chosen == Algorithm::Mesh
                    } else {
                        matches!(chosen, Algorithm::HierMesh | Algorithm::HierPublish)
                    };
                    assert!(
                        decision.canonical && expected,
                        "{collective:?} {topology:?} {bytes}: {chosen:?}"
                    );
                }
            }
        }
    }
}
