//! Channels and messages over a wire: a rank's half of what its group does between nodes.
//!
//! A channel's reader has as many cells as the window that all ranks agree on; its writer stays that far ahead at most,
//! and is told of cells that are free again where it needs them: on a long way of several at a time. The writer itself has
//! that many cells only where the wire keeps no copy of what is on its way. So whatever arrives for the operation under way has
//! its place, and what is for a later one waits in the wire.

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::frame::{Frame, Kind, LANES};
use super::letters::Letters;
use super::wire::{Place, Sink, Ticket, Wire};
use crate::fork;
use crate::shm::{Endpoint, Owner};
use crate::{Fault, Head, Inlet, Mail, Mismatch, Stream};

/// A channel that this rank writes and ranks of other nodes read.
pub(crate) struct NetOutlet {
    /// Its number in the program.
    pub(crate) channel: usize,
    pub(crate) readers: Vec<usize>,
    pub(crate) cell: usize,
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
}

struct Out {
    channel: usize,
    /// (rank, messages it has read that we know of); in rotated order, so that not all ranks write to one first.
    readers: Vec<(usize, u64)>,
    /// Of its first cell, in the operation's memory.
    at: usize,
    cell: usize,
    /// Messages that it may be ahead of its readers.
    window: u64,
    sent: u64,
    messages: u64,
    bytes: u64,
    /// Sends under way from each of its cells.
    busy: Vec<u32>,
}

struct In {
    want: Inlet,
    at: usize,
    depth: u64,
    /// Messages that are here, and that are read.
    there: u64,
    taken: u64,
    /// Of those that are read, the writer was told of so many.
    told: u64,
    /// The writer's header was seen.
    resolved: bool,
    bad: Option<Mismatch>,
}

impl In {
    /// Something is still to come.
    fn awaited(&self) -> bool {
        !self.resolved || self.there < self.want.messages
    }
}

/// Headers of operations that are over here, against which late frames are held.
const REMEMBERED: usize = 64;
/// Frames that carry less than a cell need no place: a channel of tokens still has an address.
const NOWHERE: *mut u8 = std::ptr::dangling_mut();

/// What arrives is judged and kept here.
pub(super) struct State {
    me: usize,
    owner: Owner,
    /// Number of the operation under way, or of the next one.
    seq: u64,
    open: bool,
    opened: Option<Instant>,
    head: Head,
    /// The operation's cells, and how many bytes they are.
    base: *mut u8,
    bytes: usize,
    outs: Vec<Out>,
    ins: Vec<In>,
    places: HashMap<(usize, u32), usize>,
    /// Sends of cells whose memory is still in use.
    flying: u64,
    past: VecDeque<(u64, Head)>,
    differs: Option<Fault>,
    /// Per rank: operations it is known to have begun, and the header of the newest.
    begun: Vec<u64>,
    newest: Vec<Head>,
    /// It was asked what it has begun, so `begun` is all there is to know.
    asked: Vec<bool>,
    /// It was asked and did not answer.
    silent: Vec<bool>,
    /// Ranks that anything was sent to or came from.
    met: Vec<bool>,
    /// Lanes (bits) on which anything was sent to each rank, and on which it said goodbye.
    used: Vec<u8>,
    goodbyes: Vec<u8>,
    poison: Vec<Option<String>>,
    /// First operation in which a rank declared the group dead.
    dead_from: Option<u64>,
    left: Vec<bool>,
    /// What ranks say of why the group is dead, while it arrives.
    words: Vec<Vec<u8>>,
    pub(super) letters: Letters,
}

// SAFETY: cell addresses lie in the endpoint's staging memory, in a region that this operation owns until it ends; one
// thread at a time owns the link.
unsafe impl Send for State {}

pub(crate) struct Net {
    wire: Box<dyn Wire>,
    state: State,
    poisoned: bool,
    gone: bool,
    /// In the operation under way.
    hailed: bool,
    forks: u32,
}

/// Ranks that keep this one waiting longer are told so.
const HAIL: Duration = Duration::from_millis(50);
/// Leaving waits this long for the last bytes to get out.
const GOODBYE: Duration = Duration::from_secs(2);
/// Acknowledgements are looked for this often.
const ACKNOWLEDGED: Duration = Duration::from_micros(50);
/// Bytes of the reason that a dead group's ranks are told.
const LONGEST_WHY: usize = 1000;
/// Ranks of a group of which one tells all others what has happened.
const TOLD_BY_ONE: usize = 256;
/// A writer is told of free cells so many times while it goes through its window.
const WORDS: u64 = 8;
/// Tickets with this bit are the letters'.
const LETTER: Ticket = 1 << 63;

