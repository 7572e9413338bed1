//! Every algorithm by force, with both ways of writing cells.

use smddp_core::{Algorithm, Collective};

use crate::common::procs::{Me, start};
use crate::common::{ALL, PATIENCE, Wire, over, try_one};

const ROOTED: [Collective; 4] =
    [Collective::Broadcast, Collective::Reduce, Collective::Gather, Collective::Scatter];
const IN_PLACE: [Collective; 3] = [Collective::AllReduce, Collective::Broadcast, Collective::Reduce];

/// This process has its settings from the environment, and all ranks as threads.
pub(crate) fn rank(me: &Me) {
    for n in 2..=9 {
        for wire in [Wire::Far, Wire::Shm] {
            over(wire.links(n), PATIENCE, |comm| {
                for count in [1, 777, if n < 6 { 30_000 } else { 9_000 }] {
                    for collective in ALL {
                        try_one(comm, collective, count, 0, false).unwrap();
                        if ROOTED.contains(&collective) {
                            try_one(comm, collective, count, n / 2, false).unwrap();
                        }
                        if IN_PLACE.contains(&collective) {
                            try_one(comm, collective, count, n - 1, true).unwrap();
                        }
                    }
                }
            });
        }
    }
    me.say("done");
}

#[test]
fn every_algorithm_does_every_collective_it_is_forced_to_at_2_to_9_ranks() {
    for algorithm in Algorithm::ALL {
        // Large pieces, shared out among helpers; and small ones.
        for (segment, threads) in [("", "3"), ("4096", "1")] {
            let algorithm = ("SMDDP_ALGO", algorithm.name());
            let environment = [algorithm, ("SMDDP_SEGMENT_BYTES", segment), ("SMDDP_THREADS", threads)];
            let mut ranks = start("algorithm", 1, &environment, 4 * PATIENCE);
            ranks.hear(0, "done");
            ranks.finish([0]);
        }
    }
}
