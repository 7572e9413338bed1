//! A group whose ranks are on several nodes: shared memory inside a node, a wire between nodes, one link.

mod join;
mod link;
mod route;

pub use join::{Between, JoinError, Joined, Means, Prepared};
