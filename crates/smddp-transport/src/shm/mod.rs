//! Shared memory between the processes of one node.
//!
//! Each process owns one sealed memfd: control blocks (headers, small payload, states) and a staging pool. Peers receive its
//! descriptor over an abstract unix socket. Nothing has a name in a file system, and nothing outlives the processes.

mod cache_distance;
mod channel_table;
mod channels;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod local_ranks;
#[cfg(test)]
mod malformed_tests;
mod messages;
mod prepare;
mod recv_targets;
mod shared_page;

pub use crate::process::layout::HEADER_PAYLOAD_BYTES;
pub use channels::{LocalChannels, ZeroCopySource};
pub use prepare::{Prepared, Unreachable};
pub use shared_page::SharedPage;
