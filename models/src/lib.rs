//! Models of the source files that order memory, over loom's atomic types.
//!
//! A model has a few threads. loom runs it for every interleaving of the threads and every allowed memory
//! order. Each model also runs with weaker orders than the code requests. It must fail there, otherwise it
//! would prove nothing.

#![cfg(test)]
#![allow(dead_code, unused_imports, reason = "no model needs all of a file")]

// `layout.rs` imports a constant from there.
extern crate self as smddp_base;

/// Constant that `layout.rs` needs for sizes; the models do not use it.
pub const MAX_ABORT_REPORT: usize = 1000;
#[path = "../../crates/smddp-process/src/layout.rs"]
mod layout;
mod weak;

pub(crate) use weak::error;

// The same source files over each kind of atomic types.
mod loads_relaxed;
mod right;
mod stores_relaxed;
mod unfenced;

// The models.
mod doorbell;
mod finish;
mod header;
mod job_gate_model;
mod ownership_model;
mod raised_means_over;
mod slots;

use std::process::{Command, Stdio};

/// Maximum preemptions per execution; sufficient for all interactions of two or three threads here.
const SWITCHES: usize = 3;

fn model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(SWITCHES);
    builder.check(body);
}

/// Checks that a model detects an error. It runs in a separate process, because loom may not survive the
/// error.
fn fails(name: &str, model: fn()) {
    const SELECTED: &str = "MODEL_THAT_FAILS";
    match std::env::var(SELECTED) {
        Ok(wanted) if wanted == name => {
            model();
            std::process::exit(0);
        }
        Ok(_) => {}
        Err(_) => {
            let test = std::thread::current().name().unwrap().to_owned();
            let mut again = Command::new(std::env::current_exe().unwrap());
            again.args([&test, "--exact"]).env(SELECTED, name).stdout(Stdio::null()).stderr(Stdio::null());
            assert!(!again.status().unwrap().success(), "{name}: the model does not detect a broken order");
        }
    }
}
