//! Messages between two ranks, outside the collectives.
//!
//! A sender announces each message in its ring to that receiver: tag, size and where the pieces will lie. The
//! receiver takes announcements off the ring as it looks, so that messages may be received in any order of tags.
//! Short messages are written whole, before they are announced, and need nobody to be there; the shortest lie beside
//! their announcement. Long ones go through a few cells.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use slab::Slab;

use super::local_ranks::{GroupHome, Ranks};
use crate::process::layout::*;
use crate::process::memory::SharedMemory;
use crate::process::pool::{Region, ReleaseCondition};
use crate::{Envelope, Fault, MessageId, MessageTransport};

/// Messages up to this many bytes are written whole.
const INLINE_PAYLOAD: usize = 64 << 10;
const PIECE: usize = 128 << 10;
const PIECES: usize = 4;
/// What a message is moved with when the pool is used up.
const LEAST_PIECE: usize = 16 << 10;

/// Region of a message: line `published`, line `read`, cells from the second grain on.
const FIRST_CELL: usize = GRAIN;

/// My ring to a receiver.
#[derive(Clone, Copy, Default)]
struct Ring {
    /// 0: none yet.
    at: usize,
    /// Messages that have a place in it.
    used: u64,
    /// Those of them that were taken when this was last looked at.
    taken: u64,
}

struct Outgoing {
    to: usize,
    envelope: Envelope,
    /// Its place among all to that receiver.
    number: u64,
    /// `None`: it has no bytes, or they lie beside its announcement.
    region: Option<Region>,
    cell: usize,
    depth: u64,
    pieces: u64,
    sent: u64,
}

/// Where an announced message lies.
enum Incoming {
    Beside { body: [u64; INLINE_BYTES / 8], bytes: usize },
    In(Cells),
}

#[derive(Clone, Copy)]
struct Cells {
    region: usize,
    cell: usize,
    depth: u64,
    bytes: usize,
    taken: u64,
}

/// "The receiver has read all pieces", or it is gone.
struct AllRead {
    memory: Arc<SharedMemory>,
    ranks: Arc<Ranks>,
    region: usize,
    pieces: u64,
    to: usize,
}

impl ReleaseCondition for AllRead {
    fn released(&self) -> bool {
        self.memory.counter(self.region + LINE).read() >= self.pieces
            || self.ranks.remotes[self.to].finished()
    }
}

pub(super) struct NearMessages {
    /// A group of one rank has none.
    home: Option<GroupHome>,
    ranks: Arc<Ranks>,
    /// By receiver.
    rings: Vec<Ring>,
    /// Others' rings to me, by sender: (offset in its memory, messages taken off it, messages received).
    inbound: Vec<(usize, u64, u64)>,
    outgoing: Slab<Outgoing>,
    incoming: Slab<Incoming>,
    /// A sender whose words cannot be true.
    pub(super) nonsense: Option<Fault>,
}

impl Cells {
    /// Whether it is one piece, which was there before it was announced.
    fn whole(&self) -> bool {
        self.bytes <= self.cell
    }

    /// Whether all of its cells lie in its sender's memory.
    fn lies_in(&self, memory: &SharedMemory) -> bool {
        let bytes = || {
            let cell = self.cell.checked_next_multiple_of(LINE).filter(|&cell| cell > 0)?;
            FIRST_CELL.checked_add(cell.checked_mul(usize::try_from(self.depth).ok()?)?)
        };
        bytes().is_some_and(|bytes| memory.contains(self.region, bytes))
    }
}

fn entry(ring: usize, message: u64) -> usize {
    ring + LINE * (1 + (message % RING_ENTRIES) as usize)
}

impl NearMessages {
    pub(super) fn new(home: Option<GroupHome>, ranks: Arc<Ranks>) -> Self {
        Self {
            home,
            rings: vec![Ring::default(); ranks.remotes.len()],
            inbound: vec![(0, 0, 0); ranks.remotes.len()],
            ranks,
            outgoing: Slab::new(),
            incoming: Slab::new(),
            nonsense: None,
        }
    }

    /// When the receiver has read so many pieces of the message there.
    fn read(
        &self,
        GroupHome { endpoint, .. }: &GroupHome,
        region: usize,
        pieces: u64,
        to: usize,
    ) -> Arc<AllRead> {
        Arc::new(AllRead { memory: endpoint.memory.clone(), ranks: self.ranks.clone(), region, pieces, to })
    }

