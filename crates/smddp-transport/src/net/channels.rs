//! Channels and messages over a wire: a rank's half of what its group does between nodes.
//!
//! A channel's reader has as many cells as the window that all ranks agree on; its writer stays that far ahead at most,
//! and is told of cells that are free again where it needs them: on a long way of several at a time. The writer itself has
//! that many cells only where the wire keeps no copy of what is on its way. So whatever arrives for the operation under way has
//! its place, and what is for a later one waits in the wire.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::leave_notice::LastError;
use super::frame::{CLASSES, COLLECTIVES, Frame, Kind, MESSAGES};
use super::layout::{Progress, RecvProgress, RecvTarget, RemoteLayout, RemoteRecv};
use super::messages::{QueuedMessage, RemoteMessages};
use super::tcp::{ProcessLiveness, Sideband};
use super::wire::{Broken, Sink, Target, Ticket, Wire};
use crate::fork;
use crate::process::layout::MAX_ERROR_BYTES;
use crate::process::{Endpoint, StagingMemory, last_error};
use crate::{CallFingerprint, Fault, MAX_ABORT_REPORT, MessageTransport, Mismatch};

mod leave_notice;
mod straggler_query;
#[cfg(test)]
mod tests;

/// Headers of operations that are over here, against which late frames are held.
const REMEMBERED: usize = 64;
/// Frames that carry less than a cell need no place: a channel of tokens still has an address.
const NOWHERE: *mut u8 = std::ptr::dangling_mut();

/// What is known of a rank.
#[derive(Clone, Default)]
struct PeerRecord {
    /// Operations it is known to have begun, and the header of the newest.
    begun: u64,
    newest: CallFingerprint,
    /// It was asked what it has begun and said so: `begun` is all there is to know.
    answered: bool,
    /// Of the survey, too: its host took the question up, and it did not answer.
    mute: bool,
    /// It was asked, and nothing came.
    silent: bool,
    /// What it said that it does, when it was asked.
    doing: String,
    /// Anything was sent to it or came from it.
    met: bool,
    /// Classes (bits) on which anything was sent to it or came from it, and on which it said goodbye.
    used: u8,
    goodbyes: u8,
    /// All its messages are announced.
    last_announced: bool,
    left: bool,
    /// What came with its goodbye.
    last_error: Option<LastError>,
    /// What it says of why the group is dead, and the class on which that comes. Made once, since it may be written to for as
    /// long as the wire is.
    words: Option<(u32, Box<[u8]>)>,
    /// In which operation it declared the group dead, and why.
    abort: Option<(u64, String)>,
    /// Since when the wire has it for broken.
    broken: Option<Instant>,
    /// It sent what no rank sends, and what: nothing more that it sends counts.
    wrong: Option<&'static str>,
}

/// What arrives is judged and kept here.
pub(super) struct Inbound {
    me: usize,
    owner: StagingMemory,
    /// Number of the operation under way, or of the next one.
    seq: u64,
    open: bool,
    fingerprint: CallFingerprint,
    /// The operation's cells.
    base: *mut u8,
    channel_layout: Arc<RemoteLayout>,
    flow: Progress,
    /// Inlets whose messages arrive in the call's own memory.
    recv_targets: Vec<Option<RecvTarget>>,
    /// Sends of cells whose memory is still in use.
    flying: u64,
    /// Bytes of collectives that were given to the wire.
    crossed: u64,
    past: VecDeque<(u64, CallFingerprint)>,
    differs: Option<Fault>,
    /// First operation in which a rank declared the group dead.
    dead_from: Option<u64>,
    /// By rank.
    peers: Vec<PeerRecord>,
    pub(super) messages: RemoteMessages,
}

// SAFETY: cell addresses lie in the endpoint's staging memory, in a region that this operation owns until it ends, and landings
// in the call's output, valid until it ends or lets go; one thread at a time owns the link.
unsafe impl Send for Inbound {}

/// What leads to other nodes, and who watches their ranks where the wire does not.
pub(crate) struct RemoteParts {
    pub(crate) wire: Box<dyn Wire>,
    /// Where those ranks' processes answer for them, though they do not drive.
    pub(crate) listeners: Option<Arc<Sideband>>,
    pub(crate) watches: Option<ProcessLiveness>,
}

/// Whether those that are waited for were told so.
#[derive(Default)]
enum WaitNotice {
    /// Nobody had to be waited for.
    #[default]
    Idle,
    /// Since that time.
    Waits(Instant),
    Told,
}

pub(crate) struct RemoteChannels {
    wire: Box<dyn Wire>,
    listeners: Option<Arc<Sideband>>,
    /// Peers' TCP listeners tell of their end, where the wire does not: libfabric's providers notice a peer that is gone late
    /// or never while nothing is sent to it.
    watches: Option<ProcessLiveness>,
    state: Inbound,
    aborted: bool,
    gone: bool,
    /// In the operation under way.
    wait_notice: WaitNotice,
    forks: u32,
}

