//! Shared memory between the processes of one node.
//!
//! Each process owns one sealed memfd: control blocks (headers, small payload, states) and a staging pool. Peers receive its
//! descriptor over an abstract unix socket. Nothing has a name in a file system, and nothing outlives the processes.

#![deny(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

mod cache_distance;
mod channel_table;
mod channels;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
mod local_ranks;
#[cfg(test)]
#[allow(unsafe_code)]
mod malformed_tests;
mod messages;
mod prepare;
mod rank_address;
mod recv_targets;
mod shared_page;

pub use channels::{LocalChannels, ZeroCopySource};
pub use prepare::{Prepared, Unreachable};
pub use rank_address::RankAddress;
pub use shared_page::SharedPage;
pub use smddp_process::layout::HEADER_PAYLOAD_BYTES;
