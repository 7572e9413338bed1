//! Timeouts: a rank that never makes the call.

use std::time::{Duration, Instant};

use smddp_core::{Collective, Communicator, Error, Result};

use crate::common::job::Job;
use crate::common::{Gate, PROMPT_LIMIT, TIMEOUT, Wire, over};

const DEADLINE: Duration = Duration::from_millis(500);
/// Maximum delay between the calls of two ranks that leave a gate together, on a loaded machine.
const MAX_SKEW: Duration = Duration::from_millis(200);

fn one(comm: &Communicator, collective: Collective, count: usize) -> Result<()> {
    Job::new(comm.rank(), comm.size(), collective, count, 0, 0).run(comm)
}

#[test]
fn timeout_reports_the_missing_ranks_on_all_ranks() {
    for wire in Wire::EACH {
        for (collective, count) in [
            (Collective::AllReduce, 10),
            (Collective::AllGather, 100_000),
            (Collective::Barrier, 0),
            (Collective::AllToAll, 50_000),
            (Collective::ReduceScatter, 3),
        ] {
            let (failed, together) = (Gate::new(4), Gate::new(2));
            over(wire.links(4), TIMEOUT, |comm| {
                let late = comm.rank() >= 2;
                for _ in 0..3 {
                    one(comm, Collective::AllReduce, 100).unwrap();
                }
                if late {
                    // Ranks 2 and 3 make no call while the others wait.
                    failed.wait();
                } else {
                    // Without the gate the slower rank might be missing too.
                    together.wait();
                    comm.set_timeout(DEADLINE);
                }
                let begun = Instant::now();
                // A late rank that has all its data may finish this call; then its next call fails.
                let outcome = one(comm, collective, count);
                assert!(late || outcome.is_err());
                let done = u64::from(outcome.is_ok());
                let error = outcome.and_then(|()| one(comm, collective, count)).unwrap_err();
                let took = begun.elapsed();
                let text = error.to_string();
                let Error::Timeout { operation, group, missing, .. } = &error else { panic!("{text}") };
                assert!(
                    operation.ends_with(&format!("#{}", 3 + done))
                        && operation.starts_with(smddp_core::name_of(collective)),
                    "{operation}"
                );
                assert_eq!(group, "test");
                assert_eq!(*missing, [2, 3], "rank {} over {wire:?}: {text}", comm.rank());
                assert!(text.contains("rank 2") && text.contains("rank 3"), "{text}");
                if !late {
                    // The other rank may have begun slightly earlier, and reports its timeout to this rank.
                    assert!(took >= DEADLINE - MAX_SKEW && took < DEADLINE + PROMPT_LIMIT, "{took:?}");
                    failed.wait();
                }
                assert_eq!(one(comm, Collective::Barrier, 0), Err(error), "the group remains failed");
            });
        }
    }
}

#[test]
fn late_root_gets_the_timeout_error_at_its_call() {
    for wire in Wire::EACH {
        for count in [1, 1000, 200_000] {
            let (failed, reported) = (Gate::new(2), Gate::new(2));
            over(wire.links(2), TIMEOUT, |comm| {
                if comm.rank() == 0 {
                    failed.wait();
                } else {
                    comm.set_timeout(DEADLINE);
                }
                let mut outcome = one(comm, Collective::Broadcast, count);
                // Over a network the failure notice takes time, so a later call may report it.
                let begun = Instant::now();
                while matches!(wire, Wire::Nodes(1) | Wire::Efa(_))
                    && outcome.is_ok()
                    && begun.elapsed() < TIMEOUT
                {
                    outcome = one(comm, Collective::Broadcast, count);
                }
                assert!(matches!(outcome, Err(Error::Timeout { .. })), "{wire:?}, {count}: {outcome:?}");
                if comm.rank() == 1 {
                    failed.wait();
                }
                // Keeps both ranks alive, because this test is not about departed ranks.
                reported.wait();
            });
        }
    }
}
