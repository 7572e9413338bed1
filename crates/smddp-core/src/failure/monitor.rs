//! Failure monitor. It evaluates observations of a group: dead ranks, departed ranks, mismatched calls and expired
//! deadlines. The result is the next action, or the error that ends the group.

use std::time::{Duration, Instant};

use smddp_plan::Collective;
use smddp_transport::{CallFingerprint, Facts, Liveness, Mismatch};

use super::limits::Limits;
use super::names::GroupNames;
use super::pending::{Pending, PendingCall};
use super::straggler_query::{QueryStep, StragglerQuery, Subject};
use super::{error_text, report};
use crate::call::{fingerprint, numbered};
use crate::error::Error;

/// Description of a rank that left the group.
const LEFT: &str = "left the group (destroyed it or exited) before this operation";
/// Name of the call by which a rank leaves, in error texts.
const LEAVING_CALL: &str = "destroy_process_group";

/// Result of an observation.
#[derive(Debug, PartialEq)]
pub(crate) enum Verdict {
    /// Nothing is wrong yet. Observe again at `until` at the latest.
    Wait { until: Option<Instant> },
    /// Query these ranks, and observe again.
    Query { ranks: Vec<usize> },
    /// Log this text (a rank is late), and observe again.
    Log(String),
    /// End these sends and recvs, which have not begun, with their errors. The group continues.
    EndMessages(Vec<(u64, Error)>),
    /// End only the call by which this rank leaves. `report`: report for the other ranks, if they need one.
    EndLeaveCall { reason: String, report: Option<String> },
    /// End the group.
    Fail(Box<Failure>),
}

/// End of the group.
#[derive(Debug, PartialEq)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// Report of another rank, to be forwarded unchanged.
    pub(crate) report: Option<String>,
    /// Last error of the process whose death ends the group.
    pub(crate) last_error: Option<String>,
}

impl Failure {
    fn verdict(error: Error) -> Verdict {
        Verdict::Fail(Box::new(Self { error, report: None, last_error: None }))
    }
}

/// State between two observations.
#[derive(Debug)]
enum State {
    Watching,
    /// A transport or a device reported an error of a peer. A fault may still explain it.
    Explaining,
    /// A rank left before the operation `what`. A message that it sent before, or a report of another rank, may
    /// still arrive. `call`: sequence number of the operation; `None` for a message.
    Draining {
        rank: usize,
        what: String,
        call: Option<u64>,
        since: Instant,
    },
    /// A deadline has passed, and ranks are queried.
    Querying(StragglerQuery),
}

/// Evaluates observations of one group. Reads no clock and performs no I/O.
pub(crate) struct FailureMonitor {
    names: GroupNames,
    limits: Limits,
    state: State,
    /// Error of a transport or a device because of a peer, and the time until which another cause takes precedence.
    transport_error: Option<(Error, Instant)>,
    /// Sequence number of the active operation, if a rank ended it before it aborted the group, and the time of discovery.
    trailing_since: Option<(u64, Instant)>,
    /// A departed rank that had not yet received this rank's data, the sequence number of that operation, and the
    /// time of discovery.
    undelivered_since: Option<(usize, u64, Instant)>,
    /// Sequence number of the last call whose late ranks were logged.
    logged_late: Option<u64>,
}

/// Report or departure of a rank.
enum Notice<'a> {
    Aborted(usize, &'a str, bool),
    Left(usize),
}

impl FailureMonitor {
    pub(crate) fn new(names: GroupNames, limits: Limits) -> Self {
        Self {
            names,
            limits,
            state: State::Watching,
            transport_error: None,
            trailing_since: None,
            undelivered_since: None,
            logged_late: None,
        }
    }

    /// Returns true while the cause of a transport error is unknown: the failed call must not continue.
    pub(crate) fn holds_calls(&self) -> bool {
        self.transport_error.is_some()
    }

    /// Returns true while ranks are queried.
    pub(crate) fn is_querying(&self) -> bool {
        matches!(self.state, State::Querying(_))
    }

    /// Returns the departed rank whose last messages the monitor waits for.
    pub(crate) fn draining_rank(&self) -> Option<usize> {
        match self.state {
            State::Draining { rank, .. } => Some(rank),
            _ => None,
        }
    }

