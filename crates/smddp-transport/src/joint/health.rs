//! Facts about the other ranks of a group: their progress, errors and deaths.

use std::time::{Duration, Instant};

use super::group::Group;
use crate::net::channels::RemoteChannels;
use crate::process::{last_error, status};
use crate::{CallFingerprint, Fault};

/// Description of a rank of another node whose process does not run.
const MUTE: &str = "does not answer, though its host does: its process is stopped, or has no time";

impl Group {
    /// Returns the node index of a rank of this node, or the remote channels for a rank of another node.
    pub(super) fn path_to(&self, rank: usize) -> Result<usize, &RemoteChannels> {
        match (self.routes.local_index(rank), &self.remote) {
            (None, Some(remote)) => Err(&remote.net),
            (local, _) => Ok(local.unwrap_or(rank)),
        }
    }

    /// Returns true if `rank` has begun operation `seq` or a later one; `None` if that is unknown.
    pub fn arrived(&self, rank: usize, seq: u64) -> Option<bool> {
        self.path_to(rank)
            .map_or_else(|net| net.arrived(rank, seq), |local| Some(self.local.arrived(local, seq)))
    }

    /// Returns true if operation `seq` cannot end here without `rank`, and `rank` is not known to have begun it.
    pub fn waits_for(&self, rank: usize, seq: u64) -> bool {
        self.path_to(rank)
            .map_or_else(|net| net.waits_for(rank, seq), |local| !self.local.arrived(local, seq))
    }

    /// Returns true if operation `seq` cannot end here before `rank`, of another node, has accepted this rank's data.
    pub fn has_unfinished_sends(&self, rank: usize, seq: u64) -> bool {
        self.path_to(rank).err().is_some_and(|net| net.has_pending_sends_to(rank, seq))
    }

    /// Returns the ranks of other nodes that the operation in progress waits for: for their data, or until they accept data.
    pub fn missing_peers(&self) -> Vec<usize> {
        self.remote.as_ref().map_or_else(Vec::new, |remote| remote.net.pending_ranks())
    }

    /// Returns the fingerprint of operation `seq` at `rank`, if that is among the operations that `rank` has begun most recently.
    pub fn fingerprint_of(&self, rank: usize, seq: u64) -> Option<CallFingerprint> {
        self.path_to(rank)
            .map_or_else(|net| net.fingerprint_of(rank, seq), |local| self.local.fingerprint_of(local, seq))
    }

    /// Queries after an expired deadline which ranks have begun the operation, if that is unknown. Takes a few seconds at most, and
    /// ends early once another rank aborts the group.
    pub fn straggler_query(&mut self) {
        let Some(remote) = &mut self.remote else { return };
        let (local, routes) = (&self.local, &self.routes);
        let node_indices = || (0..routes.size()).filter_map(|rank| routes.local_index(rank));
        remote.net.query_stragglers(&routes.remote_ranks(), |seq| {
            node_indices().any(|index| !local.arrived(index, seq))
        });
    }

    /// Queries only `ranks`, when this rank waits for something else than an operation.
    pub fn straggler_query_of(&mut self, ranks: &[usize]) {
        let Some(remote) = &mut self.remote else { return };
        let peers: Vec<usize> =
            ranks.iter().copied().filter(|&rank| self.routes.local_index(rank).is_none()).collect();
        remote.net.query_ranks(&peers);
    }

    /// Sets the number by which status queries refer to this rank.
    pub fn set_status_id(&self, about: u64) {
        if let Some(remote) = &self.remote {
            remote.net.set_query_subject(about);
        }
    }

    /// Returns the activity that `rank` reports: queried now for a rank of this node, else from the last straggler query. Empty if it
    /// reported none. `about`: number for status queries about it. May take a second.
    pub fn activity(&self, rank: usize, about: u64) -> String {
        match self.path_to(rank) {
            Err(net) => net.activity(rank).to_owned(),
            Ok(local) => {
                let process = self.local.process(local);
                process.map_or_else(String::new, |one| status::activity(one, self.local.pid(local), about))
            }
        }
    }

    /// Returns the last error of the process of `rank` and its age; the text names the rank that had it. `None` if there was none,
    /// or if `rank` is on another node and has not sent its last message.
    pub fn last_error(&self, rank: usize) -> Option<(Duration, String)> {
        if rank == self.info().rank {
            return last_error::own();
        }
        self.path_to(rank).map_or_else(|net| net.last_error(rank), |local| self.local.last_error(local))
    }

    /// Returns the ranks whose processes do not run although their hosts do, with a description. For ranks of other nodes it is the
    /// result of the last straggler query.
    pub fn stalled(&self) -> Vec<(usize, &'static str)> {
        let local = (0..self.routes.size()).filter(|&rank| {
            let pid = self.routes.local_index(rank).and_then(|local| self.local.pid(local));
            pid.is_some_and(status::is_stopped)
        });
        let remote = self.remote.iter().flat_map(|remote| remote.net.unresponsive());
        local.map(|rank| (rank, status::STOPPED)).chain(remote.map(|rank| (rank, MUTE))).collect()
    }

    /// Returns the ranks of other nodes whose hosts did not reply to the last straggler query.
    pub fn silent(&self) -> Vec<usize> {
        self.remote.as_ref().map_or_else(Vec::new, |remote| remote.net.silent_hosts())
    }

    /// Returns ranks that are lost, have left or have aborted the group, and mismatched calls. Call it while this rank waits: it starts
    /// watching, at `now`, the ranks that this rank waits for.
    pub fn faults(&mut self, now: Instant) -> Vec<Fault> {
        let mut faults = self.local.faults();
        if let Some(remote) = &mut self.remote {
            faults.iter_mut().for_each(|fault| self.routes.fault_globally(fault));
            faults.extend(remote.net.faults(now));
        }
        faults
    }

    /// Returns true if `rank`, which aborted the group, had ended operation `seq` before.
    pub fn failed_after(&self, rank: usize, seq: u64) -> bool {
        self.path_to(rank)
            .map_or_else(|net| net.aborted_after(rank, seq), |local| self.local.arrived(local, seq + 1))
    }

    /// Watches ranks that this rank waits for outside of this group: detects their deaths from `now` on, if called repeatedly.
    pub fn watch(&mut self, ranks: &[usize], now: Instant) {
        let Some(remote) = &mut self.remote else { return };
        let remote_ranks = ranks.iter().filter(|&&rank| self.routes.local_index(rank).is_none());
        remote_ranks.for_each(|&rank| remote.net.watch(rank, now));
    }

    /// Returns the ranks of other nodes that do not acknowledge data, with the largest packet payload to them in bytes.
    pub fn unacknowledged(&self) -> Vec<(usize, u32)> {
        self.remote.as_ref().map_or_else(Vec::new, |remote| remote.net.unacknowledged())
    }

    /// Returns the round-trip time to `rank` that the kernel of this process has measured; `None` without a measurement.
    pub fn round_trip(&self, rank: usize) -> Option<Duration> {
        self.remote.as_ref()?.net.round_trip(rank)
    }
}