/// Ranks that keep this one waiting longer are told so.
const HAIL: Duration = Duration::from_millis(50);
/// Leaving waits this long for the last bytes to get out.
const GOODBYE: Duration = Duration::from_secs(2);
/// A group's failure waits this long for the word of it to get out.
const SPEAK: Duration = Duration::from_millis(50);
/// Acknowledgements are looked for this often.
const ACKNOWLEDGED: Duration = Duration::from_micros(50);
/// Ranks of a group of which one tells all others what has happened.
const TOLD_BY_ONE: usize = 256;
/// A writer is told of free cells so many times while it goes through its window.
const WORDS: u64 = 8;
/// Tickets with this bit are the messages'.
const P2P: Ticket = 1 << 63;

impl RemoteChannels {
    /// `nonce`: the group's number at this process's staging pool.
    pub(crate) fn new(
        me: usize,
        size: usize,
        RemoteParts { wire, listeners, watches }: RemoteParts,
        endpoint: Arc<Endpoint>,
        nonce: u64,
    ) -> Self {
        let owner = StagingMemory::new(endpoint, nonce);
        let state = Inbound {
            me,
            messages: RemoteMessages::new(size, owner.sibling(), wire.copies()),
            owner,
            seq: 0,
            open: false,
            fingerprint: CallFingerprint::default(),
            base: NOWHERE,
            channel_layout: Arc::default(),
            flow: Progress::default(),
            recv_targets: Vec::new(),
            flying: 0,
            crossed: 0,
            past: VecDeque::new(),
            differs: None,
            dead_from: None,
            peers: vec![PeerRecord::default(); size],
        };
        Self {
            wire,
            listeners,
            watches,
            state,
            aborted: false,
            gone: false,
            wait_notice: WaitNotice::default(),
            forks: fork::generation(),
        }
    }

    pub(crate) fn name(&self) -> String {
        self.wire.name()
    }

    pub(crate) fn turn(&mut self) -> bool {
        self.wire.poll(&mut self.state) | self.post()
    }

    /// Sends what waits, without a look at what comes in.
    pub(crate) fn push(&mut self) {
        self.wire.push(&mut self.state);
    }

    pub(crate) fn busy(&self) -> bool {
        self.state.flying > 0 || self.state.messages.flying() || !self.wire.drained()
    }

    /// Sends a frame whose payload, if any, is short or staged.
    fn frame(&mut self, to: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        self.note(to, frame);
        // SAFETY: payloads are cells of regions that are kept until their tickets are back, or short, or the input of a call or a
        // message, kept until then or until it is let go.
        unsafe { self.wire.send(to, frame, payload, ticket) };
    }

    /// Something is sent to a rank.
    fn note(&mut self, to: usize, frame: &Frame) {
        self.state.peers[to].met = true;
        self.state.peers[to].used |= 1 << frame.class();
    }

    /// The channels of the operations to come.
    pub(crate) fn wire_up(&mut self, channel_layout: &Arc<RemoteLayout>) {
        let state = &mut self.state;
        if Arc::ptr_eq(&state.channel_layout, channel_layout) {
            return;
        }
        state.channel_layout = channel_layout.clone();
        state.flow.reset(channel_layout);
        for recv_channel in &channel_layout.ins {
            state.peers[recv_channel.want.rank].met = true;
        }
    }

    /// Takes the memory that the operation needs; false while the pool has none.
    pub(crate) fn reserve(&mut self) -> bool {
        self.state.owner.reserve(self.state.channel_layout.bytes)
    }

    /// Opens operation `seq`, which is wired up and whose memory is reserved.
    pub(crate) fn begin(&mut self, seq: u64, fingerprint: CallFingerprint) {
        let state = &mut self.state;
        (state.seq, state.fingerprint, state.open) = (seq, fingerprint, true);
        self.wait_notice = WaitNotice::Idle;
        state.base = state.owner.base();
        state.flow.reset(&state.channel_layout);
        state.recv_targets.clear();
        // A channel that carries nothing still tells its readers what this operation is.
        for out in 0..self.state.channel_layout.outs.len() {
            if self.state.channel_layout.outs[out].messages == 0 {
                self.tell(out, 0, std::ptr::null(), 0);
            }
        }
    }

    /// Who asks is told of the operation under way, too.
    pub(crate) fn tell_begun(&self) {
        if let Some(listeners) = &self.listeners {
            listeners.begun(self.state.seq + 1);
        }
    }

