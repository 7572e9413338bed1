//! Send path: frames split into messages, sent within the peer's credits.

use smddp_net::frame::{Frame, HEADER};
use smddp_net::wire::{INLINE_PAYLOAD, Payload};

use super::endpoint::{FabricEndpoint, Operation};
use super::header::{Header, HeaderKind, MESSAGE_HEADER};
use super::rail::Posted;

impl FabricEndpoint {
    /// Queues a frame for a rank of a group. See `Wire::send`.
    ///
    /// # Safety
    /// As `Wire::send`.
    pub(crate) unsafe fn send(&mut self, number: u32, rank: usize, frame: &Frame, payload: Payload) {
        let (payload, ticket) = match payload {
            Payload::None => (std::ptr::null(), None),
            Payload::Borrowed { at, ticket } => (at, Some(ticket)),
            Payload::Copied { at } => (at, None),
        };
        let Some(group) = self.groups.get_mut(&number) else { return };
        let member = group.members.get(rank).and_then(Option::as_ref);
        let Some(peer) = member.map(|m| m.peer).filter(|&p| self.peers[p].broken.is_none()) else {
            group.sent.extend(ticket);
            return;
        };
        let bytes = frame.bytes as usize;
        if bytes > INLINE_PAYLOAD
            && let Some(ticket) = ticket
            && let Some(offset) = self.staging.offset(payload, bytes)
        {
            self.offer(number, rank, peer, frame, (payload, offset), ticket);
            return;
        }
        let head = frame.encode();
        let room = self.peers[peer].message - MESSAGE_HEADER;
        #[cfg(test)]
        let room = if self.breaks(super::endpoint::ProtocolError::Size) { usize::MAX } else { room };
        let mut from = 0;
        loop {
            let first = from == 0;
            let part = (bytes - from).min(if first { room - HEADER } else { room });
            let piece: &[u8] = if part == 0 {
                &[]
            } else {
                // SAFETY: the caller guarantees `bytes` readable bytes.
                unsafe { std::slice::from_raw_parts(payload.add(from), part) }
            };
            let kind = if first { HeaderKind::First } else { HeaderKind::More };
            let body = [if first { &head[..] } else { &[] }, piece];
            self.send_ordered(number, rank, peer, kind, body);
            from += part;
            if from >= bytes {
                break;
            }
        }
        if let Some(ticket) = ticket
            && let Some(group) = self.groups.get_mut(&number)
        {
            group.sent.push(ticket);
        }
    }

