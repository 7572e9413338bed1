//! Choices for measured shapes and for extreme shapes.

#![allow(clippy::unwrap_used)] // Test helpers may panic.

#[path = "choice/between_nodes.rs"]
mod between_nodes;

use smddp_plan::{
    Algorithm, Choice, Collective, Counts, Decision, GroupShape, Memory, Network, Reason, Settings, Topology,
    decide,
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A call of `bytes` as nccl-tests counts them, in a group of `size` ranks.
#[derive(Clone, Copy, Debug)]
struct Shape {
    collective: Collective,
    size: usize,
    bytes: usize,
    pairs: bool,
    half: bool,
    staging: usize,
    network: Network,
}

impl Shape {
    fn block(&self) -> usize {
        let counts = Counts::of_buffer(self.collective, self.bytes, self.size);
        counts.blocks(self.size, 1).into_iter().max().unwrap()
    }

    fn decide(&self, topology: &Topology, algorithm: Option<Algorithm>) -> Decision {
        let Self { collective, size, bytes, half, staging, network, .. } = *self;
        let counts = match self.pairs {
            true => Counts::Pairs(vec![bytes / size; size], vec![bytes / size; size]),
            false => Counts::of_buffer(collective, bytes, size),
        };
        let shape =
            smddp_plan::Shape { collective, element: 1, half, single: false, counts, memory: Memory::Host };
        let inline_bytes = if topology.nodes() > 1 { 0 } else { 8 * KIB };
        let settings = Settings { algorithm, staging, ..Settings::default() };
        decide(&shape, &GroupShape { topology, inline_bytes, network }, &settings)
    }
}

fn choose_in(shape: &Shape, topology: &Topology) -> Choice {
    shape.decide(topology, None).choice
}

/// Returns the choice with a forced algorithm. `None` if the decision reports that it does not support the
/// call.
fn named_in(algorithm: Algorithm, shape: &Shape, topology: &Topology) -> Option<Choice> {
    let decision = shape.decide(topology, Some(algorithm));
    let supported = decision.reason == Reason::Setting;
    assert!(supported || decision.reason == Reason::Unsupported(algorithm), "{decision:?}");
    assert!(!supported || decision.choice.algorithm == algorithm, "{decision:?}");
    supported.then_some(decision.choice)
}

fn choose(shape: &Shape) -> Choice {
    choose_in(shape, &Topology::single(shape.size))
}

fn choose_named(algorithm: Algorithm, shape: &Shape) -> Option<Choice> {
    named_in(algorithm, shape, &Topology::single(shape.size))
}

fn shape(collective: Collective, size: usize, bytes: usize) -> Shape {
    let network = Network::ASSUMED;
    Shape { collective, size, bytes, pairs: false, half: false, staging: 64 * MIB, network }
}

#[test]
fn publish_is_chosen_while_the_message_fits_a_header() {
    // Every all_to_all may have uneven pairs.
    for collective in Collective::ALL.into_iter().filter(|&c| c != Collective::AllToAll) {
        for size in 2..=64 {
            for bytes in [0, 64, KIB, 8 * KIB] {
                let shape = shape(collective, size, bytes);
                let choice = choose(&shape);
                assert_eq!(choice.algorithm, Algorithm::Publish, "{shape:?}");
                assert!(choice.segment >= shape.block() && choice.depth == 1, "{shape:?} {choice:?}");
            }
        }
    }
    // The message of an all_gather is one block.
    assert_eq!(choose(&shape(Collective::AllGather, 4, 32 * KIB)).algorithm, Algorithm::Publish);
    assert_eq!(choose(&shape(Collective::AllReduce, 4, 32 * KIB)).algorithm, Algorithm::Mesh);
}

#[test]
fn uneven_pairs_use_mesh() {
    let shape = Shape { pairs: true, ..shape(Collective::AllToAll, 4, 64) };
    assert_eq!(choose(&shape).algorithm, Algorithm::Mesh);
    assert_eq!(choose_named(Algorithm::Publish, &shape), None);
    assert_eq!(choose_named(Algorithm::HierLog, &shape), None);
}

#[test]
fn piece_sizes_are_the_fastest_measured() {
    let large = |size, bytes| {
        let Choice { segment, depth, .. } = choose(&shape(Collective::AllGather, size, bytes));
        (segment, depth)
    };
    assert_eq!(large(2, 256 * KIB), (64 * KIB, 4));
    assert_eq!(large(2, MIB), (256 * KIB, 4));
    assert_eq!(large(2, 256 * MIB), (256 * KIB, 4));
    assert_eq!(large(4, 4 * MIB), (128 * KIB, 8));
    assert_eq!(large(4, 256 * MIB), (128 * KIB, 8));
}

#[test]
fn slots_of_many_ranks_fit_the_cache_together() {
    for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce] {
        for size in 5..=16 {
            let channels = match collective {
                Collective::AllGather => 1,
                Collective::ReduceScatter => size - 1,
                _ => size,
            };
            let choice = choose(&shape(collective, size, 64 * MIB));
            let staged = size * channels * choice.depth * choice.segment;
            assert!(staged <= 2 * MIB, "{collective:?} {size} {choice:?} {staged}");
            assert!(choice.segment >= 4 * KIB, "{collective:?} {size} {choice:?}");
        }
    }
}

