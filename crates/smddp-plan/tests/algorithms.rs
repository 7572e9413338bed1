//! Checks every algorithm and collective for 1 to 16 ranks, several shapes, several depths, in place and out
//! of place.

use smddp_plan::check::{Operation, Sizes, check, programs};
use smddp_plan::{Algorithm, Collective, Topology};

/// Segments per block: one each, several each, uneven with gaps, one non-empty block, all zero.
fn shapes(size: usize) -> Vec<Vec<usize>> {
    vec![
        vec![1; size],
        vec![4; size],
        (0..size).map(|b| [2, 0, 5, 1, 3][b % 5]).collect(),
        (0..size).map(|b| if b == size / 2 { 3 } else { 0 }).collect(),
        vec![0; size],
    ]
}

fn sizes_of(collective: Collective, size: usize) -> Vec<Sizes> {
    if collective == Collective::AllToAll {
        return [1, 4, 0].map(|s| Sizes::Blocks(vec![s; size])).to_vec();
    }
    shapes(size).into_iter().map(Sizes::Blocks).collect()
}

fn roots(collective: Collective, size: usize) -> Vec<usize> {
    let mut roots = if collective.has_root() { vec![0, size / 2, size - 1] } else { vec![0] };
    roots.dedup();
    roots
}

fn sweep(algorithm: Algorithm) -> usize {
    let mut cases = 0;
    for collective in Collective::ALL {
        for size in 1..=16 {
            for root in roots(collective, size) {
                let Some(programs) = programs(algorithm, collective, &Topology::single(size), root, false)
                else {
                    continue;
                };
                for sizes in sizes_of(collective, size) {
                    let Sizes::Blocks(blocks) = &sizes else { continue };
                    let most = blocks.iter().max().copied().unwrap_or(0);
                    for in_place in [false, true] {
                        for depth in [1, 2, 4] {
                            if depth < algorithm.least_depth(most) {
                                continue;
                            }
                            let op =
                                Operation { collective, root, programs: &programs, sizes: &sizes, in_place };
                            if let Err(error) = check(&op, depth) {
                                panic!(
                                    "{algorithm:?} {collective:?} N={size} root={root} {sizes:?} \
                                     in_place={in_place} depth={depth}: {error}"
                                );
                            }
                            cases += 1;
                        }
                    }
                }
            }
        }
    }
    cases
}

#[test]
fn publish_is_correct() {
    assert!(sweep(Algorithm::Publish) > 0);
}

#[test]
fn mesh_is_correct() {
    assert!(sweep(Algorithm::Mesh) > 0);
}

#[test]
fn ring_is_correct() {
    assert!(sweep(Algorithm::HierRing) > 0);
}

#[test]
fn tree_is_correct() {
    assert!(sweep(Algorithm::HierTree) > 0);
}

#[test]
fn recursive_is_correct() {
    assert!(sweep(Algorithm::HierRecursive) > 0);
}

#[test]
fn log_is_correct() {
    assert!(sweep(Algorithm::HierLog) > 0);
}

#[test]
fn algorithms_support_the_documented_collectives() {
    use Collective::*;
    let does = |algorithm, uneven| -> Vec<Collective> {
        let all = Collective::ALL.into_iter();
        all.filter(|&c| programs(algorithm, c, &Topology::single(5), 0, uneven && c == AllToAll).is_some())
            .collect()
    };
    assert_eq!(does(Algorithm::Publish, false), Collective::ALL);
    assert_eq!(does(Algorithm::Mesh, true), Collective::ALL);
    assert_eq!(does(Algorithm::HierRing, false), [AllGather, ReduceScatter, AllReduce, Broadcast, Reduce]);
    assert_eq!(does(Algorithm::HierTree, false), [AllReduce, Broadcast, Reduce]);
    assert_eq!(does(Algorithm::HierRecursive, false), [AllGather, ReduceScatter, AllReduce]);
    assert_eq!(does(Algorithm::HierLog, false), [AllGather, AllReduce, Broadcast, Reduce, Barrier]);
    assert!(!does(Algorithm::Publish, true).contains(&AllToAll));
    assert!(!does(Algorithm::HierLog, true).contains(&AllToAll));
}
