//! Facts about the other ranks of a group: their progress, errors and deaths.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_base::Fault;
use smddp_process::activity_query::ActivityQuery;
use smddp_process::{last_error, status};
use smddp_tcp::status_query::StatusPeers;

use super::group::Group;
use super::local_queries::LocalQueries;
use super::probe_contacts::ProbeContacts;
use crate::channels::RemoteChannels;
use crate::facts::{AbortReport, CallMismatch, Facts, Liveness, QueryAnswer, RankFacts};

/// Observation of the other ranks of a group. All methods return at once.
pub struct Health<'a>(&'a mut Group);

/// Place of a rank.
enum Place<'a> {
    /// This node; with the rank's index on it.
    Local(usize),
    /// Another node; with the channels to it.
    Remote(&'a RemoteChannels),
}

impl Group {
    /// Returns the access to facts about the other ranks.
    pub fn health(&mut self) -> Health<'_> {
        Health(self)
    }

    /// Returns the place of a rank: on this node, or on another node.
    fn place_of(&self, rank: usize) -> Place<'_> {
        match (self.routes.local_index(rank), &self.remote) {
            (None, Some(remote)) => Place::Remote(&remote.net),
            (local, _) => Place::Local(local.unwrap_or(rank)),
        }
    }

    /// Returns ranks that are lost, have left or have aborted the group, and mismatched calls. Starts watching, at `now`, the ranks
    /// that this rank waits for.
    pub(crate) fn faults(&mut self, now: Instant) -> Vec<Fault> {
        let mut faults = self.local.faults();
        if let Some(remote) = &mut self.remote {
            faults.iter_mut().for_each(|fault| self.routes.fault_globally(fault));
            faults.extend(remote.net.faults(now));
        }
        faults
    }

    /// Returns true if `rank`, which aborted the group, had ended operation `seq` before.
    fn failed_after(&self, rank: usize, seq: u64) -> bool {
        match self.place_of(rank) {
            Place::Local(local) => self.local.arrived(local, seq + 1),
            Place::Remote(net) => net.aborted_after(rank, seq),
        }
    }
}

