//! Several ranks die one after the other before a call: the error reports the first as the cause, and lists the
//! others.

use smddp_core::{Error, Options};

use crate::common::TIMEOUT;
use crate::common::group::world;
use crate::common::procs::{RankProcess, start};

const SIZE: usize = 4;
/// Victims in the order of their deaths.
const VICTIMS: [usize; 2] = [2, 0];

pub(crate) fn rank(me: &RankProcess) {
    let comm = world(me, TIMEOUT);
    comm.barrier(Options::default()).unwrap();
    me.report("ready");
    for victim in VICTIMS {
        me.get(&format!("killed {victim}"));
        while !comm.dead(&[victim]).iter().any(|(rank, _)| *rank == victim) {
            std::thread::yield_now();
        }
        me.report(&format!("detected {victim}"));
    }
    let error = comm.barrier(Options::default()).unwrap_err();
    let Error::PeerLost { rank, ref reason, .. } = error else { panic!("not a loss: {error}") };
    assert_eq!(rank, VICTIMS[0], "{error}");
    assert!(reason.contains(&format!("also lost: rank {}", VICTIMS[1])), "{error}");
    me.report("done");
}

#[test]
fn first_of_several_deaths_is_the_reported_cause() {
    let mut ranks = start("multiple_deaths", SIZE, &[], TIMEOUT);
    (0..SIZE).for_each(|rank| drop(ranks.wait_for(rank, "ready")));
    let survivors: Vec<usize> = (0..SIZE).filter(|rank| !VICTIMS.contains(rank)).collect();
    for victim in VICTIMS {
        ranks.kill(victim);
        ranks.put(&format!("killed {victim}"), "yes");
        survivors.iter().for_each(|&rank| drop(ranks.wait_for(rank, &format!("detected {victim}"))));
    }
    survivors.iter().for_each(|&rank| drop(ranks.wait_for(rank, "done")));
    ranks.finish(survivors);
}
