//! Large payloads: announced by their sender, brought over by one-sided operations on all rails.
//!
//! Everywhere the receiver can *fetch*: it reads from the sender's memory into the place, and says when it has. Where
//! both ends' devices write, it *grants* the place instead: the sender writes, each write with the grant's number, and
//! the receiver counts as many numbers as there are writes. Writes arrive in any order, so none of them says that the
//! others are there.

use super::endpoint::{FabricEndpoint, Operation};
use super::header::{Header, HeaderKind, numbers};
use super::pair::{Offered, remotes};
use super::queues::Queues;
use super::rail::{LocalMemory, Posted, RemoteMemory};
use super::transfers::{Grant, PayloadOffer, PendingTransfer, TransferKind};
use crate::net::frame::Frame;
use crate::net::wire::Ticket;

/// Payloads above this many bytes take all rails.
const STRIPE: usize = 128 << 10;
/// Nobody grants a payload in more pieces.
const PIECES: usize = 4096;
/// Pieces of a payload on different rails begin at multiples of this.
const GRAIN: usize = 4096;

/// Bytes of each piece of a payload; the last may be shorter.
fn piece(bytes: usize, rails: usize, most: usize) -> usize {
    let even = if bytes > STRIPE { bytes.div_ceil(rails).next_multiple_of(GRAIN) } else { bytes };
    let most = if most > GRAIN { most & !(GRAIN - 1) } else { most };
    even.min(most).max(1)
}

impl FabricEndpoint {
    /// Where bytes of the staging memory are for others, by rail.
    fn places(&mut self, offset: usize, bytes: usize) -> Result<Vec<RemoteMemory>, String> {
        let part = self.staging.part(&mut self.rails, offset, bytes)?;
        let place = |r: &super::rail::Registered| RemoteMemory {
            address: r.base.wrapping_add(part.offset as u64),
            key: r.key,
        };
        #[cfg(test)]
        let place = |r| {
            use super::endpoint::ProtocolError;
            match self.careless {
                Some(ProtocolError::Address) => RemoteMemory { address: part.offset as u64, ..place(r) },
                Some(ProtocolError::Key) => RemoteMemory { key: 1, ..place(r) },
                _ => place(r),
            }
        };
        Ok(part.rails.iter().map(place).collect())
    }

    fn one_sided(&self) -> usize {
        #[cfg(test)]
        if self.breaks(super::endpoint::ProtocolError::Cap) {
            return usize::MAX >> 1;
        }
        self.limits.one_sided
    }

    /// Announces a payload at (address, offset in the staging memory).
    pub(super) fn offer(
        &mut self,
        number: u32,
        rank: usize,
        peer: usize,
        frame: &Frame,
        at: (*const u8, usize),
        ticket: Ticket,
    ) {
        let (at, offset) = at;
        let offer =
            PayloadOffer { group: number, peer, ticket, offset, at, bytes: frame.bytes as usize, writes: 0 };
        let id = self.offers.insert(offer);
        if let Some(group) = self.groups.get_mut(&number) {
            group.offers += 1;
        }
        let writes = self.writes();
        let at = match self.places(offset, frame.bytes as usize) {
            Ok(at) => at,
            Err(reason) => {
                return self.lose(peer, &format!("memory for it could not be registered: {reason}"));
            }
        };
        let offered = Offered { id, writes: writes.then(|| self.one_sided()), at };
        let (head, body) = (frame.encode(), offered.encode());
        self.ordered(number, rank, peer, HeaderKind::TransportOffer, [&head, &body]);
    }

    /// An offer needs its memory no more.
    pub(super) fn offer_over(&mut self, offer: &PayloadOffer) {
        if let Some(group) = self.groups.get_mut(&offer.group) {
            group.offers -= 1;
            group.sent.push(offer.ticket);
            group.ring();
        }
    }

    fn writes(&self) -> bool {
        #[cfg(test)]
        if self.breaks(super::endpoint::ProtocolError::Writes) {
            return true;
        }
        self.limits.writes
    }