    /// Message `index`, of `bytes`, goes to all readers of an outlet.
    fn tell(&mut self, out: usize, index: u64, payload: *const u8, bytes: usize) {
        let (state, o) = (&self.state, &self.state.channel_layout.outs[out]);
        let cell = index % o.cells;
        let frame = Frame {
            channel: o.channel as u32,
            index,
            bytes: bytes as u64,
            what: state.fingerprint.what,
            count: state.fingerprint.count,
            total: o.bytes,
            ..Frame::new(Kind::Data, state.seq)
        };
        let ticket = (out as u64) << 32 | cell;
        let (readers, place) = (o.readers.len(), o.first_cell + cell as usize);
        self.state.flying += readers as u64;
        self.state.crossed += (bytes * readers) as u64;
        self.state.flow.busy[place] += readers as u32;
        for reader in 0..readers {
            let to = self.state.channel_layout.outs[out].readers[reader];
            self.frame(to, &frame, payload, ticket);
        }
    }

    pub(crate) fn cell(&mut self, out: usize) -> Option<*mut u8> {
        let (o, flow) = (&self.state.channel_layout.outs[out], &self.state.flow);
        let sent = flow.sent[out];
        let readers = o.first_reader..o.first_reader + o.readers.len();
        let slowest = flow.read[readers].iter().copied().min().unwrap_or(sent);
        let cell = (sent % o.cells) as usize;
        let free = sent.saturating_sub(slowest) < o.window && flow.busy[o.first_cell + cell] == 0;
        free.then(|| self.state.base.wrapping_add(o.at + cell * o.cell))
    }

    pub(crate) fn publish(&mut self, out: usize, bytes: usize) {
        let (state, o) = (&self.state, &self.state.channel_layout.outs[out]);
        let cell = state.flow.sent[out] % o.cells;
        let payload = state.base.wrapping_add(o.at + cell as usize * o.cell);
        self.publish_from(out, payload, bytes);
    }

    /// A message that lies in `payload` takes the place of the cell that is free.
    pub(crate) fn publish_from(&mut self, out: usize, payload: *const u8, bytes: usize) {
        let index = self.state.flow.sent[out];
        self.state.flow.sent[out] += 1;
        self.tell(out, index, payload, bytes);
    }

    /// In the operation under way, messages of this inlet arrive one behind the other in `bytes` from `at` on.
    pub(crate) fn land(&mut self, recv_channel: usize, at: *mut u8, bytes: usize, stride: usize) {
        let state = &mut self.state;
        state.recv_targets.resize(state.channel_layout.ins.len(), None);
        state.recv_targets[recv_channel] = Some(RecvTarget { at, bytes, stride });
    }

    /// The memory of the calls under way is their callers' again.
    pub(crate) fn release_user_buffers(&mut self) {
        self.state.recv_targets.clear();
        self.state.messages.release_user_buffers();
        self.wire.release_user_buffers();
    }

