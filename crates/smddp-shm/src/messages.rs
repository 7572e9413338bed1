//! Point-to-point messages between ranks of one node.
//!
//! A sender announces each message in its ring for that receiver: tag, size and location of the fragments. The receiver
//! removes announcements from the ring as it polls, so that messages may be received in any order of tags.
//! Short messages are written completely before they are announced, and do not need an active receiver. The shortest are
//! inline in their announcement. Long messages pass through a few slots.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use slab::Slab;
use smddp_base::{Envelope, Fault, MessageId, MessageTransport};
use smddp_process::ControlBlock;
use smddp_process::layout::*;
use smddp_process::memory::SharedMemory;
pub(crate) use smddp_process::pool::{Region, ReleaseCondition};

use super::local_ranks::{GroupHome, LocalRanks};

/// Largest message, in bytes, that is written completely before it is announced.
const EAGER_LIMIT: usize = 64 << 10;
/// Bytes of a fragment of a long message.
const FRAGMENT: usize = 128 << 10;
const FRAGMENTS: usize = 4;
/// Bytes of a fragment once the pool is exhausted.
const MIN_FRAGMENT: usize = 16 << 10;

/// Offset of the slots in the region of a message. Its first grain holds two lines: fragments published, fragments read.
const FIRST_SLOT: usize = GRAIN;

/// Ring of this rank for one receiver.
#[derive(Default)]
struct Ring {
    /// Memory of the ring; `None`: not allocated yet.
    block: Option<ControlBlock>,
    /// Offset of `block` in this process's memory; 0 without one.
    at: usize,
    /// Number of messages that received an entry.
    used: u64,
    /// Number of messages that the receiver had removed at the last check.
    taken: u64,
}

struct Outgoing {
    to: usize,
    envelope: Envelope,
    /// Sequence number among the messages to that receiver.
    number: u64,
    /// `None` if the message is empty or inline in its announcement.
    region: Option<Region>,
    slot_bytes: usize,
    depth: u64,
    fragments: u64,
    sent: u64,
}

/// Payload of an announced message.
enum Incoming {
    Inline { body: [u64; INLINE_BYTES / 8], bytes: usize },
    Slots(Slots),
}

#[derive(Clone, Copy)]
struct Slots {
    region: usize,
    slot_bytes: usize,
    depth: u64,
    bytes: usize,
    taken: u64,
}

/// Release condition: the receiver has read `fragments` fragments, or has finished with the group.
struct AllRead {
    memory: Arc<SharedMemory>,
    ranks: Arc<LocalRanks>,
    region: usize,
    fragments: u64,
    to: usize,
}

impl ReleaseCondition for AllRead {
    fn released(&self) -> bool {
        self.memory.counter(self.region + LINE).read() >= self.fragments
            || self.ranks.peers[self.to].has_finished()
    }
}

pub(super) struct LocalMessages {
    /// `None` for a group of one rank.
    home: Option<GroupHome>,
    ranks: Arc<LocalRanks>,
    /// Rings of this rank, by receiver.
    rings: Vec<Ring>,
    /// Rings of other ranks for this one, by sender: (offset in its memory, messages removed, messages received).
    inbound: Vec<(usize, u64, u64)>,
    outgoing: Slab<Outgoing>,
    incoming: Slab<Incoming>,
    /// First fault found in the shared memory of a sender.
    pub(super) peer_fault: Option<Fault>,
}

impl Slots {
    /// Returns true if the message is one fragment, which was written before the announcement.
    fn is_single(&self) -> bool {
        self.bytes <= self.slot_bytes
    }

    /// Returns true if all of its slots are within its sender's memory.
    fn is_within(&self, memory: &SharedMemory) -> bool {
        let bytes = || {
            let slot_bytes =
                self.slot_bytes.checked_next_multiple_of(LINE).filter(|&slot_bytes| slot_bytes > 0)?;
            FIRST_SLOT.checked_add(slot_bytes.checked_mul(usize::try_from(self.depth).ok()?)?)
        };
        bytes().is_some_and(|bytes| memory.contains(self.region, bytes))
    }
}