    /// (bytes, number) of the writes that an offered payload takes, if it is written: both devices write, and there are
    /// not more of them than numbers that may be under way.
    fn by_writes(&self, offered: &Offered, bytes: usize) -> Option<(usize, usize)> {
        let most = offered.writes.filter(|_| self.writes())?;
        let piece = piece(bytes, self.busy.len(), self.one_sided().min(most));
        let count = bytes.div_ceil(piece);
        #[cfg(test)]
        if self.breaks(super::endpoint::ProtocolError::Writes) {
            return Some((piece, count));
        }
        (count <= Queues::new(&self.limits).numbers).then_some((piece, count))
    }

    /// Whether an offered payload can be brought over now.
    pub(super) fn may_fetch(&self, offered: &Offered, bytes: usize) -> bool {
        self.by_writes(offered, bytes).is_none_or(|(_, count)| {
            self.numbers == 0 || self.numbers + count <= Queues::new(&self.limits).numbers
        })
    }

    /// Brings an offered payload to its place. Returns how many operations that takes, or why it cannot be.
    pub(super) fn fetch(
        &mut self,
        group: u32,
        rank: u32,
        seq: u64,
        peer: usize,
        bytes: usize,
        (offered, place): (&Offered, *mut u8),
    ) -> Result<usize, String> {
        let Some(offset) = self.staging.offset(place, bytes) else {
            return Err(format!("a place for {bytes} bytes lies outside the staging memory"));
        };
        if let Some((piece, count)) = self.by_writes(offered, bytes) {
            let places = self.places(offset, bytes)?.into_iter().flat_map(|r| [r.address, r.key]);
            // Behind the registration, which may fail: only writes that will come are counted.
            self.numbers += count;
            let slot = self.grants.insert(Grant { peer, group, rank, seq, left: count });
            let body: Vec<u8> = [offered.id, slot, piece as u64]
                .into_iter()
                .chain(places)
                .flat_map(u64::to_le_bytes)
                .collect();
            let head = Header::new(HeaderKind::Grant, self.id);
            self.message(peer, head, [&body, &[]]);
            return Ok(1);
        }
        let piece = piece(bytes, self.busy.len(), self.one_sided());
        self.spread(
            peer,
            (place, offset, bytes),
            piece,
            &offered.at,
            TransferKind::Read { group, rank, seq },
        );
        Ok(bytes.div_ceil(piece))
    }

    /// Puts the operations of a payload at (address, offset in the staging memory, bytes) on the list, a piece each, over all
    /// rails in turn.
    fn spread(
        &mut self,
        peer: usize,
        (local, offset, bytes): (*mut u8, usize, usize),
        piece: usize,
        places: &[RemoteMemory],
        kind: TransferKind,
    ) {
        for from in (0..bytes).step_by(piece) {
            self.turn += 1;
            let rail = self.turn % self.busy.len();
            let remote = places[rail % places.len()];
            self.todo.push_back(PendingTransfer {
                peer,
                rail,
                local: local.wrapping_add(from),
                offset: offset + from,
                bytes: piece.min(bytes - from),
                remote: RemoteMemory { address: remote.address.wrapping_add(from as u64), ..remote },
                kind,
            });
        }
    }

    /// A peer has fetched these.
    pub(super) fn fetched(&mut self, peer: usize, body: &[u8]) -> Result<(), String> {
        for id in numbers(body) {
            // Only its own: the number comes from outside.
            match self.offers.get_mut(id) {
                // What is being written is not fetched: its memory is in use.
                Some(offer) if offer.peer == peer && offer.writes == 0 => {}
                _ => return Err(format!("offer {id} was fetched, and there is none")),
            }
            if let Some(offer) = self.offers.remove(id) {
                self.offer_over(&offer);
            }
        }
        Ok(())
    }

