//! Elements that travel between nodes in fewer bits: all ranks have the same of them.

mod support;

use smddp_plan::check::{Error, Operation, Sizes, check_rounded, programs};
use smddp_plan::{
    Algorithm, Collective, Counts, Formats, Group, Memory, Network, Settings, Shape, Topology, decide,
};
use support::{Dice, in_blocks, in_turns, partitions};

const COLLECTIVES: [Collective; 3] =
    [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce];
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::HierMesh,
    Algorithm::HierRing,
    Algorithm::HierLog,
    Algorithm::HierRecursive,
    Algorithm::HierTree,
];

/// Over every split of up to 10 ranks.
#[test]
fn what_may_be_chosen_leaves_all_ranks_with_the_same() {
    let mut dice = Dice(11);
    let mut proven = 0;
    for size in 2..=10 {
        for split in partitions(size) {
            for topology in [in_blocks(&split), in_turns(&split), dice.shuffled(&split)] {
                for (algorithm, collective) in
                    ALGORITHMS.into_iter().flat_map(|a| COLLECTIVES.map(|c| (a, c)))
                {
                    let Some(programs) = programs(algorithm, collective, &topology, 0, false) else {
                        continue;
                    };
                    let sizes = Sizes::Blocks((0..size).map(|_| dice.below(4)).collect());
                    let in_place = dice.below(2) == 0;
                    let op = Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place };
                    if topology.nodes() == 1 {
                        continue;
                    }
                    if let Err(error) = check_rounded(&op, 2, &topology) {
                        panic!(
                            "{algorithm:?} {collective:?} {topology:?} {sizes:?} in place={in_place}: {error}"
                        );
                    }
                    proven += 1;
                }
            }
        }
    }
    assert!(proven > 3_000, "{proven}");
}

/// Every leader adds its own sum, as it is, to those of the others, which came over a link.
#[test]
fn where_every_leader_reduces_they_differ() {
    let topology = Topology::blocks(3, 2);
    let programs = programs(Algorithm::HierPublish, Collective::AllReduce, &topology, 0, false).unwrap();
    let sizes = Sizes::Blocks(vec![1; 6]);
    let collective = Collective::AllReduce;
    let op = Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place: false };
    assert!(matches!(check_rounded(&op, 2, &topology), Err(Error::OrdersDiffer { .. })));
}

#[test]
fn only_large_buffers_of_32_bit_floats_between_nodes_have_a_format() {
    let two = Topology::blocks(2, 2);
    let format =
        |collective, bytes: usize, topology: &Topology, change: fn(&mut Shape, &mut Settings<'_>)| {
            let counts = Counts::of_buffer(collective, bytes / 4, topology.size());
            let mut shape =
                Shape { collective, element: 4, half: false, single: true, counts, memory: Memory::Host };
            let formats = Formats::parse("bf16,reduce_scatter=int8").unwrap();
            let mut settings = Settings { formats, ..Settings::default() };
            change(&mut shape, &mut settings);
            let group = Group { topology, slot: 4096, network: Network::ASSUMED };
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
    // In any memory.
    assert_eq!(
        format(Collective::AllReduce, large, &two, |shape, _| shape.memory = Memory::Bounced),
        Some("bf16")
    );
    assert_eq!(
        format(Collective::AllGather, large, &two, |shape, _| shape.memory = Memory::Reference),
        Some("bf16")
    );
    assert_eq!(format(Collective::AllReduce, large, &two, |_, settings| settings.canonical = true), None);
    // What is forced gives way where ranks would not agree.
    let publish =
        |_: &mut Shape, settings: &mut Settings<'_>| settings.algorithm = Some(Algorithm::HierPublish);
    assert_eq!(format(Collective::AllReduce, large, &two, publish), Some("bf16"));
}

/// Where groups begin must not depend on how a block is cut, which depends on a measured network.
#[test]
fn segments_of_int8_are_whole_groups() {
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
                let group = Group { topology: &two, slot: 4096, network };
                let settings = Settings { formats, segment, ..Settings::default() };
                let decision = decide(&shape, &group, &settings);
                assert_eq!(decision.format.map(|format| format.name()), Some("int8"));
                assert_eq!(decision.choice.segment % 1024, 0, "{collective:?}, {elements} elements");
            }
        }
    }
}
