//! What can go wrong, said in full: what failed, on which group, with which peer, and what to try.

use std::time::Duration;

/// Errors of the core. Cloneable: the first cause that poisons a communicator is what every later call raises.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A bad argument, found before anything moved; the communicator stays usable.
    #[error("{0}")]
    Invalid(String),
    /// A deadline passed.
    #[error("{what} on group `{group}` Timed out waiting {}ms: {detail}", .after.as_millis())]
    Timeout { what: String, group: String, after: Duration, missing: Vec<usize>, detail: String },
    /// Two ranks made different calls.
    #[error("{what} on group `{group}` does not match: {detail}")]
    Mismatch { what: String, group: String, rank: usize, detail: String },
    /// A rank's process ended, or it left the group, while it was still needed.
    #[error("{what} on group `{group}` failed: {who} {how}; {advice}")]
    PeerLost { what: String, group: String, rank: usize, who: String, how: String, advice: &'static str },
    /// The communicator was aborted or closed here.
    #[error("group `{group}` is closed: {reason}")]
    Closed { group: String, reason: String },
    /// Ranks that cannot reach each other.
    #[error("{0}")]
    Topology(String),
    /// A bad setting.
    #[error("{0}")]
    Config(String),
    /// A signal arrived while waiting; the operation goes on.
    #[error("interrupted by a signal")]
    Interrupted,
    /// The group was made before a fork; the child cannot use it.
    #[error(
        "group `{group}` was made before this process was forked: a forked child (a DataLoader worker?) cannot use its \
         parent's communicators; make a group of its own in the child, or move the collective to the parent"
    )]
    Forked { group: String },
    /// The system refused something.
    #[error("{what}: {reason}")]
    System { what: String, reason: String },
}

pub type Result<T, E = Error> = std::result::Result<T, E>;
