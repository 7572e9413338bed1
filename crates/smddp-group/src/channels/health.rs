//! Facts about the other ranks of a group: progress, faults, and wait notices.

use std::time::{Duration, Instant};

use smddp_base::{CallFingerprint, Fault};
use smddp_net::frame::{Frame, Kind};
use smddp_net::wire::{Broken, Payload};
use smddp_tcp::status_query::StatusPeers;

use super::state::PeerRecord;
use super::{RemoteChannels, WaitNotice};
use crate::facts::{QueryAnswer, RankFacts};

/// Waiting time after which a rank sends a wait notice to the ranks that it waits for.
pub(super) const WAIT_NOTICE_DELAY: Duration = Duration::from_millis(50);

impl RemoteChannels {
    /// Returns true if `rank` has begun operation `seq`; `None`: unknown.
    pub(crate) fn arrived(&self, rank: usize, seq: u64) -> Option<bool> {
        let begun = self.state.peers[rank].begun > seq;
        (begun || self.state.peers[rank].replied).then_some(begun)
    }

    /// Adds the facts about `rank` and operation `seq` that need no search in the channels.
    pub(crate) fn observe(&self, rank: usize, seq: u64, facts: &mut RankFacts) {
        let peer = &self.state.peers[rank];
        facts.arrived = self.arrived(rank, seq);
        facts.fingerprint = self.fingerprint_of(rank, seq);
        facts.messages_announced = self.all_announced(rank);
        facts.answer = match peer {
            PeerRecord { silent: true, .. } => Some(QueryAnswer::HostSilent),
            PeerRecord { unresponsive: true, .. } => Some(QueryAnswer::ProcessUnresponsive),
            PeerRecord { replied: true, .. } => Some(QueryAnswer::Replied),
            _ => None,
        };
    }

    /// Adds the ranks for which operation `seq`, and the operation in progress, wait.
    pub(crate) fn observe_operation(&self, seq: u64, facts: &mut [RankFacts]) {
        let state = &self.state;
        for (i, progress) in state.recv_channels().filter(|(i, progress)| progress.is_pending(&i.spec)) {
            let facts = &mut facts[i.spec.rank];
            facts.awaited = true;
            facts.missing |= state.open
                && state.seq == seq
                && state.peers[i.spec.rank].begun <= seq
                && progress.received <= progress.released;
        }
        for reader in state.pending_readers().filter(|_| state.open) {
            facts[reader].awaited = true;
            facts[reader].undelivered |= state.seq == seq;
        }
    }

    /// Sets the number by which status queries refer to this rank.
    pub(crate) fn set_status_id(&self, status_id: u64) {
        if let Some(sideband) = &self.sideband {
            sideband.set_status_id(status_id);
        }
    }

    /// Returns the ranks of other nodes, for status queries; `None` without a sideband.
    pub(crate) fn status_peers(&self) -> Option<StatusPeers> {
        self.sideband.as_ref().map(|sideband| sideband.status_peers())
    }

    /// Returns the activity that a rank reported in its reply to a query; empty if it reported none.
    pub(crate) fn activity(&self, rank: usize) -> &str {
        &self.state.peers[rank].activity
    }

    pub(crate) fn fingerprint_of(&self, rank: usize, seq: u64) -> Option<CallFingerprint> {
        let peer = &self.state.peers[rank];
        peer.newest.filter(|_| peer.begun == seq + 1)
    }

    /// Returns true if a rank aborted the group in operation `seq` or before.
    pub(crate) fn is_aborted(&self, seq: u64) -> bool {
        self.state.aborted_from.is_some_and(|from| from <= seq)
    }

    /// Returns true if `rank` aborted the group in an operation after `seq`.
    pub(crate) fn aborted_after(&self, rank: usize, seq: u64) -> bool {
        self.state.peers[rank].abort.as_ref().is_some_and(|(from, _)| *from > seq)
    }

    /// Returns true if a rank made a different call in an operation that this rank has completed.
    pub(crate) fn has_mismatch(&self) -> bool {
        self.state.mismatch.is_some()
    }