fn entry(ring: usize, message: u64) -> usize {
    ring + LINE * (1 + (message % RING_ENTRIES) as usize)
}

impl LocalMessages {
    pub(super) fn new(home: Option<GroupHome>, ranks: Arc<LocalRanks>) -> Self {
        Self {
            home,
            rings: ranks.peers.iter().map(|_| Ring::default()).collect(),
            inbound: vec![(0, 0, 0); ranks.peers.len()],
            ranks,
            outgoing: Slab::new(),
            incoming: Slab::new(),
            peer_fault: None,
        }
    }

    /// Returns the condition for releasing `region`: rank `to` has read that number of fragments.
    fn release_condition(
        &self,
        GroupHome { endpoint, .. }: &GroupHome,
        region: usize,
        fragments: u64,
        to: usize,
    ) -> Arc<AllRead> {
        Arc::new(AllRead {
            memory: endpoint.memory.clone(),
            ranks: self.ranks.clone(),
            region,
            fragments,
            to,
        })
    }

    /// Writes the announcement of a message and notifies the receiver. The payload of a short message must already be written.
    fn write_announcement(&self, GroupHome { endpoint, .. }: &GroupHome, out: &Outgoing) {
        let (memory, at) = (&endpoint.memory, entry(self.rings[out.to].at, out.number));
        let write = |i: usize, value: u64| memory.flag64(at + 8 + 8 * i).store(value, Ordering::Relaxed);
        let Envelope { tag, dtype, bytes } = out.envelope;
        [tag, dtype, bytes].into_iter().enumerate().for_each(|(i, value)| write(i, value));
        if let Some(region) = &out.region {
            let location = [region.offset() as u64, out.slot_bytes as u64, out.depth];
            location.into_iter().enumerate().for_each(|(i, value)| write(3 + i, value));
        }
        // Release: a receiver that sees the number also sees the announcement.
        memory.counter(at).publish(out.number + 1);
        self.ranks.notify(out.to);
    }

    /// Closes all messages when the group ends. Rings are released once their receivers have finished with the group.
    pub(super) fn drain(&mut self) {
        for message in
            self.outgoing.iter().map(|(at, out)| MessageId::local(out.to, at as u64)).collect::<Vec<_>>()
        {
            self.close(message);
        }
        let rings = std::mem::take(&mut self.rings);
        let Some(home @ GroupHome { endpoint, nonce, .. }) = &self.home else { return };
        endpoint.pool.disown(&endpoint.memory, nonce ^ MESSAGE_OWNER);
        for (to, ring) in rings.into_iter().enumerate() {
            if let Some(block) = ring.block {
                endpoint.control.give(block, self.release_condition(home, ring.at, u64::MAX, to));
            }
        }
    }
}

impl GroupHome {
    /// Allocates memory for a message of `bytes` bytes. Returns the region (`None` for an inline message) and the fragment size.
    fn allocate_region(&self, bytes: usize) -> Option<(Option<Region>, usize)> {
        if bytes <= INLINE_BYTES {
            return Some((None, bytes));
        }
        let slot_bytes = if bytes <= EAGER_LIMIT { bytes } else { FRAGMENT.min(bytes) };
        let want =
            FIRST_SLOT + slot_bytes.next_multiple_of(LINE) * if bytes <= EAGER_LIMIT { 1 } else { FRAGMENTS };
        // Every message must be able to progress, if necessary in small fragments and past the cap of the pool. The receiver may
        // need the message that was announced last.
        let least = want.min(FIRST_SLOT + 2 * MIN_FRAGMENT);
        let memory = &self.endpoint.memory;
        let region =
            self.endpoint.pool.acquire_for_message(memory, self.nonce ^ MESSAGE_OWNER, want, least)?;
        let slot_bytes = if region.bytes() < want { MIN_FRAGMENT.min(bytes) } else { slot_bytes };
        Some((Some(region), slot_bytes))
    }
}

