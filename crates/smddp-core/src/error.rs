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
    #[error("{operation} on group `{group}` Timed out waiting {}ms: {detail}", .after.as_millis())]
    Timeout {
        /// Operation: "all_reduce (#61)".
        operation: String,
        /// Name of the group.
        group: String,
        /// Time limit of the call.
        after: Duration,
        /// Ranks that have not begun the operation, or do not answer.
        missing: Vec<usize>,
        /// State of the other ranks, and a remedy.
        detail: String,
    },
    /// Two ranks made different calls.
    #[error("{operation} on group `{group}` does not match: {detail}")]
    Mismatch {
        /// Operation: "all_reduce (#61)".
        operation: String,
        /// Name of the group.
        group: String,
        /// Rank of the other call.
        rank: usize,
        /// Both calls with their values.
        detail: String,
    },
    /// A rank's process ended, or it left the group, while it was still needed.
    #[error("{operation} on group `{group}` failed: {peer} {reason}; {remedy}")]
    PeerLost {
        /// Operation: "all_reduce (#61)".
        operation: String,
        /// Name of the group.
        group: String,
        /// The lost rank.
        rank: usize,
        /// The rank with its host and process: "rank 3 (host h1, pid 812)".
        peer: String,
        /// Cause of the loss, as a predicate.
        reason: String,
        /// Remedy.
        remedy: &'static str,
    },
    /// Data changed in transit between two ranks, or the results of ranks differ (`SMDDP_AUDIT`).
    #[error("{operation} on group `{group}` failed: {detail}")]
    Corrupted {
        /// Operation: "all_reduce (#61)".
        operation: String,
        /// Name of the group.
        group: String,
        /// Sender of the data, or the ranks whose results differ.
        ranks: Vec<usize>,
        /// Place of the corruption, and a remedy.
        detail: String,
    },
    /// Ranks wait for each other in a cycle.
    #[error("{operation} on group `{group}` cannot end: {detail}")]
    Deadlock {
        /// Operation: "all_reduce (#61)".
        operation: String,
        /// Name of the group.
        group: String,
        /// Rank that the operation waits for.
        rank: usize,
        /// The cycle with the call and the Python line of each rank, and a remedy.
        detail: String,
    },
    /// The communicator was aborted or closed by this process.
    #[error("group `{group}` is closed: {reason}; create a new group to continue")]
    Closed {
        /// Name of the group.
        group: String,
        /// Reason of the end.
        reason: String,
    },
    /// The ranks cannot form a group, for example because they cannot reach each other.
    #[error("{0}")]
    Topology(String),
    /// An invalid setting.
    #[error("{0}")]
    Config(String),
    /// A signal arrived during a wait; the operation continues.
    #[error("a signal interrupted the wait; the operation continues")]
    Interrupted,
    /// The group was created before a fork; the child cannot use it.
    #[error(
        "group `{group}` was created before this process was forked: a forked child (a DataLoader worker?) cannot use its \
         parent's communicators; create a new group in the child, or move the collective to the parent"
    )]
    Forked {
        /// Name of the group.
        group: String,
    },
    /// A system call failed, or a resource is missing.
    #[error("{operation}: {reason}")]
    System {
        /// The failed action.
        operation: String,
        /// Error of the operating system or the device.
        reason: String,
    },
}

impl Error {
    /// Names the user's call that consists of several operations: "split #3 (all_gather #3)".
    pub(crate) fn within(mut self, call: &str) -> Self {
        if let Self::Timeout { operation, .. }
        | Self::Mismatch { operation, .. }
        | Self::PeerLost { operation, .. }
        | Self::Corrupted { operation, .. }
        | Self::Deadlock { operation, .. } = &mut self
        {
            *operation = format!("{call} ({operation})");
        }
        self
    }
}

/// Result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
