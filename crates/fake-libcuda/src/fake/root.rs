//! Root of the library that `build.rs` compiles separately; see `lib.rs`.

#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    clippy::too_many_arguments,
    reason = "the implementing side of a C interface; every function has the contract of the driver's documentation"
)]
#![allow(dead_code, reason = "types.rs contains everything that smddp-cuda uses")]

#[path = "../../../smddp-cuda/src/driver/types.rs"]
mod types;

mod basics;
mod check;
mod clock;
mod copies;
mod history;
mod memory;
mod modules;
mod numbers;
mod operation;
mod os;
mod query;
mod queue;
mod shadow;
mod sharing;
mod state;
mod streams;
mod views;
mod vmm;
mod words;