impl Net {
    /// `nonce`: the group's number at this process's staging pool.
    pub(crate) fn new(
        me: usize,
        size: usize,
        wire: Box<dyn Wire>,
        endpoint: Arc<Endpoint>,
        nonce: u64,
    ) -> Self {
        let owner = Owner::new(endpoint, nonce);
        let state = State {
            me,
            letters: Letters::new(size, owner.sibling()),
            owner,
            seq: 0,
            open: false,
            opened: None,
            head: Head::default(),
            base: NOWHERE,
            bytes: 0,
            outs: Vec::new(),
            ins: Vec::new(),
            places: HashMap::new(),
            flying: 0,
            past: VecDeque::new(),
            differs: None,
            begun: vec![0; size],
            newest: vec![Head::default(); size],
            asked: vec![false; size],
            silent: vec![false; size],
            met: vec![false; size],
            used: vec![0; size],
            goodbyes: vec![0; size],
            poison: vec![None; size],
            dead_from: None,
            left: vec![false; size],
            words: vec![Vec::new(); size],
        };
        Self { wire, state, poisoned: false, gone: false, hailed: false, forks: fork::generation() }
    }

    pub(crate) fn name(&self) -> String {
        self.wire.name()
    }

    pub(crate) fn turn(&mut self) -> bool {
        let mut moved = self.wire.poll(&mut self.state);
        while let Some((to, frame)) = self.state.letters.due() {
            self.frame(to, &frame, std::ptr::null(), LETTER);
            moved = true;
        }
        moved
    }

    pub(crate) fn busy(&self) -> bool {
        self.state.flying > 0 || self.state.letters.flying() || !self.wire.drained()
    }

    /// Sends a frame whose payload, if any, is short or staged.
    fn frame(&mut self, to: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        self.state.met[to] = true;
        self.state.used[to] |= 1 << frame.lane();
        // SAFETY: payloads are cells of regions that are kept until their tickets are back, or short.
        unsafe { self.wire.send(to, frame, payload, ticket) };
    }

    /// The channels of the operations to come.
    ///
    /// `window`: cells on which all ranks agree; `depth`: those that a channel needs for its writer's and its reader's work.
    pub(crate) fn wire_up(&mut self, outlets: Vec<NetOutlet>, inlets: &[Inlet], window: usize, depth: usize) {
        let written = if self.wire.copies() { window.min(depth) } else { window };
        let state = &mut self.state;
        let mut end = 0;
        let mut place = |cell: usize, messages: u64, most: usize| {
            let (at, cell, cells) = (end, cell.next_multiple_of(64), messages.min(most as u64).max(1));
            end += cell * cells as usize;
            (at, cell, cells)
        };
        state.outs.clear();
        for outlet in outlets {
            let (at, cell, cells) = place(outlet.cell, outlet.messages, written);
            let mut readers: Vec<_> = outlet.readers.into_iter().map(|rank| (rank, 0)).collect();
            let first = readers.iter().position(|&(rank, _)| rank > state.me).unwrap_or(0);
            readers.rotate_left(first);
            state.outs.push(Out {
                channel: outlet.channel,
                readers,
                at,
                cell,
                window: outlet.messages.min(window as u64).max(1),
                sent: 0,
                messages: outlet.messages,
                bytes: outlet.bytes,
                busy: vec![0; cells as usize],
            });
        }
        state.ins.clear();
        state.places.clear();
        for (index, inlet) in inlets.iter().enumerate() {
            let (at, _, depth) = place(inlet.cell, inlet.messages, window);
            state.places.insert((inlet.rank, inlet.channel as u32), index);
            state.met[inlet.rank] = true;
            state.ins.push(In {
                want: *inlet,
                at,
                depth,
                there: 0,
                taken: 0,
                told: 0,
                resolved: false,
                bad: None,
            });
        }
        state.bytes = end;
    }

    /// Takes the memory that the operation needs; false while the pool has none.
    pub(crate) fn reserve(&mut self) -> bool {
        self.state.owner.reserve(self.state.bytes)
    }