    /// Checks the ranks that this rank waits for, and returns all faults known at `now`.
    pub(crate) fn faults(&mut self, now: Instant) -> Vec<Fault> {
        let (awaited, readers) = self.state.pending_ranks();
        self.wait_notice(&awaited, now);
        let awaited = awaited.into_iter().chain(readers).chain(self.state.messages.expected_ranks());
        for rank in awaited {
            self.watch(rank, now);
        }
        self.wire.check(now, &self.watched);
        self.watched.clear();
        self.liveness.iter_mut().for_each(|liveness| liveness.check(now));
        self.state
            .peers
            .iter_mut()
            .filter_map(|p| p.last_error.as_mut())
            .for_each(|error| error.observe(now));
        let broken = self.broken(now);
        let mut faults: Vec<Fault> = self.state.mismatch.clone().into_iter().collect();
        let peers = || self.state.peers.iter().enumerate();
        faults.extend(
            peers().filter_map(|(rank, p)| Some(Fault::Aborted { rank, reason: p.abort.clone()?.1 })),
        );
        faults.extend(peers().filter(|(_, p)| p.left).map(|(rank, _)| Fault::Left { rank }));
        let protocol_error = |what: &str| format!("is lost (it sent {what})");
        faults.extend(
            peers()
                .filter_map(|(rank, p)| Some(Fault::Lost { rank, how: protocol_error(p.protocol_error?) })),
        );
        let mut states = self.wire.peers().iter().enumerate();
        faults.extend(
            states.find_map(|(rank, p)| Some(Fault::Unreachable { rank, reason: p.local_error.clone()? })),
        );
        let path = format!("over {}", self.wire.capabilities().name);
        let states = self.wire.peers().iter().enumerate();
        faults.extend(states.filter_map(|(rank, p)| {
            Some(Fault::Corrupted { rank, detail: format!("{}; {path}", p.corrupted.as_ref()?) })
        }));
        // A rank that sent the abort reason may close its connection.
        let known = |peer: usize| self.state.peers[peer].left || self.state.peers[peer].abort.is_some();
        let broken = broken.into_iter().filter(|b| !known(b.peer));
        faults.extend(broken.map(|b| Fault::Lost { rank: b.peer, how: format!("is lost ({})", b.reason) }));
        faults
    }

    /// Starts liveness checks of `rank`, for which this rank waits. The wire starts them in the next call of [`Self::faults`].
    pub(crate) fn watch(&mut self, rank: usize, now: Instant) {
        self.watched.push(rank);
        self.liveness.iter_mut().for_each(|liveness| liveness.watch(rank, now));
    }

    /// Lost peers in order of detection. A liveness report takes precedence over a report of the wire.
    pub(super) fn broken(&mut self, now: Instant) -> Vec<Broken> {
        let mut broken = self.liveness.as_ref().map_or_else(Vec::new, |liveness| liveness.broken(now));
        let drain_grace = self.wire.capabilities().drain_grace;
        let mut also = Vec::new();
        for found in Broken::among(self.wire.peers()) {
            let since = *self.state.peers[found.peer].broken.get_or_insert(now);
            if now.duration_since(since) >= drain_grace && !broken.iter().any(|b| b.peer == found.peer) {
                also.push((since, found));
            }
        }
        also.sort_unstable_by_key(|(since, broken)| (*since, broken.peer));
        broken.extend(also.into_iter().map(|(_, found)| found));
        broken
    }

    /// Sends the fingerprint of the operation in progress to the ranks that it waits for, once per operation and after
    /// `WAIT_NOTICE_DELAY`. A rank in another call, which sends nothing to this rank, then detects the mismatch.
    pub(super) fn wait_notice(&mut self, awaited: &[usize], now: Instant) {
        match self.wait_notice {
            _ if !self.state.open => return,
            WaitNotice::Idle => {
                self.wait_notice = WaitNotice::Waiting(now);
                return;
            }
            WaitNotice::Waiting(since) if now.duration_since(since) >= WAIT_NOTICE_DELAY => {
                self.wait_notice = WaitNotice::Sent
            }
            WaitNotice::Waiting(_) | WaitNotice::Sent => return,
        }
        let fingerprint = self.state.fingerprint;
        let frame = Frame {
            what: fingerprint.call,
            count: fingerprint.count,
            ..Frame::new(Kind::WaitNotice, self.state.seq)
        };
        for &rank in awaited {
            self.send_frame(rank, &frame, Payload::None);
        }
    }
}