    /// A peer says where an offered payload goes.
    pub(super) fn granted(&mut self, peer: usize, body: &[u8]) -> Result<(), String> {
        let mut words = numbers(body);
        let (Some(id), Some(slot), Some(piece)) = (words.next(), words.next(), words.next()) else {
            return Err("a grant is too short".to_owned());
        };
        let places = remotes(words);
        let number = u32::try_from(slot).map_err(|_| format!("a grant's number {slot} is too large"))?;
        let piece = usize::try_from(piece).unwrap_or(0);
        let offer = self.offers.get_mut(id).filter(|o| o.peer == peer && o.writes == 0);
        let (Some(offer), false, true) = (offer, places.is_empty(), piece > 0) else {
            return Err(format!("a grant for offer {id} fits none"));
        };
        if offer.bytes.div_ceil(piece) > PIECES {
            return Err(format!("a grant for pieces of {piece} bytes of {}", offer.bytes));
        }
        let (bytes, at, offset) = (offer.bytes, offer.at.cast_mut(), offer.offset);
        offer.writes = bytes.div_ceil(piece);
        self.spread(peer, (at, offset, bytes), piece, &places, TransferKind::Write { offer: id, number });
        Ok(())
    }

    /// One write of an offer is over.
    pub(super) fn wrote(&mut self, id: u64) {
        if let Some(offer) = self.offers.get_mut(id) {
            offer.writes -= 1;
            if offer.writes == 0
                && let Some(offer) = self.offers.remove(id)
            {
                self.offer_over(&offer);
            }
        }
    }

    /// A peer's write with this number is here. The grant, when it was the last one.
    pub(super) fn counted(&mut self, number: u32) -> Option<Grant> {
        #[cfg(test)]
        if self.breaks(super::endpoint::ProtocolError::Counting)
            && let Some(grant) = self.grants.get_mut(u64::from(number))
        {
            grant.left = 1;
        }
        let grant = self.grants.get_mut(u64::from(number))?;
        self.numbers = self.numbers.saturating_sub(1);
        grant.left -= 1;
        if grant.left > 0 {
            return None;
        }
        self.grants.remove(u64::from(number))
    }

    /// The writes of some grants will not come, or nobody wants them any more: their numbers may be used for others. Those
    /// groups stay in motion, because the memory may still be written to, and is therefore never used again.
    pub(super) fn give_up(&mut self, which: impl Fn(&Grant) -> bool) {
        let left: usize = self.grants.drain_where(which).iter().map(|grant| grant.left).sum();
        self.numbers = self.numbers.saturating_sub(left);
    }

    /// Hands over operations that there is room for now, as many as keep some room for messages.
    pub(super) fn start(&mut self) -> bool {
        let mut moved = false;
        let most = (self.operations() * 3 / 4).max(1);
        // Whoever is refused comes last the next time.
        let mut late = Vec::new();
        for _ in 0..self.todo.len() {
            if (0..self.busy.len()).all(|rail| !self.open(rail)) {
                break;
            }
            let Some(next) = self.todo.pop_front() else { break };
            if self.peers[next.peer].broken.is_some() {
                self.abandoned(&next);
                continue;
            }
            if !self.open(next.rail) || self.busy[next.rail] >= most {
                // Other rails may have room.
                self.todo.push_back(next);
                continue;
            }
            match self.operate(&next) {
                Ok(Posted::Yes) => moved = true,
                Ok(Posted::Again) => {
                    self.refused[next.rail] += 1;
                    late.push(next);
                }
                Err(reason) => {
                    self.lose(next.peer, &format!("its memory could not be reached: {reason}"));
                    self.abandoned(&next);
                }
            }
        }
        self.todo.extend(late);
        moved
    }

    /// An operation into this process's memory will not come.
    fn abandoned(&mut self, todo: &PendingTransfer) {
        if let TransferKind::Read { group, .. } = todo.kind
            && let Some(group) = self.groups.get_mut(&group)
        {
            group.moving -= 1;
        }
    }

