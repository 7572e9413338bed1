//! Operations that wait, as the failure monitor evaluates them. Plain data.

use std::time::{Duration, Instant};

use smddp_base::CallFingerprint;
use smddp_plan::Collective;

use crate::call::{fingerprint, numbered};
use crate::error::Error;

/// A pending collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PendingCall {
    pub(crate) collective: Collective,
    pub(crate) seq: u64,
    pub(crate) fingerprint: CallFingerprint,
    /// Time of the submission, or of the first observation after it.
    pub(crate) since: Instant,
    pub(crate) timeout: Duration,
    /// The call has published its fingerprint.
    pub(crate) begun: bool,
}

impl PendingCall {
    pub(crate) fn name(&self) -> String {
        match self.is_leaving() {
            true => fingerprint::call(self.fingerprint),
            false => numbered(self.collective, self.seq),
        }
    }

    /// Returns true if this is the call by which the rank leaves the group.
    pub(crate) fn is_leaving(&self) -> bool {
        fingerprint::is_leaving(self.fingerprint)
    }

    pub(crate) fn is_expired(&self, now: Instant) -> bool {
        now.duration_since(self.since) >= self.timeout
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.since.checked_add(self.timeout)
    }
}

/// A send or recv that is past its deadline, or in which a thread waits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PendingMessage {
    /// Index among all sends and recvs of this rank.
    pub(crate) number: u64,
    /// "send #3 to rank 1 (5 elements of float32, tag 0)".
    pub(crate) description: String,
    /// `None` for a recv from any rank.
    pub(crate) peer: Option<usize>,
    /// The message is announced or matched: its transfer may be in progress.
    pub(crate) begun: bool,
    pub(crate) timeout: Duration,
}

/// A send or recv in which a thread waits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WaitedMessage {
    pub(crate) message: PendingMessage,
    /// Begin of the wait.
    pub(crate) since: Instant,
    /// Transferred bytes.
    pub(crate) moved: usize,
}

/// Messages of this rank with a rank that has left or leaves the group.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PeerMessages {
    pub(crate) rank: usize,
    /// A pending message cannot complete without the rank.
    pub(crate) needed: bool,
    /// A recv awaits a message from the rank.
    pub(crate) awaited: bool,
    /// Description of the first message from the rank without a matching recv.
    pub(crate) unexpected: Option<String>,
    /// Error for a message from the rank whose tag differs from that of the recv that waits for it.
    pub(crate) wrong_tag: Option<Error>,
}

/// Pending sends and recvs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PendingMessages {
    /// A send or recv is pending.
    pub(crate) any: bool,
    /// Name of the pending message that was posted first. Filled if a fault is known.
    pub(crate) oldest: Option<String>,
    /// Messages with ranks that have left or leave, by ascending rank.
    pub(crate) departed: Vec<PeerMessages>,
    /// Ranks that may lack a recv for a message of this rank. Filled while this rank leaves, and after a mismatch.
    pub(crate) unconfirmed: Vec<usize>,
    pub(crate) expired: Vec<PendingMessage>,
    /// Earliest deadline of a message.
    pub(crate) deadline: Option<Instant>,
    /// The longest wait of a thread in a message.
    pub(crate) waited: Option<WaitedMessage>,
}

/// Everything that this rank waits for at the time of an observation.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Pending {
    /// The active collective.
    pub(crate) call: Option<PendingCall>,
    /// Collectives whose work is completely on a device.
    pub(crate) on_device: Vec<PendingCall>,
    pub(crate) messages: PendingMessages,
    /// The last poll moved data, perhaps from ranks that have left.
    pub(crate) moving: bool,
    /// The last poll advanced a collective.
    pub(crate) advanced: bool,
}

impl Pending {
    /// Returns the name of the oldest operation, as errors name it.
    pub(crate) fn oldest(&self) -> String {
        match (&self.call, self.on_device.first()) {
            (Some(call), _) | (None, Some(call)) => call.name(),
            (None, None) => self.messages.oldest.clone().unwrap_or_else(|| "send or recv".to_owned()),
        }
    }

    /// Returns the messages with a rank that has left or leaves.
    pub(crate) fn with(&self, rank: usize) -> Option<&PeerMessages> {
        let departed = &self.messages.departed;
        Some(&departed[departed.binary_search_by_key(&rank, |messages| messages.rank).ok()?])
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.call.as_ref().is_some_and(PendingCall::is_leaving)
    }
}
