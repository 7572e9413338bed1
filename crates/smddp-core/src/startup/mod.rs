//! Making a group: ranks meet over a store, exchange cards, connect, and learn what the network between them is like.

mod bootstrap;
mod claims;
mod pending;
mod probe;
mod siblings;
mod size;
mod split;
mod store;

pub use bootstrap::Known;
pub use pending::Pending;
pub use size::{MAX_RANKS, check_size};
pub use store::{Deletion, Store};
