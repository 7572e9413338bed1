//! Pending messages as plain data for the failure monitor, and the end of expired messages.

use std::collections::BTreeMap;
use std::time::Instant;

use smddp_group::Group;

use super::{Active, MessageQueues, count_message};
use crate::error::Error;
use crate::failure::pending::{PeerMessages, PendingMessage, WaitedMessage};
use crate::observe::recorder::Outcome;

impl Active {
    fn as_pending(&self) -> PendingMessage {
        PendingMessage {
            number: self.seq,
            description: self.description(),
            peer: self.peer(),
            begun: self.stream.is_some(),
            timeout: self.post.timeout,
        }
    }
}

impl MessageQueues {
    /// Returns the messages with `rank`, which has left or leaves.
    pub(crate) fn with_peer(&mut self, rank: usize, group: &mut Group, name: &str) -> PeerMessages {
        let unexpected = self.first_unexpected(rank, group);
        let awaited = self.waiting.contains_key(&Some(rank));
        let wrong_tag = self.wrong_tag_error(rank, group, name);
        PeerMessages { rank, needed: self.needs(rank), awaited, unexpected, wrong_tag }
    }

    /// Returns the messages past their deadline, and the earliest deadline of the other ones.
    pub(crate) fn deadlines(&self, now: Instant) -> (Vec<PendingMessage>, Option<Instant>) {
        let waiting = self.waiting.values().flat_map(BTreeMap::values).flatten().map(|(_, recv)| recv);
        let (mut expired, mut next) = (Vec::new(), None);
        for active in self.sends.iter().chain(&self.recvs).chain(waiting) {
            if active.is_late(now) {
                expired.push(active.as_pending());
            } else if let Some(deadline) = active.post.submitted.checked_add(active.post.timeout) {
                next = Some(next.map_or(deadline, |next: Instant| next.min(deadline)));
            }
        }
        (expired, next)
    }

    /// Returns the message of the longest of these waits: numbers of messages, and the begin of the waits.
    pub(crate) fn longest_wait(&self, waits: &[(u64, Instant)]) -> Option<WaitedMessage> {
        let (number, since) = *waits.iter().min_by_key(|(_, since)| *since)?;
        let active = self.all().find(|active| active.seq == number)?;
        Some(WaitedMessage { message: active.as_pending(), since, moved: active.moved })
    }

    /// Ends these messages, which have not begun, with their errors.
    pub(crate) fn end_expired(&mut self, ended: Vec<(u64, Error)>) {
        let mut errors = BTreeMap::new();
        errors.extend(ended);
        let is_ended = |active: &Active| active.stream.is_none() && errors.contains_key(&active.seq);
        let mut ended: Vec<Active> = self.sends.extract_if(.., |send| is_ended(send)).collect();
        self.waiting.retain(|_, by_tag| {
            by_tag.retain(|_, posts| {
                if posts.iter().any(|(_, recv)| is_ended(recv)) {
                    let all = std::mem::take(posts).into_iter();
                    let (expired, left): (Vec<_>, Vec<_>) = all.partition(|(_, recv)| is_ended(recv));
                    *posts = left.into();
                    ended.extend(expired.into_iter().map(|(_, recv)| recv));
                }
                !posts.is_empty()
            });
            !by_tag.is_empty()
        });
        for active in ended {
            let Some(error) = errors.remove(&active.seq) else { continue };
            count_message(&mut self.message_log, &active.post, -1);
            self.recorder.over(active.seq, Outcome::Failed);
            active.post.work.finish(Err(error));
        }
    }
}
