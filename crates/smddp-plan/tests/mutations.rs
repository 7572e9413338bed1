//! Mutation tests: the checker rejects every plan in which a step is missing, moved or changed.

use smddp_plan::check::{Operation, Sizes, check, programs};
use smddp_plan::{Algorithm, Collective, Program, Span, Step, Topology};

/// Returns groups of 2 to 6 ranks on one node, and some on several nodes.
fn topologies() -> Vec<Topology> {
    let splits: [&[usize]; 4] = [&[0, 0, 1, 1], &[0, 1, 0, 1, 1], &[0, 0, 0, 1, 2], &[0, 0, 1, 1, 2, 2]];
    (2..=6).map(Topology::single).chain(splits.map(Topology::from_labels)).collect()
}

/// Calls `mutate(program, pipeline, step)` for each step of each rank of all plans, and returns the plans
/// that still pass. `mutate` returns whether it changed the program.
fn survivors(in_place: bool, mutate: impl Fn(&mut Program, usize, usize) -> bool) -> Vec<String> {
    let mut survivors = Vec::new();
    for topology in topologies() {
        let size = topology.size();
        for algorithm in Algorithm::ALL {
            // The other two algorithms give the same plan on any topology.
            if !algorithm.is_hierarchical() && topology.nodes() > 1 {
                continue;
            }
            for collective in Collective::ALL {
                let Some(right) = programs(algorithm, collective, &topology, 0, false) else {
                    continue;
                };
                let sizes = Sizes::Blocks(vec![3; size]);
                for rank in 0..size {
                    let pipelines = right[rank].pipelines.iter().enumerate();
                    for (pipeline, step) in
                        pipelines.flat_map(|(l, steps)| (0..steps.len()).map(move |s| (l, s)))
                    {
                        let mut programs = right.clone();
                        if !mutate(&mut programs[rank], pipeline, step) {
                            continue;
                        }
                        let op =
                            Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place };
                        if check(&op, 2).is_ok() {
                            let what = &right[rank].pipelines[pipeline][step];
                            survivors.push(format!(
                                "{algorithm:?} {collective:?} {topology:?} rank {rank} pipeline {pipeline}: {what:?}"
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
fn missing_step_is_rejected() {
    let survivors = survivors(false, |program, pipeline, step| {
        program.pipelines[pipeline].remove(step);
        true
    });
    assert!(survivors.is_empty(), "{survivors:#?}");
}

/// Moves a span by one block, backwards if possible.
fn shift(span: &mut Span) -> bool {
    span.block = if span.block > 0 { span.block - 1 } else { span.block + 1 };
    span.blocks > 0
}

#[test]
fn read_of_another_block_is_rejected() {
    let survivors =
        survivors(false, |program, pipeline, step| match &mut program.pipelines[pipeline][step].step {
            Step::Send { source, .. } | Step::Copy { source, .. } => shift(source),
            Step::Receive { from, .. } => shift(&mut from.message),
            Step::Reduce { own: Some((_, own)), .. } => shift(own),
            _ => false,
        });
    assert!(survivors.is_empty(), "{survivors:#?}");
}

#[test]
fn write_to_another_block_is_rejected() {
    let survivors =
        survivors(false, |program, pipeline, step| match &mut program.pipelines[pipeline][step].step {
            Step::Send { tee: Some(to), .. }
            | Step::Copy { to, .. }
            | Step::Receive { to, .. }
            | Step::Reduce { to: Some(to), .. } => shift(to),
            _ => false,
        });
    assert!(survivors.is_empty(), "{survivors:#?}");
}

#[test]
fn missing_own_contribution_is_rejected() {
    let survivors =
        survivors(false, |program, pipeline, step| match &mut program.pipelines[pipeline][step].step {
            Step::Reduce { own, .. } => own.take().is_some(),
            _ => false,
        });
    assert!(survivors.is_empty(), "{survivors:#?}");
}

#[test]
fn moved_finish_is_rejected() {
    let survivors =
        survivors(false, |program, pipeline, step| match &mut program.pipelines[pipeline][step].step {
            Step::Reduce { finish, .. } => {
                *finish = !*finish;
                true
            }
            _ => false,
        });
    assert!(survivors.is_empty(), "{survivors:#?}");
}
