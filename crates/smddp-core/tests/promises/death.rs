//! Scripted death of a rank at its n-th message, in every collective.

use std::time::Instant;

use smddp_core::{Communicator, Error};

use crate::common::job::Job;
use crate::common::{ALL, PROMPT_LIMIT, TIMEOUT, Wire, over};

#[test]
fn scripted_death_is_reported_by_all_survivors_in_every_collective() {
    for collective in ALL {
        for (size, victim, at, count) in [(2, 0, 1, 10), (3, 1, 2, 5_000), (3, 0, 3, 70_001), (4, 3, 5, 100)]
        {
            let begun = Instant::now();
            over(Wire::Dying(victim, at).links(size), TIMEOUT, |comm: &Communicator| {
                let root = |iteration: usize| iteration % size;
                let error = (0..)
                    .find_map(|iteration| {
                        Job::new(comm.rank(), size, collective, count, root(iteration), iteration)
                            .run(comm)
                            .err()
                    })
                    .unwrap();
                if comm.rank() != victim {
                    assert!(
                        matches!(error, Error::PeerLost { rank, .. } if rank == victim),
                        "{collective:?}, rank {} of {size}, {victim} dead: {error}",
                        comm.rank()
                    );
                    let again = Job::new(comm.rank(), size, collective, count, 0, 0).run(comm);
                    assert_eq!(again, Err(error), "later calls fail with the same error");
                }
                comm.close();
            });
            let took = begun.elapsed();
            assert!(took < PROMPT_LIMIT, "{collective:?} with {size} ranks took {took:?}");
        }
    }
}

#[test]
fn survivor_error_refers_to_the_log_of_the_failed_rank() {
    over(Wire::Dying(1, 1).links(2), TIMEOUT, |comm: &Communicator| {
        let error = (0..)
            .find_map(|iteration| Job::new(comm.rank(), 2, ALL[0], 10, 0, iteration).run(comm).err())
            .unwrap();
        if comm.rank() == 0 {
            let text = error.to_string();
            assert!(text.contains("this error follows from that rank's failure: see its log"), "{text}");
        }
        comm.close();
    });
}
