//! Facts about the other ranks of a group, as plain data. The transports fill them; the failure monitor evaluates them.

use std::sync::Arc;
use std::time::Duration;

use smddp_base::{CallFingerprint, Mismatch};

/// Observed state of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankFacts {
    /// The rank is on this node.
    pub is_local: bool,
    /// Last known state of the rank.
    pub liveness: Liveness,
    /// Report with which the rank aborted the group.
    pub abort: Option<AbortReport>,
    /// Data from the rank changed in transit to this rank: a description of the data and of the difference.
    pub corrupted: Option<Arc<str>>,
    /// True if the rank has begun the observed operation or a later one; `None`: unknown.
    pub arrived: Option<bool>,
    /// Ranks of this node only: the rank has completed the observed operation.
    pub completed: bool,
    /// Fingerprint of the observed operation at the rank, if that is among the operations that it has begun most
    /// recently.
    pub fingerprint: Option<CallFingerprint>,
    /// The observed operation cannot end without the rank, which is not known to have begun it.
    pub missing: bool,
    /// Remote ranks only: the observed operation cannot end before the rank has accepted this rank's data.
    pub undelivered: bool,
    /// Remote ranks only: the operation in progress waits for data of the rank, or until the rank accepts data.
    pub awaited: bool,
    /// Remote ranks only: the rank announces no further messages. Payload of announced messages may still be pending.
    pub messages_announced: bool,
    /// Last error that the process recorded, and its age; the text names the rank that had it. Filled for ranks that
    /// are not alive.
    pub last_error: Option<(Duration, Arc<str>)>,
    /// Result of the last query of the rank.
    pub answer: Option<QueryAnswer>,
    /// Activity that the rank reported when it was queried last.
    pub activity: Option<Arc<str>>,
    /// Largest packet payload to the rank, in bytes, if the rank does not acknowledge data. Filled at the end of a
    /// query.
    pub unacknowledged: Option<u32>,
}

/// Last known state of a rank. A loss takes precedence over the other states.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Liveness {
    /// No departure, loss or unreachability of the rank is known.
    #[default]
    Alive,
    /// The rank left the group (closed it or exited in good order).
    Left,
    /// This process cannot reach the rank because of a local limit or permission. The rank itself may be healthy.
    Unreachable {
        /// Description of the limit or permission.
        reason: String,
    },
    /// The process ended without leaving the group. Losses are ordered by `order`: the first one found is the lowest.
    Lost {
        /// Position in the order in which losses were found.
        order: usize,
        /// Description of the loss.
        reason: String,
    },
}

/// Report of a rank that aborted the group.
#[derive(Clone, Debug, PartialEq)]
pub struct AbortReport {
    /// Abort reason that the rank reported.
    pub report: Arc<str>,
    /// The rank ended the observed operation before it aborted the group.
    pub is_later: bool,
}

/// Result of the query of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryAnswer {
    /// The process replied.
    Replied,
    /// Local ranks only: a signal or a debugger has stopped the process.
    Stopped,
    /// The host of the process received the query, but the process did not reply.
    ProcessUnresponsive,
    /// The host did not reply.
    HostSilent,
}

/// Different call of another rank in operation `seq`. The operation did not depend on that rank, and has ended here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallMismatch {
    /// Sequence number of the operation.
    pub seq: u64,
    /// Fingerprint of the call that this rank made.
    pub mine: CallFingerprint,
    /// Fingerprint of the call that the other rank made.
    pub found: Mismatch,
}

/// One observation of a group.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Observed operation.
    pub seq: u64,
    /// State of each rank, by rank.
    pub ranks: Vec<RankFacts>,
    /// Different calls in operations that have ended here.
    pub mismatches: Vec<CallMismatch>,
    /// A query of ranks is in progress.
    pub is_querying: bool,
}

impl Facts {
    /// Returns true if a rank is lost, unreachable, has left or aborted the group, made a different call, or sent
    /// corrupted data.
    #[must_use]
    pub fn has_faults(&self) -> bool {
        let is_faulty = |rank: &RankFacts| {
            rank.liveness != Liveness::Alive || rank.abort.is_some() || rank.corrupted.is_some()
        };
        !self.mismatches.is_empty() || self.ranks.iter().any(is_faulty)
    }

    /// Returns the lost ranks with the reasons, in the order in which they were found.
    #[must_use]
    pub fn lost(&self) -> Vec<(usize, &str)> {
        let mut lost: Vec<(usize, usize, &str)> = Vec::new();
        for (rank, facts) in self.ranks.iter().enumerate() {
            if let Liveness::Lost { order, reason } = &facts.liveness {
                lost.push((*order, rank, reason));
            }
        }
        lost.sort_unstable();
        lost.into_iter().map(|(_, rank, reason)| (rank, reason)).collect()
    }
}
