//! Errors of the core. Texts name the failed call, the group, the peer and a remedy.

use std::time::Duration;

/// Error of a call. Cloneable, because the first cause that ends a communicator is the error of every later call.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid argument, found before any data moved; the communicator stays usable.
    #[error("{0}")]
    Invalid(String),
    /// A deadline has passed.
    #[error("{what} on group `{group}` Timed out waiting {}ms: {detail}", .after.as_millis())]
    Timeout { what: String, group: String, after: Duration, missing: Vec<usize>, detail: String },
    /// Two ranks made different calls.
    #[error("{what} on group `{group}` does not match: {detail}")]
    Mismatch { what: String, group: String, rank: usize, detail: String },
    /// A rank's process ended, or it left the group, while it was still needed.
    #[error("{what} on group `{group}` failed: {who} {how}; {advice}")]
    PeerLost { what: String, group: String, rank: usize, who: String, how: String, advice: &'static str },
    /// The communicator was aborted or closed by this process.
    #[error("group `{group}` is closed: {reason}")]
    Closed { group: String, reason: String },
    /// The ranks cannot form a group, for example because they cannot reach each other.
    #[error("{0}")]
    Topology(String),
    /// An invalid setting.
    #[error("{0}")]
    Config(String),
    /// A signal arrived during a wait; the operation continues.
    #[error("interrupted by a signal")]
    Interrupted,
    /// The group was created before a fork; the child cannot use it.
    #[error(
        "group `{group}` was created before this process was forked: a forked child (a DataLoader worker?) cannot use its \
         parent's communicators; create a new group in the child, or move the collective to the parent"
    )]
    Forked { group: String },
    /// A system call failed, or a resource is missing.
    #[error("{what}: {reason}")]
    System { what: String, reason: String },
}

pub type Result<T, E = Error> = std::result::Result<T, E>;
