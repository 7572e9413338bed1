//! A group: shared memory inside a node, a wire between nodes where there are several.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod group;
mod join;
mod means;
mod offer;
mod reach;
mod scripted;
mod simulated;

pub use group::Group;
pub use join::{JoinError, Joined, OpenEndpoint, Prepared};
pub use means::{Between, Means};
pub use offer::may_have_efa;
pub use reach::{Reach, Wired};
pub use scripted::WireScript;
pub use simulated::simulated;
