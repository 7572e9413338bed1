//! Receive path: completions, and delivery of frames in order.

use std::collections::VecDeque;

use smddp_base::warning::warn;
use smddp_net::frame::{CORRUPTED_HEADER, Frame, check_payload};
use smddp_net::wire::{Sink, Target};

use super::endpoint::{FabricEndpoint, Operation};
use super::header::{Header, HeaderKind, MESSAGE_HEADER};
use super::pair::{Arrival, Payload, PendingFrame, split};
use super::rail::Completion;

/// Number of frames per class whose payloads may be transferred at the same time.
const LOOKAHEAD: usize = 4;

impl FabricEndpoint {
    /// Makes progress on everything, and reports a group's events to its sink. See `Wire::poll`.
    pub(crate) fn poll(&mut self, number: u32, sink: &mut dyn Sink) -> bool {
        if let Some(group) = self.groups.get_mut(&number) {
            group.clear_notification();
        }
        let mut moved = false;
        let mut events = std::mem::take(&mut self.events);
        if self.failure.is_none() {
            self.rails.iter_mut().for_each(|rail| rail.poll(&mut events));
        }
        self.rejections.fill(0);
        for completion in events.drain(..) {
            moved = true;
            self.complete(completion, number, sink);
        }
        self.events = events;
        moved |= self.deliver(number, sink);
        moved |= self.post_transfers();
        moved |= self.flush_queued();
        self.post_receive_buffers();
        let sent = self.groups.get_mut(&number).map(|g| std::mem::take(&mut g.sent)).unwrap_or_default();
        for ticket in sent {
            moved = true;
            sink.sent(ticket);
        }
        moved
    }

    fn complete(&mut self, completion: Completion, number: u32, sink: &mut dyn Sink) {
        match completion {
            Completion::Received(context, bytes) => {
                let Some(Operation::Receive { buffer, rail }) = self.ops.remove(context) else {
                    self.fail("a message arrived without a posted receive buffer");
                    return;
                };
                self.received(rail, buffer, bytes, number, sink);
                self.recycle_buffer(rail, buffer);
            }
            Completion::Done(context) => match self.ops.remove(context) {
                Some(op) => self.finish_operation(op, None, number),
                None => self.fail("an unknown operation completed"),
            },
            Completion::RemoteWrite(slot) => {
                if let Some(grant) = self.immediate_received(slot) {
                    if let Some(g) = self.groups.get_mut(&grant.group) {
                        g.transfers -= 1;
                    }
                    self.transfer_completed(grant.group, grant.rank, grant.seq, grant.group != number);
                }
            }
            Completion::BufferConsumed(context) => {
                if let Some(Operation::Receive { buffer, rail }) = self.ops.remove(context) {
                    self.recycle_buffer(rail, buffer);
                }
            }
            Completion::Failed(context, reason) => match context.and_then(|context| self.ops.remove(context))
            {
                Some(op) => self.finish_operation(op, Some(&reason), number),
                None => self.fail(&reason),
            },
        }
    }

    /// Handles the end of an operation of this process, successful or failed.
    fn finish_operation(&mut self, op: Operation, failed: Option<&str>, number: u32) {
        let (peer, rail) = match op {
            Operation::Receive { buffer, rail } => {
                self.fail(failed.unwrap_or("a receive buffer was returned without a message"));
                return self.recycle_buffer(rail, buffer);
            }
            Operation::Send { buffer, peer } => {
                self.sends.give(buffer);
                self.peers[peer].sending -= 1;
                self.peers[peer].contacted |= failed.is_none();
                (peer, 0)
            }
            Operation::Read { peer, rail, group, .. } => {
                if let Some(g) = self.groups.get_mut(&group) {
                    g.transfers -= 1;
                }
                (peer, rail)
            }
            Operation::Write { peer, rail, .. } => (peer, rail),
        };
        self.busy[rail] -= 1;
        match (op, failed) {
            (_, Some(reason)) => self.fail_peer(peer, reason),
            (Operation::Read { group, rank, seq, .. }, None) => {
                if let Some(offer) = self.transfer_completed(group, rank, seq, group != number) {
                    self.peers[peer].fetched.push(offer);
                    self.mark_active(peer);
                }
            }
            (Operation::Write { offer, .. }, None) => self.write_completed(offer),
            (_, None) => {}
        }
    }

    /// Records the completion of one operation of a payload transfer. Returns the offer's id after the last operation of a
    /// payload that was read.
    fn transfer_completed(&mut self, group: u32, rank: u32, seq: u64, other: bool) -> Option<u64> {
        let g = self.groups.get_mut(&group)?;
        if other {
            g.notify();
        }
        let item = g.pairs.get_mut(&rank)?.transfer_completed(seq)?;
        match (&item.stage, &item.payload) {
            (Arrival::Placed, Payload::Remote(offered)) => Some(offered.id),
            _ => None,
        }
    }

