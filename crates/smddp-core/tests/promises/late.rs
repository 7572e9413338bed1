//! A rank that does something else for a while, under a deadline that is far.

use std::time::Duration;

use smddp_core::{Collective, Communicator};
use smddp_transport::fabric::srd::SrdScript;

use crate::common::job::Job;
use crate::common::{ALL, Wire, fabric_links, over, simulated_links};

const DEADLINE: Duration = Duration::from_secs(600);

/// The last rank comes so much later than the others, whose messages fill all that there is of room meanwhile: little, as
/// nothing was sent before.
fn turns(comm: &Communicator, collective: Collective, by: Duration, count: usize) {
    for turn in 0..3 {
        if turn == 0 && comm.rank() + 1 == comm.size() {
            // As a checkpoint or a data loader does.
            std::thread::sleep(by);
        }
        let mut job = Job::new(comm.rank(), comm.size(), collective, count, 0, turn);
        job.run(comm).unwrap_or_else(|error| panic!("{collective:?}, turn {turn}, late by {by:?}: {error}"));
        job.check();
    }
}

/// Each collective over each wire that this machine has, all at once.
fn late(by: Duration, count: usize) {
    std::thread::scope(|scope| {
        for (wire, size) in [(Wire::Nodes(1), 2), (Wire::Nodes(2), 3), (Wire::Shm, 3)] {
            for collective in ALL {
                scope.spawn(move || {
                    over(wire.links(size), DEADLINE, |comm| turns(comm, collective, by, count));
                });
            }
        }
        for collective in ALL {
            scope.spawn(move || {
                let (_srd, links) = simulated_links(2, 1, SrdScript::default());
                over(links, DEADLINE, |comm| turns(comm, collective, by, count));
            });
            if let Some(links) = fabric_links(2) {
                scope.spawn(move || over(links, DEADLINE, |comm| turns(comm, collective, by, count)));
            }
        }
    });
}

#[test]
fn a_slow_rank_ends_nothing() {
    late(Duration::from_secs(1), 1 << 20);
}

#[test]
#[ignore = "takes two minutes; run with --ignored"]
fn a_rank_that_is_late_by_one_half_one_and_two_minutes_ends_nothing() {
    std::thread::scope(|scope| {
        for seconds in [25, 60, 120] {
            scope.spawn(move || late(Duration::from_secs(seconds), 1 << 20));
        }
    });
}
