//! Send and recv: numbered per ordered pair by their order on the wire, matched by tag, outside the collectives.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_transport::{Envelope, Group, MessageId};

use crate::call::message_label::{Direction, MessageLabel, MessageNumbers};
use crate::call::types::DType;
use crate::error::Error;
use crate::failure::call_log::MessageLog;
use crate::failure::error_text;
use crate::kernels;
use crate::observe::recorder::{Outcome, Recorder};
use crate::sync::completion::Completion;

/// One send or recv as it was asked for.
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

/// What a message's bytes pass through.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Through {
    /// Not asked yet: the message is not known.
    Unknown,
    /// Cells of the carrier's.
    Cells,
    /// Nothing: they leave from the post's own memory, or arrive in it.
    Nothing,
}

/// A post under way.
struct Active {
    post: Request,
    label: MessageLabel,
    /// Its place among all sends and recvs here.
    seq: u64,
    /// The rank a recv was matched with.
    from: usize,
    stream: Option<MessageId>,
    through: Through,
    moved: usize,
}

impl Active {
    fn bytes(&self) -> usize {
        self.post.count * self.post.dtype.size()
    }
    fn is_late(&self, now: Instant) -> bool {
        now.duration_since(self.post.submitted) >= self.post.timeout
    }
    /// The rank that it is to or from, where it is of one.
    fn peer(&self) -> Option<usize> {
        self.post.direction.peer()
    }
    /// "send #3 to rank 1 (5 elements of float32, tag 0)"
    fn what(&self) -> String {
        let (count, dtype, tag) = (self.post.count, self.post.dtype.name(), self.post.tag);
        format!("{} ({count} elements of {dtype}, tag {tag})", self.label.numbered())
    }
}

/// Of a recv from any rank it is known later whose message it took.
fn enter(message_log: &mut MessageLog, post: &Request, times: i32) {
    match post.direction {
        Direction::To(rank) => message_log.sent(rank, post.tag, times),
        Direction::From(rank) => message_log.requested(rank, post.tag, times),
        Direction::FromAny => {}
    }
}

/// Announced, and asked for by nobody yet.
struct Unexpected {
    /// Its place in the order of arrival.
    number: u64,
    from: usize,
    envelope: Envelope,
    stream: MessageId,
}

/// Receives by tag, each with its place in the order of posting.
type ByTag = BTreeMap<u64, VecDeque<(u64, Active)>>;

pub(crate) struct MessageTransport {
    sends: Vec<Active>,
    /// Receives whose message is here or on its way.
    recvs: Vec<Active>,
    /// Those that wait for a message of a rank (`None`: of any).
    waiting: BTreeMap<Option<usize>, ByTag>,
    /// By rank and tag, each in the order of its sender.
    unexpected: BTreeMap<(usize, u64), VecDeque<Unexpected>>,
    /// A receive found no message that fits: its group is to learn of it.
    misfit: Option<(Active, Envelope)>,
    numbers: MessageNumbers,
    /// Posts so far.
    posts: u64,
    /// Posts and announcements so far.
    order: u64,
    /// Of this poll: the last one in which an announcement to each rank had to wait.
    held: Vec<u64>,
    polls: u64,
    size: usize,
    pub(crate) message_log: MessageLog,
    recorder: Arc<Recorder>,
}

impl MessageTransport {
    pub(crate) fn new(me: usize, size: usize, recorder: Arc<Recorder>) -> Self {
        Self {
            sends: Vec::new(),
            recvs: Vec::new(),
            waiting: BTreeMap::new(),
            unexpected: BTreeMap::new(),
            misfit: None,
            numbers: MessageNumbers::new(size),
            posts: 0,
            order: 0,
            held: Vec::new(),
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
            through: Through::Unknown,
            moved: 0,
            post,
            label,
            seq: self.posts,
        };
        self.posts += 1;
        self.recorder.posted(active.seq, &label, active.bytes());
        enter(&mut self.message_log, &active.post, 1);
        let source = match active.post.direction {
            Direction::To(_) => return self.sends.push(active),
            Direction::From(rank) => Some(rank),
            Direction::FromAny => None,
        };
        match self.earliest(source, active.post.tag) {
            Some(message) => self.assign(active, message),
            None => {
                let number = self.ordered();
                let by_tag = self.waiting.entry(source).or_default();
                by_tag.entry(active.post.tag).or_default().push_back((number, active));
            }
        }
    }

