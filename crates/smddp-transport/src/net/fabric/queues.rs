//! Receive buffers, operations and completions of a rail: how many, so that no queue overruns.

use super::header::HEAD;
use super::rail::RailLimits;
use super::send_buffers::Buffers;
use crate::net::frame::HEADER;
use crate::net::wire::INLINE_PAYLOAD;

/// Pings to a peer that are not answered yet.
pub(super) const PINGS: u32 = 2;
/// Receive buffers of a peer for messages that need no credit: two that return credits, pings and their answers.
const UNCREDITED: usize = 2 + 2 * PINGS as usize;
/// The most that one peer may have under way.
const WINDOW: usize = 64;
/// Operations under way per rail, and numbers of writes that may be on their way to this process.
const OPERATIONS: usize = 256;
const NUMBERS: usize = 64;
/// Bytes of a buffer that a write's number takes: nothing is put into it.
const TOKEN: usize = 64;

/// Receive buffers for messages of peers that are in use, and of others that have their first credits alone.
pub(super) fn buffers((opened, window): (usize, u32), (silent, first): (usize, u32)) -> usize {
    opened * (window as usize + UNCREDITED) + silent * first as usize
}

/// The receive buffers of a rail. Messages come over the first alone; over all come numbers of writes, for each of
/// which some devices take a buffer.
pub(super) struct ReceiveQueue {
    pub(super) buffers: Buffers,
    pub(super) bytes: usize,
    /// Posted, and how many should be.
    pub(super) posted: usize,
    pub(super) wanted: usize,
}

impl ReceiveQueue {
    pub(super) fn new(rail: usize, message: usize) -> Self {
        let bytes = if rail == 0 { message } else { TOKEN };
        Self { buffers: Buffers::new(bytes), bytes, posted: 0, wanted: 0 }
    }
}

/// How a rail's completion queue is divided, so that it cannot overrun.
pub(super) struct Queues {
    /// Sends, reads and writes under way.
    pub(super) operations: usize,
    /// Numbers of peers' writes to come.
    pub(super) numbers: usize,
    /// Receive buffers posted.
    pub(super) receives: usize,
}

impl Queues {
    pub(super) fn new(limits: &RailLimits) -> Self {
        let numbers = if limits.writes { NUMBERS.min(limits.completions / 8) } else { 0 };
        let rest = limits.completions - numbers;
        let operations = limits.operations.min(OPERATIONS).min(rest / 2).max(2);
        let receives = limits.receives.min(rest.saturating_sub(operations));
        Self { operations, numbers, receives }
    }
}

/// Messages that a peer may have under way before it is in use: half of the buffers are divided so.
pub(super) fn first(limits: &RailLimits, peers: usize, window: u32) -> u32 {
    ((Queues::new(limits).receives / 2 / peers) as u32).clamp(1, window)
}

/// Bytes of a message at least: the announcement of a large payload has to fit.
pub(super) fn least(rails: usize) -> usize {
    HEAD + HEADER + 16 * (1 + rails)
}

/// Messages that a peer may have under way, and bytes of the largest, so that `peers` peers fit the budget if all are in
/// use: first the window shrinks, then the messages, which get more then, as long as it is their bytes that are short.
pub(super) fn shape(limits: &RailLimits, rails: usize, peers: usize, budget: usize) -> (u32, usize) {
    let largest = limits.message.min(HEAD + HEADER + INLINE_PAYLOAD);
    let least = least(rails);
    let sizes = [largest, 4096, 2048, 1024, 512].into_iter().filter(|&s| s <= largest && s >= least);
    let mut best = (2, largest);
    for size in sizes {
        let queues = Queues::new(limits);
        let most = budget / size;
        let buffers = most.min(queues.receives).saturating_sub(queues.numbers);
        let window = (buffers / peers).saturating_sub(UNCREDITED).min(WINDOW) & !1;
        best = (window.max(2) as u32, size);
        if window >= 4 || most >= queues.receives {
            break;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::fabric::ofi::{OPERATIONS, RECEIVES};

    /// Ranks that one of a large job deals with: one for each of its node's, on as many nodes.
    const USED: usize = 128;

    #[test]
    fn receive_buffers_stay_within_their_budget_however_many_peers_there_are() {
        // What is asked of a device that has more of everything.
        let limits = RailLimits {
            message: 8192,
            one_sided: 1 << 30,
            operations: OPERATIONS,
            receives: RECEIVES,
            completions: OPERATIONS + RECEIVES,
            writes: true,
            patient: false,
        };
        let queues = Queues::new(&limits);
        assert_eq!(queues.receives, RECEIVES, "completions leave room for all of them");
        for peers in [1, 2, 7, 63, 255, 999, 1023, 2047, 4095, 6999] {
            let (window, message) = shape(&limits, 4, peers, 32 << 20);
            assert!(window >= 2 && window.is_multiple_of(2), "{peers}: {window}");
            // Of up to a thousand all may be in use, of more a part of them.
            let used = if peers < 1000 { peers } else { USED };
            let posted = buffers((used, window), (peers - used, first(&limits, peers, window)));
            assert!(posted * message <= 32 << 20, "{peers} peers: {posted} x {message}");
            let posted = posted + queues.numbers;
            assert!(
                posted <= queues.receives,
                "{peers} peers, {used} in use: {posted} of {}",
                queues.receives
            );
        }
        assert_eq!(shape(&limits, 4, 1, 32 << 20), (64, 8192));
        // Smaller messages help where bytes are short, not where buffers are.
        assert_eq!(shape(&limits, 4, 6999, 64 << 20), (2, 8192));
    }
}
