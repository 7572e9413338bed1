//! Large payloads on their way, as the engine keeps them.

use super::rail::RemoteMemory;
use crate::net::wire::Ticket;

/// A payload of this process that a peer may fetch.
pub(super) struct PayloadOffer {
    pub(super) group: u32,
    pub(super) peer: usize,
    pub(super) ticket: Ticket,
    /// Where it begins in the staging memory.
    pub(super) offset: usize,
    pub(super) at: *const u8,
    pub(super) bytes: usize,
    /// Writes under way or to come.
    pub(super) writes: usize,
}

// SAFETY: the address of staging memory, whose owner keeps it until the ticket is back; the device reads it.
unsafe impl Send for PayloadOffer {}

/// A place that a peer writes to.
pub(super) struct Grant {
    pub(super) peer: usize,
    pub(super) group: u32,
    pub(super) rank: u32,
    pub(super) seq: u64,
    /// Numbers still to come.
    pub(super) left: usize,
}

/// An operation that waits for room in a queue.
pub(super) struct PendingTransfer {
    pub(super) peer: usize,
    pub(super) rail: usize,
    pub(super) local: *mut u8,
    pub(super) offset: usize,
    pub(super) bytes: usize,
    pub(super) remote: RemoteMemory,
    pub(super) kind: TransferKind,
}

// SAFETY: the address of staging memory, whose owner keeps it until the operation's end was told.
unsafe impl Send for PendingTransfer {}

#[derive(Clone, Copy)]
pub(super) enum TransferKind {
    Read { group: u32, rank: u32, seq: u64 },
    Write { offer: u64, number: u32 },
}
