//! Consecutive operations in the same slots, and concurrent groups.

use smddp_plan::check::{Operation, Sizes, check, check_concurrent, check_sequence, programs};
use smddp_plan::{Algorithm, Collective, Program, Topology};

/// Returns every algorithm and collective of a group on one node; the root is 1 if there is one.
fn all(size: usize) -> Vec<(Algorithm, Collective, usize, Vec<Program>)> {
    all_on(&Topology::single(size))
}

/// Returns the same for several nodes, including the hierarchical algorithms.
fn all_on(topology: &Topology) -> Vec<(Algorithm, Collective, usize, Vec<Program>)> {
    let (size, mut all) = (topology.size(), Vec::new());
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            let root = usize::from(collective.has_root() && size > 1);
            if let Some(programs) = programs(algorithm, collective, topology, root, false) {
                all.push((algorithm, collective, root, programs));
            }
        }
    }
    all
}

fn operations<'a>(
    plans: &'a [(Algorithm, Collective, usize, Vec<Program>)],
    sizes: &'a Sizes,
    in_place: bool,
) -> Vec<Operation<'a>> {
    plans
        .iter()
        .map(|(_, collective, root, programs)| Operation {
            collective: *collective,
            root: *root,
            programs,
            sizes,
            in_place,
        })
        .collect()
}

#[test]
fn any_operation_may_follow_any_other_in_the_same_slots() {
    let alone = [2, 3, 5].map(Topology::single);
    let split = [vec![0, 1], vec![0, 0, 1, 1], vec![0, 1, 1, 2, 0]];
    for topology in alone.into_iter().chain(split.map(|labels| Topology::from_labels(&labels))) {
        let plans = all_on(&topology);
        let sizes = Sizes::Blocks(vec![3; topology.size()]);
        let operations = operations(&plans, &sizes, true);
        for first in &operations {
            for second in &operations {
                check_sequence(&[*first, *second, *first], 2)
                    .unwrap_or_else(|e| panic!("{:?} then {:?}: {e}", first.collective, second.collective));
            }
        }
    }
}

#[test]
fn sequence_of_single_messages_needs_one_slot() {
    for size in 2..=6 {
        let plans: Vec<_> = all(size).into_iter().filter(|(a, ..)| a.least_depth(1) == 1).collect();
        let sizes = Sizes::Blocks(vec![1; size]);
        check_sequence(&operations(&plans, &sizes, false), 1).unwrap();
    }
}

#[test]
fn two_concurrent_operations_need_only_their_own_slots() {
    let alone = [2, 3, 4, 6].map(Topology::single);
    for topology in alone.into_iter().chain([Topology::blocks(2, 2), Topology::blocks(3, 2)]) {
        let plans = all_on(&topology);
        let sizes = Sizes::Blocks(vec![4; topology.size()]);
        let forth = operations(&plans, &sizes, true);
        let back: Vec<_> = forth.iter().rev().copied().collect();
        for (a, b) in forth.iter().zip(&back) {
            check_concurrent(&[&[*a], &[*b]], 2).unwrap();
        }
        check_concurrent(&[&forth, &back], 2).unwrap();
    }
}

#[test]
fn groups_of_different_sizes_run_concurrently() {
    let (three, five) = (all(3), all(5));
    let sizes = [Sizes::Blocks(vec![3; 3]), Sizes::Blocks(vec![2; 5])];
    check_concurrent(&[&operations(&three, &sizes[0], false), &operations(&five, &sizes[1], false)], 2)
        .unwrap();
}

/// Returns groups of 1 to 16 ranks on one node, and some on several nodes.
fn groups() -> Vec<Topology> {
    let split = [
        Topology::blocks(2, 1),
        Topology::blocks(4, 2),
        Topology::blocks(5, 1),
        Topology::from_labels(&[0, 1, 1, 2, 2, 2]),
        Topology::from_labels(&[0, 1, 2, 0, 1, 2, 0, 1, 0]),
        Topology::blocks(2, 8),
        Topology::blocks(7, 2),
    ];
    (1..=16).map(Topology::single).chain(split).collect()
}

/// With one segment binding drops all lags; steps then run in program order.
#[test]
fn single_segment_needs_no_lags() {
    for topology in groups() {
        let size = topology.size();
        for (algorithm, collective, root, mut programs) in all_on(&topology) {
            for timed in programs.iter_mut().flat_map(|p| &mut p.pipelines).flatten() {
                timed.lag = 0;
            }
            let gaps = (0..size).map(|b| b % 3 % 2).collect();
            for sizes in [vec![1; size], gaps] {
                if collective == Collective::AllToAll && sizes.iter().any(|&s| s != sizes[0]) {
                    continue;
                }
                let sizes = Sizes::Blocks(sizes);
                for in_place in [false, true] {
                    let op = Operation { collective, root, programs: &programs, sizes: &sizes, in_place };
                    for depth in algorithm.least_depth(1)..=2 {
                        check(&op, depth)
                            .unwrap_or_else(|e| panic!("{algorithm:?} {collective:?} N={size}: {e}"));
                    }
                }
            }
        }
    }
}

#[test]
fn steps_ascend_by_lag() {
    for topology in groups() {
        for (algorithm, collective, _, programs) in all_on(&topology) {
            for pipeline in programs.iter().flat_map(|p| &p.pipelines) {
                assert!(pipeline.is_sorted_by_key(|t| t.lag), "{algorithm:?} {collective:?} {topology:?}");
            }
        }
    }
}

#[test]
fn program_size_is_linear_in_the_group() {
    let alone = [2, 64, 1000].map(Topology::single);
    let split = [Topology::blocks(2, 1), Topology::blocks(16, 4), Topology::blocks(1000, 1)];
    for topology in alone.into_iter().chain(split).chain([Topology::blocks(125, 8)]) {
        let size = topology.size();
        for algorithm in Algorithm::ALL {
            for collective in Collective::ALL {
                let request = smddp_plan::PlanRequest {
                    collective,
                    rank: size / 2,
                    size,
                    root: 0,
                    uneven_pairs: false,
                    canonical: false,
                };
                let Some(program) = smddp_plan::plan(algorithm, &request, &topology) else {
                    continue;
                };
                let steps: usize = program.pipelines.iter().map(Vec::len).sum();
                assert!(steps <= 4 * size + 4, "{algorithm:?} {collective:?} N={size}: {steps}");
                assert!(program.channels.len() <= 2 * size, "{algorithm:?} {collective:?} N={size}");
            }
        }
    }
}

#[test]
fn group_of_one_copies() {
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            let programs = programs(algorithm, collective, &Topology::single(1), 0, true).unwrap();
            let steps: usize = programs[0].pipelines.iter().map(Vec::len).sum();
            assert_eq!(steps, usize::from(collective != Collective::Barrier));
        }
    }
}
