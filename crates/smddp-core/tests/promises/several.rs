//! Several ranks are gone, one after the other, before anybody makes a call: the first is the cause of the others' ends.

use smddp_core::{Error, Options};

use crate::common::PATIENCE;
use crate::common::group::world;
use crate::common::procs::{Me, start};

const SIZE: usize = 4;
/// In the order in which they die.
const VICTIMS: [usize; 2] = [2, 0];

pub(crate) fn rank(me: &Me) {
    let comm = world(me, PATIENCE);
    comm.barrier(Options::default()).unwrap();
    me.say("ready");
    for victim in VICTIMS {
        me.get(&format!("killed {victim}"));
        while !comm.dead(&[victim]).iter().any(|(rank, _)| *rank == victim) {
            std::thread::yield_now();
        }
        me.say(&format!("knows {victim}"));
    }
    let error = comm.barrier(Options::default()).unwrap_err();
    let Error::PeerLost { rank, ref how, .. } = error else { panic!("not a loss: {error}") };
    assert_eq!(rank, VICTIMS[0], "{error}");
    assert!(how.contains(&format!("gone, too: rank {}", VICTIMS[1])), "{error}");
    me.say("done");
}

#[test]
fn of_several_dead_the_first_to_die_is_named_first_and_the_others_too() {
    let mut ranks = start("several", SIZE, &[], PATIENCE);
    (0..SIZE).for_each(|rank| drop(ranks.hear(rank, "ready")));
    let survivors: Vec<usize> = (0..SIZE).filter(|rank| !VICTIMS.contains(rank)).collect();
    for victim in VICTIMS {
        ranks.kill(victim);
        ranks.put(&format!("killed {victim}"), "yes");
        survivors.iter().for_each(|&rank| drop(ranks.hear(rank, &format!("knows {victim}"))));
    }
    survivors.iter().for_each(|&rank| drop(ranks.hear(rank, "done")));
    ranks.finish(survivors);
}
