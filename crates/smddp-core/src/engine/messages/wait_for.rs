//! Messages as edges of the wait-for graph, for the detection of deadlocks.

use std::sync::Arc;
use std::time::Duration;

use super::{Active, MessageQueues};
use crate::call::message_label::Direction;
use crate::failure::deadlock::Needed;

/// Maximum number of pending messages in a [`MessageView`].
const MAX_VIEWED: usize = 4096;

/// Wait for a message: the peer, its needed action, and the description of the message.
pub(crate) struct MessageWait {
    pub(crate) peer: usize,
    pub(crate) needed: Needed,
    pub(crate) operation: String,
    /// Time to its deadline.
    pub(crate) remaining: Duration,
}

/// Pending messages of a rank that its peers may wait for.
pub(crate) struct MessageView {
    /// Announcements to each rank.
    announced_to: Vec<u64>,
    /// Ranks to which a send waits for its announcement.
    unannounced: Vec<usize>,
    /// Announcements read from each rank.
    announced_from: Vec<u64>,
    /// Source and tag of the recvs without a message; `None`: any rank.
    waiting: Vec<(Option<usize>, u64)>,
    /// Source and announcement of the messages without a recv.
    unexpected: Vec<(usize, u64)>,
}

impl MessageView {
    /// Returns true if rank `from` waits for an action that this rank has not begun.
    pub(crate) fn blocks(&self, from: usize, needed: &Needed) -> bool {
        match *needed {
            Needed::Collective(_) => false,
            // An announcement that the receiver has not read is in flight.
            Needed::Send { taken, .. } => {
                self.announced_to.get(from) == Some(&taken) && !self.unannounced.contains(&from)
            }
            Needed::Recv { tag, index } => {
                let matches = |&(source, of): &(Option<usize>, u64)| {
                    of == tag && source.is_none_or(|source| source == from)
                };
                let is_unread = self.announced_from.get(from).is_some_and(|&read| index == 0 || index > read);
                (is_unread || self.unexpected.contains(&(from, index))) && !self.waiting.iter().any(matches)
            }
        }
    }
}

impl MessageQueues {
    /// Returns the number of the pending message whose completion has this address.
    pub(crate) fn number_of(&self, work: usize) -> Option<u64> {
        let has_work = |active: &&Active| Arc::as_ptr(&active.post.work) as usize == work;
        self.all().find(has_work).map(|active| active.seq)
    }

    /// Returns the edge of the pending message whose completion has this address. `None`: it progresses, may come from any rank, or does
    /// not exist.
    pub(crate) fn wait_for(&self, work: usize) -> Option<MessageWait> {
        let waiting =
            self.waiting.values().flat_map(|by_tag| by_tag.values()).flatten().map(|(_, recv)| recv);
        let has_work = |active: &&Active| Arc::as_ptr(&active.post.work) as usize == work;
        let active = self.sends.iter().chain(waiting).find(has_work)?;
        let tag = active.post.tag;
        let (peer, needed) = match active.post.direction {
            Direction::To(rank) => (rank, Needed::Recv { tag, index: active.index }),
            Direction::From(rank) => (rank, Needed::Send { tag, taken: self.announced_from[rank] }),
            Direction::FromAny => return None,
        };
        let remaining = active.post.timeout.saturating_sub(active.post.submitted.elapsed());
        Some(MessageWait { peer, needed, operation: active.description(), remaining })
    }

    /// Returns the pending messages for the peers that may wait for them. `None` if there are too many.
    pub(crate) fn view(&self) -> Option<MessageView> {
        let waiting =
            self.waiting.iter().flat_map(|(source, by_tag)| by_tag.keys().map(|tag| (*source, *tag)));
        let unexpected = self
            .unexpected
            .iter()
            .flat_map(|((from, _), messages)| messages.iter().map(|message| (*from, message.index)));
        let unannounced = self.sends.iter().filter(|send| send.stream.is_none());
        let view = MessageView {
            announced_to: self.announced_to.clone(),
            unannounced: unannounced.filter_map(Active::peer).collect(),
            announced_from: self.announced_from.clone(),
            waiting: waiting.take(MAX_VIEWED).collect(),
            unexpected: unexpected.take(MAX_VIEWED).collect(),
        };
        (view.waiting.len().max(view.unexpected.len()) < MAX_VIEWED).then_some(view)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view() -> MessageView {
        MessageView {
            announced_to: vec![0, 2],
            unannounced: Vec::new(),
            announced_from: vec![0, 3],
            waiting: vec![(Some(1), 7)],
            unexpected: vec![(1, 2)],
        }
    }

    #[test]
    fn recv_waits_only_while_no_message_is_in_flight() {
        let needs = |taken| Needed::Send { tag: 0, taken };
        assert!(view().blocks(1, &needs(2)));
        assert!(!view().blocks(1, &needs(1)), "the second announcement is in flight");
        assert!(!MessageView { unannounced: vec![1], ..view() }.blocks(1, &needs(2)));
        assert!(!view().blocks(9, &needs(0)), "an unknown rank");
    }

    #[test]
    fn send_waits_only_while_its_message_has_no_recv() {
        let needs = |tag, index| Needed::Recv { tag, index };
        assert!(view().blocks(1, &needs(0, 2)), "it is unexpected");
        assert!(!view().blocks(1, &needs(0, 1)), "it has been matched");
        assert!(view().blocks(1, &needs(0, 4)), "it has not been read");
        assert!(view().blocks(1, &needs(0, 0)), "it is not announced");
        assert!(!view().blocks(1, &needs(7, 4)), "a recv waits for it");
        assert!(!MessageView { waiting: vec![(None, 0)], ..view() }.blocks(1, &needs(0, 4)));
    }
}
