//! Posting of receive buffers, up to the target number.

use super::endpoint::{FabricEndpoint, Operation};
use super::queues::{Queues, required_buffers};
use super::rail::Posted;

impl FabricEndpoint {
    /// Computes the target number of receive buffers: for peers with an open window, and for known or expected other peers.
    pub(super) fn resize_receive_queues(&mut self) -> Result<(), String> {
        let alive = || self.peers.iter().filter(|p| p.broken.is_none());
        let opened = alive().filter(|p| p.window_opened).count();
        let known = alive().filter(|p| !p.window_opened && !p.to.is_empty()).count();
        let unopened = known + self.groups.values().map(|g| g.expected).sum::<usize>();
        let queues = Queues::new(&self.limits);
        let immediates = if opened + unopened > 0 { queues.immediates } else { 0 };
        for rail in 0..self.receive_queues.len() {
            let messages = if rail == 0 {
                required_buffers((opened, self.window), (unopened, self.initial_credits))
            } else {
                0
            };
            let (target, room) = (messages + immediates, queues.receives);
            if target > room && !self.limits.holds_messages {
                return Err(format!(
                    "out of receive buffers: {opened} peers in use and {unopened} other peers need {target} buffers of {} bytes, \
                     but {} has room for {room}",
                    self.message,
                    self.name()
                ));
            }
            self.receive_queues[rail].target = target.min(room);
        }
        self.post_receive_buffers();
        Ok(())
    }

    /// Opens a peer's window: posts buffers for all messages that it may send. The next message to it returns the credits.
    pub(super) fn open_window(&mut self, peer: usize) {
        let p = &mut self.peers[peer];
        if p.broken.is_some() || std::mem::replace(&mut p.window_opened, true) {
            return;
        }
        p.pending_release += self.window - self.initial_credits;
        if let Err(reason) = self.resize_receive_queues() {
            self.peers[peer].window_opened = false;
            self.fail_peer(peer, &reason);
        }
    }

    /// Posts receive buffers up to the target number.
    pub(super) fn post_receive_buffers(&mut self) {
        for rail in 0..self.receive_queues.len() {
            while self.receive_queues[rail].posted < self.receive_queues[rail].target
                && self.failure.is_none()
            {
                match self.receive_queues[rail].buffers.take(self.rails[rail].as_mut()) {
                    Ok(buffer) => {
                        if !self.post(rail, buffer) {
                            break;
                        }
                    }
                    Err(reason) => self.fail(&reason),
                }
            }
        }
    }

    /// Posts a receive buffer; returns false if the queue is full.
    fn post(&mut self, rail: usize, buffer: u32) -> bool {
        let context = self.ops.insert(Operation::Receive { buffer, rail });
        let receive_queue = &self.receive_queues[rail];
        let local = self.local(&receive_queue.buffers, buffer, receive_queue.bytes);
        // SAFETY: the buffer belongs to the operation until its completion, and lives as long as the rail.
        let posted = unsafe { self.rails[rail].receive(local, context) };
        if posted == Ok(Posted::Accepted) {
            self.receive_queues[rail].posted += 1;
            return true;
        }
        self.ops.remove(context);
        self.receive_queues[rail].buffers.give(buffer);
        if let Err(reason) = posted {
            self.fail(&format!("a receive buffer could not be posted: {reason}"));
        }
        false
    }

    /// Reposts a used buffer at once if it is still needed, because the returned credit promises its sender a buffer.
    pub(super) fn recycle_buffer(&mut self, rail: usize, buffer: u32) {
        let receive_queue = &mut self.receive_queues[rail];
        receive_queue.posted -= 1;
        if receive_queue.posted < receive_queue.target && self.failure.is_none() {
            self.post(rail, buffer);
        } else {
            receive_queue.buffers.give(buffer);
        }
    }
}
