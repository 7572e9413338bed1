//! What a process has of its own, for all its groups: its memory and what is lent of it, its name, its bell, and whom it knows.

pub(crate) mod bell;
mod buffer;
pub(crate) mod callers;
mod control;
mod credentials;
mod deaths;
pub(crate) mod endpoint;
pub(crate) mod foreign;
mod frames;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod handshake;
pub(crate) mod last_error;
pub(crate) mod layout;
mod lending;
pub(crate) mod memory;
pub(crate) mod order;
mod owner;
pub(crate) mod peer;
pub(crate) mod pool;
pub(crate) mod questions;
mod room;
mod service;
mod symmetric;
mod sync;
mod trusted;
mod undisturbed;

pub use crate::token::PROTOCOL;
pub(crate) use bell::Bell;
pub use bell::Sleeper;
pub use buffer::{SymmetricBuffer, SymmetricUsage};
pub(crate) use credentials::{check_user, outer_uid};
pub use endpoint::Endpoint;
pub(crate) use endpoint::random;
pub use foreign::SingleCopy;
pub use frames::{frames_from, whereabouts};
pub(crate) use handshake::{Id, UnixAddress, listen};
pub use last_error::leave_error;
pub use lending::{Lent, Maker};
pub use memory::refused;
pub(crate) use owner::Owner;
pub(crate) use pool::Region;
pub use questions::{Question, answer_with};
pub use undisturbed::undisturbed;
