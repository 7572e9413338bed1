//! The near half of a group: one rank's end of what the ranks of a node have in shared memory. Ranks are numbered by their
//! places in the node.

mod recv;
mod send;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Pid;

use self::recv::LocalRecv;
use self::send::LocalSend;
pub use self::send::ZeroCopySource;
use super::cache_distance::CacheDistance;
use super::local_ranks::{AllFinished, GroupHome, Ranks};
use super::messages::NearMessages;
use super::recv_targets::RecvTargets;
use super::shared_page::SharedPage;
use crate::fork;
use crate::process::layout::*;
use crate::process::order::Slot;
use crate::process::{Endpoint, ProcessAddress, Region, Sleeper};
use crate::{CallFingerprint, Channels, Fault, MAX_ABORT_REPORT, MessageTransport, Mismatch};

/// An operation that is over here and read nobody's header: held against the others' when the next one begins.
/// Whichever of two ranks comes later finds the other's header there.
struct Unchecked {
    seq: u64,
    fingerprint: CallFingerprint,
    rank: usize,
}

const LOOKS_BEFORE_RINGING: u32 = 8;

pub struct LocalChannels {
    /// A group of one rank has none.
    home: Option<GroupHome>,
    pub(super) ranks: Arc<Ranks>,
    me: usize,
    size: usize,
    /// Of the home, or 0.
    layout: usize,
    block: usize,
    /// Per rank: operations it is known to have begun.
    begun: Vec<u64>,
    seq: u64,
    fingerprint: CallFingerprint,
    region: Option<Region>,
    outs: Vec<LocalSend>,
    ins: Vec<LocalRecv>,
    recv_targets: RecvTargets,
    /// Of the operation begun last.
    channel_layout: Arc<Channels>,
    unchecked: Vec<Unchecked>,
    differs: Option<Fault>,
    /// A rank whose words make no sense.
    nonsense: Option<Fault>,
    /// Something was read that may not have been the message any more: what is under way cannot end well.
    spoiled: bool,
    /// Somebody may sleep who should see what was published.
    pending_release: bool,
    /// Looks in vain since.
    idle_polls: u32,
    distance: CacheDistance,
    /// Messages of large cells.
    large: u32,
    messages: NearMessages,
    left: bool,
    /// Devices know this group's pages.
    kept: Arc<AtomicBool>,
    forks: u32,
}

