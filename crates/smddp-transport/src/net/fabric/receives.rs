//! Receive buffers: how many are posted where, so that no queue overruns.

use super::buffers::Buffers;
use super::engine::{Engine, Op, PINGS};
use super::message::HEAD;
use super::provider::{Limits, Posted};
use crate::net::frame::HEADER;
use crate::net::wire::EAGER;

/// Receive buffers of a peer for messages that need no credit: two that return credits, pings and their answers.
const UNCREDITED: usize = 2 + 2 * PINGS as usize;
/// The most that one peer may have under way.
const WINDOW: usize = 64;
/// Operations under way per rail, and numbers of writes that may be on their way to this process.
const OPERATIONS: usize = 256;
const NUMBERS: usize = 64;
/// Bytes of a buffer that a write's number takes: nothing is put into it.
const TOKEN: usize = 64;

/// The receive buffers of a rail. Messages come over the first alone; over all come numbers of writes, for each of
/// which some devices take a buffer.
pub(super) struct Inbox {
    pub(super) buffers: Buffers,
    bytes: usize,
    /// Posted, and how many should be.
    posted: usize,
    wanted: usize,
}

impl Inbox {
    pub(super) fn new(rail: usize, message: usize) -> Self {
        let bytes = if rail == 0 { message } else { TOKEN };
        Self { buffers: Buffers::new(rail, bytes), bytes, posted: 0, wanted: 0 }
    }
}

impl Engine {
    /// How many receive buffers the peers there are, and the expected ones, ask for.
    pub(super) fn want(&mut self) -> Result<(), String> {
        let known = self.peers.iter().filter(|p| !p.to.is_empty()).count();
        let peers = known + self.groups.values().map(|g| g.expected).sum::<usize>();
        let queues = Queues::new(&self.limits);
        let numbers = if peers > 0 { queues.numbers } else { 0 };
        for rail in 0..self.inboxes.len() {
            let messages = if rail == 0 { peers * (self.window as usize + UNCREDITED) } else { 0 };
            let (wanted, room) = (messages + numbers, queues.receives);
            if wanted > room && !self.limits.patient {
                return Err(format!(
                    "{peers} peers need {wanted} receive buffers of {} at once, and {} has room for {room}",
                    self.message,
                    self.name()
                ));
            }
            self.inboxes[rail].wanted = wanted.min(room);
        }
        self.fill();
        Ok(())
    }

    /// Posts receive buffers until there are enough.
    pub(super) fn fill(&mut self) {
        for rail in 0..self.inboxes.len() {
            while self.inboxes[rail].posted < self.inboxes[rail].wanted && self.dead.is_none() {
                match self.inboxes[rail].buffers.take(self.provider.as_mut()) {
                    Ok(buffer) => {
                        if !self.post(rail, buffer) {
                            break;
                        }
                    }
                    Err(why) => self.die(&why),
                }
            }
        }
    }

    /// Posts one; `false`: not now.
    fn post(&mut self, rail: usize, buffer: u32) -> bool {
        let context = self.ops.insert(Op::Receive { buffer, rail });
        let inbox = &self.inboxes[rail];
        let local = self.local(&inbox.buffers, buffer, inbox.bytes);
        // SAFETY: the buffer belongs to the operation until its end is told, and lives as long as the provider.
        let posted = unsafe { self.provider.receive(rail, local, context) };
        if posted == Ok(Posted::Yes) {
            self.inboxes[rail].posted += 1;
            return true;
        }
        self.ops.remove(context);
        self.inboxes[rail].buffers.give(buffer);
        if let Err(why) = posted {
            self.die(&format!("no receive buffer could be posted: {why}"));
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

/// How a rail's completion queue is divided, so that it cannot overrun.
pub(super) struct Queues {
    /// Sends, reads and writes under way.
    pub(super) operations: usize,
    /// Numbers of peers' writes to come.
    pub(super) numbers: usize,
    /// Receive buffers posted.
    receives: usize,
}

impl Queues {
    pub(super) fn new(limits: &Limits) -> Self {
        let numbers = if limits.writes { NUMBERS.min(limits.completions / 8) } else { 0 };
        let rest = limits.completions - numbers;
        let operations = limits.operations.min(OPERATIONS).min(rest / 2).max(2);
        let receives = limits.receives.min(rest.saturating_sub(operations));
        Self { operations, numbers, receives }
    }
}

/// Messages that a peer may have under way, and bytes of the largest, so that `peers` peers fit the budget: first the
/// window shrinks, then the messages, which get more then.
pub(super) fn shape(limits: &Limits, rails: usize, peers: usize, budget: usize) -> (u32, usize) {
    let largest = limits.message.min(HEAD + HEADER + EAGER);
    // The announcement of a large payload has to fit.
    let least = HEAD + HEADER + 16 * (1 + rails);
    let sizes = [largest, 4096, 2048, 1024, 512].into_iter().filter(|&s| s <= largest && s >= least);
    let mut best = (2, largest);
    for size in sizes {
        let queues = Queues::new(limits);
        let buffers = (budget / size).min(queues.receives).saturating_sub(queues.numbers);
        let window = (buffers / peers).saturating_sub(UNCREDITED).min(WINDOW) & !1;
        best = (window.max(2) as u32, size);
        if window >= 4 {
            break;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receive_buffers_stay_within_their_budget_however_many_peers_there_are() {
        let limits = Limits {
            message: 8192,
            one_sided: 1 << 30,
            operations: 4096,
            receives: 32768,
            completions: 65536,
            writes: true,
            patient: false,
        };
        for peers in [1, 2, 7, 63, 255, 1023, 4095, 8191] {
            let (window, message) = shape(&limits, 4, peers, 32 << 20);
            assert!(window >= 2 && window.is_multiple_of(2), "{peers}: {window}");
            let bytes = peers * (window as usize + UNCREDITED) * message;
            assert!(bytes <= 32 << 20, "{peers} peers: {window} x {message}");
        }
        assert_eq!(shape(&limits, 4, 1, 32 << 20), (64, 8192));
    }
}
