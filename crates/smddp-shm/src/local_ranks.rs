//! Access of one rank to the other ranks of its node.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::process::{Pid, getpid};
use smddp_base::{Fault, MAX_ABORT_REPORT};
use smddp_net::token::Token;
use smddp_process::doorbell::{Doorbell, notify_at};
use smddp_process::endpoint::Endpoint;
use smddp_process::last_error::read_from;
use smddp_process::layout::*;
use smddp_process::memory::SharedMemory;
use smddp_process::order::{self, Counter, OperationHeader};
use smddp_process::peer::PeerProcess;
pub(crate) use smddp_process::pool::ReleaseCondition;

use super::rank_address::RankAddress;

/// Resources of a group of several ranks in this process.
#[derive(Clone)]
pub(super) struct GroupHome {
    pub(super) endpoint: Arc<Endpoint>,
    /// Offset of this rank's control block.
    pub(super) block: usize,
    pub(super) nonce: u64,
    /// Size of the whole group: control blocks are laid out before it is known which ranks share this node.
    pub(super) size: usize,
    /// Group token, which authenticates requests for exported memory. This process accepts connections with it while this handle
    /// exists.
    pub(super) token: Option<Arc<Token>>,
}

/// One rank of the group: the shared memory of its process, and its control block in that memory.
pub(super) struct LocalRank {
    pub(super) process: Option<Arc<PeerProcess>>,
    /// Doorbell and memory of this process, for a rank that is one of its threads.
    pub(super) doorbell: Doorbell,
    pub(super) block: usize,
    pub(super) nonce: u64,
    pub(super) address: RankAddress,
}

impl LocalRank {
    pub(super) fn memory(&self) -> &SharedMemory {
        self.process.as_ref().map_or_else(|| self.doorbell.memory(), |p| &p.memory)
    }
    /// Returns the id of its process; `None` for a process in another PID namespace.
    pub(super) fn pid(&self) -> Option<Pid> {
        self.process.as_ref().map_or_else(|| Some(getpid()), |process| process.pid)
    }
    /// Returns the process id for `process_vm_readv`; `None` if this process may not read its memory.
    pub(super) fn readable_pid(&self) -> Option<Pid> {
        self.process.as_ref().map_or_else(|| Some(getpid()), |process| process.readable)
    }
    /// Wakes the sleeping threads of its process.
    pub(super) fn notify(&self) {
        notify_at(self.memory(), self.process.as_ref().map_or_else(|| self.doorbell.event(), |p| p.event()));
    }
    pub(super) fn flag(&self, at: usize) -> &AtomicU64 {
        self.memory().flag64(self.block + at)
    }
    /// Number of operations that it has finished.
    pub(super) fn done(&self) -> Counter<'_> {
        Counter(self.flag(DONE))
    }
    /// Returns its header of operation `seq`. `size`: size of the group.
    pub(super) fn header(&self, size: usize, seq: u64) -> OperationHeader<'_> {
        OperationHeader(self.memory().flags(self.block + header_at(size, seq)))
    }
    /// Returns true if the control block still belongs to this group and is not closed.
    pub(super) fn is_open(&self) -> bool {
        self.flag(NONCE).load(Ordering::Acquire) == self.nonce && self.state() & CLOSED == 0
    }
    /// Returns true if the rank is in the group and has not aborted it. Ordered after all preceding reads.
    pub(super) fn is_healthy(&self) -> bool {
        fence(Ordering::Acquire);
        self.is_open() && self.state() & ABORTED == 0
    }
    pub(super) fn state(&self) -> u32 {
        self.memory().flag32(self.block + STATE).load(Ordering::Acquire)
    }
    /// Returns true if its process has ended and no longer accesses any memory.
    fn has_ended(&self) -> bool {
        self.process.as_ref().is_some_and(|p| p.ended.load(Ordering::Acquire))
    }
    /// Returns true if its process has ended or is about to end, and writes nothing more.
    pub(super) fn is_dead(&self) -> bool {
        self.has_ended() || self.death_order().is_some()
    }
    /// Returns the position of its death among the deaths that this process has observed.
    fn death_order(&self) -> Option<u64> {
        self.process.as_ref()?.death_order()
    }
    /// Records the death of its process if necessary, and returns its position.
    pub(super) fn record_death(&self) -> Option<u64> {
        self.process.as_ref().map(|process| process.mark_dead())
    }
    /// Returns its abort report.
    pub(super) fn reason(&self) -> String {
        self.memory().read_text(self.block + ABORT_REPORT, MAX_ABORT_REPORT)
    }
    /// Returns the last error of its process and its age.
    pub(super) fn last_error(&self) -> Option<(Duration, String)> {
        read_from(&self.process.as_ref()?.memory)
    }
    /// Returns true if this rank will not read anything more in this group.
    pub(super) fn has_finished(&self) -> bool {
        self.has_ended() || !self.is_open()
    }
}

/// Ranks of the group on this node. Pending release conditions keep them alive.
pub(super) struct LocalRanks {
    pub(super) peers: Vec<LocalRank>,
    pub(super) me: usize,
}

impl LocalRanks {
    /// Notifies a rank if it sleeps. Call it after publishing data for that rank.
    pub(super) fn notify(&self, rank: usize) {
        order::Doorbell::publish_fence();
        self.peers[rank].notify();
    }

    /// Returns true if all other ranks may read this rank's memory.
    pub(super) fn all_read(&self) -> bool {
        let mut others = self.peers.iter().enumerate().filter(|(rank, _)| *rank != self.me);
        others.all(|(_, peer)| peer.state() & READS_PEERS != 0)
    }

    /// Notifies all other ranks that sleep.
    pub(super) fn notify_all(&self) {
        order::Doorbell::publish_fence();
        for (_, peer) in self.peers.iter().enumerate().filter(|(rank, _)| *rank != self.me) {
            peer.notify();
        }
    }
}

/// Fault for control words of `rank` with values that this library never writes: the rank is no longer trusted.
pub(super) fn malformed(rank: usize, of: &str) -> Fault {
    let how = format!("has invalid values in its shared memory (field: {of}): a bug or memory corruption");
    Fault::Lost { rank, how }
}

/// Release condition: all other ranks have finished `operations` operations of this group.
pub(super) struct AllFinished {
    pub(super) ranks: Arc<LocalRanks>,
    pub(super) operations: u64,
}

impl ReleaseCondition for AllFinished {
    fn released(&self) -> bool {
        self.ranks.peers.iter().enumerate().all(|(rank, peer)| {
            rank == self.ranks.me || peer.done().read() >= self.operations || peer.has_finished()
        })
    }
}
