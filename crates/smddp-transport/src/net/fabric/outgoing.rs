//! Sending: messages within a peer's credits, and frames made of them.

use std::time::Instant;

use super::endpoint::{FabricEndpoint, Operation};
use super::header::{HEAD, Header, HeaderKind};
use super::rail::Posted;
use crate::net::frame::{Frame, HEADER};
use crate::net::wire::{INLINE_PAYLOAD, Ticket};

impl FabricEndpoint {
    /// Queues a frame for a rank of a group. See `Wire::send`.
    ///
    /// # Safety
    /// As `Wire::send`.
    pub(crate) unsafe fn send(
        &mut self,
        number: u32,
        rank: usize,
        frame: &Frame,
        payload: *const u8,
        ticket: Ticket,
    ) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        let member = group.members.get(rank).and_then(Option::as_ref);
        let Some(peer) = member.map(|m| m.peer).filter(|&p| self.peers[p].broken.is_none()) else {
            group.sent.push(ticket);
            return;
        };
        let bytes = frame.bytes as usize;
        if bytes > INLINE_PAYLOAD
            && let Some(offset) = self.staging.offset(payload, bytes)
        {
            self.offer(number, rank, peer, frame, (payload, offset), ticket);
            return;
        }
        let head = frame.encode();
        let room = self.peers[peer].message - HEAD;
        #[cfg(test)]
        let room = if self.breaks(super::endpoint::ProtocolError::Size) { usize::MAX } else { room };
        let mut from = 0;
        loop {
            let first = from == 0;
            let part = (bytes - from).min(if first { room - HEADER } else { room });
            let piece: &[u8] = if part == 0 {
                &[]
            } else {
                // SAFETY: the caller's promise: `bytes` readable bytes.
                unsafe { std::slice::from_raw_parts(payload.add(from), part) }
            };
            let what = if first { HeaderKind::First } else { HeaderKind::More };
            let body = [if first { &head[..] } else { &[] }, piece];
            self.ordered(number, rank, peer, what, body);
            from += part;
            if from >= bytes {
                break;
            }
        }
        if let Some(group) = self.groups.get_mut(&number) {
            group.sent.push(ticket);
        }
    }

    /// A message in the order of a pair.
    pub(super) fn ordered(
        &mut self,
        number: u32,
        rank: usize,
        peer: usize,
        what: HeaderKind,
        body: [&[u8]; 2],
    ) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        let me = group.me;
        let Some(member) = group.members[rank].as_mut() else { return };
        let head = Header { group: member.group, rank: me, seq: member.next, ..Header::new(what, self.id) };
        member.next += 1;
        self.message(peer, head, body);
    }

    /// Sends a message, at once where it can be.
    pub(super) fn message(&mut self, peer: usize, head: Header, body: [&[u8]; 2]) {
        self.open_window(peer);
        let mut start = [0; HEAD];
        head.encode(&mut start);
        let parts = [&start[..], body[0], body[1]];
        if self.peers[peer].outgoing.is_empty() && self.may_send(peer) && self.launch(peer, &parts, true) {
            return;
        }
        if self.peers[peer].broken.is_none() {
            self.peers[peer].outgoing.push_back(parts.concat());
            self.list(peer);
        }
    }

    fn may_send(&self, peer: usize) -> bool {
        let p = &self.peers[peer];
        let credit = p.credits > 0;
        #[cfg(test)]
        let credit = credit || self.breaks(super::endpoint::ProtocolError::Window);
        let room = self.open(0) && self.busy[0] < self.operations();
        credit && room && !p.to.is_empty() && p.broken.is_none()
    }

    /// Hands a message to the provider; `false`: not now.
    fn launch(&mut self, peer: usize, parts: &[&[u8]], counted: bool) -> bool {
        let buffer = match self.sends.take(self.rails[0].as_mut()) {
            Ok(buffer) => buffer,
            Err(reason) => {
                self.die(&reason);
                return true;
            }
        };
        let bytes = parts.iter().map(|p| p.len()).sum();
        let local = self.local(&self.sends, buffer, bytes);
        #[cfg(test)]
        let local = if bytes > local.bytes {
            // Only the careless get here.
            let large = Box::leak(parts.concat().into_boxed_slice());
            super::rail::LocalMemory { at: large.as_mut_ptr(), bytes, ..local }
        } else {
            local
        };
        // SAFETY: the buffer is this function's until it is handed over, and has room for a message of `bytes`.
        let message = unsafe { std::slice::from_raw_parts_mut(local.at, local.bytes) };
        let mut at = 0;
        for part in parts {
            message[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        Header::seal(message, self.peers[peer].pending_release, counted);
        let to = self.peers[peer].to[0];
        let context = self.context(Operation::Send { buffer, peer });
        // SAFETY: the buffer belongs to the operation until its end is told, and lives as long as the rail.
        let posted = unsafe { self.rails[0].send(to, local, context) };
        #[cfg(test)]
        let posted = if posted == Ok(Posted::Again) && self.breaks(super::endpoint::ProtocolError::Again) {
            // SAFETY: as above.
            let mut again = || unsafe { self.rails[0].send(to, local, context) };
            (0..5000).map(|_| again()).find(|p| *p != Ok(Posted::Again)).unwrap_or(posted)
        } else {
            posted
        };
        match posted {
            Ok(Posted::Yes) => {
                let p = &mut self.peers[peer];
                p.pending_release = 0;
                p.sending += 1;
                if counted {
                    p.credits = p.credits.saturating_sub(1);
                }
                self.busy[0] += 1;
                true
            }
            Ok(Posted::Again) => {
                self.refused[0] += 1;
                self.ops.remove(context);
                self.sends.give(buffer);
                false
            }
            Err(reason) => {
                self.ops.remove(context);
                self.sends.give(buffer);
                self.lose(peer, &format!("a message could not be sent: {reason}"));
                true
            }
        }
    }

    pub(super) fn list(&mut self, peer: usize) {
        if !std::mem::replace(&mut self.peers[peer].listed, true) {
            self.active.push_back(peer);
        }
    }

    /// Sends what waited and can go now, and returns credits that enough have come together of.
    pub(super) fn pump(&mut self) -> bool {
        let mut moved = false;
        // Whoever is refused comes last the next time.
        let mut late = Vec::new();
        for _ in 0..self.active.len() {
            let Some(peer) = self.active.pop_front() else { break };
            let refused = self.refused[0];
            moved |= self.pump_peer(peer);
            let p = &self.peers[peer];
            let more = p.pongs > 0
                || !p.outgoing.is_empty()
                || !p.fetched.is_empty()
                || p.pending_release >= self.window / 2;
            if !more || p.broken.is_some() || p.to.is_empty() {
                self.peers[peer].listed = false;
            } else if self.refused[0] > refused {
                late.push(peer);
            } else {
                self.active.push_back(peer);
            }
        }
        self.active.extend(late);
        moved
    }

    fn pump_peer(&mut self, peer: usize) -> bool {
        let mut moved = false;
        let plain = Header::new(HeaderKind::Fetched, self.id);
        // Before all else: somebody waits for the memory.
        while !self.peers[peer].fetched.is_empty() && self.may_send(peer) {
            let most = (self.peers[peer].message - HEAD) / 8;
            let told = self.peers[peer].fetched.len().min(most);
            let ids: Vec<u8> =
                self.peers[peer].fetched[..told].iter().flat_map(|i| i.to_le_bytes()).collect();
            let mut start = [0; HEAD];
            plain.encode(&mut start);
            if !self.launch(peer, &[&start, &ids], true) {
                return moved;
            }
            let fetched = &mut self.peers[peer].fetched;
            fetched.drain(..told.min(fetched.len()));
            moved = true;
        }
        while self.may_send(peer)
            && let Some(next) = self.peers[peer].outgoing.pop_front()
        {
            if !self.launch(peer, &[&next], true) {
                self.peers[peer].outgoing.push_front(next);
                return moved;
            }
            moved = true;
        }
        while self.peers[peer].pongs > 0 && self.uncounted(peer, HeaderKind::Pong) {
            self.peers[peer].pongs -= 1;
            moved = true;
        }
        // Each such message returns half a window, so two of them at most are under way: for these the peer has
        // buffers beyond the window.
        if self.peers[peer].pending_release >= self.window / 2 {
            moved |= self.uncounted(peer, HeaderKind::Credit);
        }
        moved
    }

    /// Sends a message that needs no credit where its receiver has opened its window; `false`: not now.
    fn uncounted(&mut self, peer: usize, what: HeaderKind) -> bool {
        self.open_window(peer);
        let p = &self.peers[peer];
        let room = self.open(0) && self.busy[0] < self.operations() && (p.heard || p.credits > 0);
        if p.to.is_empty() || p.broken.is_some() || !room {
            return false;
        }
        let mut start = [0; HEAD];
        Header::new(what, self.id).encode(&mut start);
        self.launch(peer, &[&start], !p.heard)
    }

    /// `false`: not now.
    pub(super) fn ping(&mut self, peer: usize, now: Instant) -> bool {
        let sent = self.uncounted(peer, HeaderKind::Ping);
        if sent {
            let p = &mut self.peers[peer];
            p.pinged += 1;
            p.ping = Some(now);
        }
        sent
    }
}
