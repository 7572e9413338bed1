//! Compression between nodes: all ranks get the same values.

mod support;

use smddp_plan::check::{Error, Operation, Sizes, check_rounded, programs};
use smddp_plan::{
    Algorithm, Collective, Counts, Formats, GroupShape, Memory, Network, Settings, Shape, Topology, decide,
};
use support::{Rng, in_blocks, partitions, round_robin};

const COLLECTIVES: [Collective; 3] =
    [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce];
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::HierMesh,
    Algorithm::HierRing,
    Algorithm::HierLog,
    Algorithm::HierRecursive,
    Algorithm::HierTree,
];

/// Every split of up to 10 ranks.
#[test]
fn compressed_plans_give_all_ranks_the_same_values() {
    let mut rng = Rng(11);
    let mut checked = 0;
    for size in 2..=10 {
        for split in partitions(size) {
            for topology in [in_blocks(&split), round_robin(&split), rng.shuffled(&split)] {
                for (algorithm, collective) in
                    ALGORITHMS.into_iter().flat_map(|a| COLLECTIVES.map(|c| (a, c)))
                {
                    let Some(programs) = programs(algorithm, collective, &topology, 0, false) else {
                        continue;
                    };
                    let sizes = Sizes::Blocks((0..size).map(|_| rng.below(4)).collect());
                    let in_place = rng.below(2) == 0;
                    let op = Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place };
                    if topology.nodes() == 1 {
                        continue;
                    }
                    if let Err(error) = check_rounded(&op, 2, &topology) {
                        panic!(
                            "{algorithm:?} {collective:?} {topology:?} {sizes:?} in place={in_place}: {error}"
                        );
                    }
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 3_000, "{checked}");
}

/// Every leader adds its own unrounded sum to the rounded sums of the others.
#[test]
fn results_differ_if_every_leader_reduces() {
    let topology = Topology::blocks(3, 2);
    let programs = programs(Algorithm::HierPublish, Collective::AllReduce, &topology, 0, false).unwrap();
    let sizes = Sizes::Blocks(vec![1; 6]);
    let collective = Collective::AllReduce;
    let op = Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place: false };
    assert!(matches!(check_rounded(&op, 2, &topology), Err(Error::OrdersDiffer { .. })));
}

#[test]
fn only_large_float32_buffers_between_nodes_have_a_format() {
    let two = Topology::blocks(2, 2);
    let format =
        |collective, bytes: usize, topology: &Topology, change: fn(&mut Shape, &mut Settings<'_>)| {
            let counts = Counts::of_buffer(collective, bytes / 4, topology.size());
            let mut shape =
                Shape { collective, element: 4, half: false, single: true, counts, memory: Memory::Host };
            let formats = Formats::parse("bf16,reduce_scatter=int8").unwrap();
            let mut settings = Settings { formats, ..Settings::default() };
            change(&mut shape, &mut settings);
            let group = GroupShape { topology, inline_bytes: 4096, network: Network::ASSUMED };
            decide(&shape, &group, &settings).format.map(|format| format.name())
        };
    let large = 1 << 20;
    assert_eq!(format(Collective::AllReduce, large, &two, |_, _| ()), Some("bf16"));
    assert_eq!(format(Collective::AllGather, large, &two, |_, _| ()), Some("bf16"));
    assert_eq!(format(Collective::ReduceScatter, large, &two, |_, _| ()), Some("int8"));
    assert_eq!(format(Collective::Broadcast, large, &two, |_, _| ()), None);
    assert_eq!(format(Collective::AllReduce, 32 << 10, &two, |_, _| ()), None);
    assert_eq!(format(Collective::AllReduce, large, &Topology::blocks(1, 4), |_, _| ()), None);
    assert_eq!(format(Collective::AllReduce, large, &two, |shape, _| shape.single = false), None);
    // Any memory kind has a format.
    assert_eq!(
        format(Collective::AllReduce, large, &two, |shape, _| shape.memory = Memory::Bounced),
        Some("bf16")
    );
    assert_eq!(
        format(Collective::AllGather, large, &two, |shape, _| shape.memory = Memory::Reference),
        Some("bf16")
    );
    assert_eq!(format(Collective::AllReduce, large, &two, |_, settings| settings.canonical = true), None);
    // A forced algorithm is ignored if ranks would get different values.
    let publish =
        |_: &mut Shape, settings: &mut Settings<'_>| settings.algorithm = Some(Algorithm::HierPublish);
    assert_eq!(format(Collective::AllReduce, large, &two, publish), Some("bf16"));
}

/// GroupShape boundaries must not depend on the segment size, which depends on a measured network.
#[test]
fn int8_segments_are_whole_groups() {
    let two = Topology::blocks(2, 2);
    let formats = Formats::parse("int8").unwrap();
    for (collective, segment) in [
        (Collective::AllGather, None),
        (Collective::ReduceScatter, None),
        (Collective::AllReduce, None),
        (Collective::AllReduce, Some(5000)),
    ] {
        for elements in (20_000..400_000).step_by(7_777) {
            for rate in [0.1, 1.0, 12.0] {
                let counts = Counts::of_buffer(collective, elements, two.size());
                let shape =
                    Shape { collective, element: 4, half: false, single: true, counts, memory: Memory::Host };
                let network = Network { bytes_per_ns: rate, ..Network::ASSUMED };
                let group = GroupShape { topology: &two, inline_bytes: 4096, network };
                let settings = Settings { formats, segment, ..Settings::default() };
                let decision = decide(&shape, &group, &settings);
                assert_eq!(decision.format.map(|format| format.name()), Some("int8"));
                assert_eq!(decision.choice.segment % 1024, 0, "{collective:?}, {elements} elements");
            }
        }
    }
}
