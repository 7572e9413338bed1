//! Local half of a group: the channels of one rank in the shared memory of its node. Ranks are numbered by their index on the node.

#[allow(unsafe_code)]
mod recv;
mod send;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Pid;
use smddp_base::fork;
use smddp_base::{CallFingerprint, Channels, Fault, MAX_ABORT_REPORT, MessageTransport, Mismatch};
use smddp_process::layout::*;
use smddp_process::order::OperationHeader;
pub(crate) use smddp_process::{ControlBlock, Endpoint, ProcessAddress, Region, Sleeper};

use self::recv::LocalRecv;
use self::send::LocalSend;
pub use self::send::ZeroCopySource;
use super::cache_distance::CacheDistance;
use super::local_ranks::{AllFinished, GroupHome, LocalRanks};
use super::messages::LocalMessages;
use super::recv_targets::RecvTargets;
use super::shared_page::SharedPage;

/// An operation that ended here without reading the header of `rank`. Its fingerprint is compared when the next operation begins:
/// the later of two ranks always finds the header of the earlier one.
struct Unchecked {
    seq: u64,
    fingerprint: CallFingerprint,
    rank: usize,
}

const IDLE_POLLS_BEFORE_NOTIFY: u32 = 8;

/// Channels of one rank in the shared memory of its node. Ranks are numbered by their index on the node.
pub struct LocalChannels {
    /// `None` for a group of one rank.
    home: Option<GroupHome>,
    /// Control block of `home`.
    control_block: Option<ControlBlock>,
    pub(super) ranks: Arc<LocalRanks>,
    me: usize,
    size: usize,
    /// Size of the whole group, which determines the layout of its control blocks; 1 without a home.
    layout: usize,
    /// Offset of this rank's control block, or 0 without a home.
    block: usize,
    /// Per rank: number of operations that it is known to have begun.
    begun: Vec<u64>,
    seq: u64,
    fingerprint: CallFingerprint,
    region: Option<Region>,
    sends: Vec<LocalSend>,
    recvs: Vec<LocalRecv>,
    recv_targets: RecvTargets,
    /// Channels of the operation begun last.
    channel_layout: Arc<Channels>,
    unchecked: Vec<Unchecked>,
    mismatch: Option<Fault>,
    /// First fault found in the shared memory of a peer.
    peer_fault: Option<Fault>,
    /// Set once a message was read whose memory may have been overwritten meanwhile: the operation in progress cannot succeed.
    corrupted: bool,
    /// Set while sleeping ranks still have to be notified of published data.
    pending_notify: bool,
    /// Polls without a result since data was last published.
    idle_polls: u32,
    distance: CacheDistance,
    /// Number of messages in large slots.
    large_messages: u32,
    messages: LocalMessages,
    left: bool,
    /// Set once devices know the addresses of this group's shared pages.
    retained_pages: Arc<AtomicBool>,
    forks: u32,
}

impl LocalChannels {
    pub(super) fn new(
        home: Option<GroupHome>,
        control_block: Option<ControlBlock>,
        ranks: LocalRanks,
    ) -> Self {
        let (me, size, ranks) = (ranks.me, ranks.peers.len().max(1), Arc::new(ranks));
        if let Some(home) = &home
            && ranks.peers.iter().all(|peer| peer.readable_pid().is_some())
        {
            home.endpoint.memory.flag32(home.block + STATE).fetch_or(READS_PEERS, Ordering::Release);
        }
        Self {
            me,
            size,
            layout: home.as_ref().map_or(1, |home| home.size),
            block: home.as_ref().map_or(0, |home| home.block),
            begun: vec![0; size],
            seq: 0,
            fingerprint: CallFingerprint::default(),
            region: None,
            sends: Vec::new(),
            recvs: Vec::new(),
            recv_targets: RecvTargets::default(),
            channel_layout: Arc::default(),
            unchecked: Vec::new(),
            mismatch: None,
            peer_fault: None,
            corrupted: false,
            pending_notify: false,
            idle_polls: 0,
            distance: CacheDistance::default(),
            large_messages: 0,
            control_block,
            messages: LocalMessages::new(home.clone(), ranks.clone()),
            left: false,
            retained_pages: Arc::default(),
            forks: fork::generation(),
            home,
            ranks,
        }
    }