    fn operate(&mut self, todo: &PendingTransfer) -> Result<Posted, String> {
        let rail = todo.rail;
        let part = self.staging.part(&mut self.rails, todo.offset, todo.bytes)?;
        let desc = part.rails[rail].desc;
        #[cfg(test)]
        let desc = if self.breaks(super::endpoint::ProtocolError::Desc) { 0 } else { desc };
        debug_assert!(self.staging.offset(todo.local, todo.bytes) == Some(todo.offset));
        let local = LocalMemory { at: todo.local, bytes: todo.bytes, desc };
        let to = self.peers[todo.peer].to[rail];
        let (op, number) = match todo.kind {
            TransferKind::Read { group, rank, seq } => {
                (Operation::Read { peer: todo.peer, rail, group, rank, seq }, None)
            }
            TransferKind::Write { offer, number } => {
                (Operation::Write { peer: todo.peer, rail, offer }, Some(number))
            }
        };
        let context = self.context(op);
        // SAFETY: staging memory, registered on every rail, which is this transfer's until its end was told.
        let posted = unsafe { self.rails[rail].one_sided(to, local, todo.remote, number, context) };
        if posted == Ok(Posted::Yes) {
            self.busy[rail] += 1;
        } else {
            self.ops.remove(context);
        }
        posted
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::RawFd;
    use std::sync::Arc;

    use super::super::rail::{Context, Event, Rail, RailLimits, Registered};
    use super::super::registration::RegisteredStaging;
    use super::*;

    /// A device that cannot register memory (its limit is reached).
    struct Exhausted;

    impl Rail for Exhausted {
        fn limits(&self) -> RailLimits {
            let (operations, receives, completions) = (64, 64, 256);
            let (message, one_sided) = (8192, 1 << 20);
            RailLimits { message, one_sided, operations, receives, completions, writes: true, patient: false }
        }
        fn address(&self) -> Vec<u8> {
            Vec::new()
        }
        unsafe fn register(&mut self, _: *mut u8, _: usize) -> Result<Registered, String> {
            Err("no memory region is left".to_owned())
        }
        fn insert(&mut self, _: &[u8]) -> Result<u64, String> {
            Ok(0)
        }
        unsafe fn receive(&mut self, _: LocalMemory, _: Context) -> Result<Posted, String> {
            Ok(Posted::Again)
        }
        unsafe fn send(&mut self, _: u64, _: LocalMemory, _: Context) -> Result<Posted, String> {
            Ok(Posted::Again)
        }
        unsafe fn one_sided(
            &mut self,
            _: u64,
            _: LocalMemory,
            _: RemoteMemory,
            _: Option<u32>,
            _: Context,
        ) -> Result<Posted, String> {
            Ok(Posted::Again)
        }
        fn poll(&mut self, _: &mut Vec<Event>) {}
        fn interest(&mut self) -> Option<RawFd> {
            None
        }
    }

    #[test]
    fn failed_registrations_leave_room_for_later_payloads() {
        let memory = Arc::new(vec![0u64; 1 << 10]);
        let (at, bytes) = (memory.as_ptr().cast::<u8>().cast_mut(), 8 << 10);
        let staging = RegisteredStaging::new(at, bytes, memory.clone());
        let mut engine =
            FabricEndpoint::new("exhausted".to_owned(), vec![Exhausted], staging, 1, 1 << 20).unwrap();
        let offered = Offered { id: 1, writes: Some(1 << 20), at: Vec::new() };
        for _ in 0..200 {
            let failed = engine.fetch(0, 1, 0, 0, bytes, (&offered, at));
            assert_eq!(failed, Err("no memory region is left".to_owned()));
            assert!(engine.may_fetch(&offered, bytes), "{} numbers are taken", engine.numbers);
        }
        assert_eq!(engine.numbers, 0);
    }

    #[test]
    fn pieces_cover_a_payload_and_none_is_too_large() {
        for rails in [1, 2, 4, 32] {
            for most in [512, 8192, 100_000, 1 << 30] {
                for bytes in [1, 8193, 65_536, 131_072, 131_073, 1 << 20, (1 << 20) + 17] {
                    let piece = piece(bytes, rails, most);
                    assert!(piece > 0 && piece <= most.max(1));
                    if bytes > STRIPE && most == 1 << 30 {
                        assert!(bytes.div_ceil(piece) <= rails);
                    }
                    if bytes <= STRIPE && most == 1 << 30 {
                        assert_eq!(piece, bytes);
                    }
                }
            }
        }
    }
}
