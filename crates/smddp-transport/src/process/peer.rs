//! Another process of this node as this one knows it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::process::Pid;

use super::layout::LIVENESS_FUTEX;
use super::memory::SharedMemory;
use super::single_copy;

/// Another process on this node, its memory mapped.
pub(crate) struct PeerProcess {
    pub(crate) memory: SharedMemory,
    event: OwnedFd,
    /// `None` in another PID namespace.
    pub(crate) pid: Option<Pid>,
    /// By which the kernel reads the rest of its memory for this process, where it does.
    pub(crate) readable: Option<Pid>,
    /// Set by the service thread when the process is gone.
    pub(crate) ended: Arc<AtomicBool>,
    /// Set earlier, as soon as it is known that it will be: which of the deaths that this process learned of it is, from 1.
    death_order: AtomicU64,
}

/// Deaths that this process learned of.
static DEATHS: AtomicU64 = AtomicU64::new(0);

impl PeerProcess {
    /// `event`: what wakes those who poll there. `ended`: as whoever watches it sets it. `pid`: if it has one here.
    pub(super) fn new(
        memory: SharedMemory,
        event: OwnedFd,
        ended: Arc<AtomicBool>,
        pid: Option<Pid>,
    ) -> Self {
        let readable = pid.filter(|&pid| single_copy::is_permitted(pid, &memory));
        Self { memory, event, pid, readable, ended, death_order: AtomicU64::new(0) }
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// It will be gone, or is: which of the deaths that this process learned of that is.
    pub(crate) fn mark_dead(&self) -> u64 {
        self.death_order().unwrap_or_else(|| {
            let number = DEATHS.fetch_add(1, Ordering::Relaxed) + 1;
            let known = self.death_order.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
            known.err().unwrap_or(number)
        })
    }

    /// Which of the deaths that this process learned of is its own, if it is known that it will be gone.
    pub(crate) fn death_order(&self) -> Option<u64> {
        Some(self.death_order.load(Ordering::Acquire)).filter(|&number| number > 0)
    }

    /// The word that one of its threads holds.
    pub(super) fn liveness_futex(&self) -> &AtomicU32 {
        self.memory.flag32(LIVENESS_FUTEX)
    }
}
