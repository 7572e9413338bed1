//! Guarantees of the engine: error handling, concurrency, and every type and size.
//!
//! This is one binary. Ranks that must be real processes are further instances of it (see `common/procs.rs`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../common/mod.rs"]
mod common;

mod algorithms;
mod audit;
mod bits;
mod bootstrap;
mod busy;
mod canonical;
mod deadline;
mod death;
mod departure;
mod descriptor_limit;
mod error_propagation;
mod float_modes;
mod fork;
mod formats;
mod groups;
mod identity;
mod kill;
mod late_rank;
mod matrix;
mod memory_after_error;
mod mismatch;
mod missing;
mod multiple_deaths;
mod overlap;
mod p2p;
mod panics;
mod probe;
mod repeats;
mod single_copy;
mod slow_exit;
mod soak;
mod stale_data;
mod symmetric;
mod threads;
mod types;
mod unreceived;
mod waits;
mod window;

use common::procs::RankProcess;

/// Entry point of the processes that the other tests start, not a test. Passes without a role.
#[test]
fn rank_process() {
    let Some(me) = RankProcess::role() else { return };
    match me.role.as_str() {
        "error_propagation" => error_propagation::rank(&me),
        "slow_exit" => slow_exit::rank(&me),
        "float_modes" => float_modes::rank(&me),
        "fork" => fork::rank(&me),
        "departure" => departure::rank(&me),
        "overlap" => overlap::rank(&me),
        "p2p" => p2p::rank(&me),
        "audit" => audit::rank(&me),
        "averages" => types::averages(&me),
        "algorithm" => algorithms::rank(&me),
        "canonical" => canonical::rank(&me),
        "sibling" => canonical::sibling(&me),
        "formats" => formats::rank(&me),
        "alone" => groups::alone(&me),
        "groups" => groups::many(&me),
        "multiple_deaths" => multiple_deaths::rank(&me),
        "single_copy" => single_copy::rank(&me),
        "soak" => soak::rank(&me),
        "stale_data" => stale_data::rank(&me),
        "probe" => probe::rank(&me),
        "kill" => kill::rank(&me),
        "descriptor_limit" => descriptor_limit::rank(&me),
        other => panic!("no role `{other}`"),
    }
}
