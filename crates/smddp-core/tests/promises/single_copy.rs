//! Large messages that the kernel copies from where they lie: the same results as staged ones.

use smddp_core::{Collective, Endpoint};

use crate::common::group::world;
use crate::common::procs::{Me, start};
use crate::common::{PATIENCE, try_one};

/// Elements of a block: as many bytes as are worth it, of segments that are not alike, and several of them.
const COUNTS: [usize; 3] = [128 << 10, 150_001, 700_000];

pub(crate) fn rank(me: &Me) {
    let comm = world(me, PATIENCE);
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
    me.say(if copied > 0 { "copied once" } else { "staged" });
}

#[test]
fn messages_that_the_kernel_copies_are_what_they_were_and_none_is_where_that_is_forbidden() {
    for (setting, size, says) in [("1", 2, "copied once"), ("1", 3, "copied once"), ("0", 2, "staged")] {
        let mut ranks = start("single_copy", size, &[("SMDDP_SINGLE_COPY", setting)], 4 * PATIENCE);
        (0..size).for_each(|rank| drop(ranks.hear(rank, says)));
        ranks.finish(0..size);
    }
}