    fn ordered(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    pub(crate) fn pending(&self) -> bool {
        !self.sends.is_empty() || !self.recvs.is_empty() || !self.waiting.is_empty() || self.misfit.is_some()
    }

    /// The one that waits longest, as errors name it.
    pub(crate) fn eldest(&self) -> Option<String> {
        let waiting = self.waiting.values().flat_map(BTreeMap::values).flatten().map(|(_, recv)| recv);
        let all = self.sends.iter().chain(&self.recvs).chain(self.misfit.iter().map(|(recv, _)| recv));
        all.chain(waiting).min_by_key(|active| active.seq).map(|active| active.label.numbered())
    }

    /// Whether something here cannot end without `rank`.
    pub(crate) fn needs(&self, rank: usize) -> bool {
        self.sends.iter().any(|a| a.post.direction == Direction::To(rank))
            || self.recvs.iter().any(|a| a.from == rank)
            || self.waiting.contains_key(&Some(rank))
            || (self.size == 2 && self.waiting.contains_key(&None))
    }

    /// Whether each message that is to be sent is announced to its receiver.
    pub(crate) fn announced_all(&self) -> bool {
        self.sends.iter().all(|send| send.stream.is_some())
    }

    /// The ranks of which a recv waits for a message.
    pub(crate) fn sought(&self) -> Vec<usize> {
        self.waiting.keys().flatten().copied().collect()
    }

    /// The first of them from `rank` on.
    fn sought_from(&self, rank: usize) -> Option<usize> {
        self.waiting.range(Some(rank)..).next().and_then(|(&from, _)| from)
    }

    /// What `rank`, which has left, sent with other tags than those that a recv here waits for.
    pub(crate) fn unclaimed(&self, rank: usize, group: &Group, name: &str) -> Option<Error> {
        let (_, recv) = self.waiting.get(&Some(rank))?.values().next()?.front()?;
        let message =
            self.unexpected.range((rank, 0)..=(rank, u64::MAX)).find_map(|(_, list)| list.front())?;
        Some(misfit(recv, message.envelope, rank, group, name))
    }

    /// What `rank`, which has left, sent to this one that nobody here asked for: the first of it, in words.
    pub(crate) fn unasked(&mut self, rank: usize, group: &mut Group) -> Option<String> {
        self.take_announced(rank, group);
        let lists = self.unexpected.range((rank, 0)..=(rank, u64::MAX)).filter_map(|(_, list)| list.front());
        let first = lists.min_by_key(|message| message.number)?;
        Some(format!("sends {}", in_words(first.envelope)))
    }

    pub(crate) fn poll(&mut self, group: &mut Group, name: &str) -> Result<bool, Error> {
        let mut moved = self.send(group);
        moved |= self.take_announcements(group);
        if let Some((recv, envelope)) = self.misfit.take() {
            let error = misfit(&recv, envelope, recv.from, group, name);
            // It ends with the group, as all others do.
            self.recvs.push(recv);
            return Err(error);
        }
        moved |= self.receive(group);
        Ok(moved)
    }

    /// Moves on what is sent.
    pub(crate) fn send(&mut self, group: &mut Group) -> bool {
        let mut moved = false;
        // Announcements keep their order per receiver; the bytes of different messages may interleave.
        self.polls += 1;
        self.held.resize(if self.sends.is_empty() { 0 } else { self.size }, 0);
        let (poll, held) = (self.polls, &mut self.held);
        self.sends.retain_mut(|send| {
            let Direction::To(to) = send.post.direction else { return true };
            let bytes = send.bytes();
            if send.stream.is_none() && held[to] != poll {
                let envelope =
                    Envelope { tag: send.post.tag, what: send.post.dtype as u64, bytes: bytes as u64 };
                send.stream = group.p2p_open(to, envelope);
                if send.stream.is_some() {
                    self.recorder.begun(send.seq);
                    moved = true;
                }
            }
            let Some(stream) = send.stream else {
                held[to] = poll;
                return true;
            };
            if send.through == Through::Unknown {
                let lent = group.p2p_lend(to, stream, send.post.ptr as *const u8);
                send.through = if lent { Through::Nothing } else { Through::Cells };
            }
            if send.through == Through::Nothing {
                if !group.p2p_gone(to, stream) {
                    return true;
                }
                (send.moved, moved) = (bytes, true);
            }
            while send.moved < bytes {
                let Some((cell, room)) = group.p2p_cell(to, stream) else { return true };
                let piece = room.min(bytes - send.moved);
                // SAFETY: the cell is ours and has `room` bytes; the buffer holds `bytes` and is valid until the
                // post is over. This thread owns the driver.
                unsafe { kernels::copy(cell, (send.post.ptr + send.moved) as *const u8, piece, false) };
                group.p2p_publish(to, stream, piece);
                send.moved += piece;
                moved = true;
            }
            group.p2p_close(to, stream);
            self.recorder.over(send.seq, Outcome::Ok);
            send.post.work.finish(Ok(()));
            false
        });
        moved
    }

    /// Takes announcements off the wire where some recv may want them.
    fn take_announcements(&mut self, group: &mut Group) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        let any = self.waiting.contains_key(&None);
        let (me, mut next, mut moved) = (group.rank(), 0, false);
        while let Some(from) = if any { Some(next) } else { self.sought_from(next) }
            && from < self.size
        {
            if from != me {
                moved |= self.take_announced(from, group);
            }
            next = from + 1;
        }
        moved
    }

