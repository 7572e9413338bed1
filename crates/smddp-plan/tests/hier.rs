//! Hierarchical algorithms: every collective on every split of up to 16 ranks into nodes.

mod support;

use smddp_plan::check::{Operation, Sizes, check, programs};
use smddp_plan::{Algorithm, Collective, Topology};
use support::{Rng, in_blocks, partitions, round_robin};

/// Maximum segments per block in small groups.
const MOST: usize = 5;

fn hierarchical() -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL.into_iter().filter(|a| a.is_hierarchical())
}

/// Returns up to `most` segments for each block: one each, equal, or uneven with gaps.
fn sizes(collective: Collective, size: usize, most: usize, rng: &mut Rng) -> Sizes {
    match (collective, rng.below(4)) {
        (Collective::AllToAll, 0..2) => {
            Sizes::Pairs((0..size).map(|_| (0..size).map(|_| rng.below(most + 1)).collect()).collect())
        }
        (_, 0) => Sizes::Blocks(vec![1; size]),
        (Collective::AllToAll, _) | (_, 1) => Sizes::Blocks(vec![1 + rng.below(most); size]),
        _ => Sizes::Blocks((0..size).map(|_| rng.below(most + 1)).collect()),
    }
}

/// Checks one case, if the algorithm supports the collective.
fn check_case(
    algorithm: Algorithm,
    collective: Collective,
    topology: &Topology,
    most: usize,
    rng: &mut Rng,
) -> bool {
    let size = topology.size();
    let root = if collective.has_root() { rng.below(size) } else { 0 };
    let sizes = sizes(collective, size, most, rng);
    let uneven = matches!(sizes, Sizes::Pairs(_));
    let Some(programs) = programs(algorithm, collective, topology, root, uneven) else {
        return false;
    };
    let in_place = rng.below(2) == 0;
    let op = Operation { collective, root, programs: &programs, sizes: &sizes, in_place };
    let depth = 2 + rng.below(2);
    if let Err(error) = check(&op, depth) {
        panic!(
            "{algorithm:?} {collective:?} {topology:?} root={root} {sizes:?} in_place={in_place} depth={depth}: {error}"
        );
    }
    true
}

/// Checks every second split of up to 16 ranks, starting with the first or second.
fn every_second_split(half: usize) -> usize {
    let mut rng = Rng(1 + half as u64);
    let mut cases = 0;
    for size in 2..=16 {
        let splits = partitions(size).into_iter().filter(|split| split.len() > 1);
        for split in splits.skip(half).step_by(2) {
            let mut backwards = split.clone();
            backwards.reverse();
            for topology in
                [in_blocks(&split), round_robin(&split), in_blocks(&backwards), rng.shuffled(&split)]
            {
                for algorithm in hierarchical() {
                    for collective in Collective::ALL {
                        cases += usize::from(check_case(algorithm, collective, &topology, MOST, &mut rng));
                    }
                }
            }
        }
    }
    cases
}

#[test]
fn every_split_of_up_to_16_ranks_is_correct() {
    let cases: usize = std::thread::scope(|scope| {
        let halves = [0, 1].map(|half| scope.spawn(move || every_second_split(half)));
        halves.map(|half| half.join().expect("no panic")).iter().sum()
    });
    assert!(cases > 80_000, "{cases}");
}

/// Checks six random combinations of root, depth, size and aliasing per split; the short test has one.
#[test]
#[ignore = "takes minutes: part of the slow run"]
fn every_split_is_correct_in_many_variants() {
    let mut rng = Rng(2);
    for size in 2..=16 {
        for split in partitions(size).iter().filter(|split| split.len() > 1) {
            for topology in [in_blocks(split), round_robin(split), rng.shuffled(split)] {
                for algorithm in hierarchical() {
                    for collective in Collective::ALL {
                        for _ in 0..6 {
                            check_case(algorithm, collective, &topology, MOST, &mut rng);
                        }
                    }
                }
            }
        }
    }
}

/// Returns the node sizes of a group of `size` ranks: equal, or random.
fn some_split(size: usize, rng: &mut Rng) -> Vec<usize> {
    let nodes = 2 + rng.below(size - 1).min(rng.below(64));
    if rng.below(3) == 0 {
        return vec![(size / nodes).max(1); nodes];
    }
    let mut sizes = vec![1; nodes];
    for _ in nodes..size {
        sizes[rng.below(nodes)] += 1;
    }
    sizes
}

/// Checks groups of up to `2 << bits` ranks, equally many of each power of two. Each group runs one reducing
/// and one other collective.
fn sample(topologies: usize, bits: usize, seed: u64) {
    let mut rng = Rng(seed);
    let algorithms: Vec<Algorithm> = hierarchical().collect();
    for _ in 0..topologies {
        let power = 2 << rng.below(bits);
        let split = some_split(power + 1 + rng.below(power), &mut rng);
        let topology = match rng.below(3) {
            0 => in_blocks(&split),
            1 => round_robin(&split),
            _ => rng.shuffled(&split),
        };
        let mut checked = 0;
        while checked < 2 {
            let algorithm = algorithms[rng.below(algorithms.len())];
            let collective = Collective::ALL[rng.below(Collective::ALL.len())];
            // An all_to_all of many ranks has more messages than the checker can store.
            let too_many = collective == Collective::AllToAll && topology.size() > 200;
            if !too_many && collective.reduces() == (checked == 0) {
                checked += usize::from(check_case(algorithm, collective, &topology, 2, &mut rng));
            }
        }
    }
}

#[test]
fn sampled_groups_of_up_to_128_ranks_are_correct() {
    sample(40, 6, 3);
}

#[test]
#[ignore = "takes minutes: part of the slow run"]
fn sampled_groups_of_up_to_512_ranks_are_correct() {
    sample(500, 8, 4);
}
