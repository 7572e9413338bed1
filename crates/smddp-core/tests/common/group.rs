//! Groups between rank processes, created over the test's store.

use std::time::Duration;

use smddp_core::{Communicator, Pending};

use super::procs::{RankProcess, from_hex, to_hex};

/// Creates the group `name` of these world ranks. Every member makes the same call.
pub(crate) fn group(me: &RankProcess, name: &str, members: &[usize], timeout: Duration) -> Communicator {
    let rank = members.iter().position(|&r| r == me.rank).unwrap();
    let mut pending = Pending::new(name, rank, members.len(), timeout).unwrap();
    me.put(&format!("{name}/{rank}"), &to_hex(&pending.rank_info()));
    let infos: Vec<Vec<u8>> = (0..members.len()).map(|r| from_hex(&me.get(&format!("{name}/{r}")))).collect();
    // No rank connects before every rank accepts connections.
    pending.trust(&infos[0]).unwrap();
    me.put(&format!("{name}/listens/{rank}"), "1");
    (0..members.len()).for_each(|r| drop(me.get(&format!("{name}/listens/{r}"))));
    pending.connect(&infos).unwrap()
}

/// Creates a group of all ranks of the test.
pub(crate) fn world(me: &RankProcess, timeout: Duration) -> Communicator {
    group(me, "world", &(0..me.size).collect::<Vec<_>>(), timeout)
}
