//! Departed ranks: wait for their last messages, and errors of the operations that need them.

use std::time::{Duration, Instant};

use smddp_group::Facts;

use super::{Failure, FailureMonitor, State, Verdict, departs};
use crate::error::Error;
use crate::failure::pending::Pending;
use crate::failure::report;

/// Description of a rank that left the group.
const LEFT: &str = "left the group (destroyed it or exited) before this operation";

impl FailureMonitor {
    /// Evaluates the departure of a rank that the pending `operation` needs.
    pub(super) fn needed_rank_left(
        &mut self,
        now: Instant,
        operation: String,
        rank: usize,
        facts: &Facts,
        pending: &Pending,
    ) -> Verdict {
        match pending.with(rank).and_then(|messages| messages.wrong_tag.clone()) {
            Some(error) => Failure::verdict(error),
            None => self.begin_drain(now, operation, rank, facts, pending),
        }
    }

    /// Waits for messages of a rank that left before `operation`. The departed rank may have sent a message
    /// instead, to this rank or to another one.
    pub(super) fn begin_drain(
        &mut self,
        now: Instant,
        operation: String,
        rank: usize,
        facts: &Facts,
        pending: &Pending,
    ) -> Verdict {
        let call = pending.call.map(|call| call.seq);
        self.state = State::Draining { rank, operation, call, since: now };
        let verdict = self.drain(now, facts, pending);
        verdict.unwrap_or_else(|| Verdict::Wait { until: self.next_check(now, pending) })
    }

    /// Continues the wait for messages of a departed rank. Returns `None` without such a wait, or if the operation has
    /// ended.
    pub(super) fn drain(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Option<Verdict> {
        let State::Draining { rank, ref operation, call, since } = self.state else { return None };
        let needed = || pending.with(rank).is_some_and(|messages| messages.needed);
        let is_pending = match call {
            Some(_) => pending.call.map(|call| call.seq) == call,
            None => !pending.on_device.is_empty() || needed(),
        };
        if !is_pending {
            self.state = if self.transport_error.is_some() { State::Explaining } else { State::Watching };
            return None;
        }
        if let Some(verdict) = self.unreceived(operation, rank, pending) {
            return Some(verdict);
        }
        let mismatch = facts.ranks.iter().enumerate().find_map(|(from, facts)| {
            let report = &facts.abort.as_ref()?.report;
            report::is_error_of_calls_or_data(report).then_some((from, report))
        });
        if let Some((from, report)) = mismatch {
            return Some(self.forward(operation.clone(), from, report));
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
        Some(self.lost(operation.clone(), rank, LEFT, facts))
    }

    /// Evaluates receives from ranks that have left. Within a node all messages of a rank are visible before its
    /// departure. Between nodes messages use another connection, which ends with a marker.
    pub(super) fn check_departed(
        &mut self,
        now: Instant,
        facts: &Facts,
        pending: &Pending,
    ) -> Option<Verdict> {
        if pending.call.is_some() {
            return None;
        }
        let mut departed = pending.messages.departed.iter();
        let rank = departed.find(|messages| messages.awaited && departs(messages.rank, facts))?.rank;
        let operation = pending.messages.oldest.clone().unwrap_or_else(|| "recv".to_owned());
        Some(self.needed_rank_left(now, operation, rank, facts, pending))
    }

    /// Returns the error of `operation` for a message of departed rank `rank` that this rank did not receive.
    fn unreceived(&self, operation: &str, rank: usize, pending: &Pending) -> Option<Verdict> {
        let description = pending.with(rank)?.unexpected.as_ref()?;
        let peer = self.names.describe(rank);
        let detail = format!(
            "{peer} {LEFT}; its last message to this rank has no matching recv: it {description}; post a recv for it, or remove the send"
        );
        let group = self.names.group();
        Some(Failure::verdict(Error::Mismatch { operation: operation.to_owned(), group, rank, detail }))
    }

    /// Returns the error of [`Self::unreceived`] if another rank reported the departure first.
    pub(super) fn unreceived_of_lost(
        &self,
        operation: &str,
        report: &str,
        facts: &Facts,
        pending: &Pending,
    ) -> Option<Verdict> {
        let rank =
            report::lost_rank(report).filter(|&rank| rank != self.names.me && rank < facts.ranks.len())?;
        departs(rank, facts).then(|| self.unreceived(operation, rank, pending)).flatten()
    }
}
