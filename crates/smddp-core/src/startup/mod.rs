//! Making a group: ranks meet over a store, exchange cards, connect, and learn what the network between them is like.

mod bootstrap;
mod claims;
mod pending;
mod probe;
mod siblings;
mod size;
mod split;

pub use bootstrap::{Known, Store};
pub use pending::Pending;
pub use size::{MAX_RANKS, check_size};