    fn received(&mut self, rail: usize, buffer: u32, bytes: usize, number: u32, sink: &mut dyn Sink) {
        let local = self.receive_queues[rail].buffers.local(buffer, bytes);
        // SAFETY: the device has filled these bytes of the buffer and released it; nothing else uses it until it is posted again,
        // after this.
        let message = unsafe { std::slice::from_raw_parts(local.at.cast_const(), local.bytes) };
        // Any process with access to the fabric may have sent the message: it must not end the groups of this process.
        let Some(head) = Header::decode(message) else {
            self.foreign += 1;
            if self.foreign == 1 {
                warn(&format!(
                    "dropped a message of {bytes} bytes that is not from smddp; further ones are dropped silently. Another program \
                     can send to this rank's endpoint ({}): docs/security.md",
                    self.name()
                ));
            }
            return;
        };
        let peer = self.peer(head.endpoint);
        let p = &mut self.peers[peer];
        p.credits = p.credits.saturating_add(head.credits);
        p.pending_release += u32::from(head.uses_credit);
        p.peer_window_open = true;
        match head.kind {
            HeaderKind::Ping => p.pending_pongs += 1,
            HeaderKind::Pong => p.unanswered_pings = p.unanswered_pings.saturating_sub(1),
            _ => {}
        }
        self.open_window(peer);
        let p = &self.peers[peer];
        if p.pending_pongs > 0
            || p.pending_release >= self.window / 2
            || head.credits > 0 && !p.outgoing.is_empty()
        {
            self.mark_active(peer);
        }
        let body = &message[MESSAGE_HEADER..];
        let result = match head.kind {
            HeaderKind::Credit | HeaderKind::Ping | HeaderKind::Pong => Ok(()),
            HeaderKind::Fetched => self.receive_fetched(peer, body),
            HeaderKind::Grant => self.receive_grant(peer, body),
            _ => self.ordered_message(head, body, number, sink),
        };
        if let Err(reason) = result {
            self.fail_peer(peer, &format!("protocol error: {reason}"));
        }
    }

    fn ordered_message(
        &mut self,
        head: Header,
        body: &[u8],
        number: u32,
        sink: &mut dyn Sink,
    ) -> Result<(), String> {
        debug_assert!(head.kind.ordered());
        #[cfg(test)]
        let injected_error = self.breaks(super::endpoint::ProtocolError::Order);
        // The group is closed here. Its peers detect that by other means.
        let Some(group) = self.groups.get_mut(&head.group) else { return Ok(()) };
        if head.rank as usize >= group.size {
            return Err(format!("rank {} in a group of {} ranks", head.rank, group.size));
        }
        let ready = head.group == number && !group.members.is_empty() && !group.is_corrupted(head.rank);
        if group.checks && has_invalid_frame(head.kind, body) {
            group.report_corruption(head.rank, CORRUPTED_HEADER.to_owned());
            return Ok(());
        }
        let pair = group.pairs.entry(head.rank).or_default();
        #[cfg(test)]
        if injected_error {
            pair.accept_unordered(head.kind, head.seq, body)?;
            if !std::mem::replace(&mut pair.listed, true) {
                group.waiting.push_back(head.rank);
            }
            return Ok(());
        }
        if ready
            && head.kind == HeaderKind::First
            && let Some((frame, payload)) = split(body)
            && payload.len() as u64 == frame.bytes
            && pair.is_idle(head.seq, &frame)
            && (!group.checks || check_payload(&frame, payload).is_ok())
        {
            let rank = head.rank as usize;
            match sink.target(rank, &frame) {
                Target::Later => {}
                target => {
                    if let Target::At(at) = target {
                        // SAFETY: the sink guarantees room for the frame's payload, which has this length.
                        unsafe { at.copy_from_nonoverlapping(payload.as_ptr(), payload.len()) };
                    }
                    pair.advance();
                    sink.received(rank, &frame);
                    return Ok(());
                }
            }
        }
        pair.accept(head.kind, head.seq, body)?;
        if !pair.is_empty() && !std::mem::replace(&mut pair.listed, true) {
            group.waiting.push_back(head.rank);
        }
        if head.group != number {
            group.notify();
        }
        Ok(())
    }

    /// Transfers the waiting frames of a group to their targets and delivers them in the order of each class. Serves the pairs
    /// round-robin.
    fn deliver(&mut self, number: u32, sink: &mut dyn Sink) -> bool {
        let mut moved = false;
        let Some(group) = self.groups.get_mut(&number).filter(|g| !g.members.is_empty()) else {
            return false;
        };
        let mut waiting = std::mem::take(&mut group.waiting);
        for _ in 0..waiting.len() {
            let Some(rank) = waiting.pop_front() else { break };
            let Some(group) = self.groups.get_mut(&number) else { break };
            // Removed while methods of this endpoint run.
            let Some(mut pair) = group.pairs.remove(&rank) else { continue };
            for class in &mut pair.classes {
                moved |= self.deliver_class(number, rank, class, sink);
            }
            pair.listed = !pair.is_empty();
            if pair.listed {
                waiting.push_back(rank);
            }
            if let Some(group) = self.groups.get_mut(&number) {
                group.pairs.insert(rank, pair);
            }
        }
        waiting.rotate_left(usize::from(waiting.len() > 1));
        if let Some(group) = self.groups.get_mut(&number) {
            group.waiting.append(&mut waiting);
        }
        moved
    }

