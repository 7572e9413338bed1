//! A rank dies by script, at its n-th message, in every collective.

use std::time::Instant;

use smddp_core::{Communicator, Error};

use crate::common::job::Job;
use crate::common::{ALL, PATIENCE, SOON, Wire, over};

#[test]
fn survivors_of_a_scripted_death_all_name_it_in_every_collective() {
    for collective in ALL {
        for (size, victim, at, count) in [(2, 0, 1, 10), (3, 1, 2, 5_000), (3, 0, 3, 70_001), (4, 3, 5, 100)]
        {
            let begun = Instant::now();
            over(Wire::Dying(victim, at).links(size), PATIENCE, |comm: &Communicator| {
                let root = |turn: usize| turn % size;
                let error = (0..)
                    .find_map(|turn| {
                        Job::new(comm.rank(), size, collective, count, root(turn), turn).run(comm).err()
                    })
                    .unwrap();
                if comm.rank() != victim {
                    assert!(
                        matches!(error, Error::PeerLost { rank, .. } if rank == victim),
                        "{collective:?}, rank {} of {size}, {victim} dead: {error}",
                        comm.rank()
                    );
                    let again = Job::new(comm.rank(), size, collective, count, 0, 0).run(comm);
                    assert_eq!(again, Err(error), "later calls fail with the first cause");
                }
                comm.close();
            });
            let took = begun.elapsed();
            assert!(took < SOON, "{collective:?} with {size} ranks took {took:?}");
        }
    }
}

#[test]
fn a_survivors_error_says_that_it_is_a_consequence_and_where_the_first_cause_is() {
    over(Wire::Dying(1, 1).links(2), PATIENCE, |comm: &Communicator| {
        let error =
            (0..).find_map(|turn| Job::new(comm.rank(), 2, ALL[0], 10, 0, turn).run(comm).err()).unwrap();
        if comm.rank() == 0 {
            let text = error.to_string();
            assert!(text.contains("this error follows from that rank's failure: see its log"), "{text}");
        }
        comm.close();
    });
}
