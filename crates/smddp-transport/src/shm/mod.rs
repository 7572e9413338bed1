//! Shared memory between the processes of one node.
//!
//! Each process owns one sealed memfd: control blocks (headers, small payload, states) and a staging pool. It is
//! handed to peers over an abstract unix socket; nothing has a name in a file system and nothing outlives the
//! processes.

mod board;
mod channel;
mod distance;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod landing;
mod messages;
mod near;
#[cfg(test)]
mod nonsense_tests;
mod prepare;
mod ranks;

pub use crate::process::layout::SLOT_BYTES;
pub use board::Board;
pub use near::{Near, Stay};
pub use prepare::{Prepared, Unreachable};
