//! Transport of bytes between the ranks of one group.
//!
//! A [`Group`] is one rank's end of a communicator. It has shared memory with the ranks of its node, and a wire to the ranks of
//! other nodes if there are any.

#![deny(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

pub mod bootstrap;
#[allow(unsafe_code)]
mod channels;
mod facts;
#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
pub mod joint;
mod layout;
mod messages;
mod rank_info;
#[cfg(test)]
#[allow(unsafe_code)]
mod tcp_tests;

pub use channels::Carrier;
pub use facts::{AbortReport, CallMismatch, Facts, Liveness, QueryAnswer, RankFacts};
pub use joint::{Group, GroupInfo, Health, Messages, ProbeContacts, RecvTarget, RoutedChannels, Routes};
pub use rank_info::{RankInfo, RankInfoError};
pub use smddp_tcp::{links, status_query};