    /// The memory of the collective under way has moved to `moved(address)`.
    pub(crate) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.state
            .recv_targets
            .iter_mut()
            .flatten()
            .for_each(|recv_target| recv_target.at = moved(recv_target.at));
        self.wire.relocate(moved);
    }

    pub(crate) fn message(&mut self, recv_channel: usize) -> Result<Option<*const u8>, Mismatch> {
        let came = &self.state.flow.came[recv_channel];
        match came.bad {
            Some(bad) => Err(bad),
            None if came.there > came.taken => {
                Ok(self.state.lies(recv_channel, came.taken, 0).map(<*mut u8>::cast_const))
            }
            None => Ok(None),
        }
    }

    pub(crate) fn release(&mut self, recv_channel: usize) {
        let (i, came) =
            (&self.state.channel_layout.ins[recv_channel], &mut self.state.flow.came[recv_channel]);
        came.taken += 1;
        // The writer's last messages need no room any more: word of the one before is the last.
        let last = came.taken + i.depth == i.want.messages;
        let due = came.taken - came.told >= (i.depth / WORDS).max(1);
        if last || came.taken + i.depth < i.want.messages && due {
            came.told = came.taken;
            let frame = Frame {
                channel: i.want.channel as u32,
                index: came.taken,
                ..Frame::new(Kind::Credit, self.state.seq)
            };
            let to = i.want.rank;
            self.frame(to, &frame, std::ptr::null(), P2P);
        }
    }

    /// Whether all headers are here and all that was sent is out of this process's hands: nobody drives afterwards.
    pub(crate) fn settle(&mut self) -> Result<bool, Mismatch> {
        if let Some(bad) = self.state.flow.came.iter().find_map(|came| came.bad) {
            return Err(bad);
        }
        if self.state.flow.came.iter().any(|came| !came.resolved) {
            return Ok(false);
        }
        // Where another call was found out, or the group has died, this one must not end well.
        let well = !self.differs() && !self.troubled(self.state.seq);
        Ok(well && self.state.flying == 0 && self.wire.drained())
    }

    pub(crate) fn end(&mut self) {
        let state = &mut self.state;
        state.past.push_back((state.seq, state.fingerprint));
        if state.past.len() > REMEMBERED {
            state.past.pop_front();
        }
        (state.open, state.seq) = (false, state.seq + 1);
        state.owner.give_back();
    }

    /// Whether `rank` has begun operation `seq`; `None`: not known.
    pub(crate) fn arrived(&self, rank: usize, seq: u64) -> Option<bool> {
        let begun = self.state.peers[rank].begun > seq;
        (begun || self.state.peers[rank].answered).then_some(begun)
    }

    /// Whether something of `rank` is waited for in operation `seq`, which it is not known to have begun.
    pub(crate) fn awaits(&self, rank: usize, seq: u64) -> bool {
        self.state.awaits(rank, seq)
    }

    /// Whether something of operation `seq` is still on its way to `rank`, or waits for it to take what came before.
    pub(crate) fn owes(&self, rank: usize, seq: u64) -> bool {
        self.state.open && self.state.seq == seq && self.state.debtors().any(|reader| reader == rank)
    }

    /// What questions about this rank are about.
    pub(crate) fn about(&self, about: u64) {
        if let Some(listeners) = &self.listeners {
            listeners.about(about);
        }
    }

    /// What a rank said in the survey that it does.
    pub(crate) fn doing(&self, rank: usize) -> &str {
        &self.state.peers[rank].doing
    }

    /// Ranks that did not answer the survey, though their hosts are there.
    pub(crate) fn mute(&self) -> impl Iterator<Item = usize> {
        self.state.peers.iter().enumerate().filter(|(_, peer)| peer.mute).map(|(rank, _)| rank)
    }

    /// Ranks of whose hosts the survey heard nothing.
    pub(crate) fn silent(&self) -> Vec<usize> {
        (0..self.state.peers.len()).filter(|&rank| self.state.peers[rank].silent).collect()
    }

    pub(crate) fn fingerprint_of(&self, rank: usize, seq: u64) -> Option<CallFingerprint> {
        (self.state.peers[rank].begun == seq + 1).then(|| self.state.peers[rank].newest)
    }

    /// Bytes of collectives that were given to the wire.
    pub(crate) fn crossed(&self) -> u64 {
        self.state.crossed
    }

    /// Whether a rank declared the group dead, in operation `seq` or before.
    pub(crate) fn troubled(&self, seq: u64) -> bool {
        self.state.dead_from.is_some_and(|from| from <= seq)
    }

    /// Whether that rank declared the group dead in an operation after `seq`.
    pub(crate) fn failed_after(&self, rank: usize, seq: u64) -> bool {
        self.state.peers[rank].abort.as_ref().is_some_and(|(from, _)| *from > seq)
    }

    /// Whether a rank made another call in an operation that is over here.
    pub(crate) fn differs(&self) -> bool {
        self.state.differs.is_some()
    }

    /// Looks after the ranks that this one waits for, and tells what is known to be wrong by `now`.
    pub(crate) fn faults(&mut self, now: Instant) -> Vec<Fault> {
        let (awaited, readers) = self.state.lacking();
        self.wait_notice(&awaited, now);
        let awaited = awaited.into_iter().chain(readers).chain(self.state.messages.awaited());
        for rank in awaited {
            self.look_after(rank, now);
        }
        self.wire.check(now);
        self.watches.iter_mut().for_each(|watches| watches.check(now));
        self.state.peers.iter_mut().filter_map(|p| p.last_error.as_mut()).for_each(|error| error.seen(now));
        let broken = self.broken(now);
        let mut faults: Vec<Fault> = self.state.differs.clone().into_iter().collect();
        let peers = || self.state.peers.iter().enumerate();
        faults.extend(
            peers().filter_map(|(rank, p)| Some(Fault::Poisoned { rank, reason: p.abort.clone()?.1 })),
        );
        faults.extend(peers().filter(|(_, p)| p.left).map(|(rank, _)| Fault::Left { rank }));
        let wrong = |what: &str| format!("is lost (it sent {what})");
        faults.extend(peers().filter_map(|(rank, p)| Some(Fault::Lost { rank, how: wrong(p.wrong?) })));
        let unable = self.wire.unable();
        faults.extend(unable.map(|(rank, reason)| Fault::Unable { rank, reason }));
        // Who has said why the group is dead may well hang up.
        let known = |peer: usize| self.state.peers[peer].left || self.state.peers[peer].abort.is_some();
        let broken = broken.into_iter().filter(|b| !known(b.peer));
        faults.extend(broken.map(|b| Fault::Lost { rank: b.peer, how: format!("is lost ({})", b.reason) }));
        faults
    }

    /// Ranks that the operation under way lacks something of: what they send, or that they take what is sent to them.
    pub(crate) fn lacking(&self) -> Vec<usize> {
        let (mut ranks, readers) = self.state.lacking();
        ranks.extend(readers);
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Something is waited for that only `rank` can do.
    pub(crate) fn look_after(&mut self, rank: usize, now: Instant) {
        self.wire.watch(rank, self.watches.is_some(), now);
        self.watches.iter_mut().for_each(|watches| watches.watch(rank, now));
    }

    /// What a listener says of a peer counts before what the wire says; the first to go first.
    fn broken(&mut self, now: Instant) -> Vec<Broken> {
        let mut broken = self.watches.as_ref().map_or_else(Vec::new, |watches| watches.broken(now));
        let last_words = self.wire.last_words();
        let mut also = Vec::new();
        for found in self.wire.broken() {
            let since = *self.state.peers[found.peer].broken.get_or_insert(now);
            if now.duration_since(since) >= last_words && !broken.iter().any(|b| b.peer == found.peer) {
                also.push((since, found));
            }
        }
        also.sort_by_key(|(since, _)| *since);
        broken.extend(also.into_iter().map(|(_, found)| found));
        broken
    }

    /// Tells ranks that keep this one waiting what it is that they are waited for in: perhaps they make another call, in
    /// which nothing comes this way.
    fn wait_notice(&mut self, awaited: &[usize], now: Instant) {
        match self.wait_notice {
            _ if !self.state.open => return,
            WaitNotice::Idle => {
                self.wait_notice = WaitNotice::Waits(now);
                return;
            }
            WaitNotice::Waits(since) if now.duration_since(since) >= HAIL => {
                self.wait_notice = WaitNotice::Told
            }
            WaitNotice::Waits(_) | WaitNotice::Told => return,
        }
        let fingerprint = self.state.fingerprint;
        let frame = Frame {
            what: fingerprint.what,
            count: fingerprint.count,
            ..Frame::new(Kind::WaitNotice, self.state.seq)
        };
        for &rank in awaited {
            self.frame(rank, &frame, std::ptr::null(), P2P);
        }
    }

    /// Tells the others, `remote` being all ranks of other nodes: one that this rank has had nothing to do with may wait for it
    /// in a call of its own.
    pub(crate) fn abort(&mut self, reason: &str, remote: &[usize]) {
        if std::mem::replace(&mut self.aborted, true) {
            return;
        }
        let words = &reason.as_bytes()[..reason.len().min(MAX_ABORT_REPORT)];
        for rank in self.to_be_told(remote) {
            // On the messages' class in any case, as with a goodbye. If there is no connection of it yet, this process may have
            // ended before there is one: so where there is one of the other class as well, be it that nothing came over it yet.
            let classes = self.state.peers[rank].used | self.wire.linked(rank) | 1 << MESSAGES;
            for class in (0..CLASSES).filter(|class| classes >> class & 1 == 1) {
                let (bytes, channel) = (words.len() as u64, class as u32);
                let frame = Frame { bytes, channel, ..Frame::new(Kind::Abort, self.state.seq) };
                self.frame(rank, &frame, words.as_ptr(), P2P);
            }
        }
        self.wire.poll(&mut self.state);
        self.wire.abandon();
        self.speak();
    }

    /// Sees to it that messages get out, for a moment: this process may end of the error that it is about to raise, and be taken
    /// for the first cause where nobody heard of another.
    fn speak(&mut self) {
        let until = Instant::now() + SPEAK;
        while !self.wire.spoken() && Instant::now() < until {
            if !self.wire.poll(&mut self.state) {
                std::thread::sleep(ACKNOWLEDGED);
            }
        }
    }

    /// All that this rank has to do with, and all others of a group that is not large. Of a large one those that are one, two,
    /// four, ... ranks away: each tells it on, so everybody hears it.
    fn to_be_told(&self, remote: &[usize]) -> Vec<usize> {
        let state = &self.state;
        let size = state.peers.len();
        let away = |rank: usize| rank.abs_diff(state.me).min(size - rank.abs_diff(state.me));
        let chosen =
            |rank: usize| state.peers[rank].met || size <= TOLD_BY_ONE || away(rank).is_power_of_two();
        remote.iter().copied().filter(|&rank| !state.peers[rank].left && chosen(rank)).collect()
    }

    fn acquaintances(&self) -> Vec<usize> {
        let state = &self.state;
        (0..state.peers.len()).filter(|&rank| state.peers[rank].met && !state.peers[rank].left).collect()
    }

    /// Says goodbye, and sees to it that everything gets out.
    pub(crate) fn leave(&mut self) {
        if std::mem::replace(&mut self.gone, true) {
            return;
        }
        let error = last_error::own();
        for rank in self.acquaintances() {
            // On the messages' class in any case: on the other one it may stand behind a call that the peer never makes.
            let classes = self.state.peers[rank].used | 1 << MESSAGES;
            for class in (0..CLASSES).filter(|class| classes >> class & 1 == 1) {
                let (channel, index) = (class as u32, u64::from(classes));
                let mut frame = Frame { channel, index, ..Frame::new(Kind::Leave, self.state.seq) };
                let mut payload = std::ptr::null();
                if let Some((ago, text)) = error.as_ref().filter(|_| class == MESSAGES) {
                    (frame.bytes, frame.total, payload) = leave_notice::words(*ago, text);
                }
                self.frame(rank, &frame, payload, P2P);
            }
        }
        // A peer may never take the data of a dead group. Its listener accepts a connection at any time: the abort report that waits
        // for one is delivered, so the peer does not report a lost rank instead.
        let dead = self.aborted || self.state.peers.iter().any(|peer| peer.abort.is_some());
        let mut now = Instant::now();
        let (soon, until) = (now + GOODBYE / 20, now + GOODBYE);
        let waits =
            |now: Instant, wire: &dyn Wire| now < until && (!dead || now < soon || wire.is_connecting());
        while !self.wire.finish() && waits(now, &*self.wire) {
            if self.wire.drained() {
                // Only acknowledgements are on their way.
                std::thread::sleep(ACKNOWLEDGED);
            } else if !self.wire.poll(&mut self.state) {
                self.wire.check(now);
                let mut fds = Vec::new();
                self.interest(&mut fds);
                self.state.owner.wait_briefly(&fds);
            }
            now = Instant::now();
        }
        self.wire.close();
    }

    /// Whether no message of that rank is still to be announced.
    pub(crate) fn p2p_over(&self, rank: usize) -> bool {
        let peer = &self.state.peers[rank];
        peer.last_announced || peer.goodbyes >> MESSAGES & 1 == 1
    }

    /// Tells a rank that all messages to it are announced.
    pub(crate) fn p2p_last(&mut self, rank: usize) {
        self.post();
        self.frame(rank, &Frame::new(Kind::Last, self.state.seq), std::ptr::null(), P2P);
    }

    /// The last error of a rank's process, if it said goodbye with one, and how long ago that was.
    pub(crate) fn last_error(&self, rank: usize) -> Option<(Duration, String)> {
        self.state.peers[rank].last_error.as_ref()?.told()
    }

    pub(crate) fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.watches.iter().for_each(|watches| watches.interest(fds));
        self.wire.interest(fds)
    }

    pub(crate) fn unacknowledged(&self) -> Vec<(usize, u32)> {
        self.wire.unacknowledged()
    }

    pub(crate) fn round_trip(&self, rank: usize) -> Option<Duration> {
        self.wire.round_trip(rank)
    }

    pub(crate) fn expect(&mut self, bytes: usize) {
        self.wire.expect(bytes);
    }

    /// Messages with the ranks of other nodes, and what they have to send of it.
    pub(crate) fn p2p<T>(&mut self, does: impl FnOnce(&mut dyn MessageTransport) -> T) -> T {
        let outcome = does(&mut self.state.messages);
        self.post();
        outcome
    }

    /// Sends what messages have to; whether there was anything.
    fn post(&mut self) -> bool {
        let mut any = false;
        while let Some(QueuedMessage { to, frame, payload, ticket }) = self.state.messages.due() {
            match ticket {
                Some(ticket) => self.frame(to, &frame, payload, P2P | ticket),
                None => {
                    self.note(to, &frame);
                    // SAFETY: memory of the message's sender, who is told that it is sent after this.
                    unsafe { self.wire.post(to, &frame, payload) };
                }
            }
            any = true;
        }
        any
    }
}

