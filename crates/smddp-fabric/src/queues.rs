//! Sizes of a rail's queues: receive buffers, operations and completions, chosen so that no queue overruns.

use smddp_net::frame::HEADER;
use smddp_net::wire::INLINE_PAYLOAD;

use super::header::MESSAGE_HEADER;
use super::rail::RailLimits;
use super::send_buffers::Buffers;

/// Maximum number of unanswered pings per peer.
pub(super) const MAX_PINGS: u32 = 2;
/// Receive buffers per peer for messages without credit: two credit messages, pings and their answers.
const UNCREDITED: usize = 2 + 2 * MAX_PINGS as usize;
/// Maximum window of one peer, in messages.
const MAX_WINDOW: usize = 64;
/// Maximum number of operations in flight per rail, and of writes with immediate data in flight to this process.
const OPERATIONS: usize = 256;
const MAX_IMMEDIATES: usize = 64;
/// Size of a receive buffer that immediate data may use up, in bytes: nothing is written to it.
const IMMEDIATE_BUFFER: usize = 64;

/// Receive buffers for peers with an open window, and for other peers, which have their initial credits only.
pub(super) fn required_buffers((opened, window): (usize, u32), (unopened, first): (usize, u32)) -> usize {
    opened * (window as usize + UNCREDITED) + unopened * first as usize
}

/// Receive queue of a rail. Messages arrive on the first rail only. Immediate data of writes arrives on all rails; some devices use
/// up a receive buffer for each.
pub(super) struct ReceiveQueue {
    pub(super) buffers: Buffers,
    pub(super) bytes: usize,
    /// Number of posted buffers, and the target number.
    pub(super) posted: usize,
    pub(super) target: usize,
}

impl ReceiveQueue {
    pub(super) fn new(rail: usize, message: usize) -> Self {
        let bytes = if rail == 0 { message } else { IMMEDIATE_BUFFER };
        Self { buffers: Buffers::new(bytes), bytes, posted: 0, target: 0 }
    }
}

/// Division of a rail's completion queue, which prevents an overrun.
pub(super) struct Queues {
    /// Maximum number of sends, reads and writes in flight.
    pub(super) operations: usize,
    /// Maximum number of peers' writes in flight.
    pub(super) immediates: usize,
    /// Maximum number of posted receive buffers.
    pub(super) receives: usize,
}

impl Queues {
    pub(super) fn new(limits: &RailLimits) -> Self {
        let immediates = if limits.writes { MAX_IMMEDIATES.min(limits.completions / 8) } else { 0 };
        let rest = limits.completions - immediates;
        let operations = limits.operations.min(OPERATIONS).min(rest / 2).max(2);
        let receives = limits.receives.min(rest.saturating_sub(operations));
        Self { operations, immediates, receives }
    }
}

/// Messages that a peer may send before its window is open: half of the receive buffers are divided among the peers.
pub(super) fn initial_credits(limits: &RailLimits, peers: usize, window: u32) -> u32 {
    ((Queues::new(limits).receives / 2 / peers) as u32).clamp(1, window)
}

/// Minimum message size, in bytes: the offer of a large payload must fit.
pub(super) fn min_message(rails: usize) -> usize {
    MESSAGE_HEADER + HEADER + 16 * (1 + rails)
}

/// Chooses a peer's window in messages, and the message size in bytes, so that the buffers of `peers` peers in use fit the budget.
/// The window shrinks first. Then the message size shrinks, which allows more messages, as long as bytes are the limit.
pub(super) fn choose_window(limits: &RailLimits, rails: usize, peers: usize, budget: usize) -> (u32, usize) {
    let largest = limits.message.min(MESSAGE_HEADER + HEADER + INLINE_PAYLOAD);
    let least = min_message(rails);
    let sizes = [largest, 4096, 2048, 1024, 512].into_iter().filter(|&s| s <= largest && s >= least);
    let mut best = (2, largest);
    for size in sizes {
        let queues = Queues::new(limits);
        let limit = budget / size;
        let buffers = limit.min(queues.receives).saturating_sub(queues.immediates);
        let window = (buffers / peers).saturating_sub(UNCREDITED).min(MAX_WINDOW) & !1;
        best = (window.max(2) as u32, size);
        if window >= 4 || limit >= queues.receives {
            break;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ofi::{OPERATIONS, RECEIVES};

    /// Peers in use by a rank of a large job: one for each rank of its node, on as many nodes.
    const USED: usize = 128;

    #[test]
    fn receive_buffers_fit_the_budget_for_any_number_of_peers() {
        // The limits that a larger device is opened with.
        let limits = RailLimits {
            message: 8192,
            one_sided: 1 << 30,
            operations: OPERATIONS,
            receives: RECEIVES,
            completions: OPERATIONS + RECEIVES,
            writes: true,
            holds_messages: false,
        };
        let queues = Queues::new(&limits);
        assert_eq!(queues.receives, RECEIVES, "the completion queue covers all receive buffers");
        for peers in [1, 2, 7, 63, 255, 999, 1023, 2047, 4095, 6999] {
            let (window, message) = choose_window(&limits, 4, peers, 32 << 20);
            assert!(window >= 2 && window.is_multiple_of(2), "{peers}: {window}");
            // Up to a thousand peers may all be in use; of more, only a part.
            let used = if peers < 1000 { peers } else { USED };
            let posted =
                required_buffers((used, window), (peers - used, initial_credits(&limits, peers, window)));
            assert!(posted * message <= 32 << 20, "{peers} peers: {posted} x {message}");
            let posted = posted + queues.immediates;
            assert!(
                posted <= queues.receives,
                "{peers} peers, {used} in use: {posted} of {}",
                queues.receives
            );
        }
        assert_eq!(choose_window(&limits, 4, 1, 32 << 20), (64, 8192));
        // Smaller messages help if bytes are the limit, not if buffers are.
        assert_eq!(choose_window(&limits, 4, 6999, 64 << 20), (2, 8192));
    }
}
