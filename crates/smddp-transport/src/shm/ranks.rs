//! The ranks of a node as one of them reaches the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::*;
use super::order::{Count, Slot};
use crate::LONGEST_WHY;
use crate::process::bell::{Bell, ring_at};
use crate::process::card::Card;
use crate::process::endpoint::Peer;
use crate::process::memory::Memory;
use crate::process::pool::Release;

/// One rank of the group as this process reaches it: its memory and its control block in there.
pub(super) struct Remote {
    pub(super) peer: Option<Arc<Peer>>,
    /// This process's own, where the rank is one of its threads.
    pub(super) home: Bell,
    pub(super) block: usize,
    pub(super) nonce: u64,
    pub(super) card: Card,
}

impl Remote {
    pub(super) fn memory(&self) -> &Memory {
        self.peer.as_ref().map_or_else(|| self.home.memory(), |p| &p.memory)
    }
    /// Wakes its process if anybody sleeps there.
    pub(super) fn ring(&self) {
        ring_at(self.memory(), self.peer.as_ref().map_or_else(|| self.home.event(), |p| p.event()));
    }
    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        self.memory().word64(self.block + at)
    }
    /// Operations that it has finished.
    pub(super) fn done(&self) -> Count<'_> {
        Count(self.word(DONE))
    }
    /// Where its header of operation `seq` lies; `size`: of the group.
    pub(super) fn slot(&self, size: usize, seq: u64) -> Slot<'_> {
        Slot(self.memory().words(self.block + slot_at(size, seq)))
    }
    /// Whether the block is still this group's and not closed.
    pub(super) fn open(&self) -> bool {
        self.word(NONCE).load(Ordering::Acquire) == self.nonce && self.state() & CLOSED == 0
    }
    pub(super) fn state(&self) -> u32 {
        self.memory().word32(self.block + STATE).load(Ordering::Acquire)
    }
    pub(super) fn gone(&self) -> bool {
        self.peer.as_ref().is_some_and(|p| p.gone.load(Ordering::Acquire))
    }
    /// Why it declared the group dead.
    pub(super) fn why(&self) -> String {
        let length = (self.word(WHY).load(Ordering::Relaxed) as usize).min(LONGEST_WHY);
        let bytes: Vec<u8> = (0..length.div_ceil(8))
            .flat_map(|i| self.word(WHY + 8 + 8 * i).load(Ordering::Relaxed).to_le_bytes())
            .collect();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }
    /// No more reads will come from this rank in this group.
    pub(super) fn finished(&self) -> bool {
        self.gone() || !self.open()
    }
}

/// The ranks of the group; kept alive by whatever still waits for their reads.
pub(super) struct Ranks {
    pub(super) remotes: Vec<Remote>,
    pub(super) me: usize,
}

/// "All other ranks have finished `operations` operations of this group."
pub(super) struct AllDone {
    pub(super) ranks: Arc<Ranks>,
    pub(super) operations: u64,
}

impl Release for AllDone {
    fn released(&self) -> bool {
        self.ranks.remotes.iter().enumerate().all(|(rank, remote)| {
            rank == self.ranks.me || remote.done().told() >= self.operations || remote.finished()
        })
    }
}
