//! Large payloads: offered by their sender, transferred with one-sided operations on all rails.
//!
//! The receiver can always *fetch*: it reads from the sender's memory into the target, and reports the completion. If both devices
//! support native writes, it *grants* the target instead. The sender then writes, each write with the grant's number as
//! immediate data, and the receiver counts the writes. Writes arrive in any order, so no single write proves that the others
//! have arrived.

use smddp_net::frame::Frame;
use smddp_net::wire::Ticket;

use super::endpoint::{FabricEndpoint, Operation};
use super::header::{Header, HeaderKind, integers};
use super::pair::{Offered, remotes};
use super::queues::Queues;
use super::rail::{LocalMemory, Posted, RemoteMemory};
use super::transfers::{Grant, PayloadOffer, PendingTransfer, TransferKind};

/// Payloads above this size, in bytes, are striped over all rails.
const STRIPE: usize = 128 << 10;
/// Maximum number of fragments that a grant may ask for.
const MAX_FRAGMENTS: usize = 4096;
/// Alignment of fragments on different rails, in bytes.
const GRAIN: usize = 4096;

/// Returns the fragment size of a payload, in bytes; the last fragment may be shorter.
fn fragment(bytes: usize, rails: usize, limit: usize) -> usize {
    let even = if bytes > STRIPE { bytes.div_ceil(rails).next_multiple_of(GRAIN) } else { bytes };
    let limit = if limit > GRAIN { limit & !(GRAIN - 1) } else { limit };
    even.min(limit).max(1)
}

impl FabricEndpoint {
    /// Returns the remote keys and addresses of a range of the staging memory, by rail.
    fn remote_regions(&mut self, offset: usize, bytes: usize) -> Result<Vec<RemoteMemory>, String> {
        let part = self.staging.part(&mut self.rails, offset, bytes)?;
        let target = |r: &super::rail::Registered| RemoteMemory {
            address: r.base.wrapping_add(part.offset as u64),
            key: r.key,
        };
        #[cfg(test)]
        let target = |r| {
            use super::endpoint::ProtocolError;
            match self.injected_error {
                Some(ProtocolError::Address) => RemoteMemory { address: part.offset as u64, ..target(r) },
                Some(ProtocolError::Key) => RemoteMemory { key: 1, ..target(r) },
                _ => target(r),
            }
        };
        Ok(part.rails.iter().map(target).collect())
    }

    fn one_sided(&self) -> usize {
        #[cfg(test)]
        if self.breaks(super::endpoint::ProtocolError::Cap) {
            return usize::MAX >> 1;
        }
        self.limits.one_sided
    }