impl Health<'_> {
    /// Sets the number by which status queries refer to this rank.
    pub fn set_status_id(&self, status_id: u64) {
        if let Some(remote) = &self.0.remote {
            remote.net.set_status_id(status_id);
        }
    }

    /// Returns the ranks of other nodes, for status queries from any thread; `None` for a group of one node.
    #[must_use]
    pub fn status_peers(&self) -> Option<StatusPeers> {
        self.0.remote.as_ref()?.net.status_peers()
    }

    /// Updates `facts` for operation `seq`. Call it while this rank waits: it starts watching, at `now`, the ranks that this rank waits
    /// for, and sends wait notices that are due. Results of queries of ranks of this node are kept.
    pub fn observe(&mut self, now: Instant, seq: u64, facts: &mut Facts) {
        let faults = self.0.faults(now);
        let group = &*self.0;
        facts.seq = seq;
        facts.mismatches.clear();
        facts.ranks.resize_with(group.info().size, RankFacts::default);
        for (rank, facts) in facts.ranks.iter_mut().enumerate() {
            let RankFacts { answer, activity, unacknowledged, .. } = std::mem::take(facts);
            *facts = RankFacts { answer, activity, unacknowledged, ..RankFacts::default() };
            match group.place_of(rank) {
                Place::Local(local) => {
                    facts.is_local = true;
                    facts.fingerprint = group.local.fingerprint_of(local, seq);
                    let arrived = facts.fingerprint.is_some() || group.local.arrived(local, seq);
                    (facts.arrived, facts.missing) = (Some(arrived), !arrived);
                    facts.completed = group.local.completed(local, seq);
                }
                Place::Remote(net) => net.observe(rank, seq, facts),
            }
        }
        if let Some(remote) = &group.remote {
            remote.net.observe_operation(seq, &mut facts.ranks);
        }
        for (order, fault) in faults.into_iter().enumerate() {
            self.add(order, fault, facts);
        }
    }

    /// Adds a fault; `order`: its position among all faults.
    fn add(&self, order: usize, fault: Fault, facts: &mut Facts) {
        let seq = facts.seq;
        if let Fault::Mismatch { seq, mine, found } = fault {
            return facts.mismatches.push(CallMismatch { seq, mine, found });
        }
        let (Fault::Lost { rank, .. }
        | Fault::Unreachable { rank, .. }
        | Fault::Left { rank }
        | Fault::Aborted { rank, .. }
        | Fault::Corrupted { rank, .. }
        | Fault::Mismatch { found: smddp_base::Mismatch { rank, .. }, .. }) = fault;
        let Some(facts) = facts.ranks.get_mut(rank) else { return };
        let known = std::mem::take(&mut facts.liveness);
        facts.liveness = match (known, fault) {
            (known @ Liveness::Lost { .. }, _) => known,
            (_, Fault::Lost { how, .. }) => Liveness::Lost { order, reason: how },
            (known @ Liveness::Unreachable { .. }, _) => known,
            (_, Fault::Unreachable { reason, .. }) => Liveness::Unreachable { reason },
            (_, Fault::Left { .. }) => Liveness::Left,
            (known, Fault::Aborted { reason, .. }) => {
                let is_later = self.0.failed_after(rank, seq);
                facts.abort = Some(AbortReport { report: reason.into(), is_later });
                known
            }
            (known, Fault::Corrupted { detail, .. }) => {
                facts.corrupted = Some(detail.into());
                known
            }
            (known, Fault::Mismatch { .. }) => known,
        };
        if facts.liveness != Liveness::Alive && facts.last_error.is_none() {
            facts.last_error = self.last_error(rank);
        }
    }

    /// Returns the last error of the process of `rank` and its age; the text names the rank that had it. `None` if there was none,
    /// or if `rank` is on another node and has not sent its last message.
    #[must_use]
    pub fn last_error(&self, rank: usize) -> Option<(Duration, Arc<str>)> {
        let error = match self.0.place_of(rank) {
            _ if rank == self.0.info().rank => last_error::own(),
            Place::Local(local) => self.0.local.last_error(local),
            Place::Remote(net) => net.last_error(rank),
        };
        error.map(|(ago, text)| (ago, text.into()))
    }

    /// Watches ranks that this rank waits for outside of this group: detects their deaths from `now` on, if called repeatedly.
    pub fn watch(&mut self, ranks: &[usize], now: Instant) {
        let Some(remote) = &mut self.0.remote else { return };
        let remote_ranks = ranks.iter().filter(|&&rank| self.0.routes.local_index(rank).is_none());
        remote_ranks.for_each(|&rank| remote.net.watch(rank, now));
    }

    /// Starts a query of `ranks`: for ranks of other nodes, of their progress and activity; for ranks of this node, of
    /// their activity. Continue it with [`Self::poll_query`]. It replaces a query in progress. `status_id`: returns the number by
    /// which status queries refer to a rank.
    pub fn start_query(&mut self, ranks: &[usize], status_id: impl Fn(usize) -> u64, now: Instant) {
        let group = &mut *self.0;
        let (mut remote_ranks, mut queries) = (Vec::new(), Vec::new());
        for &rank in ranks.iter().filter(|&&rank| rank != group.routes.me) {
            match group.place_of(rank) {
                Place::Remote(_) => remote_ranks.push(rank),
                Place::Local(local) => {
                    if let Some(process) = group.local.process(local) {
                        let query = ActivityQuery::new(process, group.local.pid(local), status_id(rank), now);
                        queries.push((rank, query));
                    }
                }
            }
        }
        if let Some(remote) = &mut group.remote {
            remote.net.start_query(&remote_ranks);
        }
        group.local_queries = LocalQueries { queries, unfinished: true };
    }

    /// Ends a query in progress, and removes the results of the last query: they describe the ranks at its time.
    pub fn cancel_query(&mut self) {
        self.0.local_queries = LocalQueries::default();
        if let Some(remote) = &mut self.0.remote {
            remote.net.cancel_query();
        }
    }

    /// Continues the query and adds new results to `facts`; returns true once it is complete, or if there is none. It then
    /// also adds which processes of this node are stopped, and which ranks do not acknowledge data.
    pub fn poll_query(&mut self, now: Instant, facts: &mut Facts) -> bool {
        let group = &mut *self.0;
        facts.ranks.resize_with(group.routes.size(), RankFacts::default);
        group.local_queries.queries.retain_mut(|(rank, query)| {
            let Some(activity) = query.poll(now) else { return true };
            facts.ranks[*rank].activity = Some(activity.into());
            false
        });
        let mut finished = group.local_queries.queries.is_empty();
        if let Some(remote) = &mut group.remote {
            finished &= remote.net.poll_query(now);
        }
        if finished && std::mem::take(&mut group.local_queries.unfinished) {
            self.complete_query(facts);
        }
        facts.is_querying = !finished;
        finished
    }

    fn complete_query(&self, facts: &mut Facts) {
        let group = &*self.0;
        let seq = facts.seq;
        facts.ranks.iter_mut().for_each(|rank| rank.unacknowledged = None);
        for (rank, facts) in facts.ranks.iter_mut().enumerate() {
            match group.place_of(rank) {
                Place::Local(local) => {
                    let is_stopped = group.local.pid(local).is_some_and(status::is_stopped);
                    facts.answer = is_stopped.then_some(QueryAnswer::Stopped);
                }
                Place::Remote(net) => {
                    net.observe(rank, seq, facts);
                    let activity = net.activity(rank);
                    facts.activity = (!activity.is_empty()).then(|| activity.into());
                }
            }
        }
        if let Some(remote) = &group.remote {
            for (rank, payload) in remote.net.unacknowledged() {
                facts.ranks[rank].unacknowledged = Some(payload);
            }
        }
    }

    /// Returns the addresses for deadlock probes.
    #[must_use]
    pub fn probe_contacts(&self) -> ProbeContacts {
        ProbeContacts::of(self.0)
    }

    /// Returns the round-trip time to `rank` that the kernel of this process has measured; `None` without a measurement.
    #[must_use]
    pub fn round_trip(&self, rank: usize) -> Option<Duration> {
        self.0.remote.as_ref()?.net.round_trip(rank)
    }
}
