//! Messages by reference: no rank writes memory that others may still read.

mod support;

use smddp_plan::check::{Error, Operation, Sizes, check_by_reference, programs};
use smddp_plan::{Algorithm, Buffer, Collective, Program, Step, Topology};
use support::Rng;

/// Returns true if no block is written twice, and every message is kept in memory.
fn once_and_kept(program: &Program) -> bool {
    let mut written = Vec::new();
    for timed in program.pipelines.iter().flatten() {
        let (to, kept) = match &timed.step {
            Step::Send { tee, .. } => (*tee, true),
            Step::Receive { to, .. } | Step::Copy { to, .. } => (Some(*to), true),
            Step::Reduce { to, send, .. } => (*to, to.is_some() || send.is_none()),
        };
        if !kept {
            return false;
        }
        for span in to.into_iter().filter(|span| span.buffer != Buffer::In) {
            written.extend((span.block..span.block + span.blocks).map(|block| (span.buffer, block)));
        }
    }
    let all = written.len();
    written.sort_unstable();
    written.dedup();
    written.len() == all
}

/// All algorithms on one node, with the reads of device memory.
#[test]
fn blocks_written_once_may_be_read_by_reference() {
    let mut rng = Rng(5);
    let mut checked = 0;
    for size in 2..=7 {
        let topology = Topology::single(size);
        for (algorithm, collective) in
            Algorithm::ALL.into_iter().flat_map(|a| Collective::ALL.map(|collective| (a, collective)))
        {
            let root = if collective.has_root() { rng.below(size) } else { 0 };
            let Some(programs) = programs(algorithm, collective, &topology, root, false) else { continue };
            if !programs.iter().all(once_and_kept) {
                continue;
            }
            let blocks = (0..size)
                .map(|_| if collective == Collective::AllToAll { 2 } else { rng.below(4) })
                .collect();
            let sizes = Sizes::Blocks(blocks);
            let op = Operation { collective, root, programs: &programs, sizes: &sizes, in_place: false };
            if let Err(error) = check_by_reference(&op, 2, &|_, _| true) {
                panic!("{algorithm:?} {collective:?} {size} root={root} {sizes:?}: {error}");
            }
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked}");
}

/// In place, the sum of a rank overwrites its contribution, which others may still read.
#[test]
fn write_during_reads_of_other_ranks_is_rejected() {
    let topology = Topology::single(3);
    let collective = Collective::AllReduce;
    let sizes = Sizes::Blocks(vec![1; 3]);
    let checked_in_place = |algorithm, by_reference: bool| {
        let programs = programs(algorithm, collective, &topology, 0, false).unwrap();
        let op = Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place: true };
        check_by_reference(&op, 2, &|_, _| by_reference)
    };
    assert!(matches!(checked_in_place(Algorithm::Publish, true), Err(Error::StillReferenced { .. })));
    assert!(checked_in_place(Algorithm::Publish, false).is_ok());
}