impl Drop for RemoteChannels {
    /// A device may still read from or write to the memory of a group that broke: it is not used again.
    fn drop(&mut self) {
        // And in a forked child all of it is the parent's.
        if self.forks != fork::generation() || !self.wire.drained() {
            self.state.owner.abandon();
            self.state.messages.abandon();
        }
    }
}

impl Inbound {
    fn awaits(&self, rank: usize, seq: u64) -> bool {
        let silent = |(i, came): (&RemoteRecv, &RecvProgress)| {
            i.want.rank == rank && came.awaited(&i.want) && came.there <= came.taken
        };
        self.open && self.seq == seq && self.peers[rank].begun <= seq && self.recv_channels().any(silent)
    }

    /// Readers to whom something is on its way, or that keep a writer from going on.
    fn debtors(&self) -> impl Iterator<Item = usize> {
        let flow = &self.flow;
        self.channel_layout.outs.iter().enumerate().flat_map(move |(out, o)| {
            let flies = flow.busy[o.first_cell..o.first_cell + o.cells as usize].iter().any(|&busy| busy > 0);
            let sent = flow.sent[out];
            let full = move |reader: usize| {
                sent < o.messages && sent.saturating_sub(flow.read[o.first_reader + reader]) >= o.window
            };
            let readers = o.readers.iter().enumerate();
            readers.filter(move |&(reader, _)| flies || full(reader)).map(|(_, &rank)| rank)
        })
    }

