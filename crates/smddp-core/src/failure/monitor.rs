//! Failure monitor. It evaluates observations of a group: dead ranks, departed ranks, mismatched calls and expired
//! deadlines. The result is the next action, or the error that ends the group.

mod deadlines;
mod departure;
mod faults;
mod warnings;

use std::time::{Duration, Instant};

use smddp_base::{CallFingerprint, Mismatch};
use smddp_group::Facts;
use smddp_plan::Collective;

use super::limits::Limits;
use super::names::GroupNames;
use super::pending::{Pending, PendingCall};
use super::straggler_query::StragglerQuery;
use super::{error_text, report};
use crate::call::{fingerprint, numbered};
use crate::error::Error;
/// Result of an observation.
#[derive(Debug, PartialEq)]
pub(crate) enum Verdict {
    /// Nothing is wrong yet. Observe again at `until` at the latest.
    Wait { until: Option<Instant> },
    /// Query these ranks, and observe again.
    Query { ranks: Vec<usize> },
    /// Log this text (a rank is late), and observe again.
    Log(String),
    /// Report with this text that a call waits for a long time, end the query, and observe again. `quiet`: another rank
    /// warns.
    Warn { text: String, quiet: bool },
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
    /// A rank left before `operation`. A message that it sent before, or a report of another rank, may
    /// still arrive. `call`: sequence number of the operation; `None` for a message.
    Draining {
        rank: usize,
        operation: String,
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
    /// Sequence number of the active operation, if a rank ended it before it aborted the group, and the time
    /// of discovery.
    trailing_since: Option<(u64, Instant)>,
    /// A departed rank that had not yet received this rank's data, the sequence number of that operation, and the
    /// time of discovery.
    undelivered_since: Option<(usize, u64, Instant)>,
    /// Sequence number of the last call whose late ranks were logged.
    logged_late: Option<u64>,
    /// Sequence number of the active collective, and the last time at which it was new or advanced.
    still_since: Option<(u64, Instant)>,
    /// The same of the send or recv in which a thread waits: its number and its transferred bytes.
    still_message: Option<(u64, usize, Instant)>,
    /// Time of the last warning, or of the last query for one.
    warned_at: Option<Instant>,
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
            still_since: None,
            still_message: None,
            warned_at: None,
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
        self.note_progress(now, pending);
        if let Some(verdict) = self.drain(now, facts, pending) {
            return verdict;
        }
        let explains = matches!(self.state, State::Explaining);
        let verdict = self
            .compare_calls(now, facts, pending)
            .or_else(|| {
                // Continuous message traffic must not keep a collective waiting for a dead rank.
                let due = !pending.moving || pending.call.is_some() && !pending.advanced;
                (due || explains)
                    .then(|| self.evaluate_faults(now, facts, pending, pending.moving && !explains))?
            })
            .or_else(|| self.explain(now))
            .or_else(|| self.log_late(now, facts, pending))
            .or_else(|| self.expire_call(now, facts, pending))
            .or_else(|| self.expire_on_device(now, pending))
            .or_else(|| self.check_departed(now, facts, pending))
            .or_else(|| self.expire_messages(now, facts, pending))
            .or_else(|| self.warn_late(now, facts, pending))
            .or_else(|| self.warn_late_message(now, facts, pending));
        verdict.unwrap_or_else(|| Verdict::Wait { until: self.next_check(now, pending) })
    }

    /// Returns the time of the next observation after `now`, if one is due without an event.
    pub(crate) fn next_check(&self, now: Instant, pending: &Pending) -> Option<Instant> {
        let limits = &self.limits;
        let soon = match &self.state {
            State::Watching => None,
            State::Explaining | State::Draining { .. } => Some(now + limits.poll),
            State::Querying(query) => Some(query.next_poll(now, limits)),
        };
        let call = pending.call.as_ref();
        let logs = call.filter(|call| self.logged_late != Some(call.seq));
        let late_log = logs.and_then(|call| call.since.checked_add(limits.late_log));
        let warning = call.and_then(|call| self.next_warning(call.seq));
        let message_warning = pending.messages.waited.as_ref().and_then(|_| self.next_message_warning());
        let trailing = self.trailing_since.map(|(_, since)| since + limits.abort_report);
        let undelivered = self.undelivered_since.map(|(.., since)| since + limits.departure_grace);
        let deadlines = pending.on_device.iter().chain(call).filter_map(PendingCall::deadline);
        let warnings = [warning, message_warning];
        let all = [soon, late_log, trailing, undelivered, pending.messages.deadline];
        all.into_iter().chain(warnings).flatten().chain(deadlines).filter(|&due| due > now).min()
    }

    /// Returns true if no earlier observation affects the next one while `call` is the active collective.
    #[cfg(any(test, feature = "record"))]
    pub(crate) fn is_at_rest(&self, call: Option<u64>) -> bool {
        matches!(self.state, State::Watching)
            && self.transport_error.is_none()
            && self.trailing_since.is_none()
            && self.undelivered_since.is_none()
            && (self.logged_late.is_none() || self.logged_late != call)
    }

    /// Returns the state between two observations as text.
    #[cfg(any(test, feature = "record"))]
    pub(crate) fn state_text(&self) -> String {
        let (error, late) = (&self.transport_error, self.logged_late);
        format!("{:?}", (&self.state, error, self.trailing_since, self.undelivered_since, late))
    }

    /// Compares the active call with the calls of the other ranks. In mismatched calls, all ranks may only send. Then
    /// no rank compares received fingerprints.
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

    /// Ends the group with the transport error if no other cause was found in time.
    fn explain(&mut self, now: Instant) -> Option<Verdict> {
        let (error, until) = self.transport_error.as_ref()?;
        Some(match now >= *until {
            true => Failure::verdict(error.clone()),
            false => Verdict::Wait { until: Some((now + self.limits.poll).min(*until)) },
        })
    }

    /// Ends the group with the report of another rank as an error of `operation`.
    fn forward(&self, operation: String, from: usize, report: &str) -> Verdict {
        let error = report::to_error(&self.names, operation, from, report);
        Verdict::Fail(Box::new(Failure { error, report: Some(report.to_owned()), last_error: None }))
    }

    /// Ends the group because `operation` needs rank `rank`, which is lost or has left.
    fn lost(&self, operation: String, rank: usize, reason: &str, facts: &Facts) -> Verdict {
        let last_error = facts.ranks[rank].last_error.as_ref();
        let reason = format!("{reason}{}", error_text::last_error(last_error));
        let error = error_text::lost(&self.names, operation, rank, &reason);
        let last_error = last_error.map(|(_, text)| text.to_string());
        Verdict::Fail(Box::new(Failure { error, report: None, last_error }))
    }
}

/// Returns true if rank `rank` is known to send no more messages: it leaves in the observed operation.
pub(crate) fn departs(rank: usize, facts: &Facts) -> bool {
    let facts = &facts.ranks[rank];
    facts.is_local && facts.fingerprint.is_some_and(fingerprint::is_leaving) || facts.messages_announced
}
