//! A group whose ranks are on several nodes: shared memory inside a node, a wire between nodes, one link.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod join;
mod link;
mod offer;
mod route;
mod simulated;
#[cfg(test)]
mod wiring_tests;

pub use join::{JoinError, Joined, Means, Prepared};
pub(crate) use offer::Offer;
pub use offer::{Between, may_have_efa};
pub(crate) use route::Routes;
pub use simulated::simulated;
