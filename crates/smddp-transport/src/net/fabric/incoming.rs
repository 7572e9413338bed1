//! Receiving: what completion queues tell, and frames that come to their places in order.

use std::collections::VecDeque;

use super::endpoint::{FabricEndpoint, Operation};
use super::header::{HEAD, Header, HeaderKind};
use super::pair::{Arrival, Item, Payload, split};
use super::rail::Event;
use crate::net::wire::{Sink, Target};
use crate::warning::warn;

/// Frames of a class whose payloads are brought over at once.
const AHEAD: usize = 4;

impl FabricEndpoint {
    /// Moves everything on, and tells a group's owner what is there for it. See `Wire::poll`.
    pub(crate) fn poll(&mut self, number: u32, sink: &mut dyn Sink) -> bool {
        if let Some(group) = self.groups.get_mut(&number) {
            group.hush();
        }
        let mut moved = false;
        let mut events = std::mem::take(&mut self.events);
        if self.dead.is_none() {
            self.rails.iter_mut().for_each(|rail| rail.poll(&mut events));
        }
        self.refused.fill(0);
        for event in events.drain(..) {
            moved = true;
            self.event(event, number, sink);
        }
        self.events = events;
        moved |= self.deliver(number, sink);
        moved |= self.start();
        moved |= self.pump();
        self.fill();
        let told = self.groups.get_mut(&number).map(|g| std::mem::take(&mut g.sent)).unwrap_or_default();
        for ticket in told {
            moved = true;
            sink.sent(ticket);
        }
        moved
    }

    fn event(&mut self, event: Event, number: u32, sink: &mut dyn Sink) {
        match event {
            Event::Received(context, bytes) => {
                let Some(Operation::Receive { buffer, rail }) = self.ops.remove(context) else {
                    self.die("a message arrived where no receive buffer is");
                    return;
                };
                self.received(rail, buffer, bytes, number, sink);
                self.came_back(rail, buffer);
            }
            Event::Done(context) => match self.ops.remove(context) {
                Some(op) => self.over(op, None, number),
                None => self.die("an operation ended that had not begun"),
            },
            Event::Written(slot) => {
                if let Some(grant) = self.counted(slot) {
                    if let Some(g) = self.groups.get_mut(&grant.group) {
                        g.moving -= 1;
                    }
                    self.moved(grant.group, grant.rank, grant.seq, grant.group != number);
                }
            }
            Event::Taken(context) => {
                if let Some(Operation::Receive { buffer, rail }) = self.ops.remove(context) {
                    self.came_back(rail, buffer);
                }
            }
            Event::Failed(context, reason) => match context.and_then(|context| self.ops.remove(context)) {
                Some(op) => self.over(op, Some(&reason), number),
                None => self.die(&reason),
            },
        }
    }

    /// An operation of this process is over, or has failed.
    fn over(&mut self, op: Operation, failed: Option<&str>, number: u32) {
        let (peer, rail) = match op {
            Operation::Receive { buffer, rail } => {
                self.die(failed.unwrap_or("a receive buffer came back without a message"));
                return self.came_back(rail, buffer);
            }
            Operation::Send { buffer, peer } => {
                self.sends.give(buffer);
                self.peers[peer].sending -= 1;
                self.peers[peer].met |= failed.is_none();
                (peer, 0)
            }
            Operation::Read { peer, rail, group, .. } => {
                if let Some(g) = self.groups.get_mut(&group) {
                    g.moving -= 1;
                }
                (peer, rail)
            }
            Operation::Write { peer, rail, .. } => (peer, rail),
        };
        self.busy[rail] -= 1;
        match (op, failed) {
            (_, Some(reason)) => self.lose(peer, reason),
            (Operation::Read { group, rank, seq, .. }, None) => {
                if let Some(offer) = self.moved(group, rank, seq, group != number) {
                    self.peers[peer].fetched.push(offer);
                    self.list(peer);
                }
            }
            (Operation::Write { offer, .. }, None) => self.wrote(offer),
            (_, None) => {}
        }
    }

    /// One operation of a payload on its way is over. The offer's number, when it was the last one and the payload
    /// was read.
    fn moved(&mut self, group: u32, rank: u32, seq: u64, other: bool) -> Option<u64> {
        let g = self.groups.get_mut(&group)?;
        if other {
            g.ring();
        }
        let item = g.pairs.get_mut(&rank)?.moved(seq)?;
        match (&item.stage, &item.payload) {
            (Arrival::Placed, Payload::There(offered)) => Some(offered.id),
            _ => None,
        }
    }

    fn received(&mut self, rail: usize, buffer: u32, bytes: usize, number: u32, sink: &mut dyn Sink) {
        let local = self.inboxes[rail].buffers.local(buffer, bytes);
        // SAFETY: the device has filled these bytes of the buffer and is done with it; nobody else uses it until it
        // is posted again, after this.
        let message = unsafe { std::slice::from_raw_parts(local.at.cast_const(), local.bytes) };
        // Any process that the fabric lets send to this endpoint may have sent it: it must not end the groups of this process.
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
        let peer = self.peer(head.engine);
        let p = &mut self.peers[peer];
        p.credits = p.credits.saturating_add(head.credits);
        p.pending_release += u32::from(head.counted);
        p.heard = true;
        match head.what {
            HeaderKind::Ping => p.pongs += 1,
            HeaderKind::Pong => p.pinged = p.pinged.saturating_sub(1),
            _ => {}
        }
        self.open_window(peer);
        let p = &self.peers[peer];
        if p.pongs > 0 || p.pending_release >= self.window / 2 || head.credits > 0 && !p.outgoing.is_empty() {
            self.list(peer);
        }
        let body = &message[HEAD..];
        let result = match head.what {
            HeaderKind::Credit | HeaderKind::Ping | HeaderKind::Pong => Ok(()),
            HeaderKind::Fetched => self.fetched(peer, body),
            HeaderKind::Grant => self.granted(peer, body),
            _ => self.ordered_message(head, body, number, sink),
        };
        if let Err(reason) = result {
            self.lose(peer, &format!("it sent nonsense: {reason}"));
        }
    }

