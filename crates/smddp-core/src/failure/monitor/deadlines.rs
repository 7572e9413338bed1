//! Late ranks and expired deadlines: log texts, queries and timeout errors.

use std::time::Instant;

use smddp_group::Facts;

use super::{Failure, FailureMonitor, State, Verdict};
use crate::failure::error_text;
use crate::failure::pending::Pending;
use crate::failure::straggler_query::{QueryStep, StragglerQuery, Subject};

impl FailureMonitor {
    pub(super) fn log_late(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Option<Verdict> {
        let call = pending.call.as_ref()?;
        let waited = now.duration_since(call.since);
        if waited < self.limits.late_log || self.logged_late == Some(call.seq) {
            return None;
        }
        self.logged_late = Some(call.seq);
        error_text::late(&self.names, facts, call, waited).map(Verdict::Log)
    }

    /// Queries the ranks after the deadline of the active collective, then ends the group.
    pub(super) fn expire_call(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Option<Verdict> {
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
                let subject = Subject::Call(call.seq);
                let (query, step) = StragglerQuery::of_call(self.names.me, subject, now, &self.limits, facts);
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
    pub(super) fn query_verdict(&mut self, step: QueryStep) -> Option<Verdict> {
        match step {
            QueryStep::Ask(ranks) => Some(Verdict::Query { ranks }),
            QueryStep::Wait(until) => Some(Verdict::Wait { until: Some(until) }),
            QueryStep::Complete => {
                self.state = State::Watching;
                None
            }
        }
    }

    pub(super) fn expire_on_device(&self, now: Instant, pending: &Pending) -> Option<Verdict> {
        let call = pending.on_device.iter().find(|call| call.is_expired(now))?;
        Some(Failure::verdict(error_text::device_timeout(&self.names, call)))
    }

    /// Queries the peers of messages past their deadline, then ends these messages. A message that has not begun ends
    /// alone; an interrupted transfer ends the group.
    pub(super) fn expire_messages(
        &mut self,
        now: Instant,
        facts: &Facts,
        pending: &Pending,
    ) -> Option<Verdict> {
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
                let (query, step) = StragglerQuery::of_messages(Subject::Messages, peers, now, &self.limits);
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
}
