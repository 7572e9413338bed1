//! What the engine promises when things go wrong, when many things go on at once, and for every type and size.
//!
//! One binary: ranks that must be real processes are this binary started again (see `common/procs.rs`).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../common/mod.rs"]
mod common;

mod algorithms;
mod bits;
mod bootstrap;
mod busy;
mod canonical;
mod consequence;
mod deadline;
mod death;
mod dying;
mod float_modes;
mod fork;
mod formats;
mod groups;
mod identity;
mod kill;
mod lacking;
mod late;
mod leaving;
mod matrix;
mod mismatch;
mod missing;
mod overlap;
mod p2p;
mod panics;
mod probe;
mod raised;
mod repeats;
mod several;
mod single_copy;
mod soak;
mod stale;
mod symmetric;
mod threads;
mod types;
mod unreceived;
mod window;

use common::procs::Me;

/// Not a promise of its own: the entry of the processes that the other tests start. Without a role it has nothing
/// to do and passes.
#[test]
fn rank_process() {
    let Some(me) = Me::role() else { return };
    match me.role.as_str() {
        "consequence" => consequence::rank(&me),
        "dying" => dying::rank(&me),
        "float_modes" => float_modes::rank(&me),
        "fork" => fork::rank(&me),
        "leaving" => leaving::rank(&me),
        "overlap" => overlap::rank(&me),
        "p2p" => p2p::rank(&me),
        "averages" => types::averages(&me),
        "algorithm" => algorithms::rank(&me),
        "canonical" => canonical::rank(&me),
        "sibling" => canonical::sibling(&me),
        "formats" => formats::rank(&me),
        "alone" => groups::alone(&me),
        "groups" => groups::many(&me),
        "several" => several::rank(&me),
        "single_copy" => single_copy::rank(&me),
        "soak" => soak::rank(&me),
        "stale" => stale::rank(&me),
        "probe" => probe::rank(&me),
        "kill" => kill::rank(&me),
        "lacking" => lacking::rank(&me),
        other => panic!("no role `{other}`"),
    }
}