    fn ordered_message(
        &mut self,
        head: Header,
        body: &[u8],
        number: u32,
        sink: &mut dyn Sink,
    ) -> Result<(), String> {
        debug_assert!(head.what.ordered());
        #[cfg(test)]
        let careless = self.breaks(super::endpoint::ProtocolError::Order);
        // A group that is gone here: its peers learn that from others.
        let Some(group) = self.groups.get_mut(&head.group) else { return Ok(()) };
        if head.rank as usize >= group.size {
            return Err(format!("rank {} of a group of {}", head.rank, group.size));
        }
        let ready = head.group == number && !group.members.is_empty();
        let pair = group.pairs.entry(head.rank).or_default();
        #[cfg(test)]
        if careless {
            pair.take_unordered(head.what, head.seq, body)?;
            if !std::mem::replace(&mut pair.listed, true) {
                group.waiting.push_back(head.rank);
            }
            return Ok(());
        }
        if ready
            && head.what == HeaderKind::First
            && let Some((frame, payload)) = split(body)
            && payload.len() as u64 == frame.bytes
            && pair.idle(head.seq, &frame)
        {
            let rank = head.rank as usize;
            match sink.target(rank, &frame) {
                Target::Later => {}
                place => {
                    if let Target::At(at) = place {
                        // SAFETY: the sink's promise: room for the frame's payload, which has this length.
                        unsafe { at.copy_from_nonoverlapping(payload.as_ptr(), payload.len()) };
                    }
                    pair.skip();
                    sink.received(rank, &frame);
                    return Ok(());
                }
            }
        }
        pair.take(head.what, head.seq, body)?;
        if !pair.is_empty() && !std::mem::replace(&mut pair.listed, true) {
            group.waiting.push_back(head.rank);
        }
        if head.group != number {
            group.ring();
        }
        Ok(())
    }

    /// Brings waiting frames of a group to their places and tells of them, in the order of each class; one pair after
    /// the other, beginning elsewhere each time.
    fn deliver(&mut self, number: u32, sink: &mut dyn Sink) -> bool {
        let mut moved = false;
        let Some(group) = self.groups.get_mut(&number).filter(|g| !g.members.is_empty()) else {
            return false;
        };
        let mut waiting = std::mem::take(&mut group.waiting);
        for _ in 0..waiting.len() {
            let Some(rank) = waiting.pop_front() else { break };
            let Some(group) = self.groups.get_mut(&number) else { break };
            // Taken out while others of this engine are called.
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
        items: &mut VecDeque<Item>,
        sink: &mut dyn Sink,
    ) -> bool {
        let member = self.groups.get(&number).and_then(|g| g.members.get(rank as usize)?.as_ref());
        let Some(peer) = member.map(|m| m.peer) else { return false };
        let mut moved = false;
        let mut at = 0;
        while at < AHEAD
            && let Some(item) = items.get_mut(at)
        {
            if item.stage == Arrival::Waiting && !self.settle(number, (rank, peer), item, at == 0, sink) {
                break;
            }
            if at == 0 && item.stage == Arrival::Placed {
                sink.received(rank as usize, &item.frame);
                items.pop_front();
                moved = true;
            } else {
                at += 1;
            }
        }
        moved
    }

    /// Asks for a frame's place and brings its payload there, or on its way; `false`: not yet.
    fn settle(
        &mut self,
        number: u32,
        (rank, peer): (u32, usize),
        item: &mut Item,
        first: bool,
        sink: &mut dyn Sink,
    ) -> bool {
        if self.peers[peer].broken.is_some() && matches!(item.payload, Payload::There(_)) {
            return false;
        }
        // Its place may depend on what was delivered before; that of a large one is asked ahead, to read side by side.
        if !first && matches!(item.payload, Payload::Here(_)) {
            return false;
        }
        if let Payload::There(offered) = &item.payload
            && !self.may_fetch(offered, item.frame.bytes as usize)
        {
            return false;
        }
        let place = sink.target(rank as usize, &item.frame);
        match (&item.payload, place) {
            (_, Target::Later) => return false,
            (Payload::Here(_), Target::Discard) => item.stage = Arrival::Placed,
            (Payload::Here(bytes), Target::At(at)) => {
                // SAFETY: the sink's promise: room for the frame's payload, which has this length.
                unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
                item.stage = Arrival::Placed;
            }
            (Payload::There(offered), Target::Discard) => {
                self.peers[peer].fetched.push(offered.id);
                self.list(peer);
                item.stage = Arrival::Placed;
            }
            (Payload::There(offered), Target::At(at)) => {
                let bytes = item.frame.bytes as usize;
                match self.fetch(number, rank, item.seq, peer, bytes, (offered, at)) {
                    Ok(count) => {
                        item.stage = Arrival::Moving(count);
                        if let Some(group) = self.groups.get_mut(&number) {
                            group.moving += count;
                        }
                    }
                    Err(reason) => {
                        self.lose(peer, &reason);
                        return false;
                    }
                }
            }
        }
        true
    }
}
