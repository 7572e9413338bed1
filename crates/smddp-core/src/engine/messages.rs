//! Send and recv. Messages are numbered per ordered pair of ranks in wire order, matched by tag, and independent of
//! collectives.

mod facts;
#[cfg(test)]
mod tests;
mod transfer;
mod wait_for;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_base::{Envelope, MessageId};
use smddp_group::Group;

use self::transfer::MessageBuffer;
pub(crate) use self::wait_for::{MessageView, MessageWait};
use crate::call::message_label::{Direction, MessageLabel, MessageNumbers};
use crate::call::types::DType;
use crate::error::Error;
use crate::failure::call_log::MessageLog;
use crate::observe::recorder::{Outcome, Recorder};
use crate::sync::completion::Completion;

/// A send or recv as submitted.
pub(crate) struct Request {
    pub(crate) direction: Direction,
    pub(crate) ptr: usize,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) tag: u64,
    pub(crate) timeout: Duration,
    pub(crate) submitted: Instant,
    pub(crate) work: Arc<Completion>,
}

/// A send or recv in progress.
struct Active {
    post: Request,
    label: MessageLabel,
    /// Index among all sends and recvs of this rank.
    seq: u64,
    /// Source rank that a recv was matched with.
    from: usize,
    stream: Option<MessageId>,
    /// Number of a send's announcement among those to its receiver, from 1 on; 0 without one.
    index: u64,
    buffer: MessageBuffer,
    moved: usize,
}

impl Active {
    fn bytes(&self) -> usize {
        self.post.count * self.post.dtype.size()
    }
    fn is_late(&self, now: Instant) -> bool {
        now.duration_since(self.post.submitted) >= self.post.timeout
    }
    /// Returns the peer; `None` for a recv from any rank.
    fn peer(&self) -> Option<usize> {
        self.post.direction.peer()
    }
    /// Returns the description for errors: "send #3 to rank 1 (5 elements of float32, tag 0)".
    fn description(&self) -> String {
        let (count, dtype, tag) = (self.post.count, self.post.dtype.name(), self.post.tag);
        format!("{} ({count} elements of {dtype}, tag {tag})", self.label.numbered())
    }
}

/// Counts a message in the log. A recv from any rank is counted when it is matched, since its source is unknown
/// before.
fn count_message(message_log: &mut MessageLog, post: &Request, times: i32) {
    match post.direction {
        Direction::To(rank) => message_log.sent(rank, post.tag, times),
        Direction::From(rank) => message_log.requested(rank, post.tag, times),
        Direction::FromAny => {}
    }
}

/// An announced message without a matching recv.
struct Unexpected {
    /// Position in the order of arrival.
    number: u64,
    from: usize,
    envelope: Envelope,
    stream: MessageId,
    /// Number of the announcement among those of its sender, from 1 on.
    index: u64,
}

/// Receives by tag, each with its position in the order of posting.
type ByTag = BTreeMap<u64, VecDeque<(u64, Active)>>;

/// Pending sends and recvs of a rank.
pub(crate) struct MessageQueues {
    sends: Vec<Active>,
    /// Receives that have been matched with a message.
    recvs: Vec<Active>,
    /// Receives without a matching message, by source rank (`None`: any rank).
    waiting: BTreeMap<Option<usize>, ByTag>,
    /// Unexpected messages by rank and tag, each queue in the order of its sender.
    unexpected: BTreeMap<(usize, u64), VecDeque<Unexpected>>,
    /// A recv whose message has another size or dtype, to be reported by the next poll.
    mismatched: Option<(Active, Envelope)>,
    numbers: MessageNumbers,
    /// Number of announcements to each rank, and read from each rank.
    announced_to: Vec<u64>,
    announced_from: Vec<u64>,
    /// Number of posted messages.
    posts: u64,
    /// Number of posts and announcements.
    last_order: u64,
    /// Per rank: the last poll in which an announcement to it had to wait. Later messages to it wait in that poll,
    /// too.
    deferred: Vec<u64>,
    polls: u64,
    size: usize,
    pub(crate) message_log: MessageLog,
    recorder: Arc<Recorder>,
}

impl MessageQueues {
    pub(crate) fn new(me: usize, size: usize, recorder: Arc<Recorder>) -> Self {
        Self {
            sends: Vec::new(),
            recvs: Vec::new(),
            waiting: BTreeMap::new(),
            unexpected: BTreeMap::new(),
            mismatched: None,
            numbers: MessageNumbers::new(size),
            announced_to: vec![0; size],
            announced_from: vec![0; size],
            posts: 0,
            last_order: 0,
            deferred: Vec::new(),
            polls: 0,
            size,
            message_log: MessageLog::new(me, size),
            recorder,
        }
    }