    fn take_announced(&mut self, from: usize, group: &mut Group) -> bool {
        let mut moved = false;
        while let Some((envelope, stream)) = group.p2p_next(from) {
            let number = self.ordered();
            self.announced(Unexpected { number, from, envelope, stream });
            moved = true;
        }
        moved
    }

    /// Gives a message to the first recv that waits for it.
    fn announced(&mut self, message: Unexpected) {
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
            self.assign(recv, message);
        }
    }

    /// The first message of a rank, or of any, with that tag.
    fn earliest(&mut self, source: Option<usize>, tag: u64) -> Option<Unexpected> {
        let first = |from: usize| Some((self.unexpected.get(&(from, tag))?.front()?.number, from));
        let from = match source {
            Some(from) => Some(from),
            None => (0..self.size).filter_map(first).min().map(|(_, from)| from),
        }?;
        pop(&mut self.unexpected, (from, tag))
    }

    fn assign(&mut self, mut recv: Active, message: Unexpected) {
        let Unexpected { from, envelope, stream, .. } = message;
        recv.from = from;
        if envelope.bytes != recv.bytes() as u64 || envelope.what != recv.post.dtype as u64 {
            match self.misfit {
                None => self.misfit = Some((recv, envelope)),
                // The first one ends the group, and this one with it.
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

    fn receive(&mut self, group: &mut Group) -> bool {
        let mut moved = false;
        self.recvs.retain_mut(|recv| {
            let bytes = recv.bytes();
            let Some(stream) = recv.stream else { return true };
            if recv.through == Through::Unknown {
                let lands = group.p2p_land(recv.from, stream, recv.post.ptr as *mut u8);
                recv.through = if lands { Through::Nothing } else { Through::Cells };
            }
            if recv.through == Through::Nothing {
                if !group.p2p_landed(recv.from, stream) {
                    return true;
                }
                recv.moved = bytes;
            }
            while recv.moved < bytes {
                let Some((piece, room)) = group.p2p_piece(recv.from, stream) else { return true };
                let length = room.min(bytes - recv.moved);
                // SAFETY: the piece holds `room` bytes until it is released; the buffer has `bytes` and is valid
                // until the post is over. This thread owns the driver.
                unsafe { kernels::copy((recv.post.ptr + recv.moved) as *mut u8, piece, length, false) };
                group.p2p_release(recv.from, stream);
                recv.moved += length;
                moved = true;
            }
            moved = true;
            self.recorder.over(recv.seq, Outcome::Ok);
            recv.post.work.finish(Ok(()));
            false
        });
        moved
    }

    /// The ranks that posts whose time is up are to or from; `None` where there is no such post.
    pub(crate) fn late(&self, now: Instant) -> Option<Vec<usize>> {
        let waiting = self.waiting.values().flat_map(BTreeMap::values).flatten().map(|(_, recv)| recv);
        let all = self.sends.iter().chain(&self.recvs).chain(waiting);
        let mut late = all.filter(|active| active.is_late(now)).peekable();
        late.peek()?;
        Some(late.filter_map(Active::peer).collect::<BTreeSet<_>>().into_iter().collect())
    }

    /// Ends posts whose time is up, and whose peers were asked. One that has not begun ends alone; a message cut in the middle
    /// ends the group.
    pub(crate) fn expire(&mut self, group: &Group, name: &str, now: Instant) -> Result<(), Error> {
        let late = |active: &Active| active.is_late(now);
        let begun =
            self.sends.iter().chain(&self.recvs).find(|active| active.stream.is_some() && late(active));
        if let Some(active) = begun {
            return Err(expired(active, group, name));
        }
        let mut ended: Vec<Active> = self.sends.extract_if(.., |send| late(send)).collect();
        self.waiting.retain(|_, by_tag| {
            by_tag.retain(|_, posts| {
                if posts.iter().any(|(_, recv)| late(recv)) {
                    let all = std::mem::take(posts).into_iter();
                    let (gone, left): (VecDeque<_>, _) = all.partition(|(_, recv)| late(recv));
                    *posts = left;
                    ended.extend(gone.into_iter().map(|(_, recv)| recv));
                }
                !posts.is_empty()
            });
            !by_tag.is_empty()
        });
        for active in ended {
            enter(&mut self.message_log, &active.post, -1);
            self.recorder.over(active.seq, Outcome::Failed);
            let error = expired(&active, group, name);
            error_text::record_last_error(group, name, &error);
            active.post.work.finish(Err(error));
        }
        Ok(())
    }

    pub(crate) fn fail(&mut self, error: &Error) {
        let waiting = std::mem::take(&mut self.waiting).into_values().flatten();
        let waiting = waiting.flat_map(|(_, posts)| posts).map(|(_, recv)| recv);
        let misfit = self.misfit.take().map(|(recv, _)| recv);
        let all = self.sends.drain(..).chain(self.recvs.drain(..)).chain(waiting).chain(misfit);
        for active in all.collect::<Vec<_>>() {
            self.recorder.over(active.seq, Outcome::Failed);
            active.post.work.finish(Err(error.clone()));
        }
    }
}

/// Takes the first of a queue, and the queue where that was all.
fn pop<K: Ord, V>(queues: &mut BTreeMap<K, VecDeque<V>>, key: K) -> Option<V> {
    let queue = queues.get_mut(&key)?;
    let first = queue.pop_front();
    if queue.is_empty() {
        queues.remove(&key);
    }
    first
}

/// "4 elements of float32, tag 0": a message as its sender announced it.
fn in_words(envelope: Envelope) -> String {
    let size = match DType::from_u8(envelope.what as u8) {
        Some(dtype) => format!("{} elements of {}", envelope.bytes / dtype.size() as u64, dtype.name()),
        None => format!("{} bytes", envelope.bytes),
    };
    format!("{size}, tag {}", envelope.tag)
}

fn misfit(recv: &Active, envelope: Envelope, from: usize, group: &Group, name: &str) -> Error {
    Error::Mismatch {
        what: recv.what(),
        group: name.to_owned(),
        rank: from,
        detail: format!("{} sends {}", group.describe(from), in_words(envelope)),
    }
}

fn expired(active: &Active, group: &Group, name: &str) -> Error {
    let missing: Vec<usize> = active.peer().into_iter().collect();
    let detail = match missing.first() {
        Some(&rank) => {
            let other = format!("nothing came of it; the other side is {}", group.describe(rank));
            [vec![other], error_text::activities(group, name, &missing)].concat().join("; ")
        }
        None => "no rank sent a message with this tag".to_owned(),
    };
    let (what, group) = (active.what(), name.to_owned());
    Error::Timeout { what, group, after: active.post.timeout, missing, detail }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::for_tests::group;
    use smddp_plan::Topology;

    fn recorder() -> Arc<Recorder> {
        Recorder::new(("test", "shm"), 0, &Topology::single(2), Arc::default(), 4)
    }

    fn recv(into: &mut [f32], tag: u64) -> Request {
        Request {
            direction: Direction::From(1),
            ptr: into.as_mut_ptr() as usize,
            count: into.len(),
            dtype: DType::F32,
            tag,
            timeout: Duration::MAX,
            submitted: Instant::now(),
            work: Arc::new(Completion::default()),
        }
    }

    /// Of a few tries the one in which nothing else had the processor.
    fn cheapest(group: &mut Group, size: usize, waiting: u64) -> Duration {
        let mut messages = MessageTransport::new(0, size, recorder());
        let mut into = [0f32; 1];
        (0..waiting).for_each(|tag| messages.post(recv(&mut into, tag)));
        let looks = |messages: &mut MessageTransport, group: &mut Group| {
            let begun = Instant::now();
            for _ in 0..30 {
                assert!(!messages.poll(group, "test").unwrap());
            }
            begun.elapsed()
        };
        (0..5).map(|_| looks(&mut messages, group)).min().unwrap()
    }

    #[test]
    fn a_look_costs_no_more_for_receives_that_wait_and_ranks_that_are_silent() {
        let mut group = group(1000);
        let (few, many) = (cheapest(&mut group, 2, 1), cheapest(&mut group, 1000, 2000));
        assert!(many < 100 * few, "{few:?}; {many:?} with 2,000 receives that wait in a group of 1,000");
    }
}