    fn deliver_class(
        &mut self,
        number: u32,
        rank: u32,
        items: &mut VecDeque<PendingFrame>,
        sink: &mut dyn Sink,
    ) -> bool {
        let group = self.groups.get(&number).filter(|group| !group.is_corrupted(rank));
        let member = group.and_then(|g| g.members.get(rank as usize)?.as_ref());
        let Some(peer) = member.map(|m| m.peer) else { return false };
        let mut moved = false;
        let mut at = 0;
        while at < LOOKAHEAD
            && let Some(item) = items.get_mut(at)
        {
            if item.stage == Arrival::Waiting
                && !self.place_payload(number, (rank, peer), item, at == 0, sink)
            {
                break;
            }
            if at == 0 && item.stage == Arrival::Placed {
                if !self.is_intact(number, rank, item) {
                    break;
                }
                sink.received(rank as usize, &item.frame);
                items.pop_front();
                moved = true;
            } else {
                at += 1;
            }
        }
        moved
    }

    /// Asks for a frame's target and transfers its payload, or starts the transfer; returns false if it has to wait.
    fn place_payload(
        &mut self,
        number: u32,
        (rank, peer): (u32, usize),
        item: &mut PendingFrame,
        first: bool,
        sink: &mut dyn Sink,
    ) -> bool {
        if self.peers[peer].broken.is_some() && matches!(item.payload, Payload::Remote(_)) {
            return false;
        }
        // The target may depend on frames delivered before. Targets of large payloads are requested early, for parallel reads.
        if !first && matches!(item.payload, Payload::Inline(_)) {
            return false;
        }
        if let Payload::Remote(offered) = &item.payload
            && !self.may_fetch(offered, item.frame.bytes as usize)
        {
            return false;
        }
        let target = sink.target(rank as usize, &item.frame);
        match (&item.payload, target) {
            (_, Target::Later) => return false,
            (Payload::Inline(_), Target::Discard) => item.stage = Arrival::Placed,
            (Payload::Inline(bytes), Target::At(at)) => {
                if !self.has_checksum_of(number, rank, &item.frame, bytes) {
                    return false;
                }
                // SAFETY: the sink guarantees room for the frame's payload, which has this length.
                unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
                item.stage = Arrival::Placed;
            }
            (Payload::Remote(offered), Target::Discard) => {
                self.peers[peer].fetched.push(offered.id);
                self.mark_active(peer);
                item.stage = Arrival::Placed;
            }
            (Payload::Remote(offered), Target::At(at)) => {
                let bytes = item.frame.bytes as usize;
                match self.fetch(number, rank, item.seq, peer, bytes, (offered, at)) {
                    Ok(count) => {
                        item.stage = Arrival::Transferring(count);
                        item.offset = self.staging.offset(at, bytes);
                        if let Some(group) = self.groups.get_mut(&number) {
                            group.transfers += count;
                        }
                    }
                    Err(reason) => {
                        self.fail_peer(peer, &reason);
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Checks a payload that was fetched. Returns false if its checksum differs.
    fn is_intact(&mut self, number: u32, rank: u32, item: &PendingFrame) -> bool {
        let Some(offset) = item.offset else { return true };
        if !self.groups.get(&number).is_some_and(|group| group.checks) {
            return true;
        }
        // SAFETY: the transfer has filled these bytes of the staging memory, which belong to the frame until it is
        // delivered.
        let payload = unsafe {
            std::slice::from_raw_parts(self.staging.address(offset).cast_const(), item.frame.bytes as usize)
        };
        self.has_checksum_of(number, rank, &item.frame, payload)
    }

    /// Returns true if the frame has the checksum of its payload, or if frames of this group have no checksums.
    fn has_checksum_of(&mut self, number: u32, rank: u32, frame: &Frame, payload: &[u8]) -> bool {
        let Some(group) = self.groups.get_mut(&number).filter(|group| group.checks) else { return true };
        match check_payload(frame, payload) {
            Ok(()) => true,
            Err(detail) => {
                group.report_corruption(rank, detail);
                false
            }
        }
    }
}

/// Returns true if a message that begins a frame has no valid frame header.
fn has_invalid_frame(kind: HeaderKind, body: &[u8]) -> bool {
    let begins = matches!(kind, HeaderKind::First | HeaderKind::Offer);
    begins && split(body).is_none_or(|(frame, _)| frame.checksum.is_none())
}
