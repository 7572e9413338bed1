//! Random groups of up to 40 ranks, with random nodes and sizes.

use proptest::prelude::*;
use smddp_plan::check::{Operation, Sizes, check, programs};
use smddp_plan::{Algorithm, Collective, Topology};

/// Node of each rank, root, segments of each block, depth above the minimum, in place.
fn cases() -> impl Strategy<Value = (Vec<usize>, usize, Vec<usize>, usize, bool)> {
    (1..=40usize).prop_flat_map(|size| {
        let block = prop_oneof![Just(0), 0..=6usize];
        let nodes = (1..=size).prop_flat_map(move |nodes| prop::collection::vec(0..nodes, size));
        (nodes, 0..size, prop::collection::vec(block, size), 0..=2usize, any::<bool>())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_groups_and_sizes_are_correct(
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
        collective in prop::sample::select(Collective::ALL.to_vec()),
        (nodes, root, mut blocks, more, in_place) in cases(),
    ) {
        let topology = Topology::from_labels(&nodes);
        let root = if collective.has_root() { root } else { 0 };
        if collective == Collective::AllToAll {
            let first = blocks[0];
            blocks.fill(first);
        }
        if let Some(programs) = programs(algorithm, collective, &topology, root, false) {
            let most = blocks.iter().max().copied().unwrap_or(0);
            let sizes = Sizes::Blocks(blocks);
            let op = Operation { collective, root, programs: &programs, sizes: &sizes, in_place };
            let outcome = check(&op, algorithm.least_depth(most) + more);
            prop_assert!(outcome.is_ok(), "{}", outcome.unwrap_err());
        }
    }

    #[test]
    fn all_to_all_of_random_pairs_is_correct(
        pairs in (1..=20usize).prop_flat_map(|n| prop::collection::vec(prop::collection::vec(0..=5usize, n), n)),
        nodes in prop::collection::vec(0..6usize, 20),
        depth in 2..=4usize,
    ) {
        let topology = Topology::from_labels(&nodes[..pairs.len()]);
        let sizes = Sizes::Pairs(pairs);
        for algorithm in Algorithm::ALL {
            let collective = Collective::AllToAll;
            if let Some(programs) = programs(algorithm, collective, &topology, 0, true) {
                let op = Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place: false };
                let outcome = check(&op, depth);
                prop_assert!(outcome.is_ok(), "{:?}: {}", algorithm, outcome.unwrap_err());
            }
        }
    }
}
