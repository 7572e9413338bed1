//! Recorded entries with the meaning of their fingerprints.

use super::RecordedCall;
use super::ring::{Entry, Outcome, Ring};
use crate::call::fingerprint;
use crate::call::message_label::MessageLabel;

#[derive(Clone, Copy)]
pub(super) enum RecorderSnapshot {
    Collective(Entry),
    Message(Entry),
}

impl RecorderSnapshot {
    pub(super) fn entry(&self) -> &Entry {
        match self {
            Self::Collective(entry) | Self::Message(entry) => entry,
        }
    }

    /// Returns the number of the call.
    pub(super) fn recorded_call(&self) -> RecordedCall {
        match self {
            Self::Collective(entry) => RecordedCall::Collective(entry.seq),
            Self::Message(entry) => RecordedCall::Message(entry.seq),
        }
    }

    /// Returns true for the call by which a rank leaves. Earlier calls are more informative.
    fn is_leaving(&self) -> bool {
        matches!(self, Self::Collective(entry) if fingerprint::is_leaving(entry.fingerprint))
    }

    /// Sort key of the most informative last call: calls of the program first, then by time.
    pub(super) fn order(&self) -> (bool, u64) {
        (!self.is_leaving(), self.entry().ended)
    }

    /// Name and number: "all_reduce #1531", "send #3 to rank 1", or the call by which a rank leaves.
    pub(super) fn call_name(&self) -> String {
        match self {
            Self::Collective(entry) => match fingerprint::collective(entry.fingerprint) {
                Some(collective) if !fingerprint::is_leaving(entry.fingerprint) => {
                    crate::call::numbered(collective, entry.seq)
                }
                _ => fingerprint::call(entry.fingerprint),
            },
            Self::Message(entry) => {
                MessageLabel::of(entry.fingerprint).map_or_else(|| self.call(), |label| label.numbered())
            }
        }
    }

    /// Label of a send or recv.
    pub(super) fn message(&self) -> Option<MessageLabel> {
        match self {
            Self::Collective(_) => None,
            Self::Message(entry) => MessageLabel::of(entry.fingerprint),
        }
    }

    /// Call with its dtype and element count.
    pub(super) fn call(&self) -> String {
        match self {
            Self::Collective(entry) => fingerprint::call(entry.fingerprint),
            Self::Message(entry) => MessageLabel::of(entry.fingerprint)
                .map_or_else(|| "an unknown message".to_owned(), |label| label.call(entry.bytes)),
        }
    }
}

/// Returns the last operation of a ring that ended, and the longest pending one.
pub(super) fn now(
    ring: &Ring,
    kind: fn(Entry) -> RecorderSnapshot,
) -> (Option<RecorderSnapshot>, Option<RecorderSnapshot>) {
    let entries = ring.entries();
    let last = entries
        .iter()
        .filter(|entry| entry.ended != 0)
        .copied()
        .map(kind)
        .max_by_key(RecorderSnapshot::order);
    let present = entries.iter().find(|entry| entry.ended == 0 && entry.outcome == Outcome::Running);
    (last, present.copied().map(kind))
}
