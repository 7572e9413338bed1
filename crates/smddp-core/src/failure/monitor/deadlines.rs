//! Late ranks and expired deadlines: log texts, queries and timeout errors.

use std::time::Instant;

use smddp_group::{Facts, QueryAnswer};

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

    /// Records whether the active collective is new or has advanced.
    pub(super) fn note_progress(&mut self, now: Instant, pending: &Pending) {
        let seq = pending.call.map(|call| call.seq);
        if pending.advanced || seq != self.still_since.map(|(seq, _)| seq) {
            self.still_since = seq.map(|seq| (seq, now));
        }
    }

    /// Returns the time of the next warning about operation `seq`: a minute without progress, and a minute after the
    /// last warning. `None` before the first observation of the operation.
    pub(super) fn next_warning(&self, seq: u64) -> Option<Instant> {
        let (_, since) = self.still_since.filter(|(still, _)| *still == seq)?;
        self.warned_at.map_or(since, |warned| warned.max(since)).checked_add(self.limits.warning)
    }

    /// Queries the ranks for which the active collective has waited for a long time, then warns.
    pub(super) fn warn_late(&mut self, now: Instant, facts: &Facts, pending: &Pending) -> Option<Verdict> {
        let call = pending.call.filter(|call| !call.is_expired(now));
        let subject = call.map(|call| Subject::LateCall(call.seq));
        if let State::Querying(StragglerQuery { subject: late @ Subject::LateCall(_), .. }) = &self.state
            && Some(late) != subject.as_ref()
        {
            self.state = State::Watching;
        }
        let (call, subject) = (call?, subject?);
        let is_due = self.next_warning(call.seq).is_some_and(|due| due <= now);
        let (step, is_indirect) = match &mut self.state {
            State::Querying(query) if query.subject == subject => {
                (query.advance(now, &self.limits, self.names.me, facts), query.is_indirect)
            }
            State::Watching if is_due => {
                let (query, step) = StragglerQuery::of_call(self.names.me, subject, now, &self.limits, facts);
                self.state = State::Querying(query);
                (step, false)
            }
            _ => return None,
        };
        match self.query_verdict(step) {
            Some(Verdict::Wait { .. }) => None,
            None => {
                self.warned_at = Some(now);
                let text = error_text::waiting(&self.names, facts, &call, now, is_indirect);
                Some(Verdict::Warn { text, quiet: is_indirect || self.another_warns(facts) })
            }
            query => query,
        }
    }

    /// Returns true if a lower rank of this node waits in the same operation. It warns, so that a log has one line for
    /// each node.
    fn another_warns(&self, facts: &Facts) -> bool {
        let mut lower = facts.ranks.iter().take(self.names.me).filter(|rank| rank.is_local);
        lower.any(|rank| {
            rank.arrived == Some(true) && !rank.completed && rank.answer != Some(QueryAnswer::Stopped)
        })
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
}
