//! Basis of several crates: the description of a call, faults and messages, which all transports share; fork
//! detection, sockets that a forked child does not keep, locks, threads, random bytes and log texts.
#![deny(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

mod call;
#[allow(unsafe_code)]
mod close_on_fork;
mod fault;
#[allow(unsafe_code)]
pub mod fork;
mod host;
mod lock;
#[allow(unsafe_code)]
pub mod p2p;
pub mod random;
pub mod threads;
pub mod warning;

pub use call::{CallFingerprint, Channels, Mismatch, RecvChannel, SendChannel};
pub use close_on_fork::CloseOnFork;
pub use fault::{Fault, MAX_ABORT_REPORT};
pub use host::host_name;
pub use lock::lock;
pub use p2p::{Envelope, MessageId, MessageTransport};
