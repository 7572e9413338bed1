//! A rank without free file descriptors: the error names this rank, not its peers.

use std::time::Duration;

use smddp_core::{Collective, Error};

use crate::common::TIMEOUT;
use crate::common::group::world;
use crate::common::job::Job;
use crate::common::procs::{RankProcess, start};

/// Sets the limit of descriptors of this process, and returns the previous limit.
fn allow_descriptors(number: libc::rlim_t) -> libc::rlim_t {
    // SAFETY: the calls read and write plain numbers.
    unsafe {
        let mut limit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        let before = std::mem::replace(&mut limit.rlim_cur, number);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
        before
    }
}

/// Two ranks on each of two nodes. Rank 1 has no free descriptor when it first needs a connection.
pub(crate) fn rank(me: &RankProcess) {
    let comm = world(me, 2 * TIMEOUT);
    let mut job = Job::new(me.rank, me.size, Collective::AllToAll, 5000, 0, 1);
    let forever = me.get("forever") == "yes";
    // Allows no new descriptor, even if an open one is closed in the meantime.
    let before = (me.rank == 1).then(|| allow_descriptors(0));
    let restore = || before.map(allow_descriptors);
    me.put(&format!("ready/{}", me.rank), "yes");
    (0..me.size).for_each(|rank| drop(me.get(&format!("ready/{rank}"))));
    let outcome = std::thread::scope(|scope| {
        if !forever {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(500));
                restore();
            });
            job.run(&comm)
        } else {
            let outcome = job.run(&comm);
            restore();
            outcome
        }
    });
    match outcome {
        Ok(()) => {
            job.check();
            me.report("success");
        }
        Err(Error::System { operation, reason }) => me.report(&format!("system {operation}: {reason}")),
        Err(error) => me.report(&format!("other {error:?}: {error}")),
    }
    comm.close();
}

#[test]
fn rank_without_descriptors_reports_itself() {
    let mut ranks = start(
        "descriptor_limit",
        4,
        &[("SMDDP_NODE", "node {pair}"), ("SMDDP_SOCKET_IFNAME", "=lo")],
        4 * TIMEOUT,
    );
    ranks.put("forever", "yes");
    let report = ranks.wait_for(1, "").text;
    for part in ["system all_to_all #0 on group `world` failed: rank 1 ", "cannot reach rank ", "ulimit -n"] {
        assert!(report.contains(part), "{report}");
    }
    // A rank that has all its data may succeed. A rank that misses rank 1 must report rank 1 only.
    for rank in [0, 2, 3] {
        let report = ranks.wait_for(rank, "").text;
        assert!(report == "success" && rank == 0 || report.contains("rank 1 "), "rank {rank}: {report}");
    }
    ranks.finish(0..4);
}

#[test]
fn temporary_lack_of_descriptors_is_no_error() {
    let mut ranks = start(
        "descriptor_limit",
        4,
        &[("SMDDP_NODE", "node {pair}"), ("SMDDP_SOCKET_IFNAME", "=lo")],
        4 * TIMEOUT,
    );
    ranks.put("forever", "no");
    (0..4).for_each(|rank| drop(ranks.wait_for(rank, "success")));
    ranks.finish(0..4);
}