    /// Records an error of a transport or a device because of a peer. `explained`: any other cause is known already.
    /// Otherwise the monitor waits for a death report.
    pub(crate) fn transport_failed(&mut self, now: Instant, error: Error, explained: bool) {
        let limit = if explained { Duration::ZERO } else { self.limits.death_report };
        self.transport_error.get_or_insert((error, now + limit));
        if !matches!(self.state, State::Draining { .. }) {
            self.state = State::Explaining;
        }
    }

    /// Evaluates one observation. Call it when blocked, every 50 ms while data moves, and when [`Self::next_check`] is
    /// due.
    pub(crate) fn observe(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Verdict {
        if let Some(verdict) = self.drain(now, facts, pending) {
            return verdict;
        }
        let explains = matches!(self.state, State::Explaining);
        let verdict = self
            .compare_calls(now, facts, pending)
            .or_else(|| {
                // Continuous message traffic must not keep a collective waiting for a dead rank.
                let due = !pending.moving || pending.call.is_some() && !pending.advanced;
                (due || explains).then(|| self.evaluate_faults(now, facts, pending, pending.moving && !explains))?
            })
            .or_else(|| self.explain(now))
            .or_else(|| self.log_late(now, facts, pending))
            .or_else(|| self.expire_call(now, facts, pending))
            .or_else(|| self.expire_on_device(now, pending))
            .or_else(|| self.check_departed(now, facts, pending))
            .or_else(|| self.expire_messages(now, facts, pending));
        verdict.unwrap_or_else(|| Verdict::Wait { until: self.next_check(now, pending) })
    }

    /// Returns the time of the next observation after `now`, if one is due without an event.
    pub(crate) fn next_check(&self, now: Instant, pending: &Pending) -> Option<Instant> {
        let limits = &self.limits;
        let soon = match &self.state {
            State::Watching => None,
            State::Explaining | State::Draining { .. } => Some(now + limits.poll),
            State::Querying(_) => Some(now + limits.query_poll),
        };
        let call = pending.call.as_ref();
        let logs = call.filter(|call| self.logged_late != Some(call.seq));
        let late_log = logs.and_then(|call| call.since.checked_add(limits.late_log));
        let trailing = self.trailing_since.map(|(_, since)| since + limits.abort_report);
        let undelivered = self.undelivered_since.map(|(.., since)| since + limits.departure_grace);
        let deadlines = pending.on_device.iter().chain(call).filter_map(PendingCall::deadline);
        let all = [soon, late_log, trailing, undelivered, pending.messages.deadline];
        all.into_iter().flatten().chain(deadlines).filter(|&due| due > now).min()
    }

    /// Compares the active call with the calls of the other ranks. In mismatched calls, all ranks may only send. Then no
    /// rank compares received fingerprints.
    fn compare_calls(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Option<Verdict> {
        let call = pending.call.filter(|call| call.begun)?;
        let mine = call.fingerprint;
        let found = facts.ranks.iter().enumerate().find_map(|(rank, facts)| {
            let theirs = facts.fingerprint.filter(|&theirs| rank != self.names.me && theirs != mine)?;
            Some(Mismatch { rank, theirs, bytes: None })
        })?;
        self.differ(now, (call.seq, mine, found), facts, pending)
    }

    /// Reports that this rank's call `seq` with fingerprint `mine` differs from another rank's. Mismatched calls end
    /// the group, unless one of the ranks is leaving and the other one reports that.
    pub(crate) fn fingerprints_differ(
        &mut self,
        now: Instant,
        call: (u64, CallFingerprint, Mismatch),
        facts: &Facts,
        pending: &Pending,
    ) -> Verdict {
        let verdict = self.drain(now, facts, pending).or_else(|| self.differ(now, call, facts, pending));
        verdict.unwrap_or_else(|| Verdict::Wait { until: self.next_check(now, pending) })
    }

    fn differ(
        &mut self,
        now: Instant,
        (seq, mine, found): (u64, CallFingerprint, Mismatch),
        facts: &Facts,
        pending: &Pending,
    ) -> Option<Verdict> {
        let collective = fingerprint::collective(mine).unwrap_or(Collective::Barrier);
        let (leaving, peer_leaving) = (fingerprint::is_leaving(mine), fingerprint::is_leaving(found.theirs));
        if peer_leaving
            && !leaving
            && !collective.has_root()
            && pending.call.is_some_and(|call| call.seq == seq)
        {
            return Some(self.begin_drain(now, numbered(collective, seq), found.rank, facts, pending));
        }
        // A collective without a root fails on the other rank. A rooted one may have completed without this rank.
        if leaving
            && !peer_leaving
            && fingerprint::collective(found.theirs).is_some_and(|theirs| !theirs.has_root())
        {
            // If a message of this rank was not received, the other rank reports that. The caller's time limit ends
            // the wait for the report.
            return pending.messages.unconfirmed.is_empty().then(|| {
                let (peer, call) = (self.names.describe(found.rank), fingerprint::call(found.theirs));
                Verdict::EndLeaveCall { reason: format!("{peer} waits in {call}"), report: None }
            });
        }
        Some(Failure::verdict(error_text::mismatch(&self.names, collective, seq, mine, found)))
    }

    /// Turns faults into the verdict that ends the group, causes before consequences. `moving`: messages still
    /// arrive, perhaps from ranks that have left.
    fn evaluate_faults(&mut self, now: Instant, facts: &Facts, pending: &Pending, moving: bool) -> Option<Verdict> {
        for mismatch in &facts.mismatches {
            let call = (mismatch.seq, mismatch.mine, mismatch.found);
            if let Some(verdict) = self.differ(now, call, facts, pending) {
                return Some(verdict);
            }
        }
        if !facts.has_faults() {
            return None;
        }
        if pending.is_leaving() {
            return self.evaluate_leaving(facts, pending);
        }
        let what = pending.oldest();
        // Deaths come first: they are the cause, and the reports of other ranks are the consequence.
        let lost = facts.lost();
        if let Some(&(rank, reason)) = lost.first() {
            let others: Vec<usize> = lost[1..].iter().map(|&(other, _)| other).collect();
            let how = error_text::with_others(&self.names, reason, &others);
            return Some(self.lost(what, rank, &how, facts));
        }
        // Unreachable ranks come before reports: the problem of this process may have caused a report of another rank.
        if let Some((rank, reason)) = unreachable(facts) {
            return Some(Failure::verdict(error_text::unreachable(&self.names, &what, rank, reason)));
        }
        for notice in notices(facts) {
            match notice {
                Notice::Aborted(_, _, is_later) if is_later && self.may_complete(now, pending) => {}
                Notice::Aborted(rank, report, _) => {
                    let cause = self.unreceived_of_lost(&what, report, facts, pending);
                    return Some(cause.unwrap_or_else(|| self.forward(what, rank, report)));
                }
                Notice::Left(rank) => {
                    let needed = pending.call.is_some() && facts.ranks[rank].missing;
                    let message = || !moving && pending.with(rank).is_some_and(|messages| messages.needed);
                    if needed || self.abandoned_data(now, rank, facts, pending) || message() {
                        return Some(self.needed_rank_left(now, what, rank, facts, pending));
                    }
                }
            }
        }
        None
    }

    /// Evaluates faults while this rank leaves. A lost rank ends the shutdown comparison without an error; only
    /// mismatched calls are an error.
    fn evaluate_leaving(&mut self, facts: &Facts, pending: &Pending) -> Option<Verdict> {
        let end = |rank: usize, report: Option<String>| {
            let reason = format!("{} has left or is lost", self.names.describe(rank));
            Verdict::EndLeaveCall { reason, report }
        };
        let lost = facts.lost();
        let lost = |local: bool| lost.iter().find(move |(rank, _)| facts.ranks[*rank].is_local == local);
        // Other ranks may wait for this rank's part in the shutdown comparison without monitoring the lost one.
        let end_lost = |&(rank, reason): &(usize, &str)| {
            let error = error_text::lost(&self.names, LEAVING_CALL.to_owned(), rank, reason);
            end(rank, Some(report::own(self.names.me, &error)))
        };
        let mut is_local = true;
        for notice in notices(facts) {
            let (Notice::Aborted(rank, ..) | Notice::Left(rank)) = notice;
            if is_local && !facts.ranks[rank].is_local {
                is_local = false;
                if let Some(lost) = lost(true) {
                    return Some(end_lost(lost));
                }
            }
            let report = match notice {
                Notice::Aborted(rank, report, _) if report::is_mismatch(report) => {
                    return Some(self.forward(LEAVING_CALL.to_owned(), rank, report));
                }
                Notice::Left(rank) if !facts.ranks[rank].missing => continue,
                Notice::Aborted(_, report, _) => report,
                Notice::Left(_) => "",
            };
            if self.awaits_receivers(rank, facts, pending) {
                continue;
            }
            let unreceived = self.unreceived_of_lost(LEAVING_CALL, report, facts, pending);
            return Some(unreceived.unwrap_or_else(|| end(rank, None)));
        }
        if let Some(lost) = lost(true).or_else(|| lost(false)) {
            return Some(end_lost(lost));
        }
        let (rank, reason) = unreachable(facts)?;
        let reason = format!("{} is unreachable: {reason}", self.names.describe(rank));
        Some(Verdict::EndLeaveCall { reason, report: None })
    }

    /// Returns true if rank `rank` reports the departure of this rank while a receiver of this rank's messages may
    /// still report an unreceived one.
    fn awaits_receivers(&self, rank: usize, facts: &Facts, pending: &Pending) -> bool {
        let report = facts.ranks[rank].abort.as_ref();
        let reports_me = report.is_some_and(|abort| report::lost_rank(&abort.report) == Some(self.names.me));
        let answered = |&to: &usize| {
            let to_facts = &facts.ranks[to];
            let has_ended = matches!(to_facts.liveness, Liveness::Left | Liveness::Lost { .. });
            departs(to, facts) || has_ended || to_facts.abort.is_some()
        };
        reports_me && !pending.messages.unconfirmed.iter().all(answered)
    }

    /// Returns true if the active collective may still complete although a rank aborted the group in a later one. Data
    /// of that rank may be in flight. Returns true for at most `Limits::abort_report`.
    fn may_complete(&mut self, now: Instant, pending: &Pending) -> bool {
        let Some(seq) = pending.call.map(|call| call.seq) else { return false };
        match self.trailing_since {
            Some((when, since)) if when == seq => now.duration_since(since) < self.limits.abort_report,
            _ => {
                self.trailing_since = Some((seq, now));
                true
            }
        }
    }

    /// Returns true if a rank left without receiving this rank's data of the active operation. Its final
    /// acknowledgement may still be in flight, so this waits for `Limits::departure_grace`.
    fn abandoned_data(&mut self, now: Instant, rank: usize, facts: &Facts, pending: &Pending) -> bool {
        let Some(seq) = pending.call.map(|call| call.seq).filter(|_| facts.ranks[rank].undelivered) else {
            return false;
        };
        match self.undelivered_since {
            Some((peer, when, since)) if (peer, when) == (rank, seq) => {
                now.duration_since(since) >= self.limits.departure_grace
            }
            // The first rank with undelivered data ends the group.
            Some((_, when, _)) if when == seq => false,
            _ => {
                self.undelivered_since = Some((rank, seq, now));
                false
            }
        }
    }

    /// Evaluates the departure of a rank that the pending operation `what` needs.
    fn needed_rank_left(
        &mut self,
        now: Instant,
        what: String,
        rank: usize,
        facts: &Facts,
        pending: &Pending,
    ) -> Verdict {
        match pending.with(rank).and_then(|messages| messages.wrong_tag.clone()) {
            Some(error) => Failure::verdict(error),
            None => self.begin_drain(now, what, rank, facts, pending),
        }
    }

    /// Waits for messages of a rank that left before operation `what`. The departed rank may have sent a message instead,
    /// to this rank or to another one.
    fn begin_drain(
        &mut self,
        now: Instant,
        what: String,
        rank: usize,
        facts: &Facts,
        pending: &Pending,
    ) -> Verdict {
        let call = pending.call.map(|call| call.seq);
        self.state = State::Draining { rank, what, call, since: now };
        let verdict = self.drain(now, facts, pending);
        verdict.unwrap_or_else(|| Verdict::Wait { until: self.next_check(now, pending) })
    }

    /// Continues the wait for messages of a departed rank. Returns `None` without such a wait, or if the operation has
    /// ended.
    fn drain(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Option<Verdict> {
        let State::Draining { rank, ref what, call, since } = self.state else { return None };
        let needed = || pending.with(rank).is_some_and(|messages| messages.needed);
        let is_pending = match call {
            Some(_) => pending.call.map(|call| call.seq) == call,
            None => !pending.on_device.is_empty() || needed(),
        };
        if !is_pending {
            self.state = if self.transport_error.is_some() { State::Explaining } else { State::Watching };
            return None;
        }
        if let Some(verdict) = self.unreceived(what, rank, pending) {
            return Some(verdict);
        }
        let mismatch = facts.ranks.iter().enumerate().find_map(|(from, facts)| {
            let report = &facts.abort.as_ref()?.report;
            report::is_mismatch(report).then_some((from, report))
        });
        if let Some((from, report)) = mismatch {
            return Some(self.forward(what.clone(), from, report));
        }
        let is_drained = facts.ranks[rank].is_local || facts.ranks[rank].messages_announced;
        let limit = match facts.ranks.len() {
            2 if is_drained => Duration::ZERO,
            _ if is_drained => self.limits.abort_report,
            _ => self.limits.departure_grace,
        };
        if now.duration_since(since) < limit {
            let until = (now + self.limits.poll).min(since + limit);
            return Some(Verdict::Wait { until: Some(until) });
        }
        Some(self.lost(what.clone(), rank, LEFT, facts))
    }

    /// Ends the group with the transport error if no other cause was found in time.
    fn explain(&mut self, now: Instant) -> Option<Verdict> {
        let (error, until) = self.transport_error.as_ref()?;
        Some(match now >= *until {
            true => Failure::verdict(error.clone()),
            false => Verdict::Wait { until: Some((now + self.limits.poll).min(*until)) },
        })
    }

    fn log_late(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Option<Verdict> {
        let call = pending.call.as_ref()?;
        let waited = now.duration_since(call.since);
        if waited < self.limits.late_log || self.logged_late == Some(call.seq) {
            return None;
        }
        self.logged_late = Some(call.seq);
        error_text::late(&self.names, facts, call, waited).map(Verdict::Log)
    }

    /// Queries the ranks after the deadline of the active collective, then ends the group.
    fn expire_call(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Option<Verdict> {
        let Some(call) = pending.call.filter(|call| call.is_expired(now)) else {
            if matches!(&self.state, State::Querying(StragglerQuery { subject: Subject::Call(_), .. })) {
                self.state = State::Watching;
            }
            return None;
        };
        let step = match &mut self.state {
            State::Querying(query) if query.subject == Subject::Call(call.seq) => {
                query.advance(now, &self.limits, self.names.me, facts)
            }
            _ => {
                let (query, step) = StragglerQuery::of_call(self.names.me, &call, now, &self.limits, facts);
                self.state = State::Querying(query);
                step
            }
        };
        if let Some(verdict) = self.query_verdict(step) {
            return Some(verdict);
        }
        // Another rank may have found the cause during the query, which takes time.
        let cause = self.evaluate_faults(now, facts, pending, false);
        Some(cause.unwrap_or_else(|| Failure::verdict(error_text::timeout(&self.names, facts, &call))))
    }

    /// Returns the verdict of a step, and `None` once the query is complete.
    fn query_verdict(&mut self, step: QueryStep) -> Option<Verdict> {
        match step {
            QueryStep::Ask(ranks) => Some(Verdict::Query { ranks }),
            QueryStep::Wait(until) => Some(Verdict::Wait { until: Some(until) }),
            QueryStep::Complete => {
                self.state = State::Watching;
                None
            }
        }
    }

    fn expire_on_device(&self, now: Instant, pending: &Pending) -> Option<Verdict> {
        let call = pending.on_device.iter().find(|call| call.is_expired(now))?;
        Some(Failure::verdict(error_text::device_timeout(&self.names, call)))
    }

    /// Evaluates receives from ranks that have left. Within a node all messages of a rank are visible before its
    /// departure. Between nodes messages use another connection, which ends with a marker.
    fn check_departed(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Option<Verdict> {
        if pending.call.is_some() {
            return None;
        }
        let mut departed = pending.messages.departed.iter();
        let rank = departed.find(|messages| messages.awaited && departs(messages.rank, facts))?.rank;
        let what = pending.messages.oldest.clone().unwrap_or_else(|| "recv".to_owned());
        Some(self.needed_rank_left(now, what, rank, facts, pending))
    }

    /// Queries the peers of messages past their deadline, then ends these messages. A message that has not begun ends
    /// alone; an interrupted transfer ends the group.
    fn expire_messages(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Option<Verdict> {
        let expired = &pending.messages.expired;
        let is_querying =
            matches!(&self.state, State::Querying(StragglerQuery { subject: Subject::Messages, .. }));
        if expired.is_empty() {
            if is_querying {
                self.state = State::Watching;
            }
            return None;
        }
        let step = match &mut self.state {
            State::Querying(query) if is_querying => query.advance(now, &self.limits, self.names.me, facts),
            _ => {
                let mut peers: Vec<usize> = expired.iter().filter_map(|message| message.peer).collect();
                peers.sort_unstable();
                peers.dedup();
                let (query, step) = StragglerQuery::of_messages(peers, now, &self.limits);
                self.state = State::Querying(query);
                step
            }
        };
        if let Some(verdict) = self.query_verdict(step) {
            return Some(verdict);
        }
        // Another rank may have found the cause during the query, which takes time.
        if let Some(verdict) = self.evaluate_faults(now, facts, pending, false) {
            return Some(verdict);
        }
        let error = |message| error_text::expired(&self.names, facts, message);
        if let Some(begun) = expired.iter().find(|message| message.begun) {
            return Some(Failure::verdict(error(begun)));
        }
        Some(Verdict::EndMessages(expired.iter().map(|message| (message.number, error(message))).collect()))
    }

    /// Returns the error of the call `what` for a message of departed rank `rank` that this rank did not receive.
    fn unreceived(&self, what: &str, rank: usize, pending: &Pending) -> Option<Verdict> {
        let description = pending.with(rank)?.unexpected.as_ref()?;
        let peer = self.names.describe(rank);
        let detail =
            format!("{peer} {LEFT}; its last message to this rank has no matching recv: it {description}");
        let group = self.names.group();
        Some(Failure::verdict(Error::Mismatch { what: what.to_owned(), group, rank, detail }))
    }

    /// Returns the error of [`Self::unreceived`] if another rank reported the departure first.
    fn unreceived_of_lost(
        &self,
        what: &str,
        report: &str,
        facts: &Facts,
        pending: &Pending,
    ) -> Option<Verdict> {
        let rank =
            report::lost_rank(report).filter(|&rank| rank != self.names.me && rank < facts.ranks.len())?;
        departs(rank, facts).then(|| self.unreceived(what, rank, pending)).flatten()
    }

    /// Ends the group with the report of another rank as an error of operation `what`.
    fn forward(&self, what: String, from: usize, report: &str) -> Verdict {
        let error = report::to_error(&self.names, what, from, report);
        Verdict::Fail(Box::new(Failure { error, report: Some(report.to_owned()), last_error: None }))
    }

    /// Ends the group because operation `what` needs rank `rank`, which is lost or has left.
    fn lost(&self, what: String, rank: usize, how: &str, facts: &Facts) -> Verdict {
        let last_error = facts.ranks[rank].last_error.as_ref();
        let how = format!("{how}{}", error_text::last_error(last_error));
        let error = error_text::lost(&self.names, what, rank, &how);
        let last_error = last_error.map(|(_, text)| text.to_string());
        Verdict::Fail(Box::new(Failure { error, report: None, last_error }))
    }
}

/// Returns true if rank `rank` is known to send no more messages: it leaves in the observed operation.
pub(crate) fn departs(rank: usize, facts: &Facts) -> bool {
    let facts = &facts.ranks[rank];
    facts.is_local && facts.fingerprint.is_some_and(fingerprint::is_leaving) || facts.messages_announced
}

/// Returns the first unreachable rank, ranks of this node first.
fn unreachable(facts: &Facts) -> Option<(usize, &str)> {
    let mut found = facts.ranks.iter().enumerate().filter_map(|(rank, facts)| match &facts.liveness {
        Liveness::Unreachable { reason } => Some((!facts.is_local, rank, reason.as_str())),
        _ => None,
    });
    let first = found.next()?;
    let (_, rank, reason) = found.fold(first, std::cmp::min);
    Some((rank, reason))
}

/// Returns the reports and departures: ranks of this node, then reports and then departures of ranks of other nodes.
fn notices(facts: &Facts) -> Vec<Notice<'_>> {
    let (mut local, mut reports, mut departures) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, facts) in facts.ranks.iter().enumerate() {
        if let Some(abort) = &facts.abort {
            let of = if facts.is_local { &mut local } else { &mut reports };
            of.push(Notice::Aborted(rank, &abort.report, abort.is_later));
        }
        if facts.liveness == Liveness::Left {
            let of = if facts.is_local { &mut local } else { &mut departures };
            of.push(Notice::Left(rank));
        }
    }
    local.into_iter().chain(reports).chain(departures).collect()
}
