//! Propagation of errors between groups: ranks that wait for a failed rank report its original error, also through
//! several failed ranks.

use std::time::Duration;

use smddp_core::{Communicator, DType, Error, Options};

use crate::common::TIMEOUT;
use crate::common::group::{group, world};
use crate::common::procs::{RankProcess, start};

const SIZE: usize = 4;
/// If set, rank 1 fails in a recv and not in a barrier.
const MESSAGE: &str = "SMDDP_TEST_MESSAGE";
/// Each rank is a separate node and shuts down in order. Between nodes a killed process could not send its error.
const SEPARATE_NODES: [(&str, &str); 2] = [("SMDDP_NODE", "node {rank}"), ("SMDDP_SOCKET_IFNAME", "=lo")];

fn fail(comm: &Communicator) -> Error {
    comm.barrier(Options::default()).unwrap_err()
}

fn receive(comm: &Communicator) -> Error {
    let mut into = [0f32];
    // SAFETY: the buffer outlives the call, which has ended when this returns.
    let work = unsafe { comm.recv(into.as_mut_ptr().cast(), 1, DType::F32, Some(1), 0, Options::default()) };
    work.unwrap().wait(None).unwrap_err()
}

/// Rank 2 makes no call. Rank 1 waits for it, rank 0 for rank 1, and rank 3 for rank 0, each in a separate group.
/// Each rank exits with its error.
pub(crate) fn rank(me: &RankProcess) {
    let comm = world(me, TIMEOUT);
    let pair = [1, 2].contains(&me.rank).then(|| group(me, "pair", &[1, 2], Duration::from_millis(200)));
    let last = [0, 3].contains(&me.rank).then(|| group(me, "last", &[0, 3], TIMEOUT));
    me.report("ready");
    let error = match me.rank {
        1 if std::env::var(MESSAGE).is_ok() => receive(&pair.unwrap()),
        1 => fail(&pair.unwrap()),
        0 => fail(&comm),
        3 => fail(&last.unwrap()),
        _ => {
            me.get("over");
            return;
        }
    };
    // Exactly once: every rank forwards the text unchanged.
    assert_eq!(
        error.to_string().matches("its last recorded error").count(),
        usize::from(me.rank != 1),
        "{error}"
    );
    me.report(&error.to_string());
    if std::env::var(SEPARATE_NODES[0].0).is_ok() {
        me.get(&format!("exit {}", me.rank));
        smddp_core::shutdown();
        me.report("exited");
    }
    me.get("over");
}

fn assert_propagated(environment: &[(&str, &str)], operation: &str) {
    let mut ranks = start("error_propagation", SIZE, environment, TIMEOUT);
    (0..SIZE).for_each(|rank| drop(ranks.wait_for(rank, "ready")));
    let cause = ranks.wait_for(1, operation).text;
    assert!(cause.contains("on group `pair` Timed out"), "{cause}");
    for (failed, waiting) in [(1, 0), (0, 3)] {
        if environment.starts_with(&SEPARATE_NODES) {
            ranks.put(&format!("exit {failed}"), "yes");
        } else {
            ranks.kill(failed);
        }
        let error = ranks.wait_for(waiting, "barrier").text;
        assert!(error.contains(&format!("of group `pair`: {cause}")), "{error}");
    }
    // Ends the remaining ranks.
    for end in ["over", "exit 3"] {
        ranks.put(end, "yes");
    }
    ranks.finish([2, 3]);
}

#[test]
fn error_of_another_group_is_reported_to_waiting_ranks() {
    assert_propagated(&[], "barrier");
}

#[test]
fn error_of_a_recv_is_reported_to_waiting_ranks() {
    assert_propagated(&[(MESSAGE, "1")], "recv");
}

#[test]
fn error_before_a_shutdown_is_reported_to_waiting_ranks_of_other_nodes() {
    assert_propagated(&SEPARATE_NODES, "barrier");
    assert_propagated(&[&SEPARATE_NODES[..], &[(MESSAGE, "1")]].concat(), "recv");
}