    /// Tells the receiver. What a short message says lies where it belongs by then.
    fn announce(&self, GroupHome { endpoint, .. }: &GroupHome, out: &Outgoing) {
        let (memory, at) = (&endpoint.memory, entry(self.rings[out.to].at, out.number));
        let write = |i: usize, value: u64| memory.flag64(at + 8 + 8 * i).store(value, Ordering::Relaxed);
        let Envelope { tag, what, bytes } = out.envelope;
        [tag, what, bytes].into_iter().enumerate().for_each(|(i, value)| write(i, value));
        if let Some(Region { offset, .. }) = out.region {
            let place = [offset as u64, out.cell as u64, out.depth];
            place.into_iter().enumerate().for_each(|(i, value)| write(3 + i, value));
        }
        // Release: whoever sees the number sees the announcement.
        memory.counter(at).publish(out.number + 1);
        self.ranks.ring(out.to);
    }

    /// The group is over: everything goes back when its readers are gone.
    pub(super) fn drain(&mut self) {
        for message in self.outgoing.iter().map(|(message, _)| message as MessageId).collect::<Vec<_>>() {
            self.close(message);
        }
        let rings = std::mem::take(&mut self.rings);
        let Some(home @ GroupHome { endpoint, nonce, .. }) = &self.home else { return };
        endpoint.pool.disown(&endpoint.memory, nonce ^ MAIL_OWNER);
        for (to, ring) in rings.iter().enumerate().filter(|(_, ring)| ring.at > 0) {
            endpoint.control.give(ring.at, RING_BYTES, self.read(home, ring.at, u64::MAX, to));
        }
    }
}

impl GroupHome {
    /// Memory for a message of `bytes`, if it does not lie beside its announcement, and the size of its pieces.
    fn region(&self, bytes: usize) -> Option<(Option<Region>, usize)> {
        if bytes <= INLINE_BYTES {
            return Some((None, bytes));
        }
        let cell = if bytes <= INLINE_PAYLOAD { bytes } else { PIECE.min(bytes) };
        let want =
            FIRST_CELL + cell.next_multiple_of(LINE) * if bytes <= INLINE_PAYLOAD { 1 } else { PIECES };
        // Every message may go on, if need be in small pieces and past the cap: the receiver may want the last one
        // announced first.
        let least = want.min(FIRST_CELL + 2 * LEAST_PIECE);
        let memory = &self.endpoint.memory;
        let region = self.endpoint.pool.acquire_for_message(memory, self.nonce ^ MAIL_OWNER, want, least)?;
        let cell = if region.bytes < want { LEAST_PIECE.min(bytes) } else { cell };
        Some((Some(region), cell))
    }
}

impl MessageTransport for NearMessages {
    fn open(&mut self, to: usize, envelope: Envelope) -> Option<MessageId> {
        let home = self.home.as_ref()?;
        let memory = &home.endpoint.memory;
        let ring = &mut self.rings[to];
        if ring.at == 0 {
            ring.at = home.endpoint.control.take(memory, RING_BYTES)?;
            memory.counter(home.block + MESSAGE_RINGS + 8 * to).publish(ring.at as u64);
        }
        if ring.used.saturating_sub(ring.taken) >= RING_ENTRIES {
            // Acquire: the receiver has copied the entry that this one takes over.
            ring.taken = memory.counter(ring.at).read();
            if ring.used.saturating_sub(ring.taken) >= RING_ENTRIES {
                return None;
            }
        }
        let bytes = usize::try_from(envelope.bytes).ok()?;
        let (region, cell) = home.region(bytes)?;
        let depth =
            region.map_or(1, |r| ((r.bytes - FIRST_CELL) / cell.next_multiple_of(LINE).max(1)).max(1)) as u64;
        if let Some(Region { offset, .. }) = region {
            memory.flag64(offset).store(0, Ordering::Relaxed);
            memory.flag64(offset + LINE).store(0, Ordering::Relaxed);
        }
        let (number, pieces) = (ring.used, bytes.div_ceil(cell.max(1)) as u64);
        ring.used += 1;
        let out = Outgoing { to, envelope, number, region, cell, depth, pieces, sent: 0 };
        if pieces != 1 {
            self.announce(home, &out);
        }
        Some(self.outgoing.insert(out) as MessageId)
    }

    fn cell(&mut self, message: MessageId) -> Option<(*mut u8, usize)> {
        let (memory, out) = (&self.home.as_ref()?.endpoint.memory, self.outgoing.get(message as usize)?);
        let at = match out.region {
            None if out.sent == out.pieces => return None,
            None => entry(self.rings[out.to].at, out.number) + BODY,
            Some(region) => {
                let read = memory.counter(region.offset + LINE).read();
                if out.sent.saturating_sub(read) >= out.depth {
                    return None;
                }
                let cell = (out.sent % out.depth) as usize;
                region.offset + FIRST_CELL + cell * out.cell.next_multiple_of(LINE)
            }
        };
        Some((memory.at(at, out.cell), out.cell))
    }

