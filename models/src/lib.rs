//! The files of the crates that order memory, over words that loom watches.
//!
//! A model is a few threads. loom runs it once for each way in which they, and the memory between them, may take turns. Each
//! model is also run over words that are weaker than those that the code asks for: then it must fail, or it would prove nothing.

#![cfg(test)]
#![allow(dead_code, unused_imports, reason = "no model needs all of a file")]

/// `layout.rs` counts with it; nothing here does.
const LONGEST_WHY: usize = 1000;
#[path = "../../crates/smddp-transport/src/process/layout.rs"]
mod layout;
mod weak;

pub(crate) use weak::error;

// The same files over each kind of words.
mod loads_relaxed;
mod right;
mod stores_relaxed;
mod unfenced;

// The models.
mod bell;
mod cells;
mod finish;
mod slot;
mod turns;

use std::process::{Command, Stdio};

/// Switches of threads that nothing forces; enough for all that two or three threads can do to each other here.
const SWITCHES: usize = 3;

fn model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(SWITCHES);
    builder.check(body);
}

/// The model finds out that something is broken. In a process of its own, because loom may not survive what it finds.
fn fails(name: &str, model: fn()) {
    const WHICH: &str = "MODEL_THAT_FAILS";
    match std::env::var(WHICH) {
        Ok(wanted) if wanted == name => {
            model();
            std::process::exit(0);
        }
        Ok(_) => {}
        Err(_) => {
            let test = std::thread::current().name().unwrap().to_owned();
            let mut again = Command::new(std::env::current_exe().unwrap());
            again.args([&test, "--exact"]).env(WHICH, name).stdout(Stdio::null()).stderr(Stdio::null());
            assert!(!again.status().unwrap().success(), "{name}: a broken order goes unnoticed");
        }
    }
}
