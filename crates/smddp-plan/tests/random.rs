//! Groups of up to 40 ranks and random sizes.

use proptest::prelude::*;
use smddp_plan::check::{Operation, Sizes, check, programs};
use smddp_plan::{Algorithm, Collective, Topology};

fn cases() -> impl Strategy<Value = (usize, usize, Vec<usize>, usize, bool)> {
    (1..=40usize).prop_flat_map(|size| {
        let block = prop_oneof![Just(0), 0..=6usize];
        (Just(size), 0..size, prop::collection::vec(block, size), 0..=2usize, any::<bool>())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_group_and_any_sizes(
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
        collective in prop::sample::select(Collective::ALL.to_vec()),
        (size, root, mut blocks, more, in_place) in cases(),
    ) {
        let root = if collective.has_root() { root } else { 0 };
        if collective == Collective::AllToAll {
            let first = blocks[0];
            blocks.fill(first);
        }
        if let Some(programs) = programs(algorithm, collective, &Topology::single(size), root, false) {
            let most = blocks.iter().max().copied().unwrap_or(0);
            let sizes = Sizes::Blocks(blocks);
            let op = Operation { collective, root, programs: &programs, sizes: &sizes, in_place };
            let outcome = check(&op, algorithm.least_depth(most) + more);
            prop_assert!(outcome.is_ok(), "{}", outcome.unwrap_err());
        }
    }

    #[test]
    fn all_to_all_of_any_pairs(
        pairs in (1..=20usize).prop_flat_map(|n| prop::collection::vec(prop::collection::vec(0..=5usize, n), n)),
        depth in 2..=4usize,
    ) {
        let size = pairs.len();
        let sizes = Sizes::Pairs(pairs);
        for algorithm in Algorithm::ALL {
            let collective = Collective::AllToAll;
            if let Some(programs) = programs(algorithm, collective, &Topology::single(size), 0, true) {
                let op = Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place: false };
                let outcome = check(&op, depth);
                prop_assert!(outcome.is_ok(), "{:?}: {}", algorithm, outcome.unwrap_err());
            }
        }
    }
}