    /// Opens operation `seq`, which is wired up and whose memory is reserved.
    pub(crate) fn begin(&mut self, seq: u64, head: Head) {
        let state = &mut self.state;
        (state.seq, state.head, state.open) = (seq, head, true);
        (state.opened, self.hailed) = (Some(Instant::now()), false);
        state.base = state.owner.base();
        self.wire.begun(seq + 1);
        for out in &mut state.outs {
            out.sent = 0;
            out.readers.iter_mut().for_each(|(_, read)| *read = 0);
        }
        for inlet in &mut state.ins {
            (inlet.there, inlet.taken, inlet.told, inlet.resolved, inlet.bad) = (0, 0, 0, false, None);
        }
        // A channel that carries nothing still tells its readers what this operation is.
        for out in 0..self.state.outs.len() {
            if self.state.outs[out].messages == 0 {
                self.tell(out, 0, 0);
            }
        }
    }

    /// A message of `bytes` in cell `index` goes to all readers of an outlet.
    fn tell(&mut self, out: usize, index: u64, bytes: usize) {
        let state = &self.state;
        let o = &state.outs[out];
        let cell = index % o.busy.len() as u64;
        let payload = state.base.wrapping_add(o.at + cell as usize * o.cell).cast_const();
        let frame = Frame {
            channel: o.channel as u32,
            index,
            bytes: bytes as u64,
            what: state.head.what,
            count: state.head.count,
            total: o.bytes,
            ..Frame::new(Kind::Data, state.seq)
        };
        let ticket = (out as u64) << 32 | cell;
        for reader in 0..self.state.outs[out].readers.len() {
            let to = self.state.outs[out].readers[reader].0;
            self.state.flying += 1;
            self.state.outs[out].busy[cell as usize] += 1;
            self.frame(to, &frame, payload, ticket);
        }
    }

    pub(crate) fn cell(&mut self, out: usize) -> Option<*mut u8> {
        let o = &self.state.outs[out];
        let slowest = o.readers.iter().map(|&(_, read)| read).min().unwrap_or(o.sent);
        let cell = (o.sent % o.busy.len() as u64) as usize;
        let free = o.sent - slowest < o.window && o.busy[cell] == 0;
        free.then(|| self.state.base.wrapping_add(o.at + cell * o.cell))
    }

    pub(crate) fn publish(&mut self, out: usize, bytes: usize) {
        let index = self.state.outs[out].sent;
        self.state.outs[out].sent += 1;
        self.tell(out, index, bytes);
    }

    pub(crate) fn message(&mut self, inlet: usize) -> Result<Option<*const u8>, Mismatch> {
        let i = &self.state.ins[inlet];
        if let Some(bad) = i.bad {
            return Err(bad);
        }
        let slot = (i.taken % i.depth) as usize * i.want.cell.next_multiple_of(64);
        Ok((i.there > i.taken).then(|| self.state.base.wrapping_add(i.at + slot).cast_const()))
    }

    pub(crate) fn release(&mut self, inlet: usize) {
        let i = &mut self.state.ins[inlet];
        i.taken += 1;
        // The writer's last messages need no room any more: word of the one before is the last.
        let last = i.taken + i.depth == i.want.messages;
        if last || i.taken + i.depth < i.want.messages && i.taken - i.told >= (i.depth / WORDS).max(1) {
            i.told = i.taken;
            let frame = Frame {
                channel: i.want.channel as u32,
                index: i.taken,
                ..Frame::new(Kind::Credit, self.state.seq)
            };
            let to = i.want.rank;
            self.frame(to, &frame, std::ptr::null(), LETTER);
        }
    }

    /// Whether all headers are here and all that was sent is out of this process's hands: nobody drives afterwards.
    pub(crate) fn settle(&mut self) -> Result<bool, Mismatch> {
        if let Some(bad) = self.state.ins.iter().find_map(|inlet| inlet.bad) {
            return Err(bad);
        }
        if self.state.ins.iter().any(|inlet| !inlet.resolved) {
            return Ok(false);
        }
        // Where another call was found out, or the group has died, this one must not end well.
        let well = !self.differs() && !self.troubled(self.state.seq);
        Ok(well && self.state.flying == 0 && self.wire.drained())
    }

    pub(crate) fn end(&mut self) {
        let state = &mut self.state;
        state.past.push_back((state.seq, state.head));
        if state.past.len() > REMEMBERED {
            state.past.pop_front();
        }
        (state.open, state.seq) = (false, state.seq + 1);
        state.owner.give_back();
    }

