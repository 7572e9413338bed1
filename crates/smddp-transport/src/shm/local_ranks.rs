//! The ranks of a node as one of them reaches the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::process::{Pid, getpid};

use crate::process::doorbell::{Doorbell, notify_at};
use crate::process::endpoint::Endpoint;
use crate::process::last_error::read_from;
use crate::process::layout::*;
use crate::process::memory::SharedMemory;
use crate::process::order::{self, Counter, Slot};
use crate::process::peer::PeerProcess;
use crate::process::pool::ReleaseCondition;
use crate::token::Token;
use crate::{Fault, MAX_ABORT_REPORT, RankInfo};

/// A group of several ranks at its process.
#[derive(Clone)]
pub(super) struct GroupHome {
    pub(super) endpoint: Arc<Endpoint>,
    /// Where this rank's control block lies.
    pub(super) block: usize,
    pub(super) nonce: u64,
    /// Ranks of the whole group: control blocks are laid out before it is known which of them share this node.
    pub(super) size: usize,
    /// Under which its ranks are asked for what they lend; as long as it is here, callers who have it are heard.
    pub(super) token: Option<Arc<Token>>,
}

/// One rank of the group as this process reaches it: its memory and its control block in there.
pub(super) struct LocalRank {
    pub(super) peer: Option<Arc<PeerProcess>>,
    /// This process's own, where the rank is one of its threads.
    pub(super) home: Doorbell,
    pub(super) block: usize,
    pub(super) nonce: u64,
    pub(super) rank_info: RankInfo,
}

impl LocalRank {
    pub(super) fn memory(&self) -> &SharedMemory {
        self.peer.as_ref().map_or_else(|| self.home.memory(), |p| &p.memory)
    }
    /// The id of its process; `None` in another PID namespace.
    pub(super) fn pid(&self) -> Option<Pid> {
        self.peer.as_ref().map_or_else(|| Some(getpid()), |peer| peer.pid)
    }
    /// By which the kernel reads its process's memory, where it does.
    pub(super) fn readable(&self) -> Option<Pid> {
        self.peer.as_ref().map_or_else(|| Some(getpid()), |peer| peer.readable)
    }
    /// Wakes its process if anybody sleeps there.
    pub(super) fn ring(&self) {
        notify_at(self.memory(), self.peer.as_ref().map_or_else(|| self.home.event(), |p| p.event()));
    }
    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        self.memory().flag64(self.block + at)
    }
    /// Operations that it has finished.
    pub(super) fn done(&self) -> Counter<'_> {
        Counter(self.word(DONE))
    }
    /// Where its header of operation `seq` lies; `size`: of the group.
    pub(super) fn slot(&self, size: usize, seq: u64) -> Slot<'_> {
        Slot(self.memory().flags(self.block + slot_at(size, seq)))
    }
    /// Whether the block is still this group's and not closed.
    pub(super) fn open(&self) -> bool {
        self.word(NONCE).load(Ordering::Acquire) == self.nonce && self.state() & CLOSED == 0
    }
    /// It is in the group, and the group is not dead; asked after all that was read before.
    pub(super) fn sound(&self) -> bool {
        fence(Ordering::Acquire);
        self.open() && self.state() & ABORTED == 0
    }
    pub(super) fn state(&self) -> u32 {
        self.memory().flag32(self.block + STATE).load(Ordering::Acquire)
    }
    /// It has ended, and nothing of it reads or writes any memory.
    fn gone(&self) -> bool {
        self.peer.as_ref().is_some_and(|p| p.ended.load(Ordering::Acquire))
    }
    /// It has ended, or is about to; what it had to say is said.
    pub(super) fn dead(&self) -> bool {
        self.gone() || self.death().is_some()
    }
    /// Which of the deaths that this process learned of is its own.
    fn death(&self) -> Option<u64> {
        self.peer.as_ref()?.death_order()
    }
    /// The same of one that is dead, seen now if not before.
    pub(super) fn nth_death(&self) -> Option<u64> {
        self.peer.as_ref().map(|peer| peer.mark_dead())
    }
    /// Why it declared the group dead.
    pub(super) fn reason(&self) -> String {
        self.memory().read_text(self.block + ABORT_REPORT, MAX_ABORT_REPORT)
    }
    /// The last error of its process, and how long ago that was.
    pub(super) fn last_error(&self) -> Option<(Duration, String)> {
        read_from(&self.peer.as_ref()?.memory)
    }
    /// No more reads will come from this rank in this group.
    pub(super) fn finished(&self) -> bool {
        self.gone() || !self.open()
    }
}

/// The ranks of the group; kept alive by whatever still waits for their reads.
pub(super) struct Ranks {
    pub(super) remotes: Vec<LocalRank>,
    pub(super) me: usize,
}

impl Ranks {
    /// Rings a rank that sleeps. The caller has just published something.
    pub(super) fn ring(&self, rank: usize) {
        order::Doorbell::publish_fence();
        self.remotes[rank].ring();
    }

    /// Whether all others may read this rank's memory.
    pub(super) fn all_read(&self) -> bool {
        let mut others = self.remotes.iter().enumerate().filter(|(rank, _)| *rank != self.me);
        others.all(|(_, remote)| remote.state() & READS_PEERS != 0)
    }

    /// Rings all others.
    pub(super) fn notify_all(&self) {
        order::Doorbell::publish_fence();
        for (_, remote) in self.remotes.iter().enumerate().filter(|(rank, _)| *rank != self.me) {
            remote.ring();
        }
    }
}

/// Fault for control words of `rank` with values that this library never writes: the rank is no longer trusted.
pub(super) fn nonsense(rank: usize, of: &str) -> Fault {
    let how = format!("has invalid values in its shared memory (field: {of}): a bug or memory corruption");
    Fault::Lost { rank, how }
}

/// "All other ranks have finished `operations` operations of this group."
pub(super) struct AllFinished {
    pub(super) ranks: Arc<Ranks>,
    pub(super) operations: u64,
}

impl ReleaseCondition for AllFinished {
    fn released(&self) -> bool {
        self.ranks.remotes.iter().enumerate().all(|(rank, remote)| {
            rank == self.ranks.me || remote.done().read() >= self.operations || remote.finished()
        })
    }
}
