//! Promises about collectives on device memory, over the fake driver: in a checked world, right results and no access that no
//! wait orders; between real processes, the same results.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod common;

mod collectives;
mod failures;
mod order;
mod processes;
mod rank;
#[path = "../../../smddp-cuda/tests/common/world.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod world;

/// Not a promise of its own: the entry of the processes that other tests start. Without a role it has nothing to do and
/// passes.
#[test]
fn rank_process() {
    if let Some(me) = common::procs::Me::role() {
        processes::rank(&me);
    }
}
