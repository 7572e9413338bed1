//! Every algorithm, selected by SMDDP_ALGO, with regular and non-temporal stores to slots.

use smddp_core::{Algorithm, Collective};

use crate::common::procs::{RankProcess, start};
use crate::common::{ALL, TIMEOUT, Wire, over, try_one};

const ROOTED: [Collective; 4] =
    [Collective::Broadcast, Collective::Reduce, Collective::Gather, Collective::Scatter];
const IN_PLACE: [Collective; 3] = [Collective::AllReduce, Collective::Broadcast, Collective::Reduce];

/// Runs all ranks as threads in this process, which has the settings in its environment.
pub(crate) fn rank(me: &RankProcess) {
    for n in 2..=9 {
        for wire in [Wire::NonTemporal, Wire::Shm] {
            over(wire.links(n), TIMEOUT, |comm| {
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
    me.report("done");
}

#[test]
fn selected_algorithms_are_correct_for_every_collective_at_2_to_9_ranks() {
    for algorithm in Algorithm::ALL {
        // Large segments, shared by helper threads, and small ones.
        for (segment, threads) in [("", "3"), ("4096", "1")] {
            let algorithm = ("SMDDP_ALGO", algorithm.name());
            let environment = [algorithm, ("SMDDP_SEGMENT_BYTES", segment), ("SMDDP_THREADS", threads)];
            let mut ranks = start("algorithm", 1, &environment, 4 * TIMEOUT);
            ranks.wait_for(0, "done");
            ranks.finish([0]);
        }
    }
}
