//! Reasons why an operation cannot complete.

use crate::{CallFingerprint, Mismatch};

/// Maximum length of an abort report in bytes.
pub const MAX_ABORT_REPORT: usize = 2000;

/// Reason why an operation with a rank cannot complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process ended without leaving the group.
    Lost {
        /// Rank in the group.
        rank: usize,
        /// The end of the process in words: the rest of a sentence that begins with the rank's name.
        how: String,
    },
    /// This process cannot reach the rank because of a local limit or permission. The rank itself may be healthy.
    Unreachable {
        /// Rank in the group.
        rank: usize,
        /// Reason, for error messages.
        reason: String,
    },
    /// The rank left the group (closed it or exited in good order).
    Left {
        /// Rank in the group.
        rank: usize,
    },
    /// The rank aborted the group and reported the reason.
    Aborted {
        /// Rank in the group.
        rank: usize,
        /// Its report.
        reason: String,
    },
    /// Data from the rank changed between its checksum at the sender and its check at the receiver.
    Corrupted {
        /// Rank in the group.
        rank: usize,
        /// Description of the data and of the difference.
        detail: String,
    },
    /// Operation `seq`, which needed nothing of that rank, has ended here, and the rank made another call in its place.
    Mismatch {
        /// Sequence number of the operation.
        seq: u64,
        /// Fingerprint of this rank's call.
        mine: CallFingerprint,
        /// The other rank's call.
        found: Mismatch,
    },
}
