//! What a process has of its own, for all its groups: its memory and what is lent of it, its name, its bell, and whom it knows.

pub(crate) mod bell;
mod callers;
pub(crate) mod card;
mod control;
pub(crate) mod endpoint;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod handshake;
pub(crate) mod memory;
mod owner;
pub(crate) mod pool;
mod service;

pub(crate) use bell::Bell;
pub use bell::Sleeper;
pub(crate) use card::Id;
pub use card::{Card, CardError, PROTOCOL};
pub use endpoint::Endpoint;
pub(crate) use endpoint::random;
pub(crate) use owner::Owner;
pub(crate) use pool::Region;
