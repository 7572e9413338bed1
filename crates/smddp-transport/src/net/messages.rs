//! Messages between two ranks of different nodes, outside the collectives.
//!
//! The sender announces each message. A short one follows at once and is kept by the receiver until it is asked for, as
//! long as not too many of them are; any other one waits until the receiver asks for it and has cells for its pieces.
//! So no message ever stands in the way of another, or of a collective. Where the wire takes messages from any memory and
//! brings them to any, they leave from the sender's own, and those that the receiver has asked for arrive in its own.

use std::collections::{BTreeMap, VecDeque};

use super::frame::{Frame, Kind};
use super::wire::{INLINE_PAYLOAD, Target, Ticket};
use crate::process::{Region, StagingMemory};
use crate::{Envelope, MessageId, MessageTransport};

const PIECE: usize = 128 << 10;
/// Messages up to this many bytes follow their announcement at once.
const SHORT: usize = 64 << 10;
/// Pieces under way.
const DEPTH: u64 = 4;
/// Short messages that a receiver keeps for one sender, in bytes.
const KEPT: u64 = 8 << 20;
/// Of those that were taken since, so many are told at once: word of each would cost as much as the message.
const WORD: u64 = KEPT / 8;
/// Messages of one sender that nobody has asked for yet: more is a sender that does not stop.
const ANNOUNCED: usize = 1 << 20;
/// In `Frame::channel` of a `Ready`: short messages of `total` bytes were taken.
const TAKEN: u32 = 1;

struct Outgoing {
    to: usize,
    bytes: usize,
    /// It was announced as one that follows at once.
    short: bool,
    region: Option<Region>,
    /// Instead: its pieces leave from where the sender has them.
    lent: Option<*const u8>,
    granted: u64,
    sent: u64,
    busy: [u32; DEPTH as usize],
    closed: bool,
}

/// Where a message lies that needs no cells.
enum RecvTarget {
    At(*mut u8),
    /// It was let go: what still comes is dropped.
    Over,
}

struct Incoming {
    bytes: usize,
    follows: bool,
    region: Option<Region>,
    recv_target: Option<RecvTarget>,
    /// It was put off for a look, in which whoever waits for it may say where it belongs.
    deferred: bool,
    /// Pieces that were given room, that are here, and that are read: none is read that is not here, so the region is not
    /// given back while somebody writes to it.
    placed: u64,
    there: u64,
    taken: u64,
}

impl Incoming {
    fn pieces(&self) -> u64 {
        if self.follows { 1 } else { self.bytes.div_ceil(PIECE) as u64 }
    }

    /// Bytes of the piece that comes next.
    fn next(&self) -> usize {
        if self.follows { self.bytes } else { (self.bytes - self.placed as usize * PIECE).min(PIECE) }
    }
}

pub(super) struct RemoteMessages {
    owner: StagingMemory,
    /// The wire takes messages from any memory and brings them to any.
    direct: bool,
    next: MessageId,
    outgoing: BTreeMap<MessageId, Outgoing>,
    /// Short messages' bytes that each rank keeps for this one.
    kept: Vec<u64>,
    /// Ranks to which a short message was sent: their confirmation would be another message.
    short_sent: Vec<bool>,
    /// Bytes of short messages that were taken and that their sender has not been told of.
    unannounced: Vec<u64>,
    announced: Vec<VecDeque<(Envelope, MessageId)>>,
    incoming: BTreeMap<(usize, MessageId), Incoming>,
    /// Ranks whose announcements were looked for in vain.
    wanted: Vec<bool>,
    /// The last look for announcements was in vain.
    seeks: bool,
    due: VecDeque<QueuedMessage>,
}

/// A frame that has to be sent to a rank.
pub(super) struct QueuedMessage {
    pub(super) to: usize,
    pub(super) frame: Frame,
    pub(super) payload: *const u8,
    /// `None`: the payload is the sender's again as soon as it is sent.
    pub(super) ticket: Option<Ticket>,
}

/// One without a payload.
fn tell(due: &mut VecDeque<QueuedMessage>, to: usize, frame: Frame) {
    due.push_back(QueuedMessage { to, frame, payload: std::ptr::null(), ticket: Some(0) });
}

impl RemoteMessages {
    pub(super) fn new(size: usize, owner: StagingMemory, direct: bool) -> Self {
        Self {
            owner,
            direct,
            // Ticket 0 is nobody's.
            next: 1,
            outgoing: BTreeMap::new(),
            kept: vec![0; size],
            unannounced: vec![0; size],
            short_sent: vec![false; size],
            announced: vec![VecDeque::new(); size],
            incoming: BTreeMap::new(),
            wanted: vec![false; size],
            seeks: false,
            due: VecDeque::new(),
        }
    }

