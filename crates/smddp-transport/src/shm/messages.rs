//! Messages between two ranks, outside the collectives.
//!
//! A sender announces each message in its ring to that receiver: tag, size and where the pieces will lie. The
//! receiver takes announcements off the ring as it looks, so that messages may be received in any order of tags.
//! Short messages are written whole and need nobody to be there; long ones go through a few cells.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::ranks::{Home, Ranks};
use crate::process::layout::*;
use crate::process::memory::Memory;
use crate::process::pool::{Region, Release};
use crate::{Envelope, Fault, MessageId, PointToPoint};

/// Messages up to this many bytes are written whole.
const EAGER: usize = 64 << 10;
const PIECE: usize = 128 << 10;
const PIECES: usize = 4;
/// What a message is moved with when the pool is used up.
const LEAST_PIECE: usize = 16 << 10;

/// Region of a message: line `published`, line `read`, cells from the second grain on.
const CELLS: usize = GRAIN;

struct Outgoing {
    to: usize,
    region: Option<Region>,
    cell: usize,
    depth: u64,
    pieces: u64,
    sent: u64,
}

#[derive(Clone, Copy)]
struct Incoming {
    region: usize,
    cell: usize,
    depth: u64,
    bytes: usize,
    taken: u64,
}

/// "The receiver has read all pieces", or it is gone.
struct AllRead {
    memory: Arc<Memory>,
    ranks: Arc<Ranks>,
    region: usize,
    pieces: u64,
    to: usize,
}

impl Release for AllRead {
    fn released(&self) -> bool {
        self.memory.count(self.region + LINE).told() >= self.pieces || self.ranks.remotes[self.to].finished()
    }
}

pub(super) struct NearMessages {
    /// A group of one rank has none.
    home: Option<Home>,
    ranks: Arc<Ranks>,
    next: MessageId,
    /// My rings, by receiver: (offset, messages announced).
    rings: HashMap<usize, (usize, u64)>,
    /// Others' rings to me, by sender: (offset in its memory, messages taken).
    inbound: Vec<(usize, u64)>,
    outgoing: HashMap<MessageId, Outgoing>,
    incoming: HashMap<MessageId, Incoming>,
    /// A sender whose words cannot be true.
    pub(super) nonsense: Option<Fault>,
}

impl Incoming {
    /// Whether all of its cells lie in its sender's memory.
    fn lies_in(&self, memory: &Memory) -> bool {
        let cells = || {
            let cell = self.cell.checked_next_multiple_of(LINE).filter(|&cell| cell > 0)?;
            CELLS.checked_add(cell.checked_mul(usize::try_from(self.depth).ok()?)?)
        };
        cells().is_some_and(|bytes| memory.holds(self.region, bytes))
    }
}

fn entry(ring: usize, message: u64) -> usize {
    ring + LINE * (1 + (message % RING_ENTRIES) as usize)
}

impl NearMessages {
    pub(super) fn new(home: Option<Home>, ranks: Arc<Ranks>) -> Self {
        Self {
            home,
            next: 0,
            rings: HashMap::new(),
            inbound: vec![(0, 0); ranks.remotes.len()],
            ranks,
            outgoing: HashMap::new(),
            incoming: HashMap::new(),
            nonsense: None,
        }
    }

    /// When the receiver has read so many pieces of the message there.
    fn read(&self, Home { endpoint, .. }: &Home, region: usize, pieces: u64, to: usize) -> Arc<AllRead> {
        Arc::new(AllRead { memory: endpoint.memory.clone(), ranks: self.ranks.clone(), region, pieces, to })
    }

    /// The group is over: everything goes back when its readers are gone.
    pub(super) fn drain(&mut self) {
        for stream in self.outgoing.keys().copied().collect::<Vec<_>>() {
            self.close(stream);
        }
        let rings = std::mem::take(&mut self.rings);
        let Some(home @ Home { endpoint, nonce, .. }) = &self.home else { return };
        endpoint.pool.disown(&endpoint.memory, nonce ^ MAIL_OWNER);
        for (to, (ring, _)) in rings {
            endpoint.control.give(ring, RING_BYTES, self.read(home, ring, u64::MAX, to));
        }
    }
}

impl Home {
    /// Memory for a message of `bytes` and the size of its pieces.
    fn region(&self, bytes: usize) -> Option<(Option<Region>, usize)> {
        if bytes == 0 {
            return Some((None, 0));
        }
        let cell = if bytes <= EAGER { bytes } else { PIECE.min(bytes) };
        let want = CELLS + cell.next_multiple_of(LINE) * if bytes <= EAGER { 1 } else { PIECES };
        // Every message may go on, if need be in small pieces and past the cap: the receiver may want the last one
        // announced first.
        let least = want.min(CELLS + 2 * LEAST_PIECE);
        let memory = &self.endpoint.memory;
        let region = self.endpoint.pool.acquire_mail(memory, self.nonce ^ MAIL_OWNER, want, least)?;
        let cell = if region.bytes < want { LEAST_PIECE.min(bytes) } else { cell };
        Some((Some(region), cell))
    }
}