    /// Whether `rank` is known to have begun operation `seq`, or nothing of it is waited for.
    pub(crate) fn arrived(&self, rank: usize, seq: u64) -> bool {
        let state = &self.state;
        let awaited = state.open && state.seq == seq && {
            let silent = |i: &In| i.want.rank == rank && i.awaited() && i.there <= i.taken;
            state.ins.iter().any(silent)
        };
        state.begun[rank] > seq || !awaited && !state.asked[rank]
    }

    /// Learns from the ranks of other nodes themselves how far they are.
    pub(crate) fn survey(&mut self, peers: &[usize]) {
        let answers = self.wire.survey(peers);
        for &peer in peers {
            self.state.asked[peer] = true;
        }
        for (peer, begun) in answers {
            self.state.silent[peer] = begun.is_none();
            self.state.begun[peer] = self.state.begun[peer].max(begun.unwrap_or(0));
        }
    }

    /// Ranks that did not answer the survey.
    pub(crate) fn silent(&self) -> Vec<usize> {
        (0..self.state.silent.len()).filter(|&rank| self.state.silent[rank]).collect()
    }

    pub(crate) fn head_of(&self, rank: usize, seq: u64) -> Option<Head> {
        (self.state.begun[rank] == seq + 1).then(|| self.state.newest[rank])
    }

    /// Whether a rank declared the group dead, in operation `seq` or before.
    pub(crate) fn troubled(&self, seq: u64) -> bool {
        self.state.dead_from.is_some_and(|from| from <= seq)
    }

    /// Whether a rank made another call in an operation that is over here.
    pub(crate) fn differs(&self) -> bool {
        self.state.differs.is_some()
    }

    /// Looks after the ranks that this one waits for, and tells what is known to be wrong.
    pub(crate) fn faults(&mut self) -> Vec<Fault> {
        let awaited: Vec<usize> =
            self.state.ins.iter().filter(|i| i.awaited()).map(|i| i.want.rank).collect();
        self.hail(&awaited);
        for rank in awaited.into_iter().chain(self.state.letters.awaited()) {
            self.wire.watch(rank);
        }
        self.wire.check();
        let mut faults: Vec<Fault> = self.state.differs.clone().into_iter().collect();
        for (rank, why) in self.state.poison.iter().enumerate() {
            if let Some(why) = why {
                faults.push(Fault::Poisoned { rank, why: why.clone() });
            }
        }
        let left = self.state.left.iter().enumerate().filter(|(_, left)| **left);
        faults.extend(left.map(|(rank, _)| Fault::Left { rank }));
        // Who has said why the group is dead may well hang up.
        let known = |peer: usize| self.state.left[peer] || self.state.poison[peer].is_some();
        let broken = self.wire.broken().into_iter().filter(|b| !known(b.peer));
        faults.extend(broken.map(|b| Fault::Lost { rank: b.peer, how: format!("is lost ({})", b.why) }));
        faults
    }

    /// Tells ranks that keep this one waiting what it is that they are waited for in: perhaps they make another call, in
    /// which nothing comes this way.
    fn hail(&mut self, awaited: &[usize]) {
        if !self.state.open || self.hailed || self.state.opened.is_none_or(|at| at.elapsed() < HAIL) {
            return;
        }
        self.hailed = true;
        let head = self.state.head;
        let frame = Frame { what: head.what, count: head.count, ..Frame::new(Kind::Hail, self.state.seq) };
        for &rank in awaited {
            self.frame(rank, &frame, std::ptr::null(), LETTER);
        }
    }

    /// Tells the others, `far` being all ranks of other nodes: one that this rank has had nothing to do with may wait for it
    /// in a call of its own.
    pub(crate) fn poison(&mut self, why: &str, far: &[usize]) {
        if std::mem::replace(&mut self.poisoned, true) {
            return;
        }
        let words = &why.as_bytes()[..why.len().min(LONGEST_WHY)];
        let frame = Frame { bytes: words.len() as u64, ..Frame::new(Kind::Poison, self.state.seq) };
        for rank in self.to_be_told(far) {
            self.frame(rank, &frame, words.as_ptr(), LETTER);
        }
        self.wire.poll(&mut self.state);
    }

    /// All that this rank has to do with, and all others of a group that is not large. Of a large one those that are one, two,
    /// four, ... ranks away: each tells it on, so everybody hears it.
    fn to_be_told(&self, far: &[usize]) -> Vec<usize> {
        let state = &self.state;
        let size = state.met.len();
        let away = |rank: usize| rank.abs_diff(state.me).min(size - rank.abs_diff(state.me));
        let chosen = |rank: usize| state.met[rank] || size <= TOLD_BY_ONE || away(rank).is_power_of_two();
        far.iter().copied().filter(|&rank| !state.left[rank] && chosen(rank)).collect()
    }