    /// Sends a message in the order of its pair.
    pub(super) fn send_ordered(
        &mut self,
        number: u32,
        rank: usize,
        peer: usize,
        kind: HeaderKind,
        body: [&[u8]; 2],
    ) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        let me = group.me;
        let Some(member) = group.members[rank].as_mut() else { return };
        let head = Header { group: member.group, rank: me, seq: member.next, ..Header::new(kind, self.id) };
        member.next += 1;
        self.send_message(peer, head, body);
    }

    /// Sends a message, or queues it if it cannot be posted now.
    pub(super) fn send_message(&mut self, peer: usize, head: Header, body: [&[u8]; 2]) {
        self.open_window(peer);
        let mut start = [0; MESSAGE_HEADER];
        head.encode(&mut start);
        let parts = [&start[..], body[0], body[1]];
        if self.peers[peer].outgoing.is_empty() && self.may_send(peer) && self.post_send(peer, &parts, true) {
            return;
        }
        if self.peers[peer].broken.is_none() {
            self.peers[peer].outgoing.push_back(parts.concat());
            self.mark_active(peer);
        }
    }

    fn may_send(&self, peer: usize) -> bool {
        let p = &self.peers[peer];
        let credit = p.credits > 0;
        #[cfg(test)]
        let credit = credit || self.breaks(super::endpoint::ProtocolError::Window);
        let room = self.accepts_work(0) && self.busy[0] < self.operations();
        credit && room && !p.to.is_empty() && p.broken.is_none()
    }

    /// Posts a message; returns false if the queue is full.
    fn post_send(&mut self, peer: usize, parts: &[&[u8]], uses_credit: bool) -> bool {
        let buffer = match self.sends.take(self.rails[0].as_mut()) {
            Ok(buffer) => buffer,
            Err(reason) => {
                self.fail(&reason);
                return true;
            }
        };
        let bytes = parts.iter().map(|p| p.len()).sum();
        let local = self.local(&self.sends, buffer, bytes);
        #[cfg(test)]
        let local = if bytes > local.bytes {
            // Reached with an injected error only.
            let large = Box::leak(parts.concat().into_boxed_slice());
            super::rail::LocalMemory { at: large.as_mut_ptr(), bytes, ..local }
        } else {
            local
        };
        // SAFETY: the buffer belongs to this function until it is posted, and has room for a message of `bytes`.
        let message = unsafe { std::slice::from_raw_parts_mut(local.at, local.bytes) };
        let mut at = 0;
        for part in parts {
            message[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        Header::seal(message, self.peers[peer].pending_release, uses_credit);
        let to = self.peers[peer].to[0];
        let context = self.context(Operation::Send { buffer, peer });
        // SAFETY: the buffer belongs to the operation until its completion, and lives as long as the rail.
        let posted = unsafe { self.rails[0].send(to, local, context) };
        #[cfg(test)]
        let posted = if posted == Ok(Posted::QueueFull) && self.breaks(super::endpoint::ProtocolError::Again)
        {
            // SAFETY: as above.
            let mut again = || unsafe { self.rails[0].send(to, local, context) };
            (0..5000).map(|_| again()).find(|p| *p != Ok(Posted::QueueFull)).unwrap_or(posted)
        } else {
            posted
        };
        match posted {
            Ok(Posted::Accepted) => {
                let p = &mut self.peers[peer];
                p.pending_release = 0;
                p.sending += 1;
                if uses_credit {
                    p.credits = p.credits.saturating_sub(1);
                }
                self.busy[0] += 1;
                true
            }
            Ok(Posted::QueueFull) => {
                self.rejections[0] += 1;
                self.ops.remove(context);
                self.sends.give(buffer);
                false
            }
            Err(reason) => {
                self.ops.remove(context);
                self.sends.give(buffer);
                self.fail_peer(peer, &format!("a message could not be sent: {reason}"));
                true
            }
        }
    }

    pub(super) fn mark_active(&mut self, peer: usize) {
        if !std::mem::replace(&mut self.peers[peer].listed, true) {
            self.active.push_back(peer);
        }
    }

    /// Sends queued messages, and returns credits in batches.
    pub(super) fn flush_queued(&mut self) -> bool {
        let mut moved = false;
        // Peers with a full queue are served last in the next call.
        let mut late = Vec::new();
        for _ in 0..self.active.len() {
            let Some(peer) = self.active.pop_front() else { break };
            let rejections = self.rejections[0];
            moved |= self.flush_peer(peer);
            let p = &self.peers[peer];
            let more = p.pending_pongs > 0
                || !p.outgoing.is_empty()
                || !p.fetched.is_empty()
                || p.pending_release >= self.window / 2;
            if !more || p.broken.is_some() || p.to.is_empty() {
                self.peers[peer].listed = false;
            } else if self.rejections[0] > rejections {
                late.push(peer);
            } else {
                self.active.push_back(peer);
            }
        }
        self.active.extend(late);
        moved
    }

    fn flush_peer(&mut self, peer: usize) -> bool {
        let mut moved = false;
        let plain = Header::new(HeaderKind::Fetched, self.id);
        // First: the peers wait for this memory.
        while !self.peers[peer].fetched.is_empty() && self.may_send(peer) {
            let limit = (self.peers[peer].message - MESSAGE_HEADER) / 8;
            let count = self.peers[peer].fetched.len().min(limit);
            let ids: Vec<u8> =
                self.peers[peer].fetched[..count].iter().flat_map(|i| i.to_le_bytes()).collect();
            let mut start = [0; MESSAGE_HEADER];
            plain.encode(&mut start);
            if !self.post_send(peer, &[&start, &ids], true) {
                return moved;
            }
            let fetched = &mut self.peers[peer].fetched;
            fetched.drain(..count.min(fetched.len()));
            moved = true;
        }
        while self.may_send(peer)
            && let Some(next) = self.peers[peer].outgoing.pop_front()
        {
            if !self.post_send(peer, &[&next], true) {
                self.peers[peer].outgoing.push_front(next);
                return moved;
            }
            moved = true;
        }
        while self.peers[peer].pending_pongs > 0 && self.send_uncredited(peer, HeaderKind::Pong) {
            self.peers[peer].pending_pongs -= 1;
            moved = true;
        }
        // Each of these messages returns half a window, so at most two are in flight. The peer has buffers for them beyond the
        // window.
        if self.peers[peer].pending_release >= self.window / 2 {
            moved |= self.send_uncredited(peer, HeaderKind::Credit);
        }
        moved
    }

    /// Sends a message that needs no credit once the receiver has opened its window; returns false if it has to wait.
    pub(super) fn send_uncredited(&mut self, peer: usize, kind: HeaderKind) -> bool {
        self.open_window(peer);
        let p = &self.peers[peer];
        let room =
            self.accepts_work(0) && self.busy[0] < self.operations() && (p.peer_window_open || p.credits > 0);
        if p.to.is_empty() || p.broken.is_some() || !room {
            return false;
        }
        let mut start = [0; MESSAGE_HEADER];
        Header::new(kind, self.id).encode(&mut start);
        self.post_send(peer, &[&start], !p.peer_window_open)
    }
}
