//! A group: shared memory within a node, and a wire between nodes if there are several.

#[cfg(any(test, feature = "testing"))]
pub(crate) mod fuzzing;
#[allow(unsafe_code)]
mod group;
mod health;
mod info;
mod join;
mod local_queries;
mod messages;
mod options;
mod probe_contacts;
mod routes;
#[allow(unsafe_code)]
mod scripted;
mod transports;

pub use group::{Group, RecvTarget};
pub use health::Health;
pub use info::GroupInfo;
pub use join::{JoinError, Joined, OpenEndpoint, Prepared};
pub use messages::Messages;
pub use options::{InterNode, TransportOptions};
pub use probe_contacts::ProbeContacts;
pub use routes::{RoutedChannels, Routes};
pub use scripted::WireScript;
pub use transports::may_have_efa;
