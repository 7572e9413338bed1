//! Claims of processes on the ranks of a group, in the group's store. They outlive the creation of the group. A
//! rank that leaves in order deletes its own claim.
//!
//! Only initial groups have claims: any other group is created by processes of a group that has them.

use smddp_group::bootstrap::{Holder, RankTree};

use super::store::{Deletion, Store};
use crate::error::{Error, Result};

fn key(rank: usize) -> String {
    format!("smddp/held/{rank}")
}

/// Stores the claim of this process on `rank` and returns its deletion. `record`: its address record.
pub(super) fn claim(store: &dyn Store, rank: usize, record: &[u8]) -> Result<Option<Deletion>> {
    store.set(&key(rank), record)?;
    Ok(store.deletion(&key(rank), record))
}

/// Returns the other process that joined the group as `rank` before, if it may still hold the rank.
pub(super) fn holder(store: &dyn Store, rank: usize, tree: &RankTree) -> Result<Option<Holder>> {
    let key = key(rank);
    let held = store.has(std::slice::from_ref(&key))?;
    Ok(if held { tree.holder(&store.get(&key)?) } else { None })
}

/// Maximum number of ranks whose claims are examined before a process is rejected.
const EXAMINED: usize = 64;

/// Returns the other process that holds `rank`. `None` if one of the first ranks of its group has left: a group
/// with a dead rank does not continue, so its restart is not rejected.
pub(super) fn running(
    store: &dyn Store,
    rank: usize,
    size: usize,
    tree: &RankTree,
) -> Result<Option<String>> {
    let Some(Holder::Open(process)) = holder(store, rank, tree)? else { return Ok(None) };
    for other in (0..size.min(EXAMINED)).filter(|&other| other != rank) {
        if holder(store, other, tree)?.is_none() {
            return Ok(None);
        }
    }
    Ok(Some(process))
}

/// Error of the call `call` in a process whose rank process `holder` holds.
pub(super) fn refused((call, name): (&str, &str), rank: usize, holder: &str, tree: &RankTree) -> Error {
    let mine = tree.process();
    Error::Topology(format!(
        "{call} failed: two processes claim rank {rank} of group '{name}': {holder}, which has joined the group and still holds \
         the rank, and {mine}, which started later. The existing group continues. Start one process per rank (RANK), or use \
         another store for another job"
    ))
}

/// Part of the error of a deadline that names the process that holds a missing rank.
pub(super) fn still_held(rank: usize, holder: &str) -> String {
    format!(
        ". {holder} has joined the group as rank {rank} before: a new process of that rank is refused while it runs"
    )
}

/// Part of the error of a deadline that names the process that joined as `rank` before this one.
pub(super) fn joined_before(rank: usize, holder: &str) -> String {
    format!(
        ". {holder} has joined the group as rank {rank} before this process: if it still runs, start this process with \
         another rank or over another store"
    )
}
