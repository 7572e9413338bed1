//! Posting receive buffers, as many as there should be.

use super::endpoint::{FabricEndpoint, Operation};
use super::queues::{Queues, buffers};
use super::rail::Posted;

impl FabricEndpoint {
    /// How many receive buffers the peers in use ask for, and the others that there are or may be.
    pub(super) fn want(&mut self) -> Result<(), String> {
        let alive = || self.peers.iter().filter(|p| p.broken.is_none());
        let opened = alive().filter(|p| p.opened).count();
        let known = alive().filter(|p| !p.opened && !p.to.is_empty()).count();
        let silent = known + self.groups.values().map(|g| g.expected).sum::<usize>();
        let queues = Queues::new(&self.limits);
        let numbers = if opened + silent > 0 { queues.numbers } else { 0 };
        for rail in 0..self.inboxes.len() {
            let messages = if rail == 0 { buffers((opened, self.window), (silent, self.first)) } else { 0 };
            let (wanted, room) = (messages + numbers, queues.receives);
            if wanted > room && !self.limits.patient {
                return Err(format!(
                    "{opened} peers in use and {silent} others need {wanted} receive buffers of {} at once, and {} has room \
                     for {room}",
                    self.message,
                    self.name()
                ));
            }
            self.inboxes[rail].wanted = wanted.min(room);
        }
        self.fill();
        Ok(())
    }

    /// A peer is in use from now on: buffers for all that it may send are posted, and it is to be told so.
    pub(super) fn open_window(&mut self, peer: usize) {
        let p = &mut self.peers[peer];
        if p.broken.is_some() || std::mem::replace(&mut p.opened, true) {
            return;
        }
        p.pending_release += self.window - self.first;
        if let Err(reason) = self.want() {
            self.peers[peer].opened = false;
            self.lose(peer, &reason);
        }
    }

    /// Posts receive buffers until there are enough.
    pub(super) fn fill(&mut self) {
        for rail in 0..self.inboxes.len() {
            while self.inboxes[rail].posted < self.inboxes[rail].wanted && self.dead.is_none() {
                match self.inboxes[rail].buffers.take(self.rails[rail].as_mut()) {
                    Ok(buffer) => {
                        if !self.post(rail, buffer) {
                            break;
                        }
                    }
                    Err(reason) => self.die(&reason),
                }
            }
        }
    }

    /// Posts one; `false`: not now.
    fn post(&mut self, rail: usize, buffer: u32) -> bool {
        let context = self.ops.insert(Operation::Receive { buffer, rail });
        let inbox = &self.inboxes[rail];
        let local = self.local(&inbox.buffers, buffer, inbox.bytes);
        // SAFETY: the buffer belongs to the operation until its end is told, and lives as long as the provider.
        let posted = unsafe { self.rails[rail].receive(local, context) };
        if posted == Ok(Posted::Yes) {
            self.inboxes[rail].posted += 1;
            return true;
        }
        self.ops.remove(context);
        self.inboxes[rail].buffers.give(buffer);
        if let Err(reason) = posted {
            self.die(&format!("no receive buffer could be posted: {reason}"));
        }
        false
    }

    /// A posted buffer has come back: it is posted again at once where it is still wanted, because its sender is told
    /// that there is room.
    pub(super) fn came_back(&mut self, rail: usize, buffer: u32) {
        let inbox = &mut self.inboxes[rail];
        inbox.posted -= 1;
        if inbox.posted < inbox.wanted && self.dead.is_none() {
            self.post(rail, buffer);
        } else {
            inbox.buffers.give(buffer);
        }
    }
}