    pub(crate) fn post(&mut self, post: Request) {
        let Request { direction, dtype, tag, .. } = post;
        let label = MessageLabel { direction, number: self.numbers.next(direction), dtype, tag };
        let active = Active {
            from: 0,
            stream: None,
            index: 0,
            buffer: MessageBuffer::Unknown,
            moved: 0,
            post,
            label,
            seq: self.posts,
        };
        self.posts += 1;
        self.recorder.posted(active.seq, &label, active.bytes());
        count_message(&mut self.message_log, &active.post, 1);
        let source = match active.post.direction {
            Direction::To(_) => return self.sends.push(active),
            Direction::From(rank) => Some(rank),
            Direction::FromAny => None,
        };
        match self.earliest(source, active.post.tag) {
            Some(message) => self.match_recv(active, message),
            None => {
                let number = self.next_order();
                let by_tag = self.waiting.entry(source).or_default();
                by_tag.entry(active.post.tag).or_default().push_back((number, active));
            }
        }
    }

    fn next_order(&mut self) -> u64 {
        self.last_order += 1;
        self.last_order
    }

    pub(crate) fn pending(&self) -> bool {
        !self.sends.is_empty()
            || !self.recvs.is_empty()
            || !self.waiting.is_empty()
            || self.mismatched.is_some()
    }

    /// Returns the pending message that was posted first, as errors name it.
    pub(crate) fn oldest(&self) -> Option<String> {
        self.all().min_by_key(|active| active.seq).map(|active| active.label.numbered())
    }

    /// Returns all pending messages.
    fn all(&self) -> impl Iterator<Item = &Active> {
        let waiting = self.waiting.values().flat_map(BTreeMap::values).flatten().map(|(_, recv)| recv);
        let all = self.sends.iter().chain(&self.recvs).chain(self.mismatched.iter().map(|(recv, _)| recv));
        all.chain(waiting)
    }

    /// Returns true if a pending message cannot complete without `rank`.
    pub(crate) fn needs(&self, rank: usize) -> bool {
        self.sends.iter().any(|a| a.post.direction == Direction::To(rank))
            || self.recvs.iter().any(|a| a.from == rank)
            || self.waiting.contains_key(&Some(rank))
            || (self.size == 2 && self.waiting.contains_key(&None))
    }

    /// Returns true if all pending sends have been announced to their receivers.
    pub(crate) fn all_announced(&self) -> bool {
        self.sends.iter().all(|send| send.stream.is_some())
    }

    /// Returns the ranks that may lack a recv for a message of this rank.
    pub(crate) fn unconfirmed(&self, group: &mut Group) -> Vec<usize> {
        let waits = |to| self.sends.iter().any(|send| send.post.direction == Direction::To(to));
        let mut ranks = self.message_log.receivers();
        ranks.retain(|&to| waits(to) || !group.messages().is_confirmed(to));
        ranks
    }

    /// Returns the ranks from which a recv awaits a message.
    pub(crate) fn awaited_sources(&self) -> Vec<usize> {
        self.waiting.keys().flatten().copied().collect()
    }

    /// Returns the first of these ranks at or above `rank`.
    fn next_awaited_source(&self, rank: usize) -> Option<usize> {
        self.waiting.range(Some(rank)..).next().and_then(|(&from, _)| from)
    }

    /// Returns the error for a message of departed rank `rank` whose tag differs from that of the recv that waits
    /// for it.
    pub(crate) fn wrong_tag_error(&self, rank: usize, group: &Group, name: &str) -> Option<Error> {
        let (_, recv) = self.waiting.get(&Some(rank))?.values().next()?.front()?;
        let message =
            self.unexpected.range((rank, 0)..=(rank, u64::MAX)).find_map(|(_, list)| list.front())?;
        Some(mismatch_error(recv, message.envelope, rank, group, name))
    }

    /// Describes the first message of departed rank `rank` that has no matching recv here.
    pub(crate) fn first_unexpected(&mut self, rank: usize, group: &mut Group) -> Option<String> {
        while self.take_next_announced(rank, group) {}
        let lists = self.unexpected.range((rank, 0)..=(rank, u64::MAX)).filter_map(|(_, list)| list.front());
        let first = lists.min_by_key(|message| message.number)?;
        Some(format!("sends {}", describe(first.envelope)))
    }

    pub(crate) fn poll(&mut self, group: &mut Group, name: &str) -> Result<bool, Error> {
        let mut moved = self.send(group);
        moved |= self.take_announcements(group);
        if let Some((recv, envelope)) = self.mismatched.take() {
            let error = mismatch_error(&recv, envelope, recv.from, group, name);
            // The group's failure ends this recv like all others.
            self.recvs.push(recv);
            return Err(error);
        }
        moved |= self.receive(group);
        Ok(moved)
    }