    /// Returns the process's endpoint and the nonce of this group's control block.
    pub fn home(&self) -> Option<(Arc<Endpoint>, u64)> {
        self.home.as_ref().map(|home| (home.endpoint.clone(), home.nonce))
    }

    /// Returns the offset of this rank's control block.
    #[cfg(test)]
    pub(super) fn block(&self) -> usize {
        self.block
    }

    /// Returns false in a forked child, which holds a copy of its parent's group.
    pub fn is_owned(&self) -> bool {
        self.forks == fork::generation()
    }

    fn header(&self, seq: u64) -> usize {
        self.block + header_at(self.layout, seq)
    }

    /// Counts a poll without a result. Sleeping ranks are notified only after a few of them: a notification costs a full barrier,
    /// and ranks that are on time do not sleep.
    fn count_idle_poll(&mut self) {
        self.idle_polls += 1;
        if self.pending_notify && self.idle_polls > IDLE_POLLS_BEFORE_NOTIFY {
            self.flush();
        }
    }

    /// Records that sleeping ranks must be notified of published data once this rank is idle.
    fn defer_notify(&mut self) {
        self.pending_notify = true;
        self.idle_polls = 0;
    }

    /// Returns true if all ranks have finished the operation whose header operation `seq` reuses.
    fn is_header_free(&mut self, seq: u64) -> bool {
        let Some(before) = (seq + 1).checked_sub(HEADERS) else { return true };
        for rank in 0..self.size {
            if rank == self.me || self.begun[rank] > before {
                continue;
            }
            let peer = &self.ranks.peers[rank];
            let tag = peer.header(self.layout, before).tag().read();
            if tag > before {
                self.begun[rank] = tag;
            } else if peer.done().read() < before && !peer.has_finished() {
                return false;
            }
        }
        true
    }

    /// Returns true if a rank has aborted the group, or has died before it began operation `seq`.
    fn has_failure(&self, seq: u64) -> bool {
        self.ranks.peers.iter().enumerate().any(|(rank, peer)| {
            rank != self.me && (peer.state() & ABORTED != 0 || peer.is_dead() && !self.arrived(rank, seq))
        })
    }

    /// Compares the fingerprints of unchecked operations with the headers of the other ranks. Returns false after a mismatch.
    fn check_fingerprints(&mut self) -> bool {
        let (ranks, size, mismatch) = (&self.ranks, self.layout, &mut self.mismatch);
        self.unchecked.retain(|unchecked| {
            let peer = &ranks.peers[unchecked.rank];
            let (tag, found) = peer.header(size, unchecked.seq).read_if_current(unchecked.seq, peer.done());
            if let Some((call, count)) = found {
                let theirs = CallFingerprint { call, count };
                if theirs != unchecked.fingerprint && mismatch.is_none() {
                    let found = Mismatch { rank: unchecked.rank, theirs, bytes: None };
                    *mismatch =
                        Some(Fault::Mismatch { seq: unchecked.seq, mine: unchecked.fingerprint, found });
                }
            }
            tag <= unchecked.seq && !peer.has_finished()
        });
        self.mismatch.is_none()
    }

    /// Begins operation `seq`: allocates its memory and publishes its fingerprint. `false`: not yet, or the group has failed.
    ///
    /// `sources`: zero-copy sources, ascending by channel. Their memory must remain unchanged until the operation ends.
    pub fn begin(
        &mut self,
        seq: u64,
        fingerprint: CallFingerprint,
        channel_layout: &Arc<Channels>,
        sources: &[ZeroCopySource],
    ) -> bool {
        if !self.is_header_free(seq)
            || !self.unchecked.is_empty() && !self.check_fingerprints()
            || self.mismatch.is_some()
        {
            return false;
        }
        if self.home.is_none() {
            return true;
        }
        if channel_layout.recv_channels.iter().all(|recv_channel| recv_channel.messages == 0)
            && self.has_failure(seq)
        {
            return false;
        }
        self.seq = seq;
        let at = self.header(seq);
        self.sends.clear();
        // Channels whose blocks are all empty carry no message, but the header must still be published.
        let carries = channel_layout.send_channels.iter().any(|send_channel| send_channel.messages > 0);
        let mut stage = 0;
        if !channel_layout.inline && carries {
            let Some(region) = self.open_region(channel_layout, sources) else { return false };
            stage = region.offset() as u64;
            self.region = Some(region);
        }
        self.fingerprint = fingerprint;
        if !Arc::ptr_eq(&self.channel_layout, channel_layout) {
            self.channel_layout = channel_layout.clone();
        }
        self.recvs.clear();
        self.recvs.resize(channel_layout.recv_channels.len(), LocalRecv::default());
        self.recv_targets.clear();
        let Some(GroupHome { endpoint, .. }) = &self.home else { return true };
        let header = OperationHeader(endpoint.memory.flags(at));
        header.write((fingerprint.call, fingerprint.count, stage));
        if channel_layout.inline && carries {
            // The header is published together with the payload.
            self.sends.push(LocalSend {
                lines: 0,
                slots: at + HEADER_FIELDS,
                slot_bytes: HEADER_PAYLOAD_BYTES,
                depth: 1,
                sent: 0,
                read: 0,
                readers: 0,
                messages: 1,
                zero_copy: false,
                is_address: false,
            });
        } else {
            header.publish(seq);
            self.defer_notify();
        }
        true
    }