    /// Ranks of which something is to come, and those that have still to take something.
    fn lacking(&self) -> (Vec<usize>, Vec<usize>) {
        let awaited =
            self.recv_channels().filter(|(i, came)| came.awaited(&i.want)).map(|(i, _)| i.want.rank);
        (awaited.collect(), if self.open { self.debtors().collect() } else { Vec::new() })
    }

    /// Takes a frame for an error of its sender's.
    fn refuse(&mut self, peer: usize, what: &'static str) -> Target {
        self.peers[peer].wrong.get_or_insert(what);
        Target::Drop
    }

    /// What this rank reads, and how far each has come.
    fn recv_channels(&self) -> impl Iterator<Item = (&RemoteRecv, &RecvProgress)> {
        self.channel_layout.ins.iter().zip(&self.flow.came)
    }

    /// A frame of an operation that is over here, or of a channel that I do not read: then the calls differ.
    fn hold(&mut self, peer: usize, frame: &Frame) {
        let theirs = CallFingerprint { what: frame.what, count: frame.count };
        let mine = match self.past.iter().find(|(seq, _)| *seq == frame.seq) {
            Some(&(_, fingerprint)) => fingerprint,
            None if frame.seq == self.seq => self.fingerprint,
            None => return,
        };
        let found = Mismatch { rank: peer, theirs, bytes: None };
        self.differs.get_or_insert(Fault::Differs { seq: frame.seq, mine, found });
    }