    /// The next frame that has to be told a rank.
    pub(super) fn due(&mut self) -> Option<QueuedMessage> {
        self.due.pop_front()
    }

    /// Whether pieces are still on their way out.
    pub(super) fn flying(&self) -> bool {
        self.outgoing.values().any(|out| out.closed) || !self.due.is_empty()
    }

    /// Whether anything should come.
    pub(super) fn wants(&self) -> bool {
        self.seeks || !self.outgoing.is_empty() || !self.incoming.is_empty()
    }

    /// A short message of `from` was taken.
    fn took(&mut self, from: usize, bytes: u64) {
        self.unannounced[from] += bytes;
        if self.unannounced[from] >= WORD {
            let total = std::mem::take(&mut self.unannounced[from]);
            tell(&mut self.due, from, Frame { channel: TAKEN, total, ..Frame::new(Kind::Ready, 0) });
        }
    }

    /// Ranks from which something should come.
    pub(super) fn awaited(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = self.outgoing.values().map(|out| out.to).collect();
        let asked = |incoming: &Incoming| incoming.region.is_some() || incoming.recv_target.is_some();
        ranks.extend(self.incoming.iter().filter(|(_, i)| asked(i)).map(|((from, _), _)| *from));
        ranks.extend(self.wanted.iter().enumerate().filter(|(_, wanted)| **wanted).map(|(rank, _)| rank));
        ranks
    }

    fn drop_done(&mut self, stream: MessageId) {
        let done = |out: &mut Outgoing| out.closed && out.busy.iter().all(|&busy| busy == 0);
        if self.outgoing.get_mut(&stream).is_some_and(done)
            && let Some(region) = self.outgoing.remove(&stream).and_then(|out| out.region)
        {
            self.owner.give(region);
        }
    }

    pub(super) fn sent(&mut self, ticket: Ticket) {
        let (stream, slot) = (ticket >> 8, (ticket & 0xff) as usize);
        if let Some(out) = self.outgoing.get_mut(&stream) {
            out.busy[slot] = out.busy[slot].saturating_sub(1);
        }
        self.drop_done(stream);
    }

    pub(super) fn granted(&mut self, peer: usize, frame: &Frame) {
        if frame.channel == TAKEN {
            self.kept[peer] = self.kept[peer].saturating_sub(frame.total);
        } else if let Some(out) = self.outgoing.get_mut(&frame.seq).filter(|out| out.to == peer) {
            out.granted = out.granted.max(frame.index);
        }
    }

    /// The error says what it is that no rank sends.
    pub(super) fn announced(&mut self, peer: usize, frame: &Frame) -> Result<(), &'static str> {
        let envelope = Envelope { tag: frame.count, what: frame.what, bytes: frame.total };
        let follows = frame.index == Frame::FOLLOWS;
        if follows && envelope.bytes > SHORT as u64 || usize::try_from(envelope.bytes).is_err() {
            return Err("a message of an impossible size");
        }
        if self.announced[peer].len() >= ANNOUNCED {
            return Err("a million messages that nobody receives");
        }
        if self.incoming.contains_key(&(peer, frame.seq)) {
            return Err("two messages of one number");
        }
        self.announced[peer].push_back((envelope, frame.seq));
        if envelope.bytes > 0 {
            let incoming = Incoming {
                bytes: envelope.bytes as usize,
                follows,
                region: None,
                recv_target: None,
                deferred: false,
                placed: 0,
                there: 0,
                taken: 0,
            };
            self.incoming.insert((peer, frame.seq), incoming);
        }
        Ok(())
    }

    /// `None`: no such piece is awaited.
    pub(super) fn place(&mut self, peer: usize, frame: &Frame) -> Option<Target> {
        let incoming = self.incoming.get_mut(&(peer, frame.seq))?;
        let whole = incoming.follows || incoming.recv_target.is_some();
        let room = if whole { incoming.pieces() } else { incoming.taken + DEPTH };
        let next = frame.index == incoming.placed && incoming.placed < incoming.pieces().min(room);
        if !next || frame.bytes != incoming.next() as u64 {
            return None;
        }
        match incoming.recv_target {
            Some(RecvTarget::At(at)) => {
                incoming.placed += 1;
                return Some(Target::Here(at.wrapping_add(frame.index as usize * PIECE)));
            }
            Some(RecvTarget::Over) => {
                incoming.placed += 1;
                return Some(Target::Drop);
            }
            // A few bytes are copied sooner than looked for again.
            None if self.direct
                && incoming.follows
                && incoming.bytes > INLINE_PAYLOAD
                && self.wanted[peer]
                && !incoming.deferred =>
            {
                incoming.deferred = true;
                return Some(Target::Later);
            }
            None => {}
        }
        if incoming.follows && incoming.region.is_none() {
            incoming.region = self.owner.take(incoming.bytes);
            // Memory comes back when some other message is taken.
            if incoming.region.is_none() {
                return Some(Target::Later);
            }
        }
        // Nobody asked for it before it has a region.
        let base = self.owner.address(incoming.region?);
        let slot = if incoming.follows { 0 } else { (frame.index % DEPTH) as usize * PIECE };
        incoming.placed += 1;
        Some(Target::Here(base.wrapping_add(slot)))
    }

    pub(super) fn arrived(&mut self, peer: usize, frame: &Frame) {
        if let Some(incoming) = self.incoming.get_mut(&(peer, frame.seq))
            && incoming.there < incoming.placed
        {
            incoming.there += 1;
        }
    }
}

