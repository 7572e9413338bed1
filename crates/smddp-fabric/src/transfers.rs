//! State of large payload transfers.

use smddp_net::wire::Ticket;

use super::rail::RemoteMemory;

/// Payload of this process that a peer may fetch.
pub(super) struct PayloadOffer {
    pub(super) group: u32,
    pub(super) peer: usize,
    pub(super) ticket: Ticket,
    /// Offset in the staging memory, in bytes.
    pub(super) offset: usize,
    pub(super) at: *const u8,
    pub(super) bytes: usize,
    /// Writes in flight or still to be posted.
    pub(super) writes: usize,
}

// SAFETY: an address in the staging memory, whose owner keeps it until the ticket returns; only the device reads it.
unsafe impl Send for PayloadOffer {}

/// Target memory that a peer writes to.
pub(super) struct Grant {
    pub(super) peer: usize,
    pub(super) group: u32,
    pub(super) rank: u32,
    pub(super) seq: u64,
    /// Writes still to arrive.
    pub(super) remaining: usize,
}

/// Operation that waits for a free queue entry.
pub(super) struct PendingTransfer {
    pub(super) peer: usize,
    pub(super) rail: usize,
    pub(super) local: *mut u8,
    pub(super) offset: usize,
    pub(super) bytes: usize,
    pub(super) remote: RemoteMemory,
    pub(super) kind: TransferKind,
}

// SAFETY: an address in the staging memory, whose owner keeps it until the operation's completion.
unsafe impl Send for PendingTransfer {}

/// Kind of a one-sided operation, with the transfer that it belongs to.
#[derive(Clone, Copy)]
pub(super) enum TransferKind {
    Read { group: u32, rank: u32, seq: u64 },
    Write { offer: u64, number: u32 },
}
