//! Another process of this node as this one knows it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};

use super::layout::LIFE_WORD;
use super::memory::Memory;

/// Another process on this node, its memory mapped.
pub(crate) struct PeerProcess {
    pub(crate) memory: Memory,
    event: OwnedFd,
    /// Set by the service thread when the process is gone.
    pub(crate) gone: Arc<AtomicBool>,
    /// Set earlier, as soon as it is known that it will be.
    pub(crate) dying: AtomicBool,
}

impl PeerProcess {
    /// `event`: what wakes those who poll there. `gone`: as whoever watches it sets it.
    pub(super) fn new(memory: Memory, event: OwnedFd, gone: Arc<AtomicBool>) -> Self {
        Self { memory, event, gone, dying: AtomicBool::new(false) }
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// The word that one of its threads holds.
    pub(super) fn life(&self) -> &AtomicU32 {
        self.memory.word32(LIFE_WORD)
    }
}
