//! Warnings about operations that wait for a long time before their deadline.

use std::time::Instant;

use smddp_group::{Facts, QueryAnswer};

use super::{FailureMonitor, State, Verdict};
use crate::failure::error_text;
use crate::failure::pending::Pending;
use crate::failure::straggler_query::{StragglerQuery, Subject};

impl FailureMonitor {
    /// Records whether the active collective, or the message in which a thread waits, is new or has advanced.
    pub(super) fn note_progress(&mut self, now: Instant, pending: &Pending) {
        let seq = pending.call.map(|call| call.seq);
        if pending.advanced || seq != self.still_since.map(|(seq, _)| seq) {
            self.still_since = seq.map(|seq| (seq, now));
        }
        let waited = pending.messages.waited.as_ref();
        let state = waited.map(|waited| (waited.message.number, waited.moved));
        if state != self.still_message.map(|(number, moved, _)| (number, moved)) {
            let number = self.still_message.map(|(number, ..)| number);
            self.still_message = waited.map(|waited| {
                // The time of the last progress of a partial transfer that is new here is unknown.
                let is_unchanged = number != Some(waited.message.number) && waited.moved == 0;
                (waited.message.number, waited.moved, if is_unchanged { waited.since } else { now })
            });
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

    /// Returns the time of the next warning about the message in which a thread waits.
    pub(super) fn next_message_warning(&self) -> Option<Instant> {
        let (.., since) = self.still_message?;
        self.warned_at.map_or(since, |warned| warned.max(since)).checked_add(self.limits.warning)
    }

    /// Queries the peer of the message in which a thread waits for a long time, then warns. The interval of the warnings
    /// includes those about collectives.
    pub(super) fn warn_late_message(
        &mut self,
        now: Instant,
        facts: &Facts,
        pending: &Pending,
    ) -> Option<Verdict> {
        let waited = pending.messages.waited.as_ref();
        let subject = waited.map(|waited| Subject::LateMessage(waited.message.number));
        if let State::Querying(StragglerQuery { subject: late @ Subject::LateMessage(_), .. }) = &self.state
            && Some(late) != subject.as_ref()
        {
            self.state = State::Watching;
        }
        let (waited, subject) = (waited?, subject?);
        let is_due = self.next_message_warning().is_some_and(|due| due <= now);
        let step = match &mut self.state {
            State::Querying(query) if query.subject == subject => {
                query.advance(now, &self.limits, self.names.me, facts)
            }
            State::Watching if is_due => {
                let peers = waited.message.peer.into_iter().collect();
                let (query, step) = StragglerQuery::of_messages(subject, peers, now, &self.limits);
                self.state = State::Querying(query);
                step
            }
            _ => return None,
        };
        match self.query_verdict(step) {
            Some(Verdict::Wait { .. }) => None,
            None => {
                self.warned_at = Some(now);
                let text = error_text::waiting_message(&self.names, facts, waited, now);
                Some(Verdict::Warn { text, quiet: false })
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
}