impl MessageTransport for RemoteMessages {
    fn open(&mut self, to: usize, envelope: Envelope) -> Option<MessageId> {
        let stream = self.next;
        self.next += 1;
        let short = envelope.bytes as usize <= SHORT && self.kept[to] + envelope.bytes <= KEPT;
        if short {
            self.kept[to] += envelope.bytes;
            self.short_sent[to] = true;
        }
        self.outgoing.insert(
            stream,
            Outgoing {
                to,
                bytes: envelope.bytes as usize,
                short,
                region: None,
                lent: None,
                granted: u64::from(short),
                sent: 0,
                busy: [0; DEPTH as usize],
                closed: false,
            },
        );
        let frame = Frame {
            index: if short { Frame::FOLLOWS } else { 0 },
            what: envelope.what,
            count: envelope.tag,
            total: envelope.bytes,
            ..Frame::new(Kind::Announce, stream)
        };
        tell(&mut self.due, to, frame);
        Some(stream)
    }

    fn cell(&mut self, stream: MessageId) -> Option<(*mut u8, usize)> {
        let out = self.outgoing.get_mut(&stream)?;
        let slot = (out.sent % DEPTH) as usize;
        if out.sent >= out.granted || out.busy[slot] > 0 {
            return None;
        }
        if out.region.is_none() {
            out.region = self.owner.take(if out.short { out.bytes } else { DEPTH as usize * PIECE });
        }
        if out.short {
            return Some((self.owner.address(out.region?), out.bytes));
        }
        Some((self.owner.address(out.region?).wrapping_add(slot * PIECE), PIECE))
    }

    fn publish(&mut self, stream: MessageId, bytes: usize) {
        if let Some(out) = self.outgoing.get_mut(&stream)
            && let Some(region) = out.region
        {
            let slot = out.sent % DEPTH;
            let payload = self.owner.address(region).wrapping_add(slot as usize * PIECE).cast_const();
            let frame = Frame { index: out.sent, bytes: bytes as u64, ..Frame::new(Kind::Piece, stream) };
            out.sent += 1;
            out.busy[slot as usize] += 1;
            self.due.push_back(QueuedMessage {
                to: out.to,
                frame,
                payload,
                ticket: Some(stream << 8 | slot),
            });
        }
    }

    fn lend(&mut self, stream: MessageId, at: *const u8) -> bool {
        let Some(out) = self.outgoing.get_mut(&stream).filter(|out| self.direct && out.bytes > 0) else {
            return false;
        };
        if out.short {
            // Its sender goes on at once, whether the reader has room for it or not.
            out.sent = 1;
            let frame = Frame { bytes: out.bytes as u64, ..Frame::new(Kind::Piece, stream) };
            self.due.push_back(QueuedMessage { to: out.to, frame, payload: at, ticket: None });
        } else {
            out.lent = Some(at);
        }
        true
    }

    fn gone(&mut self, stream: MessageId) -> bool {
        let Some(out) = self.outgoing.get_mut(&stream) else { return true };
        let Some(at) = out.lent else { return true };
        let pieces = out.bytes.div_ceil(PIECE) as u64;
        while out.sent < out.granted.min(pieces) && out.busy[(out.sent % DEPTH) as usize] == 0 {
            let (slot, from) = (out.sent % DEPTH, out.sent as usize * PIECE);
            let bytes = (out.bytes - from).min(PIECE) as u64;
            let frame = Frame { index: out.sent, bytes, ..Frame::new(Kind::Piece, stream) };
            (out.sent, out.busy[slot as usize]) = (out.sent + 1, 1);
            let payload = at.wrapping_add(from);
            self.due.push_back(QueuedMessage {
                to: out.to,
                frame,
                payload,
                ticket: Some(stream << 8 | slot),
            });
        }
        out.sent == pieces && out.busy.iter().all(|&busy| busy == 0)
    }

    fn close(&mut self, stream: MessageId) {
        if let Some(out) = self.outgoing.get_mut(&stream) {
            out.closed = true;
        }
        self.drop_done(stream);
    }