    /// A rank waits for this one in an operation that is not what it is here.
    fn hailed(&mut self, peer: usize, frame: &Frame) {
        let mine = if frame.seq == self.seq && self.open {
            Some(self.fingerprint)
        } else {
            self.past.iter().find(|(seq, _)| *seq == frame.seq).map(|&(_, fingerprint)| fingerprint)
        };
        if mine.is_some_and(|mine| mine != CallFingerprint { what: frame.what, count: frame.count }) {
            self.hold(peer, frame);
        }
    }

    fn place_data(&mut self, peer: usize, frame: &Frame) -> Target {
        self.peers[peer].begun = self.peers[peer].begun.max(frame.seq.saturating_add(1));
        self.peers[peer].newest = CallFingerprint { what: frame.what, count: frame.count };
        if frame.seq > self.seq || frame.seq == self.seq && !self.open {
            return Target::Later;
        }
        let recv_channel =
            self.channel_layout.places.get(&(peer, frame.channel)).filter(|_| frame.seq == self.seq).copied();
        let Some(recv_channel) = recv_channel else {
            self.hold(peer, frame);
            return Target::Drop;
        };
        let (i, came) = (&self.channel_layout.ins[recv_channel], &mut self.flow.came[recv_channel]);
        let theirs = CallFingerprint { what: frame.what, count: frame.count };
        if theirs != self.fingerprint {
            came.bad = Some(Mismatch { rank: peer, theirs, bytes: None });
        } else if frame.total != i.want.bytes || frame.bytes > i.want.cell as u64 {
            came.bad = Some(Mismatch { rank: peer, theirs, bytes: Some((i.want.bytes, frame.total)) });
        }
        if came.bad.is_some() {
            return Target::Drop;
        }
        // Each message once, in order, and none besides.
        let known = if i.want.messages == 0 { frame.bytes == 0 } else { frame.index == came.placed };
        if !known || frame.index >= i.want.messages.max(1) {
            return self.refuse(peer, "a message out of order");
        }
        if frame.index >= came.taken + i.depth {
            return Target::Later;
        }
        let Some(place) = self.lies(recv_channel, frame.index, frame.bytes) else {
            return self.refuse(peer, "a message that is longer than what is left of its block");
        };
        self.flow.came[recv_channel].placed += 1;
        Target::Here(place)
    }

    /// Where message `index` of an inlet lies: in the call's own memory, if it is to and `bytes` fit there, or in a cell.
    fn lies(&self, recv_channel: usize, index: u64, bytes: u64) -> Option<*mut u8> {
        if let Some(recv_target) = self.recv_targets.get(recv_channel).copied().flatten() {
            return recv_target.place(index, bytes);
        }
        let i = &self.channel_layout.ins[recv_channel];
        let slot = (index % i.depth) as usize * i.want.cell.next_multiple_of(64);
        Some(self.base.wrapping_add(i.at + slot))
    }

    fn data_arrived(&mut self, peer: usize, frame: &Frame) {
        if frame.seq != self.seq || !self.open {
            return;
        }
        if let Some(&recv_channel) = self.channel_layout.places.get(&(peer, frame.channel)) {
            let (i, came) = (&self.channel_layout.ins[recv_channel], &mut self.flow.came[recv_channel]);
            came.resolved = true;
            if came.bad.is_none() && i.want.messages > 0 && came.there < came.placed {
                came.there += 1;
            }
        }
    }
}

