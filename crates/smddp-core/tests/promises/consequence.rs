//! A rank ends because of an error in one group, and is waited for in another: that error is told, however many ends lie between.

use std::time::Duration;

use smddp_core::{Communicator, DType, Error, Options};

use crate::common::PATIENCE;
use crate::common::group::{group, world};
use crate::common::procs::{Me, start};

const SIZE: usize = 4;
/// Rank 1 waits for a message.
const MESSAGE: &str = "SMDDP_TEST_MESSAGE";
/// Each rank is a node of its own, and leaves where others are killed: between nodes a process that is killed tells nothing.
const APART: [(&str, &str); 2] = [("SMDDP_NODE", "node {rank}"), ("SMDDP_SOCKET_IFNAME", "=lo")];

fn fail(comm: &Communicator) -> Error {
    comm.barrier(Options::default()).unwrap_err()
}

fn receive(comm: &Communicator) -> Error {
    let mut into = [0f32];
    // SAFETY: it outlives the call, which has ended when this returns.
    let work = unsafe { comm.recv(into.as_mut_ptr().cast(), 1, DType::F32, Some(1), 0, Options::default()) };
    work.unwrap().wait(None).unwrap_err()
}

/// Rank 2 is not to be had; 1 waits for it, 0 for 1, and 3 for 0, each in a group of its own, and each ends with its error.
pub(crate) fn rank(me: &Me) {
    let comm = world(me, PATIENCE);
    let pair = [1, 2].contains(&me.rank).then(|| group(me, "pair", &[1, 2], Duration::from_millis(200)));
    let last = [0, 3].contains(&me.rank).then(|| group(me, "last", &[0, 3], PATIENCE));
    me.say("ready");
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
    // By no means more than once: it was passed on as it was.
    assert_eq!(
        error.to_string().matches("the last error that it knew of").count(),
        usize::from(me.rank != 1),
        "{error}"
    );
    me.say(&error.to_string());
    if std::env::var(APART[0].0).is_ok() {
        me.get(&format!("leave {}", me.rank));
        smddp_core::shutdown();
        me.say("left");
    }
    me.get("over");
}

fn tells(environment: &[(&str, &str)], what: &str) {
    let mut ranks = start("consequence", SIZE, environment, PATIENCE);
    (0..SIZE).for_each(|rank| drop(ranks.hear(rank, "ready")));
    let cause = ranks.hear(1, what).text;
    assert!(cause.contains("on group `pair` Timed out"), "{cause}");
    for (dies, hears) in [(1, 0), (0, 3)] {
        if environment.starts_with(&APART) {
            ranks.put(&format!("leave {dies}"), "yes");
        } else {
            ranks.kill(dies);
        }
        let error = ranks.hear(hears, "barrier").text;
        assert!(error.contains(&format!("of group `pair`: {cause}")), "{error}");
    }
    // Whoever is left.
    for end in ["over", "leave 3"] {
        ranks.put(end, "yes");
    }
    ranks.finish([2, 3]);
}

#[test]
fn a_rank_that_ends_with_an_error_of_another_group_tells_it_to_all_who_wait_for_it() {
    tells(&[], "barrier");
}

#[test]
fn a_rank_that_ends_with_the_error_of_a_message_tells_it_to_all_who_wait_for_it() {
    tells(&[(MESSAGE, "1")], "recv");
}

#[test]
fn a_rank_that_leaves_after_an_error_tells_it_to_ranks_of_other_nodes_that_wait_for_it() {
    tells(&APART, "barrier");
    tells(&[&APART[..], &[(MESSAGE, "1")]].concat(), "recv");
}
