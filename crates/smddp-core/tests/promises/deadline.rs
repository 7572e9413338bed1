//! A rank that never arrives.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, Error, Result};

use crate::common::job::Job;
use crate::common::{Gate, PATIENCE, SOON, Wire, over};

const DEADLINE: Duration = Duration::from_millis(500);
/// So much may lie between the calls of two ranks that leave a gate together, on a busy machine.
const A_MOMENT: Duration = Duration::from_millis(200);

fn one(comm: &Communicator, collective: Collective, count: usize) -> Result<()> {
    Job::new(comm.rank(), comm.size(), collective, count, 0, 0).run(comm)
}

#[test]
fn a_rank_that_never_arrives_is_named_by_all_who_wait_and_gets_the_error_too() {
    for wire in Wire::EACH {
        for (collective, count) in [
            (Collective::AllReduce, 10),
            (Collective::AllGather, 100_000),
            (Collective::Barrier, 0),
            (Collective::AllToAll, 50_000),
            (Collective::ReduceScatter, 3),
        ] {
            let (failed, together) = (Gate::new(4), Gate::new(2));
            over(wire.links(4), PATIENCE, |comm| {
                let late = comm.rank() >= 2;
                for _ in 0..3 {
                    one(comm, Collective::AllReduce, 100).unwrap();
                }
                if late {
                    // Rank 2 and 3 do not call while the others wait.
                    failed.wait();
                } else {
                    // Whoever comes so much later than the other would be missing, too.
                    together.wait();
                    comm.set_timeout(DEADLINE);
                }
                let begun = Instant::now();
                // A late rank that finds all it needs may finish; it fails at its next call then.
                let outcome = one(comm, collective, count);
                assert!(late || outcome.is_err());
                let done = u64::from(outcome.is_ok());
                let error = outcome.and_then(|()| one(comm, collective, count)).unwrap_err();
                let took = begun.elapsed();
                let text = error.to_string();
                let Error::Timeout { what, group, missing, .. } = &error else { panic!("{text}") };
                assert!(
                    what.ends_with(&format!("#{}", 3 + done))
                        && what.starts_with(smddp_core::name_of(collective)),
                    "{what}"
                );
                assert_eq!(group, "test");
                assert_eq!(*missing, [2, 3], "rank {} over {wire:?}: {text}", comm.rank());
                assert!(text.contains("rank 2") && text.contains("rank 3"), "{text}");
                if !late {
                    // The other one may have begun a moment before, and tell.
                    assert!(took >= DEADLINE - A_MOMENT && took < DEADLINE + SOON, "{took:?}");
                    failed.wait();
                }
                assert_eq!(one(comm, Collective::Barrier, 0), Err(error), "the group stays failed");
            });
        }
    }
}

#[test]
fn a_late_root_that_needs_nobody_learns_of_the_timeout_at_its_call() {
    for wire in Wire::EACH {
        for count in [1, 1000, 200_000] {
            let (failed, told) = (Gate::new(2), Gate::new(2));
            over(wire.links(2), PATIENCE, |comm| {
                if comm.rank() == 0 {
                    failed.wait();
                } else {
                    comm.set_timeout(DEADLINE);
                }
                let mut outcome = one(comm, Collective::Broadcast, count);
                // Bad news takes its time over a network: there it may be a later call that raises it.
                let begun = Instant::now();
                while matches!(wire, Wire::Nodes(1) | Wire::Srd(_))
                    && outcome.is_ok()
                    && begun.elapsed() < PATIENCE
                {
                    outcome = one(comm, Collective::Broadcast, count);
                }
                assert!(matches!(outcome, Err(Error::Timeout { .. })), "{wire:?}, {count}: {outcome:?}");
                if comm.rank() == 1 {
                    failed.wait();
                }
                // A rank that is gone by then is not what is tested here.
                told.wait();
            });
        }
    }
}
