//! A process that lacks something of its own: nobody else is blamed for it.

use std::time::Duration;

use smddp_core::{Collective, Error};

use crate::common::PATIENCE;
use crate::common::group::world;
use crate::common::job::Job;
use crate::common::procs::{Me, start};

/// Sets how many descriptors this process may have, whatever it has; what it was before.
fn allow_descriptors(number: libc::rlim_t) -> libc::rlim_t {
    // SAFETY: plain numbers go in and out.
    unsafe {
        let mut limit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let before = std::mem::replace(&mut limit.rlim_cur, number);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        before
    }
}

/// Two ranks on each of two nodes; rank 1 has no descriptor left when it first needs a connection.
pub(crate) fn rank(me: &Me) {
    let comm = world(me, 2 * PATIENCE);
    let mut job = Job::new(me.rank, me.size, Collective::AllToAll, 5000, 0, 1);
    let forever = me.get("forever") == "yes";
    // None besides those that are open, also where one of these is closed meanwhile.
    let before = (me.rank == 1).then(|| allow_descriptors(0));
    let give_back = || before.map(allow_descriptors);
    me.put(&format!("ready/{}", me.rank), "yes");
    (0..me.size).for_each(|rank| drop(me.get(&format!("ready/{rank}"))));
    let outcome = std::thread::scope(|scope| {
        if !forever {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(500));
                give_back();
            });
            job.run(&comm)
        } else {
            let outcome = job.run(&comm);
            give_back();
            outcome
        }
    });
    match outcome {
        Ok(()) => {
            job.check();
            me.say("well");
        }
        Err(Error::System { what, why }) => me.say(&format!("system {what}: {why}")),
        Err(error) => me.say(&format!("other {error:?}: {error}")),
    }
    comm.close();
}

#[test]
fn a_rank_without_descriptors_says_so_and_blames_nobody() {
    let mut ranks =
        start("lacking", 4, &[("SMDDP_NODE", "node {pair}"), ("SMDDP_SOCKET_IFNAME", "=lo")], 4 * PATIENCE);
    ranks.put("forever", "yes");
    let said = ranks.hear(1, "").text;
    for word in ["system all_to_all #0 on group `world` failed: rank 1 ", "cannot reach rank ", "ulimit -n"] {
        assert!(said.contains(word), "{said}");
    }
    // A rank that has all it needs may be through; whoever misses rank 1 names it and nobody else.
    for rank in [0, 2, 3] {
        let said = ranks.hear(rank, "").text;
        assert!(said == "well" && rank == 0 || said.contains("rank 1 "), "rank {rank}: {said}");
    }
    ranks.finish(0..4);
}

#[test]
fn descriptors_that_come_back_in_time_were_never_missed() {
    let mut ranks =
        start("lacking", 4, &[("SMDDP_NODE", "node {pair}"), ("SMDDP_SOCKET_IFNAME", "=lo")], 4 * PATIENCE);
    ranks.put("forever", "no");
    (0..4).for_each(|rank| drop(ranks.hear(rank, "well")));
    ranks.finish(0..4);
}
