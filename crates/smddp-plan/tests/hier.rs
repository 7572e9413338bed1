//! Hierarchical algorithms: every collective on every split of up to 16 ranks into nodes.

mod support;

use smddp_plan::check::{Operation, Sizes, check, programs};
use smddp_plan::{Algorithm, Collective, Topology};
use support::{Dice, in_blocks, in_turns, partitions};

/// Segments where groups are small.
const MOST: usize = 5;

fn hierarchical() -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL.into_iter().filter(|a| a.is_hierarchical())
}

/// Up to `most` segments of each block: one each, alike, or uneven with gaps.
fn sizes(collective: Collective, size: usize, most: usize, dice: &mut Dice) -> Sizes {
    match (collective, dice.below(4)) {
        (Collective::AllToAll, 0..2) => {
            Sizes::Pairs((0..size).map(|_| (0..size).map(|_| dice.below(most + 1)).collect()).collect())
        }
        (_, 0) => Sizes::Blocks(vec![1; size]),
        (Collective::AllToAll, _) | (_, 1) => Sizes::Blocks(vec![1 + dice.below(most); size]),
        _ => Sizes::Blocks((0..size).map(|_| dice.below(most + 1)).collect()),
    }
}

/// One case, if the algorithm does the collective.
fn prove(
    algorithm: Algorithm,
    collective: Collective,
    topology: &Topology,
    most: usize,
    dice: &mut Dice,
) -> bool {
    let size = topology.size();
    let root = if collective.has_root() { dice.below(size) } else { 0 };
    let sizes = sizes(collective, size, most, dice);
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

/// Every second split of up to 16 ranks, from the first or second on.
fn every_second_split(half: usize) -> usize {
    let mut dice = Dice(1 + half as u64);
    let mut cases = 0;
    for size in 2..=16 {
        let splits = partitions(size).into_iter().filter(|split| split.len() > 1);
        for split in splits.skip(half).step_by(2) {
            let mut backwards = split.clone();
            backwards.reverse();
            for topology in
                [in_blocks(&split), in_turns(&split), in_blocks(&backwards), dice.shuffled(&split)]
            {
                for algorithm in hierarchical() {
                    for collective in Collective::ALL {
                        cases += usize::from(prove(algorithm, collective, &topology, MOST, &mut dice));
                    }
                }
            }
        }
    }
    cases
}

#[test]
fn every_split_of_up_to_16_ranks_is_right() {
    let cases: usize = std::thread::scope(|scope| {
        let halves = [0, 1].map(|half| scope.spawn(move || every_second_split(half)));
        halves.map(|half| half.join().expect("no panic")).iter().sum()
    });
    assert!(cases > 80_000, "{cases}");
}

/// Every root, depth, size and aliasing of every split that the quick test takes one of each.
#[test]
#[ignore = "takes minutes: the slow run has it"]
fn every_split_is_right_in_every_way() {
    let mut dice = Dice(2);
    for size in 2..=16 {
        for split in partitions(size).iter().filter(|split| split.len() > 1) {
            for topology in [in_blocks(split), in_turns(split), dice.shuffled(split)] {
                for algorithm in hierarchical() {
                    for collective in Collective::ALL {
                        for _ in 0..6 {
                            prove(algorithm, collective, &topology, MOST, &mut dice);
                        }
                    }
                }
            }
        }
    }
}

/// Node sizes of a group of `size`: alike, or anything.
fn some_split(size: usize, dice: &mut Dice) -> Vec<usize> {
    let nodes = 2 + dice.below(size - 1).min(dice.below(64));
    if dice.below(3) == 0 {
        return vec![(size / nodes).max(1); nodes];
    }
    let mut sizes = vec![1; nodes];
    for _ in nodes..size {
        sizes[dice.below(nodes)] += 1;
    }
    sizes
}

/// Groups of up to `2 << bits` ranks, as many of each power of two; of each one collective that reduces and one that
/// does not.
fn sample(topologies: usize, bits: usize, seed: u64) {
    let mut dice = Dice(seed);
    let algorithms: Vec<Algorithm> = hierarchical().collect();
    for _ in 0..topologies {
        let power = 2 << dice.below(bits);
        let split = some_split(power + 1 + dice.below(power), &mut dice);
        let topology = match dice.below(3) {
            0 => in_blocks(&split),
            1 => in_turns(&split),
            _ => dice.shuffled(&split),
        };
        let mut proven = 0;
        while proven < 2 {
            let algorithm = algorithms[dice.below(algorithms.len())];
            let collective = Collective::ALL[dice.below(Collective::ALL.len())];
            // All pairs of many ranks have more messages than the check has room for.
            let too_many = collective == Collective::AllToAll && topology.size() > 200;
            if !too_many && collective.reduces() == (proven == 0) {
                proven += usize::from(prove(algorithm, collective, &topology, 2, &mut dice));
            }
        }
    }
}

#[test]
fn sampled_groups_of_up_to_128_ranks_are_right() {
    sample(40, 6, 3);
}

#[test]
#[ignore = "takes minutes: the slow run has it"]
fn sampled_groups_of_up_to_512_ranks_are_right() {
    sample(500, 8, 4);
}
