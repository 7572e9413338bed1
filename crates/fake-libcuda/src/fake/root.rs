//! See `lib.rs`. Compiled by `build.rs` as a library of its own.

#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    clippy::too_many_arguments,
    reason = "C's interface from its other side; every function has the contract of the driver's documentation"
)]
#![allow(dead_code, reason = "the types are all that the real table knows")]

#[path = "../../../smddp-cuda/src/driver/types.rs"]
mod types;

mod basics;
mod check;
mod clock;
mod history;
mod memory;
mod modules;
mod numbers;
mod operation;
mod os;
mod shadow;
mod sharing;
mod state;
mod streams;
mod tell;
mod views;
mod vmm;
mod words;