    fn acquaintances(&self) -> Vec<usize> {
        let state = &self.state;
        (0..state.met.len()).filter(|&rank| state.met[rank] && !state.left[rank]).collect()
    }

    /// Says goodbye, and sees to it that everything gets out.
    pub(crate) fn leave(&mut self) {
        if std::mem::replace(&mut self.gone, true) {
            return;
        }
        for rank in self.acquaintances() {
            let lanes = self.state.used[rank].max(1);
            for lane in (0..LANES).filter(|lane| lanes >> lane & 1 == 1) {
                let (channel, index) = (lane as u32, u64::from(lanes));
                let frame = Frame { channel, index, ..Frame::new(Kind::Leave, self.state.seq) };
                self.frame(rank, &frame, std::ptr::null(), LETTER);
            }
        }
        // A dead group's bytes may have nobody to take them.
        let patience = if self.poisoned { GOODBYE / 20 } else { GOODBYE };
        let begun = Instant::now();
        while !self.wire.finish() && begun.elapsed() < patience {
            if self.wire.drained() {
                // Only acknowledgements are on their way.
                std::thread::sleep(ACKNOWLEDGED);
            } else if !self.wire.poll(&mut self.state) {
                let mut fds = Vec::new();
                self.wire.interest(&mut fds);
                self.state.owner.nap(&fds);
            }
        }
    }

    pub(crate) fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.wire.interest(fds)
    }

    pub(crate) fn round_trip(&self, rank: usize) -> Option<Duration> {
        self.wire.round_trip(rank)
    }

    pub(crate) fn expect(&mut self, bytes: usize) {
        self.wire.expect(bytes);
    }

    pub(crate) fn mail_open(&mut self, to: usize, mail: Mail) -> Option<Stream> {
        let (stream, frame) = self.state.letters.open(to, mail)?;
        self.frame(to, &frame, std::ptr::null(), LETTER);
        Some(stream)
    }

    pub(crate) fn mail_cell(&mut self, stream: Stream) -> Option<(*mut u8, usize)> {
        self.state.letters.cell(stream)
    }

    pub(crate) fn mail_publish(&mut self, stream: Stream, bytes: usize) {
        if let Some((to, frame, payload, ticket)) = self.state.letters.publish(stream, bytes) {
            self.frame(to, &frame, payload, LETTER | ticket);
        }
    }

    pub(crate) fn mail_close(&mut self, stream: Stream) {
        self.state.letters.close(stream);
    }

    pub(crate) fn mail_next(&mut self, from: usize) -> Option<(Mail, Stream)> {
        self.state.letters.next(from)
    }

    pub(crate) fn mail_piece(&mut self, from: usize, stream: Stream) -> Option<(*const u8, usize)> {
        let piece = self.state.letters.piece(from, stream);
        while let Some((to, frame)) = self.state.letters.due() {
            self.frame(to, &frame, std::ptr::null(), LETTER);
        }
        piece
    }

    pub(crate) fn mail_release(&mut self, from: usize, stream: Stream) {
        self.state.letters.release(from, stream);
        while let Some((to, frame)) = self.state.letters.due() {
            self.frame(to, &frame, std::ptr::null(), LETTER);
        }
    }
}

impl Drop for Net {
    /// A device may still read from or write to the memory of a group that broke: it is not used again.
    fn drop(&mut self) {
        // And in a forked child all of it is the parent's.
        if self.forks != fork::generation() || !self.wire.drained() {
            self.state.owner.abandon();
            self.state.letters.abandon();
        }
    }
}

impl State {
    /// A frame of an operation that is over here, or of a channel that I do not read: then the calls differ.
    fn hold(&mut self, peer: usize, frame: &Frame) {
        let theirs = Head { what: frame.what, count: frame.count };
        let mine = match self.past.iter().find(|(seq, _)| *seq == frame.seq) {
            Some(&(_, head)) => head,
            None if frame.seq == self.seq => self.head,
            None => return,
        };
        let found = Mismatch { rank: peer, theirs, bytes: None };
        self.differs.get_or_insert(Fault::Differs { seq: frame.seq, mine, found });
    }

