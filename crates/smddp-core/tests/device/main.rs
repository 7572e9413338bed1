//! Guarantees of collectives on device memory, over the fake driver. A checked world reports every unordered access;
//! real processes must get the same results.

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

/// Entry point of the processes that other tests start, not a test. Passes without a role.
#[test]
fn rank_process() {
    if let Some(me) = common::procs::RankProcess::role() {
        processes::rank(&me);
    }
}