impl PointToPoint for NearMessages {
    fn open(&mut self, to: usize, envelope: Envelope) -> Option<MessageId> {
        let home = self.home.as_ref()?;
        let memory = &home.endpoint.memory;
        let (ring, announced) = match self.rings.get(&to) {
            Some(&ring) => ring,
            None => {
                let ring = home.endpoint.control.take(memory, RING_BYTES)?;
                memory.count(home.block + MAIL + 8 * to).tell(ring as u64);
                (ring, 0)
            }
        };
        self.rings.insert(to, (ring, announced));
        // Acquire: the receiver has copied the entry that this one takes over.
        if announced.saturating_sub(memory.count(ring).told()) >= RING_ENTRIES {
            return None;
        }
        let bytes = usize::try_from(envelope.bytes).ok()?;
        let (region, cell) = home.region(bytes)?;
        let depth =
            region.map_or(1, |r| ((r.bytes - CELLS) / cell.next_multiple_of(LINE).max(1)).max(1)) as u64;
        let at = entry(ring, announced);
        let stage = region.map_or(0, |r| r.offset);
        if region.is_some() {
            memory.word64(stage).store(0, Ordering::Relaxed);
            memory.word64(stage + LINE).store(0, Ordering::Relaxed);
        }
        for (i, value) in [envelope.tag, envelope.what, envelope.bytes, stage as u64, cell as u64, depth]
            .into_iter()
            .enumerate()
        {
            memory.word64(at + 8 + 8 * i).store(value, Ordering::Relaxed);
        }
        // Release: whoever sees the number sees the announcement.
        memory.count(at).tell(announced + 1);
        self.ranks.ring(to);
        self.rings.insert(to, (ring, announced + 1));
        self.next += 1;
        let pieces = bytes.div_ceil(cell.max(1)) as u64;
        self.outgoing.insert(self.next, Outgoing { to, region, cell, depth, pieces, sent: 0 });
        Some(self.next)
    }

    fn cell(&mut self, stream: MessageId) -> Option<(*mut u8, usize)> {
        let (memory, out) = (&self.home.as_ref()?.endpoint.memory, self.outgoing.get(&stream)?);
        let region = out.region?;
        let read = memory.count(region.offset + LINE).told();
        if out.sent.saturating_sub(read) >= out.depth {
            return None;
        }
        let at = region.offset + CELLS + (out.sent % out.depth) as usize * out.cell.next_multiple_of(LINE);
        Some((memory.at(at, out.cell), out.cell))
    }

    fn publish(&mut self, stream: MessageId, _bytes: usize) {
        if let (Some(home), Some(out)) = (&self.home, self.outgoing.get_mut(&stream))
            && let Some(region) = out.region
        {
            out.sent += 1;
            home.endpoint.memory.count(region.offset).tell(out.sent);
            self.ranks.ring(out.to);
        }
    }

    fn close(&mut self, stream: MessageId) {
        if let (Some(home), Some(out)) = (&self.home, self.outgoing.remove(&stream))
            && let Some(region) = out.region
        {
            let release = self.read(home, region.offset, out.pieces, out.to);
            let Home { endpoint, nonce, .. } = home;
            endpoint.pool.retire(&endpoint.memory, nonce ^ MAIL_OWNER, region, release);
        }
    }

    fn next(&mut self, from: usize) -> Option<(Envelope, MessageId)> {
        let remote = self.ranks.remotes.get(from)?;
        let memory = remote.memory();
        let (ring, taken) = &mut self.inbound[from];
        if *ring == 0 {
            let found = memory.count(remote.block + MAIL + 8 * self.ranks.me).told();
            if found == 0 {
                return None;
            }
            match usize::try_from(found).ok().filter(|&ring| memory.holds(ring, RING_BYTES)) {
                Some(found) => *ring = found,
                None => return nonsense(&mut self.nonsense, from),
            }
        }
        let at = entry(*ring, *taken);
        if memory.count(at).told() != *taken + 1 {
            return None;
        }
        let field = |i: usize| memory.word64(at + 8 + 8 * i).load(Ordering::Relaxed);
        let envelope = Envelope { tag: field(0), what: field(1), bytes: field(2) };
        let message = Incoming {
            region: field(3) as usize,
            cell: field(4) as usize,
            depth: field(5).max(1),
            bytes: envelope.bytes as usize,
            taken: 0,
        };
        // One without bytes has no place.
        if message.bytes > 0 && !message.lies_in(memory) {
            return nonsense(&mut self.nonsense, from);
        }
        *taken += 1;
        memory.count(*ring).tell(*taken);
        self.ranks.ring(from);
        self.next += 1;
        if message.bytes > 0 {
            self.incoming.insert(self.next, message);
        }
        Some((envelope, self.next))
    }

    fn piece(&mut self, from: usize, stream: MessageId) -> Option<(*const u8, usize)> {
        let message = self.incoming.get(&stream)?;
        let left = message.bytes - message.taken as usize * message.cell;
        if left == 0 {
            return None;
        }
        let memory = self.ranks.remotes[from].memory();
        if memory.count(message.region).told() <= message.taken {
            return None;
        }
        let cell = message.cell.next_multiple_of(LINE);
        let at = message.region + CELLS + (message.taken % message.depth) as usize * cell;
        let bytes = left.min(message.cell);
        Some((memory.at(at, bytes), bytes))
    }

    fn release(&mut self, from: usize, stream: MessageId) {
        if let Some(message) = self.incoming.get_mut(&stream) {
            message.taken += 1;
            self.ranks.remotes[from].memory().count(message.region + LINE).tell(message.taken);
            if message.taken as usize * message.cell >= message.bytes {
                self.incoming.remove(&stream);
            }
        }
        self.ranks.ring(from);
    }
}

/// A sender says that its messages lie where none can.
fn nonsense<T>(found: &mut Option<Fault>, from: usize) -> Option<T> {
    found.get_or_insert_with(|| super::ranks::nonsense(from, "where a message to this rank lies"));
    None
}

/// Regions of messages are not those of collectives: they are released by other rules.
const MAIL_OWNER: u64 = 1 << 63;
