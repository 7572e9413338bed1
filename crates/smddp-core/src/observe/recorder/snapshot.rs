//! An entry of one of a group's two rings, which says what its header means.

use super::ring::{Entry, Outcome, Ring};
use crate::call::fingerprint;
use crate::call::message_label::MessageLabel;

#[derive(Clone, Copy)]
pub(super) enum Seen {
    Collective(Entry),
    Message(Entry),
}

impl Seen {
    pub(super) fn entry(&self) -> &Entry {
        match self {
            Self::Collective(entry) | Self::Message(entry) => entry,
        }
    }

    /// Whether it is the call by which a rank leaves: what was before that says more.
    fn leaves(&self) -> bool {
        matches!(self, Self::Collective(entry) if fingerprint::is_leaving(entry.fingerprint))
    }

    /// What says more of what came last: by calls of the program, and by time.
    pub(super) fn order(&self) -> (bool, u64) {
        (!self.leaves(), self.entry().ended)
    }

    /// "all_reduce #1531", "send #3 to rank 1", or the call by which a rank leaves.
    pub(super) fn numbered(&self) -> String {
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

    /// The same with what it moves.
    pub(super) fn call(&self) -> String {
        match self {
            Self::Collective(entry) => fingerprint::call(entry.fingerprint),
            Self::Message(entry) => MessageLabel::of(entry.fingerprint)
                .map_or_else(|| "an unknown message".to_owned(), |label| label.call(entry.bytes)),
        }
    }
}

/// Of a ring, what ended last and what has waited longest.
pub(super) fn now(ring: &Ring, kind: fn(Entry) -> Seen) -> (Option<Seen>, Option<Seen>) {
    let entries = ring.entries();
    let last = entries.iter().filter(|entry| entry.ended != 0).copied().map(kind).max_by_key(Seen::order);
    let present = entries.iter().find(|entry| entry.ended == 0 && entry.outcome == Outcome::Running);
    (last, present.copied().map(kind))
}
