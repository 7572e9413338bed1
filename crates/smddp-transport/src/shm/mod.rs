//! Shared memory between the processes of one node.
//!
//! Each process owns one sealed memfd: control blocks (headers, small payload, states) and a staging pool. It is
//! handed to peers over an abstract unix socket; nothing has a name in a file system and nothing outlives the
//! processes.

mod board;
mod callers;
mod card;
mod control;
mod distance;
mod endpoint;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod handshake;
mod layout;
mod mail;
mod memory;
mod near;
#[cfg(test)]
mod nonsense_tests;
mod order;
mod owner;
mod place;
mod pool;
mod service;
mod sleeper;
mod sync;

pub(crate) use card::Id;
pub use card::{Card, CardError, PROTOCOL};
pub use endpoint::Endpoint;
pub(crate) use endpoint::{Bell, random};
pub use layout::SLOT_BYTES;
pub use near::{Near, Prepared, Unreachable};
pub(crate) use owner::Owner;
pub(crate) use pool::Region;
pub use sleeper::Sleeper;