    /// Offers a payload at (address, offset in the staging memory).
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
        let at = match self.remote_regions(offset, frame.bytes as usize) {
            Ok(at) => at,
            Err(reason) => {
                return self.fail_peer(peer, &format!("payload memory could not be registered: {reason}"));
            }
        };
        let offered = Offered { id, writes: writes.then(|| self.one_sided()), at };
        let (head, body) = (frame.encode(), offered.encode());
        self.send_ordered(number, rank, peer, HeaderKind::Offer, [&head, &body]);
    }

    /// Completes an offer: its memory is free again.
    pub(super) fn complete_offer(&mut self, offer: &PayloadOffer) {
        if let Some(group) = self.groups.get_mut(&offer.group) {
            group.offers -= 1;
            group.sent.push(offer.ticket);
            group.notify();
        }
    }

    fn writes(&self) -> bool {
        #[cfg(test)]
        if self.breaks(super::endpoint::ProtocolError::Writes) {
            return true;
        }
        self.limits.writes
    }

    /// Returns (fragment bytes, number of writes) if an offered payload is to be written. Both devices must support native writes,
    /// and the limit of immediates in flight must cover all the writes.
    fn write_plan(&self, offered: &Offered, bytes: usize) -> Option<(usize, usize)> {
        let limit = offered.writes.filter(|_| self.writes())?;
        let fragment = fragment(bytes, self.busy.len(), self.one_sided().min(limit));
        let count = bytes.div_ceil(fragment);
        #[cfg(test)]
        if self.breaks(super::endpoint::ProtocolError::Writes) {
            return Some((fragment, count));
        }
        (count <= Queues::new(&self.limits).immediates).then_some((fragment, count))
    }

    /// Returns true if the transfer of an offered payload may start now.
    pub(super) fn may_fetch(&self, offered: &Offered, bytes: usize) -> bool {
        self.write_plan(offered, bytes).is_none_or(|(_, count)| {
            self.immediates == 0 || self.immediates + count <= Queues::new(&self.limits).immediates
        })
    }

    /// Starts the transfer of an offered payload to its target. Returns the number of operations, or the reason of a failure.
    pub(super) fn fetch(
        &mut self,
        group: u32,
        rank: u32,
        seq: u64,
        peer: usize,
        bytes: usize,
        (offered, target): (&Offered, *mut u8),
    ) -> Result<usize, String> {
        let Some(offset) = self.staging.offset(target, bytes) else {
            return Err(format!("the target of {bytes} bytes is outside the staging memory"));
        };
        if let Some((fragment, count)) = self.write_plan(offered, bytes) {
            let regions = self.remote_regions(offset, bytes)?.into_iter().flat_map(|r| [r.address, r.key]);
            // After the registration, which may fail: only writes that will arrive are counted.
            self.immediates += count;
            let slot = self.grants.insert(Grant { peer, group, rank, seq, remaining: count });
            let body: Vec<u8> = [offered.id, slot, fragment as u64]
                .into_iter()
                .chain(regions)
                .flat_map(u64::to_le_bytes)
                .collect();
            let head = Header::new(HeaderKind::Grant, self.id);
            self.send_message(peer, head, [&body, &[]]);
            return Ok(1);
        }
        let fragment = fragment(bytes, self.busy.len(), self.one_sided());
        self.queue_transfers(
            peer,
            (target, offset, bytes),
            fragment,
            &offered.at,
            TransferKind::Read { group, rank, seq },
        );
        Ok(bytes.div_ceil(fragment))
    }

    /// Queues the operations of a payload at (address, offset in the staging memory, bytes): one per fragment, round-robin over all
    /// rails.
    fn queue_transfers(
        &mut self,
        peer: usize,
        (local, offset, bytes): (*mut u8, usize, usize),
        fragment: usize,
        regions: &[RemoteMemory],
        kind: TransferKind,
    ) {
        for from in (0..bytes).step_by(fragment) {
            self.next_rail += 1;
            let rail = self.next_rail % self.busy.len();
            let remote = regions[rail % regions.len()];
            self.pending_transfers.push_back(PendingTransfer {
                peer,
                rail,
                local: local.wrapping_add(from),
                offset: offset + from,
                bytes: fragment.min(bytes - from),
                remote: RemoteMemory { address: remote.address.wrapping_add(from as u64), ..remote },
                kind,
            });
        }
    }

    /// Handles the peer's report of fetched offers.
    pub(super) fn receive_fetched(&mut self, peer: usize, body: &[u8]) -> Result<(), String> {
        for id in integers(body) {
            // Offers to this peer only: the id comes from the network.
            match self.offers.get_mut(id) {
                // An offer that is being written cannot be fetched: its memory is in use.
                Some(offer) if offer.peer == peer && offer.writes == 0 => {}
                _ => return Err(format!("offer {id} was fetched, but no such offer is open")),
            }
            if let Some(offer) = self.offers.remove(id) {
                self.complete_offer(&offer);
            }
        }
        Ok(())
    }

    /// Handles a grant: starts the writes of an offered payload.
    pub(super) fn receive_grant(&mut self, peer: usize, body: &[u8]) -> Result<(), String> {
        let mut values = integers(body);
        let (Some(id), Some(slot), Some(fragment)) = (values.next(), values.next(), values.next()) else {
            return Err("a grant is too short".to_owned());
        };
        let regions = remotes(values);
        let number = u32::try_from(slot).map_err(|_| format!("grant number {slot} is too large"))?;
        let fragment = usize::try_from(fragment).unwrap_or(0);
        let offer = self.offers.get_mut(id).filter(|o| o.peer == peer && o.writes == 0);
        let (Some(offer), false, true) = (offer, regions.is_empty(), fragment > 0) else {
            return Err(format!("a grant for offer {id} does not match an open offer"));
        };
        if offer.bytes.div_ceil(fragment) > MAX_FRAGMENTS {
            return Err(format!(
                "a grant for fragments of {fragment} bytes of a payload of {} bytes",
                offer.bytes
            ));
        }
        let (bytes, at, offset) = (offer.bytes, offer.at.cast_mut(), offer.offset);
        offer.writes = bytes.div_ceil(fragment);
        self.queue_transfers(
            peer,
            (at, offset, bytes),
            fragment,
            &regions,
            TransferKind::Write { offer: id, number },
        );
        Ok(())
    }

    /// Records the completion of one write of an offer.
    pub(super) fn write_completed(&mut self, id: u64) {
        if let Some(offer) = self.offers.get_mut(id) {
            offer.writes -= 1;
            if offer.writes == 0
                && let Some(offer) = self.offers.remove(id)
            {
                self.complete_offer(&offer);
            }
        }
    }

    /// Records the arrival of a peer's write by its immediate data. Returns the grant after its last write.
    pub(super) fn immediate_received(&mut self, number: u32) -> Option<Grant> {
        #[cfg(test)]
        if self.breaks(super::endpoint::ProtocolError::Counting)
            && let Some(grant) = self.grants.get_mut(u64::from(number))
        {
            grant.remaining = 1;
        }
        let grant = self.grants.get_mut(u64::from(number))?;
        self.immediates = self.immediates.saturating_sub(1);
        grant.remaining -= 1;
        if grant.remaining > 0 {
            return None;
        }
        self.grants.remove(u64::from(number))
    }

    /// Drops grants whose writes will not arrive or are not needed, and frees their share of the limit of immediates. Their groups
    /// keep counting the transfers: the memory may still be written to and is therefore never reused.
    pub(super) fn drop_grants(&mut self, which: impl Fn(&Grant) -> bool) {
        let remaining: usize = self.grants.drain_where(which).iter().map(|grant| grant.remaining).sum();
        self.immediates = self.immediates.saturating_sub(remaining);
    }

    /// Posts queued operations, up to a limit that leaves queue entries for messages.
    pub(super) fn post_transfers(&mut self) -> bool {
        let mut moved = false;
        let limit = (self.operations() * 3 / 4).max(1);
        // Operations refused by a full queue are posted last in the next call.
        let mut late = Vec::new();
        for _ in 0..self.pending_transfers.len() {
            if (0..self.busy.len()).all(|rail| !self.accepts_work(rail)) {
                break;
            }
            let Some(next) = self.pending_transfers.pop_front() else { break };
            if self.peers[next.peer].broken.is_some() {
                self.transfer_dropped(&next);
                continue;
            }
            if !self.accepts_work(next.rail) || self.busy[next.rail] >= limit {
                // Other rails may have free queue entries.
                self.pending_transfers.push_back(next);
                continue;
            }
            match self.post_transfer(&next) {
                Ok(Posted::Accepted) => moved = true,
                Ok(Posted::QueueFull) => {
                    self.rejections[next.rail] += 1;
                    late.push(next);
                }
                Err(reason) => {
                    self.fail_peer(
                        next.peer,
                        &format!("a one-sided operation could not be posted: {reason}"),
                    );
                    self.transfer_dropped(&next);
                }
            }
        }
        self.pending_transfers.extend(late);
        moved
    }

    /// Removes a dropped operation that would have written into this process's memory from its group's count.
    fn transfer_dropped(&mut self, transfer: &PendingTransfer) {
        if let TransferKind::Read { group, .. } = transfer.kind
            && let Some(group) = self.groups.get_mut(&group)
        {
            group.transfers -= 1;
        }
    }

    fn post_transfer(&mut self, transfer: &PendingTransfer) -> Result<Posted, String> {
        let rail = transfer.rail;
        let part = self.staging.part(&mut self.rails, transfer.offset, transfer.bytes)?;
        let desc = part.rails[rail].desc;
        #[cfg(test)]
        let desc = if self.breaks(super::endpoint::ProtocolError::Desc) { 0 } else { desc };
        debug_assert!(self.staging.offset(transfer.local, transfer.bytes) == Some(transfer.offset));
        let local = LocalMemory { at: transfer.local, bytes: transfer.bytes, desc };
        let to = self.peers[transfer.peer].to[rail];
        let (op, number) = match transfer.kind {
            TransferKind::Read { group, rank, seq } => {
                (Operation::Read { peer: transfer.peer, rail, group, rank, seq }, None)
            }
            TransferKind::Write { offer, number } => {
                (Operation::Write { peer: transfer.peer, rail, offer }, Some(number))
            }
        };
        let context = self.context(op);
        // SAFETY: staging memory, registered on every rail, which belongs to this transfer until its completion.
        let posted = unsafe { self.rails[rail].one_sided(to, local, transfer.remote, number, context) };
        if posted == Ok(Posted::Accepted) {
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

    use super::super::rail::{Completion, Context, Rail, RailLimits, Registered};
    use super::super::registration::RegisteredStaging;
    use super::*;

    /// Device that cannot register memory because its limit is reached.
    struct Exhausted;

    // SAFETY: it accepts no operation and accesses no memory.
    unsafe impl Rail for Exhausted {
        fn limits(&self) -> RailLimits {
            let (operations, receives, completions) = (64, 64, 256);
            let (message, one_sided) = (8192, 1 << 20);
            RailLimits {
                message,
                one_sided,
                operations,
                receives,
                completions,
                writes: true,
                holds_messages: false,
            }
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
            Ok(Posted::QueueFull)
        }
        unsafe fn send(&mut self, _: u64, _: LocalMemory, _: Context) -> Result<Posted, String> {
            Ok(Posted::QueueFull)
        }
        unsafe fn one_sided(
            &mut self,
            _: u64,
            _: LocalMemory,
            _: RemoteMemory,
            _: Option<u32>,
            _: Context,
        ) -> Result<Posted, String> {
            Ok(Posted::QueueFull)
        }
        fn poll(&mut self, _: &mut Vec<Completion>) {}
        fn wait_sources(&mut self) -> Option<RawFd> {
            None
        }
    }

    #[test]
    fn failed_registration_does_not_use_up_immediates() {
        let memory = Arc::new(vec![0u64; 1 << 10]);
        let (at, bytes) = (memory.as_ptr().cast::<u8>().cast_mut(), 8 << 10);
        let staging = RegisteredStaging::new(at, bytes, memory.clone());
        let mut endpoint =
            FabricEndpoint::new("exhausted".to_owned(), vec![Exhausted], staging, 1, 1 << 20).unwrap();
        let offered = Offered { id: 1, writes: Some(1 << 20), at: Vec::new() };
        for _ in 0..200 {
            let failed = endpoint.fetch(0, 1, 0, 0, bytes, (&offered, at));
            assert_eq!(failed, Err("no memory region is left".to_owned()));
            assert!(endpoint.may_fetch(&offered, bytes), "{} immediates are in use", endpoint.immediates);
        }
        assert_eq!(endpoint.immediates, 0);
    }

    #[test]
    fn fragments_cover_a_payload_within_the_size_limit() {
        for rails in [1, 2, 4, 32] {
            for limit in [512, 8192, 100_000, 1 << 30] {
                for bytes in [1, 8193, 65_536, 131_072, 131_073, 1 << 20, (1 << 20) + 17] {
                    let fragment = fragment(bytes, rails, limit);
                    assert!(fragment > 0 && fragment <= limit.max(1));
                    if bytes > STRIPE && limit == 1 << 30 {
                        assert!(bytes.div_ceil(fragment) <= rails);
                    }
                    if bytes <= STRIPE && limit == 1 << 30 {
                        assert_eq!(fragment, bytes);
                    }
                }
            }
        }
    }
}