    /// Compares the headers of all writers with this rank's. `false`: headers are missing, zero-copy messages are unread, or the
    /// operation cannot succeed.
    ///
    /// # Errors
    /// A writer made a different call.
    pub fn settle(&mut self) -> Result<bool, Mismatch> {
        for recv_channel in 0..self.recvs.len() {
            if !self.recvs[recv_channel].resolved && !self.resolve(recv_channel)? {
                return Ok(false);
            }
        }
        if self.peer_fault.is_some() || self.corrupted {
            return Ok(false);
        }
        let Some(GroupHome { endpoint, .. }) = &self.home else { return Ok(true) };
        let unread = |out: &LocalSend| out.zero_copy && out.read_by_all(&endpoint.memory) < out.messages;
        if self.sends.iter().any(unread) {
            self.count_idle_poll();
            return Ok(false);
        }
        Ok(true)
    }

    /// Ends the operation at this rank. Its memory is reused once its readers have finished.
    pub fn end(&mut self) {
        let Some(GroupHome { endpoint, nonce, .. }) = &self.home else { return };
        if self.channel_layout.recv_channels.is_empty() {
            let others = (0..self.size).filter(|&rank| rank != self.me);
            let (seq, fingerprint) = (self.seq, self.fingerprint);
            self.unchecked.extend(others.map(|rank| Unchecked { seq, fingerprint, rank }));
        }
        endpoint.memory.counter(self.block + DONE).publish(self.seq + 1);
        if !self.channel_layout.inline {
            self.pending_notify = true;
        }
        if let Some(region) = self.region.take() {
            let release = AllFinished { ranks: self.ranks.clone(), operations: self.seq + 1 };
            endpoint.pool.retire(&endpoint.memory, *nonce, region, Arc::new(release));
        }
    }

    /// Returns true if `rank` has begun operation `seq` or a later one.
    pub fn arrived(&self, rank: usize, seq: u64) -> bool {
        self.home.is_none() || rank == self.me || {
            let peer = &self.ranks.peers[rank];
            peer.done().read() > seq
                || (seq..seq + HEADERS).any(|s| peer.header(self.layout, s).tag().read() == s + 1)
        }
    }

    /// Returns true if `rank` has completed operation `seq`.
    pub fn completed(&self, rank: usize, seq: u64) -> bool {
        self.home.is_some() && self.ranks.peers[rank].done().read() > seq
    }

    /// Returns the process id of a rank; `None` for a process in another PID namespace.
    pub fn pid(&self, rank: usize) -> Option<Pid> {
        self.ranks.peers.get(rank)?.pid()
    }

    /// Returns the address of a rank's process.
    pub fn process(&self, rank: usize) -> Option<&ProcessAddress> {
        self.ranks.peers.get(rank).map(|peer| &peer.address.process)
    }

    /// Returns the last error of a rank's process and its age.
    pub fn last_error(&self, rank: usize) -> Option<(Duration, String)> {
        self.ranks.peers.get(rank)?.last_error()
    }

    /// Returns true if the caches of the readers are distant from those of this rank.
    pub fn has_distant_readers(&self) -> bool {
        self.distance.is_remote()
    }

