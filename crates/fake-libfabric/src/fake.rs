//! Root of the simulated library, which `build.rs` compiles separately. See `lib.rs`.

#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks,
    reason = "implementation of a C interface; every function has the contract of its manual page"
)]
#![allow(dead_code, reason = "the types include structures that only the bindings use")]

mod calls;
mod create;
mod info;
mod knob;
mod knobs;
mod network;
mod objects;
mod port;
mod simulation;
mod table;
#[path = "../../libfabric-sys/src/types.rs"]
mod types;

use std::ffi::{c_char, c_int};

const EIO: c_int = 5;
const EAGAIN: c_int = 11;
const EINVAL: c_int = 22;
const ENOSYS: c_int = 38;
const ENOMEM: c_int = 12;
const ENODATA: c_int = 61;
const ENOPROTOOPT: c_int = 92;
const EAVAIL: c_int = 259;

#[unsafe(no_mangle)]
pub extern "C" fn fi_version() -> u32 {
    match simulation::Simulation::selected().get(knob::VERSION) {
        0 => 0x0002_0001,
        version => version as u32,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn fi_strerror(number: c_int) -> *const c_char {
    match number {
        ENODATA => c"No data available".as_ptr(),
        EIO => c"Input/output error".as_ptr(),
        _ => c"some error".as_ptr(),
    }
}

/// A zeroed value: a function table without functions.
const fn none<T>() -> T {
    unsafe { std::mem::zeroed() }
}
