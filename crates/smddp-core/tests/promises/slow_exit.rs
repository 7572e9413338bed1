//! A killed rank with much memory: the kernel needs time to free it, and the survivors must not wait for that.

use smddp_core::{Collective, Communicator, Error, Result};

use crate::common::TIMEOUT;
use crate::common::group::{group, world};
use crate::common::job::Job;
use crate::common::procs::{RankProcess, start};

const VICTIM: usize = 1;
/// Bytes that the kernel takes about 0.2 s to free.
const HELD: usize = 2 << 30;

fn reduce(comm: &Communicator, iteration: usize) -> Result<()> {
    let mut job = Job::new(comm.rank(), comm.size(), Collective::AllReduce, 3000, 0, iteration);
    job.run(comm)?;
    job.check();
    Ok(())
}

/// Returns true while the process is exiting. Its last thread, the main thread or another, frees the memory.
fn is_running(pid: &str) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    threads.flatten().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    })
}

pub(crate) fn rank(me: &RankProcess) {
    let comm = world(me, TIMEOUT);
    reduce(&comm, 0).unwrap();
    let held = if me.rank == VICTIM { vec![1u8; HELD] } else { Vec::new() };
    if me.rank == VICTIM {
        me.put("pid", &std::process::id().to_string());
    }
    let pid = me.get("pid");
    me.report("ready");
    let error = (1..).find_map(|iteration| reduce(&comm, iteration).err()).unwrap();
    let detected_early = is_running(&pid);
    assert!(matches!(error, Error::PeerLost { rank: VICTIM, .. }), "{error}");
    comm.close();
    drop(comm);
    let again = group(me, "again", &[0, 2], TIMEOUT);
    reduce(&again, 5).unwrap();
    let continued_early = is_running(&pid);
    again.close();
    me.report(&format!("early {detected_early} {continued_early}"));
    drop(held);
}

/// Returns true if both survivors were earlier than the end of the process.
fn early() -> bool {
    let mut ranks = start("slow_exit", 3, &[], 2 * TIMEOUT);
    (0..3).for_each(|rank| drop(ranks.wait_for(rank, "ready")));
    ranks.kill(VICTIM);
    let reports = [0, 2].map(|rank| ranks.wait_for(rank, "early").text);
    println!("{reports:?}");
    ranks.finish([0, 2]);
    reports.iter().all(|report| report == "early true true")
}

#[test]
fn survivors_continue_before_the_memory_of_the_dead_rank_is_freed() {
    // A loaded machine may delay the survivors for as long, so one success in three attempts suffices.
    assert!((0..3).any(|_| early()), "the survivors waited for the memory in every attempt");
}