#[test]
fn slots_use_at_most_a_quarter_of_the_staging() {
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            for size in [2, 3, 4, 7, 16, 100] {
                for staging in [MIB, 8 * MIB, 64 * MIB] {
                    for bytes in [MIB, 100 * MIB + 4] {
                        let shape = Shape { staging, ..shape(collective, size, bytes) };
                        let Some(choice) = choose_named(algorithm, &shape) else {
                            continue;
                        };
                        assert_eq!(choice.segment % 64, 0);
                        assert!(choice.segment > 0 && choice.depth > 0);
                        if collective == Collective::ReduceScatter {
                            let slots = size - 1;
                            assert!(
                                slots * choice.depth * choice.segment <= staging / 4,
                                "{algorithm:?} {shape:?} {choice:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn short_staging_reduces_slots_before_bytes() {
    let two = |staging| {
        let choice = choose(&Shape { staging, ..shape(Collective::AllGather, 2, 64 * MIB) });
        (choice.segment, choice.depth)
    };
    assert_eq!(two(4 * MIB), (256 * KIB, 4));
    assert_eq!(two(2 * MIB), (256 * KIB, 2));
    assert_eq!(two(MIB), (128 * KIB, 2));
    assert_eq!(two(512 * KIB), (64 * KIB, 2));
    assert_eq!(two(1), (64, 2));
}

#[test]
fn half_precision_rounds_once() {
    for collective in [Collective::ReduceScatter, Collective::AllReduce, Collective::Reduce] {
        let shape = Shape { half: true, ..shape(collective, 8, 64 * MIB) };
        for algorithm in [Algorithm::HierRing, Algorithm::HierTree, Algorithm::HierRecursive] {
            assert_eq!(choose_named(algorithm, &shape), None);
        }
        assert!(choose_named(Algorithm::Mesh, &shape).is_some());
        assert!(choose_named(Algorithm::Publish, &shape).is_some());
    }
    let moves = Shape { half: true, ..shape(Collective::AllGather, 8, MIB) };
    assert!(choose_named(Algorithm::HierRing, &moves).is_some());
}

#[test]
fn forced_algorithm_has_the_required_depth() {
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            for size in [2, 3, 8] {
                for bytes in [0, 64, KIB, 100 * KIB, 16 * MIB] {
                    let shape = shape(collective, size, bytes);
                    let Some(choice) = choose_named(algorithm, &shape) else {
                        continue;
                    };
                    let segments = shape.block().div_ceil(choice.segment);
                    assert!(choice.depth >= algorithm.least_depth(segments), "{shape:?} {choice:?}");
                }
            }
        }
    }
}

#[test]
fn algorithm_names_round_trip() {
    for algorithm in Algorithm::ALL {
        assert_eq!(Algorithm::from_name(algorithm.name()), Some(algorithm));
    }
    assert_eq!(Algorithm::from_name("Ring"), None);
    // Name used by NCCL.
    assert_eq!(Algorithm::from_name("ring"), Some(Algorithm::HierRing));
    assert_eq!(Algorithm::from_name("publish"), Some(Algorithm::Publish));
}