impl MessageTransport for LocalMessages {
    fn announce(&mut self, to: usize, envelope: Envelope) -> Option<MessageId> {
        let home = self.home.as_ref()?;
        let memory = &home.endpoint.memory;
        let ring = &mut self.rings[to];
        if ring.at == 0 {
            let block = home.endpoint.control.take(memory, RING_BYTES)?;
            ring.at = block.offset();
            ring.block = Some(block);
            memory.counter(home.block + MESSAGE_RINGS + 8 * to).publish(ring.at as u64);
        }
        if ring.used.saturating_sub(ring.taken) >= RING_ENTRIES {
            // Acquire: the receiver has copied the entry that this message reuses.
            ring.taken = memory.counter(ring.at).read();
            if ring.used.saturating_sub(ring.taken) >= RING_ENTRIES {
                return None;
            }
        }
        let bytes = usize::try_from(envelope.bytes).ok()?;
        let (region, slot_bytes) = home.allocate_region(bytes)?;
        let depth = region
            .as_ref()
            .map_or(1, |r| ((r.bytes() - FIRST_SLOT) / slot_bytes.next_multiple_of(LINE).max(1)).max(1))
            as u64;
        if let Some(region) = &region {
            memory.flag64(region.offset()).store(0, Ordering::Relaxed);
            memory.flag64(region.offset() + LINE).store(0, Ordering::Relaxed);
        }
        let (number, fragments) = (ring.used, bytes.div_ceil(slot_bytes.max(1)) as u64);
        ring.used += 1;
        let out = Outgoing { to, envelope, number, region, slot_bytes, depth, fragments, sent: 0 };
        if fragments != 1 {
            self.write_announcement(home, &out);
        }
        Some(MessageId::local(to, self.outgoing.insert(out) as u64))
    }

    fn send_slot(&mut self, message: MessageId) -> Option<(*mut u8, usize)> {
        let (memory, out) =
            (&self.home.as_ref()?.endpoint.memory, self.outgoing.get(message.number as usize)?);
        let at = match &out.region {
            None if out.sent == out.fragments => return None,
            None => entry(self.rings[out.to].at, out.number) + BODY,
            Some(region) => {
                let read = memory.counter(region.offset() + LINE).read();
                if out.sent.saturating_sub(read) >= out.depth {
                    return None;
                }
                let slot = (out.sent % out.depth) as usize;
                region.offset() + FIRST_SLOT + slot * out.slot_bytes.next_multiple_of(LINE)
            }
        };
        Some((memory.at(at, out.slot_bytes), out.slot_bytes))
    }

    fn publish(&mut self, message: MessageId, _bytes: usize) {
        if let (Some(home), Some(out)) = (&self.home, self.outgoing.get_mut(message.number as usize)) {
            out.sent += 1;
            if out.fragments == 1 {
                self.write_announcement(home, &self.outgoing[message.number as usize]);
            } else if let Some(region) = &out.region {
                home.endpoint.memory.counter(region.offset()).publish(out.sent);
                self.ranks.notify(out.to);
            }
        }
    }

    fn close(&mut self, message: MessageId) {
        if let (Some(home), Some(out)) = (&self.home, self.outgoing.try_remove(message.number as usize))
            && let Some(region) = out.region
        {
            let release = self.release_condition(home, region.offset(), out.fragments, out.to);
            let GroupHome { endpoint, nonce, .. } = home;
            endpoint.pool.retire(&endpoint.memory, nonce ^ MESSAGE_OWNER, region, release);
        }
    }

