//! Peer process on this node.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::process::Pid;

use super::layout::LIVENESS_FUTEX;
use super::memory::SharedMemory;
use super::single_copy;

/// Peer process on this node, with its memory mapped.
pub struct PeerProcess {
    /// Its shared memory, mapped here.
    pub memory: SharedMemory,
    event: OwnedFd,
    /// `None` in another PID namespace.
    pub pid: Option<Pid>,
    /// Pid through which the kernel reads its private memory for this process; `None` if it does not.
    pub readable: Option<Pid>,
    /// Set by the service thread when the process has ended.
    pub ended: Arc<AtomicBool>,
    /// Set earlier, when its death is detected: position in the order of the deaths that this process detected, from
    /// 1; 0: alive.
    death_order: AtomicU64,
}

/// Number of deaths that this process detected.
static DEATHS: AtomicU64 = AtomicU64::new(0);

impl PeerProcess {
    /// `event`: eventfd that wakes its polling threads. `ended`: set by the watcher of the process. `pid`: `None` in
    /// another PID namespace.
    pub(super) fn new(
        memory: SharedMemory,
        event: OwnedFd,
        ended: Arc<AtomicBool>,
        pid: Option<Pid>,
    ) -> Self {
        let readable = pid.filter(|&pid| single_copy::is_permitted(pid, &memory));
        Self { memory, event, pid, readable, ended, death_order: AtomicU64::new(0) }
    }

    /// Returns the eventfd that wakes its polling threads.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Marks the process as dead. Returns the position of its death in the order of detection.
    pub fn mark_dead(&self) -> u64 {
        self.death_order().unwrap_or_else(|| {
            let number = DEATHS.fetch_add(1, Ordering::Relaxed) + 1;
            let known = self.death_order.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
            known.err().unwrap_or(number)
        })
    }

    /// Returns the position of its death in the order of detection; `None` if no death was detected.
    pub fn death_order(&self) -> Option<u64> {
        Some(self.death_order.load(Ordering::Acquire)).filter(|&number| number > 0)
    }

    /// Returns the robust futex that one of its threads holds.
    pub(super) fn liveness_futex(&self) -> &AtomicU32 {
        self.memory.flag32(LIVENESS_FUTEX)
    }
}
