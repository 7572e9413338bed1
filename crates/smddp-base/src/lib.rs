//! Shared utilities: fork detection, sockets that a forked child does not keep, locks, threads, random bytes and log
//! texts.
#![warn(missing_docs, clippy::missing_errors_doc)]

mod close_on_fork;
pub mod fork;
mod lock;
pub mod random;
pub mod threads;
pub mod warning;

pub use close_on_fork::CloseOnFork;
pub use lock::lock;