    fn next_announced(&mut self, from: usize) -> Option<(Envelope, MessageId)> {
        let peer = self.ranks.peers.get(from)?;
        let memory = peer.memory();
        let (ring, taken, _) = &mut self.inbound[from];
        if *ring == 0 {
            let found = memory.counter(peer.block + MESSAGE_RINGS + 8 * self.ranks.me).read();
            if found == 0 {
                return None;
            }
            match usize::try_from(found).ok().filter(|&ring| memory.contains(ring, RING_BYTES)) {
                Some(found) => *ring = found,
                None => return malformed(&mut self.peer_fault, from),
            }
        }
        let at = entry(*ring, *taken);
        if memory.counter(at).read() != *taken + 1 {
            return None;
        }
        let field = |i: usize| memory.flag64(at + 8 + 8 * i).load(Ordering::Relaxed);
        let envelope = Envelope { tag: field(0), dtype: field(1), bytes: field(2) };
        let bytes = envelope.bytes as usize;
        let message = if bytes == 0 {
            None
        } else if bytes <= INLINE_BYTES {
            Some(Incoming::Inline { body: [3, 4, 5, 6].map(field), bytes })
        } else {
            let (region, slot_bytes, depth) = (field(3) as usize, field(4) as usize, field(5).max(1));
            let slots = Slots { region, slot_bytes, depth, bytes, taken: 0 };
            if !slots.is_within(memory) {
                return malformed(&mut self.peer_fault, from);
            }
            Some(Incoming::Slots(slots))
        };
        *taken += 1;
        // Published once per quarter of the ring: the sender has enough entries, and fewer cache lines move between the ranks.
        if taken.is_multiple_of(RING_ENTRIES / 4) {
            memory.counter(*ring).publish(*taken);
            self.ranks.notify(from);
        }
        // An empty message has no fragments and needs no state.
        let number = message.map_or(u64::MAX, |message| self.incoming.insert(message) as u64);
        Some((envelope, MessageId::local(from, number)))
    }

    fn recv_slot(&mut self, MessageId { peer, number, .. }: MessageId) -> Option<(*const u8, usize)> {
        let slots = match self.incoming.get(number as usize)? {
            Incoming::Inline { body, bytes } => return Some((body.as_ptr().cast(), *bytes)),
            Incoming::Slots(slots) => slots,
        };
        let memory = self.ranks.peers[peer].memory();
        if !slots.is_single() && memory.counter(slots.region).read() <= slots.taken {
            return None;
        }
        let bytes = (slots.bytes - slots.taken as usize * slots.slot_bytes).min(slots.slot_bytes);
        let offset = (slots.taken % slots.depth) as usize * slots.slot_bytes.next_multiple_of(LINE);
        Some((memory.at(slots.region + FIRST_SLOT + offset, bytes), bytes))
    }

    fn release(&mut self, MessageId { peer, number, .. }: MessageId) {
        let over = match self.incoming.get_mut(number as usize) {
            None => return,
            Some(Incoming::Inline { .. }) => true,
            Some(Incoming::Slots(slots)) => {
                slots.taken += 1;
                self.ranks.peers[peer].memory().counter(slots.region + LINE).publish(slots.taken);
                self.ranks.notify(peer);
                slots.taken as usize * slots.slot_bytes >= slots.bytes
            }
        };
        if over {
            self.incoming.remove(number as usize);
        }
    }

    fn confirm(&mut self, MessageId { peer, .. }: MessageId) {
        let (ring, _, received) = &mut self.inbound[peer];
        *received += 1;
        // No notification: the sender reads the count when it leaves.
        self.ranks.peers[peer].memory().counter(*ring + CONFIRMED).publish(*received);
    }

    fn is_confirmed(&self, to: usize) -> bool {
        let (Some(home), Some(ring)) = (&self.home, self.rings.get(to)) else { return true };
        ring.used == 0 || home.endpoint.memory.counter(ring.at + CONFIRMED).read() >= ring.used
    }
}

/// Records that a sender announced a message or a ring outside of its memory.
fn malformed<T>(found: &mut Option<Fault>, from: usize) -> Option<T> {
    found.get_or_insert_with(|| super::local_ranks::malformed(from, "location of a message"));
    None
}

/// Owner bit that separates the regions of messages from those of collectives, which have other release conditions.
const MESSAGE_OWNER: u64 = 1 << 63;
