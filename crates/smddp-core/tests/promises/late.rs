//! A rank that does something else for a while, under a deadline that is far.

use std::time::Duration;

use smddp_core::Collective;

use crate::common::job::Job;
use crate::common::{Wire, over};

const DEADLINE: Duration = Duration::from_secs(600);

/// One of two ranks comes so much later than the other, whose messages fill all that there is of room meanwhile: little, as
/// nothing was sent before.
fn late(by: Duration, count: usize) {
    let each = [
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllToAll,
        Collective::Broadcast,
        Collective::AllReduce,
    ];
    std::thread::scope(|scope| {
        for collective in each {
            scope.spawn(move || {
                over(Wire::Nodes(1).links(2), DEADLINE, |comm| {
                    for turn in 0..3 {
                        if turn == 0 && comm.rank() == 1 {
                            // As a checkpoint or a data loader does.
                            std::thread::sleep(by);
                        }
                        let mut job = Job::new(comm.rank(), 2, collective, count, 0, turn);
                        job.run(comm).unwrap_or_else(|error| panic!("{collective:?}, turn {turn}: {error}"));
                        job.check();
                    }
                });
            });
        }
    });
}

#[test]
fn a_slow_rank_ends_nothing() {
    late(Duration::from_secs(1), 2 << 20);
}

#[test]
#[ignore = "takes half a minute; run with --ignored"]
fn a_rank_that_is_slower_than_any_host_may_be_silent_ends_nothing() {
    late(Duration::from_secs(25), 2 << 20);
}

#[test]
#[ignore = "takes two minutes; run with --ignored"]
fn a_rank_that_writes_a_checkpoint_for_two_minutes_ends_nothing() {
    late(Duration::from_secs(120), 2 << 20);
}
