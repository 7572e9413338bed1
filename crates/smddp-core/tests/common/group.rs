//! Groups between rank processes, over the test's store.

use std::time::Duration;

use smddp_core::{Communicator, Pending};

use super::procs::{Me, from_hex, to_hex};

/// Makes the group `name` of these ranks of the world, with every member doing the same.
pub(crate) fn group(me: &Me, name: &str, members: &[usize], timeout: Duration) -> Communicator {
    let rank = members.iter().position(|&r| r == me.rank).unwrap();
    let mut pending = Pending::new(name, rank, members.len(), timeout).unwrap();
    me.put(&format!("{name}/{rank}"), &to_hex(&pending.card()));
    let cards: Vec<Vec<u8>> = (0..members.len()).map(|r| from_hex(&me.get(&format!("{name}/{r}")))).collect();
    // Nobody is called who does not hear yet.
    pending.trust(&cards[0]).unwrap();
    me.put(&format!("{name}/hears/{rank}"), "1");
    (0..members.len()).for_each(|r| drop(me.get(&format!("{name}/hears/{r}"))));
    pending.connect(&cards).unwrap()
}

/// All ranks of the test.
pub(crate) fn world(me: &Me, timeout: Duration) -> Communicator {
    group(me, "world", &(0..me.size).collect::<Vec<_>>(), timeout)
}
