//! Contracts between nodes: frames ([`frame`]) over a wire ([`wire::Wire`]), the handshake in which both ends prove that
//! they have the group's token, and the network interface that a process uses.
//!
//! A transport implements [`wire::Wire`] in a crate of its own. This crate has no thread and no connection.

#![warn(missing_docs)]

pub mod frame;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod handshake;
pub mod interface;
pub mod known_hosts;
pub mod socket_io;
pub mod token;
pub mod wire;

pub use token::Token;