    /// Notifies sleeping ranks of published data.
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.pending_notify) {
            self.ranks.notify_all();
        }
    }

    /// Returns the fingerprint of a rank's operation `seq`; `None` if the rank has not started it or no longer keeps its header.
    pub fn fingerprint_of(&self, rank: usize, seq: u64) -> Option<CallFingerprint> {
        let peer = self.ranks.peers.get(rank)?;
        let (call, count, _) = peer.header(self.layout, seq).read(seq)?;
        Some(CallFingerprint { call, count })
    }

    /// Returns the point-to-point messages with the ranks of this node.
    pub fn messages(&mut self) -> &mut (dyn MessageTransport + 'static) {
        &mut self.messages
    }

    /// Returns the faults of this node's ranks. Lost ranks come last, in the order of their deaths if known.
    pub fn faults(&mut self) -> Vec<Fault> {
        let mut dead: Vec<(u64, usize)> = Vec::new();
        let mut faults: Vec<Fault> =
            self.mismatch.iter().chain(&self.peer_fault).chain(&self.messages.peer_fault).cloned().collect();
        for (rank, peer) in self.ranks.peers.iter().enumerate() {
            if rank == self.me {
                continue;
            }
            // Read before the state: a rank that leaves the group and then exits is reported as departed, not as lost.
            let ended = peer.is_dead();
            let same = peer.flag(NONCE).load(Ordering::Acquire) == peer.nonce;
            if same && peer.state() & ABORTED != 0 {
                faults.push(Fault::Aborted { rank, reason: peer.reason() });
            } else if !peer.is_open() {
                faults.push(Fault::Left { rank });
            } else if ended {
                dead.push((peer.record_death().unwrap_or(u64::MAX), rank));
            }
        }
        dead.sort_unstable();
        faults.extend(dead.into_iter().map(|(_, rank)| Fault::Lost { rank, how: "died".to_owned() }));
        faults
    }

    /// Aborts the group: the other ranks of this node read `reason`.
    pub fn abort(&mut self, reason: &str) {
        let Some(GroupHome { endpoint, .. }) = &self.home else { return };
        let state = endpoint.memory.flag32(self.block + STATE);
        if state.load(Ordering::Relaxed) & ABORTED != 0 {
            return;
        }
        endpoint.memory.write_text(self.block + ABORT_REPORT, reason, MAX_ABORT_REPORT);
        state.fetch_or(ABORTED, Ordering::Release);
        self.ranks.notify_all();
    }

    /// Leaves the group.
    pub fn leave(&mut self) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        let Some(GroupHome { endpoint, .. }) = &self.home else { return };
        let state = endpoint.memory.flag32(self.block + STATE);
        state.fetch_or(CLOSED, Ordering::Release);
        self.ranks.notify_all();
    }

    /// Returns this rank's view of the shared pages. `places`: node index of each rank of the group.
    pub fn shared_page(&self, places: Vec<Option<usize>>) -> Option<Arc<SharedPage>> {
        let home = self.home.as_ref()?;
        let (endpoint, token) = (home.endpoint.clone(), home.token.clone()?);
        let (ranks, retained_pages) = (self.ranks.clone(), self.retained_pages.clone());
        Some(Arc::new(SharedPage { endpoint, token, ranks, layout: self.layout, retained_pages, places }))
    }

    /// Returns the handle on which a thread of this rank sleeps.
    pub fn sleeper(&self) -> Sleeper {
        Sleeper(self.home.as_ref().map(|home| home.endpoint.doorbell()))
    }

    /// Assumes distant caches of the readers and ignores measurements. For tests.
    pub fn assume_distant_readers(&mut self) {
        self.distance.assume_remote();
    }
}

impl Drop for LocalChannels {
    fn drop(&mut self) {
        // A forked child holds a copy: the group, its memory and its regions in the pool belong to the parent.
        if self.forks != fork::generation() {
            return;
        }
        self.leave();
        self.messages.drain();
        let Some(GroupHome { endpoint, nonce, .. }) = self.home.take() else { return };
        if let Some(region) = self.region.take() {
            let release = AllFinished { ranks: self.ranks.clone(), operations: u64::MAX };
            endpoint.pool.retire(&endpoint.memory, nonce, region, Arc::new(release));
        }
        endpoint.pool.disown(&endpoint.memory, nonce);
        // A device may write its flags long after the group has ended.
        if self.retained_pages.load(Ordering::Acquire) {
            return;
        }
        // Other ranks read the state and the last headers of the block until they have left, too.
        if let Some(block) = self.control_block.take() {
            let release = AllFinished { ranks: self.ranks.clone(), operations: u64::MAX };
            endpoint.control.give(block, Arc::new(release));
        }
    }
}
