//! Large messages that the kernel copies directly between processes: the results equal those of staged messages.

use smddp_core::{Collective, Endpoint};

use crate::common::group::world;
use crate::common::procs::{RankProcess, start};
use crate::common::{TIMEOUT, try_one};

/// Elements of a block: the minimum for single copies, uneven segments, and several segments.
const COUNTS: [usize; 3] = [128 << 10, 150_001, 700_000];

pub(crate) fn rank(me: &RankProcess) {
    let comm = world(me, TIMEOUT);
    for collective in [
        Collective::AllGather,
        Collective::AllToAll,
        Collective::ReduceScatter,
        Collective::Broadcast,
        Collective::Scatter,
        Collective::Gather,
        Collective::AllReduce,
    ] {
        let may_be_in_place = matches!(collective, Collective::AllGather | Collective::AllReduce);
        for count in COUNTS {
            for root in 0..me.size {
                try_one(&comm, collective, count, root, false).unwrap();
                if may_be_in_place {
                    try_one(&comm, collective, count, root, true).unwrap();
                }
            }
        }
    }
    let copied = Endpoint::existing().map_or(0, |endpoint| endpoint.single_copies());
    comm.close();
    me.report(if copied > 0 { "copied once" } else { "staged" });
}

#[test]
fn single_copies_are_correct_and_can_be_disabled() {
    for (setting, size, expected) in [("1", 2, "copied once"), ("1", 3, "copied once"), ("0", 2, "staged")] {
        let mut ranks = start("single_copy", size, &[("SMDDP_SINGLE_COPY", setting)], 4 * TIMEOUT);
        (0..size).for_each(|rank| drop(ranks.wait_for(rank, expected)));
        ranks.finish(0..size);
    }
}