    /// Reads the announcements of all ranks from which a recv awaits a message.
    fn take_announcements(&mut self, group: &mut Group) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        let any = self.waiting.contains_key(&None);
        let (me, mut next, mut moved) = (group.info().rank, 0, false);
        while let Some(from) = if any { Some(next) } else { self.next_awaited_source(next) }
            && from < self.size
        {
            // The transport counts a request that finds nothing as a wait, and polls for messages until the next one
            // that finds some. No request therefore follows the last awaited announcement.
            while from != me && self.awaits(from) && self.take_next_announced(from, group) {
                moved = true;
            }
            next = from + 1;
        }
        moved
    }

    /// Returns true if a recv awaits a message of `from`, or of any rank.
    fn awaits(&self, from: usize) -> bool {
        self.waiting.contains_key(&Some(from)) || self.waiting.contains_key(&None)
    }

    /// Reads the next announcement of `from`. Returns false if there is none.
    fn take_next_announced(&mut self, from: usize, group: &mut Group) -> bool {
        let Some((envelope, stream)) = group.messages().next_announced(from) else { return false };
        let number = self.next_order();
        self.announced_from[from] += 1;
        let index = self.announced_from[from];
        self.match_message(Unexpected { number, from, envelope, stream, index });
        true
    }

    /// Matches a message with the recv for it that was posted first.
    fn match_message(&mut self, message: Unexpected) {
        let tag = message.envelope.tag;
        let first = |source| Some((self.waiting.get(&source)?.get(&tag)?.front()?.0, source));
        let Some((_, source)) = first(Some(message.from)).into_iter().chain(first(None)).min() else {
            self.unexpected.entry((message.from, tag)).or_default().push_back(message);
            return;
        };
        let Some(by_tag) = self.waiting.get_mut(&source) else { return };
        let recv = pop(by_tag, tag);
        if by_tag.is_empty() {
            self.waiting.remove(&source);
        }
        if let Some((_, recv)) = recv {
            self.match_recv(recv, message);
        }
    }

    /// Takes the first message with this tag, from one rank or from any (`source` is `None`).
    fn earliest(&mut self, source: Option<usize>, tag: u64) -> Option<Unexpected> {
        let first = |from: usize| Some((self.unexpected.get(&(from, tag))?.front()?.number, from));
        let from = match source {
            Some(from) => Some(from),
            None => (0..self.size).filter_map(first).min().map(|(_, from)| from),
        }?;
        pop(&mut self.unexpected, (from, tag))
    }

    fn match_recv(&mut self, mut recv: Active, message: Unexpected) {
        let Unexpected { from, envelope, stream, .. } = message;
        recv.from = from;
        if envelope.bytes != recv.bytes() as u64 || envelope.dtype != recv.post.dtype as u64 {
            match self.mismatched {
                None => self.mismatched = Some((recv, envelope)),
                // The first mismatch ends the group, and this recv with it.
                Some(_) => self.recvs.push(recv),
            }
            return;
        }
        if recv.post.direction == Direction::FromAny {
            self.message_log.requested(from, envelope.tag, 1);
        }
        recv.stream = Some(stream);
        self.recorder.begun(recv.seq);
        recv.post.work.set_source(from);
        self.recvs.push(recv);
    }

    /// Ends all messages and returns their completions.
    pub(crate) fn end_all(&mut self) -> Vec<Arc<Completion>> {
        let waiting = std::mem::take(&mut self.waiting).into_values().flatten();
        let waiting = waiting.flat_map(|(_, posts)| posts).map(|(_, recv)| recv);
        let mismatched = self.mismatched.take().map(|(recv, _)| recv);
        let all = self.sends.drain(..).chain(self.recvs.drain(..)).chain(waiting).chain(mismatched);
        let end = |active: Active| {
            self.recorder.over(active.seq, Outcome::Failed);
            active.post.work
        };
        all.map(end).collect()
    }
}

/// Takes the first element of a queue, and removes the queue if it is empty then.
fn pop<K: Ord, V>(queues: &mut BTreeMap<K, VecDeque<V>>, key: K) -> Option<V> {
    let queue = queues.get_mut(&key)?;
    let first = queue.pop_front();
    if queue.is_empty() {
        queues.remove(&key);
    }
    first
}

/// Describes a message as its sender announced it: "4 elements of float32, tag 0".
fn describe(envelope: Envelope) -> String {
    let size = match DType::from_u8(envelope.dtype as u8) {
        Some(dtype) => format!("{} elements of {}", envelope.bytes / dtype.size() as u64, dtype.name()),
        None => format!("{} bytes", envelope.bytes),
    };
    format!("{size}, tag {}", envelope.tag)
}

fn mismatch_error(recv: &Active, envelope: Envelope, from: usize, group: &Group, name: &str) -> Error {
    Error::Mismatch {
        operation: recv.description(),
        group: name.to_owned(),
        rank: from,
        detail: format!(
            "{} sends {}; use the same size, dtype and tag on both ranks",
            group.info().describe(from),
            describe(envelope)
        ),
    }
}