    fn publish(&mut self, message: MessageId, _bytes: usize) {
        if let (Some(home), Some(out)) = (&self.home, self.outgoing.get_mut(message as usize)) {
            out.sent += 1;
            if out.pieces == 1 {
                self.announce(home, &self.outgoing[message as usize]);
            } else if let Some(region) = out.region {
                home.endpoint.memory.counter(region.offset).publish(out.sent);
                self.ranks.ring(out.to);
            }
        }
    }

    fn close(&mut self, message: MessageId) {
        if let (Some(home), Some(out)) = (&self.home, self.outgoing.try_remove(message as usize))
            && let Some(region) = out.region
        {
            let release = self.read(home, region.offset, out.pieces, out.to);
            let GroupHome { endpoint, nonce, .. } = home;
            endpoint.pool.retire(&endpoint.memory, nonce ^ MAIL_OWNER, region, release);
        }
    }

    fn next(&mut self, from: usize) -> Option<(Envelope, MessageId)> {
        let remote = self.ranks.remotes.get(from)?;
        let memory = remote.memory();
        let (ring, taken, _) = &mut self.inbound[from];
        if *ring == 0 {
            let found = memory.counter(remote.block + MESSAGE_RINGS + 8 * self.ranks.me).read();
            if found == 0 {
                return None;
            }
            match usize::try_from(found).ok().filter(|&ring| memory.contains(ring, RING_BYTES)) {
                Some(found) => *ring = found,
                None => return nonsense(&mut self.nonsense, from),
            }
        }
        let at = entry(*ring, *taken);
        if memory.counter(at).read() != *taken + 1 {
            return None;
        }
        let field = |i: usize| memory.flag64(at + 8 + 8 * i).load(Ordering::Relaxed);
        let envelope = Envelope { tag: field(0), what: field(1), bytes: field(2) };
        let bytes = envelope.bytes as usize;
        let message = if bytes == 0 {
            None
        } else if bytes <= INLINE_BYTES {
            Some(Incoming::Beside { body: [3, 4, 5, 6].map(field), bytes })
        } else {
            let (region, cell, depth) = (field(3) as usize, field(4) as usize, field(5).max(1));
            let cells = Cells { region, cell, depth, bytes, taken: 0 };
            if !cells.lies_in(memory) {
                return nonsense(&mut self.nonsense, from);
            }
            Some(Incoming::In(cells))
        };
        *taken += 1;
        // Now and then is enough for a sender who has as many entries, and one line less to fetch for either.
        if taken.is_multiple_of(RING_ENTRIES / 4) {
            memory.counter(*ring).publish(*taken);
            self.ranks.ring(from);
        }
        // One without bytes has nothing more to be asked for.
        let message = message.map_or(MessageId::MAX, |message| self.incoming.insert(message) as MessageId);
        Some((envelope, message))
    }

    fn piece(&mut self, from: usize, message: MessageId) -> Option<(*const u8, usize)> {
        let cells = match self.incoming.get(message as usize)? {
            Incoming::Beside { body, bytes } => return Some((body.as_ptr().cast(), *bytes)),
            Incoming::In(cells) => cells,
        };
        let memory = self.ranks.remotes[from].memory();
        if !cells.whole() && memory.counter(cells.region).read() <= cells.taken {
            return None;
        }
        let bytes = (cells.bytes - cells.taken as usize * cells.cell).min(cells.cell);
        let cell = (cells.taken % cells.depth) as usize * cells.cell.next_multiple_of(LINE);
        Some((memory.at(cells.region + FIRST_CELL + cell, bytes), bytes))
    }

    fn release(&mut self, from: usize, message: MessageId) {
        let over = match self.incoming.get_mut(message as usize) {
            None => return,
            Some(Incoming::Beside { .. }) => true,
            Some(Incoming::In(cells)) => {
                cells.taken += 1;
                self.ranks.remotes[from].memory().counter(cells.region + LINE).publish(cells.taken);
                self.ranks.ring(from);
                cells.taken as usize * cells.cell >= cells.bytes
            }
        };
        if over {
            self.incoming.remove(message as usize);
        }
    }

    fn confirm(&mut self, from: usize) {
        let (ring, _, received) = &mut self.inbound[from];
        *received += 1;
        // No notification: the sender reads the count when it leaves.
        self.ranks.remotes[from].memory().counter(*ring + CONFIRMED).publish(*received);
    }

    fn is_confirmed(&self, to: usize) -> bool {
        let (Some(home), Some(ring)) = (&self.home, self.rings.get(to)) else { return true };
        ring.used == 0 || home.endpoint.memory.counter(ring.at + CONFIRMED).read() >= ring.used
    }
}

/// A sender says that its messages lie where none can.
fn nonsense<T>(found: &mut Option<Fault>, from: usize) -> Option<T> {
    found.get_or_insert_with(|| super::local_ranks::nonsense(from, "where a message to this rank lies"));
    None
}

/// Regions of messages are not those of collectives: they are released by other rules.
const MAIL_OWNER: u64 = 1 << 63;
