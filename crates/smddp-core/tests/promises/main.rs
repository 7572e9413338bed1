//! What the engine promises when things go wrong, when many things go on at once, and for every type and size.
//!
//! One binary: ranks that must be real processes are this binary started again (see `common/procs.rs`).

#[path = "../common/mod.rs"]
mod common;

mod deadline;
mod death;
mod fork;
mod kill;
mod leaving;
mod mismatch;
mod p2p;
mod threads;

use common::procs::Me;

/// Not a promise of its own: the entry of the processes that the other tests start. Without a role it has nothing
/// to do and passes.
#[test]
fn rank_process() {
    let Some(me) = Me::role() else { return };
    match me.role.as_str() {
        "fork" => fork::rank(&me),
        "leaving" => leaving::rank(&me),
        "p2p" => p2p::rank(&me),
        "kill" => kill::rank(&me),
        other => panic!("no role `{other}`"),
    }
}
