//! No plan has a step too many, and the check sees when one is gone, moved or points elsewhere.

use smddp_plan::check::{Operation, Sizes, check, programs};
use smddp_plan::{Algorithm, Collective, Program, Span, Step, Topology};

/// Groups of 2 to 6 ranks on one node, and some on several.
fn topologies() -> Vec<Topology> {
    let splits: [&[usize]; 4] = [&[0, 0, 1, 1], &[0, 1, 0, 1, 1], &[0, 0, 0, 1, 2], &[0, 0, 1, 1, 2, 2]];
    (2..=6).map(Topology::single).chain(splits.map(Topology::from_labels)).collect()
}

/// Calls `spoil(program, lane, step)` for each step of each rank of all plans, and returns the plans that still pass.
/// `spoil` says whether it changed anything.
fn survivors(in_place: bool, spoil: impl Fn(&mut Program, usize, usize) -> bool) -> Vec<String> {
    let mut survivors = Vec::new();
    for topology in topologies() {
        let size = topology.size();
        for algorithm in Algorithm::ALL {
            // The other two are the same on any topology.
            if !algorithm.is_hierarchical() && topology.nodes() > 1 {
                continue;
            }
            for collective in Collective::ALL {
                let Some(right) = programs(algorithm, collective, &topology, 0, false) else {
                    continue;
                };
                let sizes = Sizes::Blocks(vec![3; size]);
                for rank in 0..size {
                    let lanes = right[rank].lanes.iter().enumerate();
                    for (lane, step) in lanes.flat_map(|(l, steps)| (0..steps.len()).map(move |s| (l, s))) {
                        let mut programs = right.clone();
                        if !spoil(&mut programs[rank], lane, step) {
                            continue;
                        }
                        let op =
                            Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place };
                        if check(&op, 2).is_ok() {
                            let what = &right[rank].lanes[lane][step];
                            survivors.push(format!(
                                "{algorithm:?} {collective:?} {topology:?} rank {rank} lane {lane}: {what:?}"
                            ));
                        }
                    }
                }
            }
        }
    }
    survivors
}

#[test]
fn no_step_can_be_left_out() {
    let survivors = survivors(false, |program, lane, step| {
        program.lanes[lane].remove(step);
        true
    });
    assert!(survivors.is_empty(), "{survivors:#?}");
}

/// Moves a span by one block, the other way where there is no next.
fn shift(span: &mut Span) -> bool {
    span.block = if span.block > 0 { span.block - 1 } else { span.block + 1 };
    span.blocks > 0
}

#[test]
fn no_step_can_read_another_block() {
    let survivors = survivors(false, |program, lane, step| match &mut program.lanes[lane][step].step {
        Step::Send { source, .. } | Step::Copy { source, .. } => shift(source),
        Step::Receive { from, .. } => shift(&mut from.message),
        Step::Reduce { own: Some((_, own)), .. } => shift(own),
        _ => false,
    });
    assert!(survivors.is_empty(), "{survivors:#?}");
}

#[test]
fn no_step_can_write_another_block() {
    let survivors = survivors(false, |program, lane, step| match &mut program.lanes[lane][step].step {
        Step::Send { tee: Some(to), .. }
        | Step::Copy { to, .. }
        | Step::Receive { to, .. }
        | Step::Reduce { to: Some(to), .. } => shift(to),
        _ => false,
    });
    assert!(survivors.is_empty(), "{survivors:#?}");
}

#[test]
fn no_contribution_can_be_left_out() {
    let survivors = survivors(false, |program, lane, step| match &mut program.lanes[lane][step].step {
        Step::Reduce { own, .. } => own.take().is_some(),
        _ => false,
    });
    assert!(survivors.is_empty(), "{survivors:#?}");
}

#[test]
fn no_finish_can_be_moved() {
    let survivors = survivors(false, |program, lane, step| match &mut program.lanes[lane][step].step {
        Step::Reduce { finish, .. } => {
            *finish = !*finish;
            true
        }
        _ => false,
    });
    assert!(survivors.is_empty(), "{survivors:#?}");
}