impl Sink for Inbound {
    fn place(&mut self, peer: usize, frame: &Frame) -> Target {
        self.peers[peer].met = true;
        if self.peers[peer].wrong.is_some() {
            return Target::Drop;
        }
        if matches!(frame.kind, Kind::Data | Kind::Credit | Kind::WaitNotice) {
            self.peers[peer].used |= 1 << frame.class();
        }
        match frame.kind {
            Kind::Data => self.place_data(peer, frame),
            Kind::Piece => match self.messages.place(peer, frame) {
                Some(place) => place,
                None => self.refuse(peer, "a piece of a message that it did not announce so"),
            },
            Kind::Abort if frame.bytes <= MAX_ABORT_REPORT as u64 && self.peers[peer].words.is_none() => {
                let words = vec![0; frame.bytes as usize].into();
                Target::Here(self.peers[peer].words.insert((frame.channel, words)).1.as_mut_ptr())
            }
            // It comes on each class that is used: the first to begin counts.
            Kind::Abort if frame.bytes <= MAX_ABORT_REPORT as u64 => Target::Drop,
            Kind::Abort => self.refuse(peer, "a reason without an end why the group is dead"),
            Kind::Leave if frame.bytes > MAX_ERROR_BYTES as u64 => {
                self.refuse(peer, "an error without an end")
            }
            // Once, and where it belongs.
            Kind::Leave if frame.bytes > 0 => {
                let known = &mut self.peers[peer].last_error;
                match frame.channel as usize == MESSAGES && known.is_none() {
                    true => Target::Here(known.insert(LastError::new(frame)).place()),
                    false => Target::Drop,
                }
            }
            _ if frame.bytes > 0 => self.refuse(peer, "bytes with a frame that has none"),
            _ => Target::Drop,
        }
    }

    fn arrived(&mut self, peer: usize, frame: &Frame) {
        if self.peers[peer].wrong.is_some() {
            return;
        }
        match frame.kind {
            Kind::Data => self.data_arrived(peer, frame),
            Kind::Credit => {
                let mut outs = self.channel_layout.outs.iter().enumerate();
                let out = outs.find(|(_, out)| out.channel as u32 == frame.channel);
                if let Some((number, out)) = out.filter(|_| self.open && frame.seq == self.seq)
                    && let Some(reader) = out.readers.iter().position(|&rank| rank == peer)
                {
                    // Nobody has read what was not sent.
                    let sent = self.flow.sent[number];
                    let read = &mut self.flow.read[out.first_reader + reader];
                    *read = (*read).max(frame.index.min(sent));
                }
            }
            Kind::Abort => {
                let Some((class, words)) = &self.peers[peer].words else { return };
                if *class != frame.channel {
                    return;
                }
                let reason = String::from_utf8_lossy(words).into_owned();
                self.peers[peer].abort.get_or_insert((frame.seq, reason));
                self.dead_from = Some(self.dead_from.map_or(frame.seq, |from| from.min(frame.seq)));
            }
            Kind::Leave => {
                // What it sent on its other class may still be on its way.
                self.peers[peer].goodbyes |= 1 << (frame.channel & 7);
                self.peers[peer].left = u64::from(self.peers[peer].goodbyes) & frame.index == frame.index;
                if frame.channel as usize == MESSAGES {
                    self.peers[peer].last_error.iter_mut().for_each(LastError::came);
                }
            }
            Kind::WaitNotice => self.hailed(peer, frame),
            // Between the ends of a wire.
            Kind::Move | Kind::Moved => {}
            Kind::Announce => {
                if let Err(what) = self.messages.announced(peer, frame) {
                    self.refuse(peer, what);
                }
            }
            Kind::Last => self.peers[peer].last_announced = true,
            Kind::Ready => self.messages.granted(peer, frame),
            Kind::Piece => self.messages.arrived(peer, frame),
        }
    }

    fn awaited(&self) -> u8 {
        u8::from(self.open) << COLLECTIVES | u8::from(self.messages.wants()) << MESSAGES
    }

    fn sent(&mut self, ticket: Ticket) {
        if ticket & P2P != 0 {
            return self.messages.sent(ticket & !P2P);
        }
        let (out, cell) = ((ticket >> 32) as usize, (ticket & 0xffff_ffff) as usize);
        self.flying = self.flying.saturating_sub(1);
        if let Some(o) = self.channel_layout.outs.get(out).filter(|o| (cell as u64) < o.cells) {
            let busy = &mut self.flow.busy[o.first_cell + cell];
            *busy = busy.saturating_sub(1);
        }
    }
}

#[cfg(any(test, fuzzing))]
impl RemoteChannels {
    /// Whether these bytes lie in memory that this group has now.
    pub(crate) fn holds(&self, at: *const u8, bytes: usize) -> bool {
        let state = &self.state;
        let words = |words: &[u8]| words.as_ptr() == at && bytes <= words.len();
        state.owner.holds(at, bytes)
            || state.messages.holds(at, bytes)
            || state.peers.iter().filter_map(|peer| Some(&*peer.words.as_ref()?.1)).any(words)
            || state.peers.iter().filter_map(|peer| Some(peer.last_error.as_ref()?.text())).any(words)
    }
}