impl LocalChannels {
    pub(super) fn new(home: Option<GroupHome>, ranks: Ranks) -> Self {
        let (me, size, ranks) = (ranks.me, ranks.remotes.len().max(1), Arc::new(ranks));
        if let Some(home) = &home
            && ranks.remotes.iter().all(|remote| remote.readable().is_some())
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
            outs: Vec::new(),
            ins: Vec::new(),
            recv_targets: RecvTargets::default(),
            channel_layout: Arc::default(),
            unchecked: Vec::new(),
            differs: None,
            nonsense: None,
            spoiled: false,
            pending_release: false,
            idle_polls: 0,
            distance: CacheDistance::default(),
            large: 0,
            messages: NearMessages::new(home.clone(), ranks.clone()),
            left: false,
            kept: Arc::default(),
            forks: fork::generation(),
            home,
            ranks,
        }
    }

    /// The process's endpoint, and this group's number there.
    pub(crate) fn home(&self) -> Option<(Arc<Endpoint>, u64)> {
        self.home.as_ref().map(|home| (home.endpoint.clone(), home.nonce))
    }

    /// Whether this process has symmetric memory.
    #[inline]
    pub(crate) fn has_symmetric(&self) -> bool {
        self.home.as_ref().is_some_and(|home| home.endpoint.symmetric.in_use())
    }

    /// Where this rank's control block lies.
    #[cfg(test)]
    pub(super) fn block(&self) -> usize {
        self.block
    }

    /// False in a forked child, whose copy this is.
    pub(crate) fn ours(&self) -> bool {
        self.forks == fork::generation()
    }

    fn slot(&self, seq: u64) -> usize {
        self.block + slot_at(self.layout, seq)
    }

    /// Nothing there yet. After a few looks whoever sleeps is woken: waking costs a full barrier, and ranks that are
    /// on time are all awake.
    fn look_in_vain(&mut self) {
        self.idle_polls += 1;
        if self.pending_release && self.idle_polls > LOOKS_BEFORE_RINGING {
            self.flush();
        }
    }

    /// Something was published: sleepers are to be woken, though not before this rank has nothing better to do.
    fn owe(&mut self) {
        self.pending_release = true;
        self.idle_polls = 0;
    }

    /// Whether everybody has finished with the operation whose slot `seq` takes over.
    fn slot_free(&mut self, seq: u64) -> bool {
        let Some(before) = (seq + 1).checked_sub(SLOTS) else { return true };
        for rank in 0..self.size {
            if rank == self.me || self.begun[rank] > before {
                continue;
            }
            let remote = &self.ranks.remotes[rank];
            let tag = remote.slot(self.layout, before).tag().read();
            if tag > before {
                self.begun[rank] = tag;
            } else if remote.done().read() < before && !remote.finished() {
                return false;
            }
        }
        true
    }

    /// Whether somebody is gone or says that the group is dead.
    fn troubled(&self, seq: u64) -> bool {
        self.ranks.remotes.iter().enumerate().any(|(rank, remote)| {
            rank != self.me && (remote.state() & ABORTED != 0 || remote.dead() && !self.arrived(rank, seq))
        })
    }

    /// Looks at the headers that nothing was read from; false where one is of another call.
    fn hold(&mut self) -> bool {
        let (ranks, size, differs) = (&self.ranks, self.layout, &mut self.differs);
        self.unchecked.retain(|unchecked| {
            let remote = &ranks.remotes[unchecked.rank];
            let (tag, found) = remote.slot(size, unchecked.seq).read_if_current(unchecked.seq, remote.done());
            if let Some((what, count)) = found {
                let theirs = CallFingerprint { what, count };
                if theirs != unchecked.fingerprint && differs.is_none() {
                    let found = Mismatch { rank: unchecked.rank, theirs, bytes: None };
                    *differs =
                        Some(Fault::Differs { seq: unchecked.seq, mine: unchecked.fingerprint, found });
                }
            }
            tag <= unchecked.seq && !remote.finished()
        });
        self.differs.is_none()
    }

    pub fn begin(
        &mut self,
        seq: u64,
        fingerprint: CallFingerprint,
        channel_layout: &Arc<Channels>,
        stays: &[ZeroCopySource],
    ) -> bool {
        if !self.slot_free(seq) || !self.unchecked.is_empty() && !self.hold() || self.differs.is_some() {
            return false;
        }
        if self.home.is_none() {
            return true;
        }
        if channel_layout.recv_channels.iter().all(|recv_channel| recv_channel.messages == 0)
            && self.troubled(seq)
        {
            return false;
        }
        self.seq = seq;
        let slot = self.slot(seq);
        self.outs.clear();
        // A channel whose blocks are all empty carries nothing, but the header is still to be told.
        let carries = channel_layout.send_channels.iter().any(|send_channel| send_channel.messages > 0);
        let mut stage = 0;
        if !channel_layout.inline && carries {
            let Some(region) = self.open_region(channel_layout, stays) else { return false };
            stage = region.offset as u64;
            self.region = Some(region);
        }
        self.fingerprint = fingerprint;
        if !Arc::ptr_eq(&self.channel_layout, channel_layout) {
            self.channel_layout = channel_layout.clone();
        }
        self.ins.clear();
        self.ins.resize(channel_layout.recv_channels.len(), LocalRecv::default());
        self.recv_targets.forget();
        let Some(GroupHome { endpoint, .. }) = &self.home else { return true };
        let header = Slot(endpoint.memory.flags(slot));
        header.write((fingerprint.what, fingerprint.count, stage));
        if channel_layout.inline && carries {
            // The header is published together with the payload.
            self.outs.push(LocalSend {
                lines: 0,
                cells: slot + SLOT_HEADER,
                cell: SLOT_BYTES,
                depth: 1,
                sent: 0,
                read: 0,
                readers: 0,
                messages: 1,
                stays: false,
                foreign: false,
            });
        } else {
            header.publish(seq);
            self.owe();
        }
        true
    }

    pub fn settle(&mut self) -> Result<bool, Mismatch> {
        for recv_channel in 0..self.ins.len() {
            if !self.ins[recv_channel].resolved && !self.resolve(recv_channel)? {
                return Ok(false);
            }
        }
        if self.nonsense.is_some() || self.spoiled {
            return Ok(false);
        }
        let Some(GroupHome { endpoint, .. }) = &self.home else { return Ok(true) };
        let unread = |out: &LocalSend| out.stays && out.read_by_all(&endpoint.memory) < out.messages;
        if self.outs.iter().any(unread) {
            self.look_in_vain();
            return Ok(false);
        }
        Ok(true)
    }

    pub fn end(&mut self) {
        let Some(GroupHome { endpoint, nonce, .. }) = &self.home else { return };
        if self.channel_layout.recv_channels.is_empty() {
            let others = (0..self.size).filter(|&rank| rank != self.me);
            let (seq, fingerprint) = (self.seq, self.fingerprint);
            self.unchecked.extend(others.map(|rank| Unchecked { seq, fingerprint, rank }));
        }
        endpoint.memory.counter(self.block + DONE).publish(self.seq + 1);
        if !self.channel_layout.inline {
            self.pending_release = true;
        }
        if let Some(region) = self.region.take() {
            let release = AllFinished { ranks: self.ranks.clone(), operations: self.seq + 1 };
            endpoint.pool.retire(&endpoint.memory, *nonce, region, Arc::new(release));
        }
    }

    /// Whether that rank has begun operation `seq`, or a later one.
    pub fn arrived(&self, rank: usize, seq: u64) -> bool {
        self.home.is_none() || rank == self.me || {
            let remote = &self.ranks.remotes[rank];
            remote.done().read() > seq
                || (seq..seq + SLOTS).any(|s| remote.slot(self.layout, s).tag().read() == s + 1)
        }
    }

    /// The process id of a rank; `None` in another PID namespace.
    pub(crate) fn pid(&self, rank: usize) -> Option<Pid> {
        self.ranks.remotes.get(rank)?.pid()
    }

    /// The address of a rank's process.
    pub(crate) fn process(&self, rank: usize) -> Option<&ProcessAddress> {
        self.ranks.remotes.get(rank).map(|remote| &remote.rank_info.process)
    }

    /// The last error of a rank's process, and how long ago that was.
    pub(crate) fn last_error(&self, rank: usize) -> Option<(Duration, String)> {
        self.ranks.remotes.get(rank)?.last_error()
    }

    pub fn remote(&self) -> bool {
        self.distance.remote()
    }

    pub fn flush(&mut self) {
        if std::mem::take(&mut self.pending_release) {
            self.ranks.notify_all();
        }
    }

    pub fn fingerprint_of(&self, rank: usize, seq: u64) -> Option<CallFingerprint> {
        let remote = self.ranks.remotes.get(rank)?;
        let (what, count, _) = remote.slot(self.layout, seq).read(seq)?;
        Some(CallFingerprint { what, count })
    }

    /// Messages with the ranks of this node.
    pub fn p2p(&mut self) -> &mut dyn MessageTransport {
        &mut self.messages
    }

    /// The dead in the order in which they died, as far as that is known.
    pub fn faults(&mut self) -> Vec<Fault> {
        let mut dead: Vec<(u64, usize)> = Vec::new();
        let mut faults: Vec<Fault> =
            self.differs.iter().chain(&self.nonsense).chain(&self.messages.nonsense).cloned().collect();
        for (rank, remote) in self.ranks.remotes.iter().enumerate() {
            if rank == self.me {
                continue;
            }
            // `ended` before the state: a rank that left in good order and then exited has only left.
            let ended = remote.dead();
            let same = remote.word(NONCE).load(Ordering::Acquire) == remote.nonce;
            if same && remote.state() & ABORTED != 0 {
                faults.push(Fault::Poisoned { rank, reason: remote.reason() });
            } else if !remote.open() {
                faults.push(Fault::Left { rank });
            } else if ended {
                dead.push((remote.nth_death().unwrap_or(u64::MAX), rank));
            }
        }
        dead.sort_unstable();
        faults.extend(dead.into_iter().map(|(_, rank)| Fault::Lost { rank, how: "died".to_owned() }));
        faults
    }

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

    pub fn leave(&mut self) {
        if std::mem::replace(&mut self.left, true) {
            return;
        }
        let Some(GroupHome { endpoint, .. }) = &self.home else { return };
        let state = endpoint.memory.flag32(self.block + STATE);
        state.fetch_or(CLOSED, Ordering::Release);
        self.ranks.notify_all();
    }

    /// `places`: of the ranks of the group in this node.
    pub fn shared_page(&self, places: Vec<Option<usize>>) -> Option<Arc<SharedPage>> {
        let home = self.home.as_ref()?;
        let (endpoint, token) = (home.endpoint.clone(), home.token.clone()?);
        let (ranks, kept) = (self.ranks.clone(), self.kept.clone());
        Some(Arc::new(SharedPage { endpoint, token, ranks, layout: self.layout, kept, places }))
    }

    pub(crate) fn sleeper(&self) -> Sleeper {
        Sleeper(self.home.as_ref().map(|home| home.endpoint.doorbell()))
    }

    pub(crate) fn assume_remote(&mut self) {
        self.distance.assume_remote();
    }
}

impl Drop for LocalChannels {
    fn drop(&mut self) {
        // A forked child's copy: the group, its memory and its place in the pool are the parent's.
        if self.forks != fork::generation() {
            return;
        }
        self.leave();
        self.messages.drain();
        let Some(GroupHome { endpoint, block, nonce, size, .. }) = self.home.take() else { return };
        if let Some(region) = self.region.take() {
            let release = AllFinished { ranks: self.ranks.clone(), operations: u64::MAX };
            endpoint.pool.retire(&endpoint.memory, nonce, region, Arc::new(release));
        }
        endpoint.pool.disown(&endpoint.memory, nonce);
        // A device may write its words long after.
        if self.kept.load(Ordering::Acquire) {
            return;
        }
        // The block may be read until every other rank has left, too: they look at its state and last slots.
        let release = AllFinished { ranks: self.ranks.clone(), operations: u64::MAX };
        endpoint.control.give(block, block_bytes(size), Arc::new(release));
    }
}
