//! A rank with much memory is killed: the system takes its time to free that, and nobody waits for it.

use smddp_core::{Collective, Communicator, Error, Result};

use crate::common::PATIENCE;
use crate::common::group::{group, world};
use crate::common::job::Job;
use crate::common::procs::{Me, start};

const VICTIM: usize = 1;
/// Takes the system a fifth of a second to free.
const HELD: usize = 2 << 30;

fn reduce(comm: &Communicator, turn: usize) -> Result<()> {
    let mut job = Job::new(comm.rank(), comm.size(), Collective::AllReduce, 3000, 0, turn);
    job.run(comm)?;
    job.check();
    Ok(())
}

/// Whether the process is still being taken down: its last thread frees its memory, be that the first one or another.
fn runs(pid: &str) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    threads.flatten().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    })
}

pub(crate) fn rank(me: &Me) {
    let comm = world(me, PATIENCE);
    reduce(&comm, 0).unwrap();
    let held = if me.rank == VICTIM { vec![1u8; HELD] } else { Vec::new() };
    if me.rank == VICTIM {
        me.put("pid", &std::process::id().to_string());
    }
    let pid = me.get("pid");
    me.say("ready");
    let error = (1..).find_map(|turn| reduce(&comm, turn).err()).unwrap();
    let known_early = runs(&pid);
    assert!(matches!(error, Error::PeerLost { rank: VICTIM, .. }), "{error}");
    comm.close();
    drop(comm);
    let again = group(me, "again", &[0, 2], PATIENCE);
    reduce(&again, 5).unwrap();
    let goes_on_early = runs(&pid);
    again.close();
    me.say(&format!("early {known_early} {goes_on_early}"));
    drop(held);
}

/// Whether both survivors were early.
fn early() -> bool {
    let mut ranks = start("dying", 3, &[], 2 * PATIENCE);
    (0..3).for_each(|rank| drop(ranks.hear(rank, "ready")));
    ranks.kill(VICTIM);
    let said = [0, 2].map(|rank| ranks.hear(rank, "early").text);
    println!("{said:?}");
    ranks.finish([0, 2]);
    said.iter().all(|said| said == "early true true")
}

#[test]
fn a_death_is_known_and_survivors_go_on_before_the_memory_of_the_dead_is_freed() {
    // A machine that has other things to do may hold the survivors up for as long.
    assert!((0..3).any(|_| early()), "they wait until it is freed, every time");
}
