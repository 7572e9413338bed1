//! Hierarchical algorithms: every collective on every split of up to 16 ranks into nodes.

mod support;

use smddp_plan::check::{Operation, Sizes, check, programs};
use smddp_plan::{Algorithm, Collective, Topology};
use support::{Dice, in_blocks, in_turns, partitions};

fn hierarchical() -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL.into_iter().filter(|a| a.is_hierarchical())
}

/// Segments of each block, for one topology: as many cases as a test can afford.
fn sizes(collective: Collective, size: usize, dice: &mut Dice) -> Sizes {
    match (collective, dice.below(4)) {
        (Collective::AllToAll, 0..2) => {
            Sizes::Pairs((0..size).map(|_| (0..size).map(|_| dice.below(4)).collect()).collect())
        }
        (_, 0) => Sizes::Blocks(vec![1; size]),
        (Collective::AllToAll, _) | (_, 1) => Sizes::Blocks(vec![1 + dice.below(4); size]),
        _ => Sizes::Blocks((0..size).map(|_| [2, 0, 5, 1, 3][dice.below(5)]).collect()),
    }
}

fn prove(algorithm: Algorithm, collective: Collective, topology: &Topology, dice: &mut Dice) -> bool {
    let size = topology.size();
    let root = if collective.has_root() { dice.below(size) } else { 0 };
    let sizes = sizes(collective, size, dice);
    let uneven = matches!(sizes, Sizes::Pairs(_));
    let Some(programs) = programs(algorithm, collective, topology, root, uneven) else {
        return false;
    };
    let in_place = dice.below(2) == 0;
    let op = Operation { collective, root, programs: &programs, sizes: &sizes, in_place };
    let depth = 2 + dice.below(2);
    if let Err(error) = check(&op, depth) {
        panic!(
            "{algorithm:?} {collective:?} {topology:?} root={root} {sizes:?} in_place={in_place} depth={depth}: {error}"
        );
    }
    true
}

#[test]
fn every_split_of_up_to_16_ranks_is_right() {
    let mut dice = Dice(1);
    let mut cases = 0;
    for size in 2..=16 {
        for split in partitions(size).iter().filter(|split| split.len() > 1) {
            let mut backwards = split.clone();
            backwards.reverse();
            for topology in [in_blocks(split), in_turns(split), in_blocks(&backwards), dice.shuffled(split)] {
                for algorithm in hierarchical() {
                    for collective in Collective::ALL {
                        cases += usize::from(prove(algorithm, collective, &topology, &mut dice));
                    }
                }
            }
        }
    }
    assert!(cases > 80_000, "{cases}");
}