    /// A rank waits for this one in an operation that is not what it is here.
    fn hailed(&mut self, peer: usize, frame: &Frame) {
        let mine = if frame.seq == self.seq && self.open {
            Some(self.head)
        } else {
            self.past.iter().find(|(seq, _)| *seq == frame.seq).map(|&(_, head)| head)
        };
        if mine.is_some_and(|mine| mine != Head { what: frame.what, count: frame.count }) {
            self.hold(peer, frame);
        }
    }

    fn place_data(&mut self, peer: usize, frame: &Frame) -> Place {
        self.begun[peer] = self.begun[peer].max(frame.seq + 1);
        self.newest[peer] = Head { what: frame.what, count: frame.count };
        if frame.seq > self.seq || frame.seq == self.seq && !self.open {
            return Place::Later;
        }
        let inlet = self.places.get(&(peer, frame.channel)).filter(|_| frame.seq == self.seq).copied();
        let Some(inlet) = inlet else {
            self.hold(peer, frame);
            return Place::Drop;
        };
        let i = &mut self.ins[inlet];
        let theirs = Head { what: frame.what, count: frame.count };
        if theirs != self.head {
            i.bad = Some(Mismatch { rank: peer, theirs, bytes: None });
        } else if frame.total != i.want.bytes || frame.bytes > i.want.cell as u64 {
            i.bad = Some(Mismatch { rank: peer, theirs, bytes: Some((i.want.bytes, frame.total)) });
        }
        if i.bad.is_some() {
            return Place::Drop;
        }
        if frame.index >= i.taken + i.depth {
            return Place::Later;
        }
        let slot = (frame.index % i.depth) as usize * i.want.cell.next_multiple_of(64);
        Place::Here(self.base.wrapping_add(i.at + slot))
    }

    fn data_arrived(&mut self, peer: usize, frame: &Frame) {
        if frame.seq != self.seq || !self.open {
            return;
        }
        if let Some(&inlet) = self.places.get(&(peer, frame.channel)) {
            let i = &mut self.ins[inlet];
            i.resolved = true;
            if i.bad.is_none() && i.want.messages > 0 {
                i.there = frame.index + 1;
            }
        }
    }
}

impl Sink for State {
    fn place(&mut self, peer: usize, frame: &Frame) -> Place {
        self.met[peer] = true;
        match frame.kind {
            Kind::Data => self.place_data(peer, frame),
            Kind::Piece => self.letters.place(peer, frame),
            Kind::Poison if frame.bytes as usize <= LONGEST_WHY => {
                self.words[peer] = vec![0; frame.bytes as usize];
                Place::Here(self.words[peer].as_mut_ptr())
            }
            _ => Place::Drop,
        }
    }

    fn arrived(&mut self, peer: usize, frame: &Frame) {
        match frame.kind {
            Kind::Data => self.data_arrived(peer, frame),
            Kind::Credit => {
                let out = self.outs.iter_mut().find(|o| o.channel as u32 == frame.channel);
                if let Some(out) = out.filter(|_| self.open && frame.seq == self.seq)
                    && let Some(reader) = out.readers.iter_mut().find(|(rank, _)| *rank == peer)
                {
                    reader.1 = reader.1.max(frame.index);
                }
            }
            Kind::Poison => {
                let why = String::from_utf8_lossy(&self.words[peer]).into_owned();
                self.poison[peer].get_or_insert(why);
                self.dead_from = Some(self.dead_from.map_or(frame.seq, |from| from.min(frame.seq)));
            }
            Kind::Leave => {
                // What it sent on its other lane may still be on its way.
                self.goodbyes[peer] |= 1 << (frame.channel & 7);
                self.left[peer] = u64::from(self.goodbyes[peer]) & frame.index == frame.index;
            }
            Kind::Hail => self.hailed(peer, frame),
            // Between the ends of a wire.
            Kind::Move | Kind::Moved => {}
            Kind::Letter => self.letters.announced(peer, frame),
            Kind::Ready => self.letters.granted(peer, frame),
            Kind::Piece => self.letters.arrived(peer, frame),
        }
    }

    fn sent(&mut self, ticket: Ticket) {
        if ticket & LETTER != 0 {
            return self.letters.sent(ticket & !LETTER);
        }
        let (out, cell) = ((ticket >> 32) as usize, (ticket & 0xffff_ffff) as usize);
        self.flying = self.flying.saturating_sub(1);
        if let Some(busy) = self.outs.get_mut(out).and_then(|o| o.busy.get_mut(cell)) {
            *busy = busy.saturating_sub(1);
        }
    }
}