    fn next(&mut self, from: usize) -> Option<(Envelope, MessageId)> {
        let found = self.announced[from].pop_front();
        self.wanted[from] = found.is_none();
        self.seeks = found.is_none();
        found
    }

    fn land(&mut self, from: usize, stream: MessageId, at: *mut u8) -> bool {
        let Some(incoming) = self.incoming.get_mut(&(from, stream)) else { return false };
        if !self.direct || incoming.region.is_some() {
            return false;
        }
        incoming.recv_target = Some(RecvTarget::At(at));
        if !incoming.follows {
            let granted = Frame { index: incoming.pieces(), ..Frame::new(Kind::Ready, stream) };
            tell(&mut self.due, from, granted);
        }
        true
    }

    fn landed(&mut self, from: usize, stream: MessageId) -> bool {
        let Some(incoming) = self.incoming.get(&(from, stream)) else { return true };
        if incoming.there < incoming.pieces() {
            return false;
        }
        if incoming.follows {
            self.took(from, incoming.bytes as u64);
        }
        self.incoming.remove(&(from, stream));
        true
    }

    fn piece(&mut self, from: usize, stream: MessageId) -> Option<(*const u8, usize)> {
        let incoming = self.incoming.get_mut(&(from, stream))?;
        if !incoming.follows && incoming.region.is_none() {
            incoming.region = self.owner.take(DEPTH as usize * PIECE);
            incoming.region?;
            let granted = Frame { index: DEPTH, ..Frame::new(Kind::Ready, stream) };
            tell(&mut self.due, from, granted);
        }
        if incoming.there <= incoming.taken {
            return None;
        }
        if incoming.follows {
            return Some((self.owner.address(incoming.region?).cast_const(), incoming.bytes));
        }
        let slot = (incoming.taken % DEPTH) as usize * PIECE;
        Some((self.owner.address(incoming.region?).wrapping_add(slot).cast_const(), PIECE))
    }

    fn release(&mut self, from: usize, stream: MessageId) {
        let Some(incoming) = self.incoming.get_mut(&(from, stream)) else { return };
        incoming.taken += 1;
        let (bytes, follows, over) =
            (incoming.bytes as u64, incoming.follows, incoming.taken >= incoming.pieces());
        if !follows && incoming.taken + DEPTH <= incoming.pieces() {
            let granted = Frame { index: incoming.taken + DEPTH, ..Frame::new(Kind::Ready, stream) };
            tell(&mut self.due, from, granted);
        }
        if over && let Some(region) = self.incoming.remove(&(from, stream)).and_then(|i| i.region) {
            self.owner.give(region);
        }
        if follows {
            self.took(from, bytes);
        }
    }

    /// A long message is sent once its receiver has a recv for it.
    fn is_confirmed(&self, to: usize) -> bool {
        !self.short_sent[to] && self.outgoing.values().all(|out| out.to != to)
    }
}

impl RemoteMessages {
    /// Memory of senders and receivers is theirs again: no more is sent of it, and what still comes for it is dropped.
    pub(super) fn release_user_buffers(&mut self) {
        self.due.retain(|due| due.frame.kind != Kind::Piece);
        self.outgoing.values_mut().for_each(|out| out.lent = None);
        for recv_target in self.incoming.values_mut().filter_map(|incoming| incoming.recv_target.as_mut()) {
            *recv_target = RecvTarget::Over;
        }
    }

    /// Leaves all memory to whoever may still write into it.
    pub(super) fn abandon(&mut self) {
        self.outgoing.clear();
        self.incoming.clear();
    }
}

impl Drop for RemoteMessages {
    fn drop(&mut self) {
        let sent = std::mem::take(&mut self.outgoing).into_values().filter_map(|out| out.region);
        let came = std::mem::take(&mut self.incoming).into_values().filter_map(|incoming| incoming.region);
        sent.chain(came).for_each(|region| self.owner.give(region));
    }
}

#[cfg(any(test, fuzzing))]
impl RemoteMessages {
    /// Whether these bytes lie in memory of a message.
    pub(super) fn holds(&self, at: *const u8, bytes: usize) -> bool {
        let regions = self.outgoing.values().filter_map(|out| out.region);
        let mut regions = regions.chain(self.incoming.values().filter_map(|incoming| incoming.region));
        let lands = self.incoming.values().filter_map(|incoming| match incoming.recv_target {
            Some(RecvTarget::At(base)) => Some((base.cast_const(), incoming.bytes)),
            _ => None,
        });
        let mut own = lands.chain(self.outgoing.values().filter_map(|out| Some((out.lent?, out.bytes))));
        let lies = |(base, size): (*const u8, usize)| at >= base && at.addr() + bytes <= base.addr() + size;
        own.any(lies) || regions.any(|region| self.owner.region_contains(region, at, bytes))
    }
}
