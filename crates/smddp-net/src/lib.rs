//! Contracts between nodes: frames ([`frame`]) over a wire ([`wire::Wire`]), the handshake in which both ends prove that
//! they have the group's token, and the network interface that a process uses.
//!
//! A transport implements [`wire::Wire`] in a separate crate. This crate has neither threads nor connections.

#![deny(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod frame;
#[cfg(any(test, feature = "testing"))]
#[allow(unsafe_code)]
pub mod fuzzing;
pub mod handshake;
pub mod interface;
pub mod known_hosts;
pub mod socket_io;
pub mod token;
#[allow(unsafe_code)]
pub mod wire;

pub use token::Token;
