//! A group: shared memory within a node, and a wire between nodes if there are several.

mod facts;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod group;
mod health;
mod join;
mod messages;
mod options;
mod routes;
mod scripted;
mod simulated;
mod transports;

pub use facts::{AbortReport, CallMismatch, Facts, Liveness, QueryAnswer, RankFacts};
pub use group::Group;
pub use health::Health;
pub use join::{JoinError, Joined, OpenEndpoint, Prepared};
pub use options::{InterNode, TransportOptions};
pub use routes::{RoutedChannels, Routes};
pub use scripted::WireScript;
pub use simulated::simulated;
pub use transports::may_have_efa;
