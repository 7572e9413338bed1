//! Messages that are the memory that they are sent from: nobody writes what others may still read.

mod support;

use smddp_plan::check::{Error, Operation, Sizes, check_by_reference, programs};
use smddp_plan::{Algorithm, Buffer, Collective, Program, Step, Topology};
use support::Dice;

/// Whether no block is written twice, and all that is sent is kept where it is sent from.
fn once_and_kept(program: &Program) -> bool {
    let mut written = Vec::new();
    for timed in program.lanes.iter().flatten() {
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

/// As memory of a device is read, on one node and by every algorithm.
#[test]
fn what_is_written_once_may_be_read_where_it_lies() {
    let mut dice = Dice(5);
    let mut proven = 0;
    for size in 2..=7 {
        let topology = Topology::single(size);
        for (algorithm, collective) in
            Algorithm::ALL.into_iter().flat_map(|a| Collective::ALL.map(|collective| (a, collective)))
        {
            let root = if collective.has_root() { dice.below(size) } else { 0 };
            let Some(programs) = programs(algorithm, collective, &topology, root, false) else { continue };
            if !programs.iter().all(once_and_kept) {
                continue;
            }
            let blocks = (0..size)
                .map(|_| if collective == Collective::AllToAll { 2 } else { dice.below(4) })
                .collect();
            let sizes = Sizes::Blocks(blocks);
            let op = Operation { collective, root, programs: &programs, sizes: &sizes, in_place: false };
            if let Err(error) = check_by_reference(&op, 2, &|_, _| true) {
                panic!("{algorithm:?} {collective:?} {size} root={root} {sizes:?}: {error}");
            }
            proven += 1;
        }
    }
    assert!(proven > 100, "{proven}");
}

/// In place each rank's sum lies where its contribution was, which others may still want.
#[test]
fn what_is_written_while_others_may_read_is_refused() {
    let topology = Topology::single(3);
    let collective = Collective::AllReduce;
    let sizes = Sizes::Blocks(vec![1; 3]);
    let refused = |algorithm, by_reference: bool| {
        let programs = programs(algorithm, collective, &topology, 0, false).unwrap();
        let op = Operation { collective, root: 0, programs: &programs, sizes: &sizes, in_place: true };
        check_by_reference(&op, 2, &|_, _| by_reference)
    };
    assert!(matches!(refused(Algorithm::Publish, true), Err(Error::Lent { .. })));
    assert!(refused(Algorithm::Publish, false).is_ok());
}
