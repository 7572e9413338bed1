//! Facts about the other ranks of a group: progress, faults, and wait notices.

use std::time::{Duration, Instant};

use super::{RemoteChannels, WaitNotice};
use crate::net::frame::{Frame, Kind};
use crate::net::wire::{Broken, Payload};
use crate::{CallFingerprint, Fault};

/// Waiting time after which a rank sends a wait notice to the ranks that it waits for.
pub(super) const WAIT_NOTICE_DELAY: Duration = Duration::from_millis(50);

impl RemoteChannels {
    /// Returns true if `rank` has begun operation `seq`; `None`: unknown.
    pub(crate) fn arrived(&self, rank: usize, seq: u64) -> Option<bool> {
        let begun = self.state.peers[rank].begun > seq;
        (begun || self.state.peers[rank].replied).then_some(begun)
    }

    /// Returns true if operation `seq` waits for data of `rank`, which is not known to have begun it.
    pub(crate) fn waits_for(&self, rank: usize, seq: u64) -> bool {
        self.state.waits_for(rank, seq)
    }

    /// Returns true if data of operation `seq` is being sent to `rank`, or the window of `rank` is full.
    pub(crate) fn has_pending_sends_to(&self, rank: usize, seq: u64) -> bool {
        self.state.open && self.state.seq == seq && self.state.pending_readers().any(|reader| reader == rank)
    }

    /// Sets the number that status queries about this rank pass to the process's responder.
    pub(crate) fn set_query_subject(&self, subject: u64) {
        if let Some(sideband) = &self.sideband {
            sideband.set_query_subject(subject);
        }
    }

    /// Returns the activity that a rank reported in its reply to the straggler query.
    pub(crate) fn activity(&self, rank: usize) -> &str {
        &self.state.peers[rank].activity
    }

    /// Ranks whose process did not reply to the straggler query although its host received it.
    pub(crate) fn unresponsive(&self) -> impl Iterator<Item = usize> {
        self.state.peers.iter().enumerate().filter(|(_, peer)| peer.unresponsive).map(|(rank, _)| rank)
    }

    /// Ranks whose hosts did not reply to the straggler query.
    pub(crate) fn silent_hosts(&self) -> Vec<usize> {
        (0..self.state.peers.len()).filter(|&rank| self.state.peers[rank].silent).collect()
    }

    pub(crate) fn fingerprint_of(&self, rank: usize, seq: u64) -> Option<CallFingerprint> {
        (self.state.peers[rank].begun == seq + 1).then(|| self.state.peers[rank].newest)
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
        // A rank that sent the abort reason may close its connection.
        let known = |peer: usize| self.state.peers[peer].left || self.state.peers[peer].abort.is_some();
        let broken = broken.into_iter().filter(|b| !known(b.peer));
        faults.extend(broken.map(|b| Fault::Lost { rank: b.peer, how: format!("is lost ({})", b.reason) }));
        faults
    }

    /// Ranks for which the active operation waits: for their data, their acknowledgements or their credits.
    pub(crate) fn pending_ranks(&self) -> Vec<usize> {
        let (mut ranks, readers) = self.state.pending_ranks();
        ranks.extend(readers);
        ranks.sort_unstable();
        ranks.dedup();
        ranks
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
        also.sort_by_key(|(since, _)| *since);
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
