//! Rendezvous of ranks without torch.
//!
//! The launcher's environment gives the rank of each process ([`LaunchEnvironment`]). Rank 0 serves a key-value store at
//! the rendezvous address ([`Rendezvous`]), through which the ranks create their group ([`join`]).

#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc, clippy::missing_panics_doc)]

mod error;
mod launch;
mod protocol;
mod rendezvous;
mod server;
mod store;

pub use error::{Error, Result};
pub use launch::{LaunchEnvironment, RendezvousAddress};
pub use rendezvous::{JoinedWorld, PrefixStore, Rendezvous, StoreClient, join};
pub use server::Server;
#[cfg(any(test, fuzzing))]
pub use server::fuzzing;
