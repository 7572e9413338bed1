//! A rank that is late, with a timeout much longer than the delay.

use std::time::Duration;

use fake_libfabric::SimulatedFabric;
use smddp_core::{Collective, Communicator};

use crate::common::job::Job;
use crate::common::{ALL, Wire, efa_links, fabric_links, over};

const DEADLINE: Duration = Duration::from_secs(600);

/// Delays the last rank in the first iteration. The messages of the others fill all buffers in the meantime. The
/// buffers are small, because nothing was sent before.
fn run_late(comm: &Communicator, collective: Collective, by: Duration, count: usize) {
    for iteration in 0..3 {
        if iteration == 0 && comm.rank() + 1 == comm.size() {
            // Like a checkpoint or a data loader.
            std::thread::sleep(by);
        }
        let mut job = Job::new(comm.rank(), comm.size(), collective, count, 0, iteration);
        job.run(comm)
            .unwrap_or_else(|error| panic!("{collective:?}, iteration {iteration}, late by {by:?}: {error}"));
        job.check();
    }
}

/// Runs each collective over each wire that this machine supports, all concurrently.
fn late(by: Duration, count: usize) {
    std::thread::scope(|scope| {
        for (wire, size) in [(Wire::Nodes(1), 2), (Wire::Nodes(2), 3), (Wire::Shm, 3)] {
            for collective in ALL {
                scope.spawn(move || {
                    over(wire.links(size), DEADLINE, |comm| run_late(comm, collective, by, count));
                });
            }
        }
        for collective in ALL {
            scope.spawn(move || {
                let links = efa_links(2, 1, &SimulatedFabric::with_small_limits(0, &[]));
                over(links, DEADLINE, |comm| run_late(comm, collective, by, count));
            });
            if let Some(links) = fabric_links(2) {
                scope.spawn(move || over(links, DEADLINE, |comm| run_late(comm, collective, by, count)));
            }
        }
    });
}

#[test]
fn slow_rank_causes_no_error() {
    late(Duration::from_secs(1), 1 << 20);
}

#[test]
#[ignore = "takes two minutes; run with --ignored"]
fn rank_that_is_late_by_up_to_two_minutes_causes_no_error() {
    std::thread::scope(|scope| {
        for seconds in [25, 60, 120] {
            scope.spawn(move || late(Duration::from_secs(seconds), 1 << 20));
        }
    });
}
