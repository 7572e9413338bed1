//! Group creation: ranks join over a store, exchange their rank information, connect, and measure the network.

mod claims;
mod network_probe;
mod pending;
mod rank_exchange;
mod siblings;
mod size;
mod split;
mod store;

pub use pending::Pending;
pub use rank_exchange::ParentGroup;
pub use size::{MAX_RANKS, check_size};
pub use store::{Deletion, Store};
