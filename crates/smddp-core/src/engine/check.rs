//! Failure checks: observes the group, passes the facts to the failure monitor and applies its verdict.

use std::time::Instant;

use smddp_base::{CallFingerprint, Mismatch};
use smddp_group::Liveness;
use smddp_process::record_error;

use super::Engine;
use crate::call::numbered;
use crate::error::Error;
use crate::failure::error_text;
use crate::failure::monitor::{Verdict, departs};
use crate::failure::pending::{Pending, PendingCall, PendingMessages};
use crate::log::{self, Level};
use crate::observe::recorder::{Outcome, query_key, ticks};

impl Engine {
    /// Checks for reasons that block pending operations: dead ranks, departed ranks, mismatches and expired
    /// deadlines. Called when blocked, and periodically during continuous progress. Does not block. Returns true if
    /// anything moved.
    pub(crate) fn check(&mut self, now: Instant) -> Result<bool, Error> {
        self.announce_last_messages();
        if let Some(op) = self.queue.front().filter(|op| op.begun) {
            let (seq, mine) = (op.seq, op.bound.fingerprint);
            if let Err(found) = self.group.settle() {
                self.on_mismatch(seq, mine, found)?;
            }
        }
        self.observe(now);
        let mut moving = false;
        if self.facts.has_faults() {
            // The departed rank may have published the awaited data just before.
            moving = self.poll()?;
            if !self.pending() {
                return Ok(true);
            }
            if moving {
                // The same poll may have received a rank's report, which explains the end of its connection.
                self.observe(now);
            }
        }
        self.evaluate(now, moving).map(|()| moving)
    }

    /// Passes the facts to the monitor and applies its verdicts.
    fn evaluate(&mut self, now: Instant, moving: bool) -> Result<(), Error> {
        loop {
            let pending = self.pending_operations(now, moving, None)?;
            let verdict = self.monitor.observe(now, &self.facts, &pending);
            let again = matches!(verdict, Verdict::Query { .. } | Verdict::Log(_) | Verdict::Warn { .. });
            self.apply_verdict(verdict, now)?;
            if !again {
                return Ok(());
            }
        }
    }

    /// Updates the facts.
    fn observe(&mut self, now: Instant) {
        let seq = self.queue.front().map_or(self.next, |op| op.seq);
        if self.monitor.is_querying() {
            self.group.health().poll_query(now, &mut self.facts);
        } else if self.facts.is_querying {
            self.cancel_query();
        }
        self.group.health().observe(now, seq, &mut self.facts);
    }

    /// Ends a query in progress, and removes the results of the last query.
    pub(super) fn cancel_query(&mut self) {
        self.facts.is_querying = false;
        for facts in &mut self.facts.ranks {
            (facts.answer, facts.activity, facts.unacknowledged) = (None, None, None);
        }
        self.group.health().cancel_query();
    }

    fn apply_verdict(&mut self, verdict: Verdict, now: Instant) -> Result<(), Error> {
        self.next_check = None;
        match verdict {
            Verdict::Wait { until } => self.next_check = until,
            Verdict::Query { ranks } => {
                let mut health = self.group.health();
                health.start_query(&ranks, |rank| query_key(&self.name, rank), now);
                health.poll_query(now, &mut self.facts);
            }
            Verdict::Log(text) => log::say(Level::Info, &text),
            Verdict::Warn { text, quiet } => {
                log::say(if quiet { Level::Info } else { Level::Warn }, &text);
                self.cancel_query();
            }
            Verdict::EndMessages(ended) => {
                for (_, error) in &ended {
                    record_error(&error_text::recorded(&self.names, error));
                }
                self.messages.end_expired(ended);
            }
            Verdict::EndLeaveCall { reason, report } => {
                if let Some(report) = report {
                    self.group.abort(&report);
                }
                self.end_leaving(&reason);
                self.next_check = Some(now);
            }
            Verdict::Fail(failure) => {
                let error = failure.error;
                self.forwarded_report = failure.report.map(|report| (error.clone(), report));
                self.cause_text = failure.last_error;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Handles mismatched calls of two ranks.
    pub(super) fn on_mismatch(
        &mut self,
        seq: u64,
        mine: CallFingerprint,
        found: Mismatch,
    ) -> Result<(), Error> {
        let now = Instant::now();
        self.observe(now);
        let pending = self.pending_operations(now, false, Some(found.rank))?;
        let verdict = self.monitor.fingerprints_differ(now, (seq, mine, found), &self.facts, &pending);
        self.apply_verdict(verdict, now)
    }

    /// Handles an error that a transport or a device had because of a peer. The group ends with `error`, unless the
    /// monitor finds another cause. `explained`: see [`crate::failure::monitor::FailureMonitor::transport_failed`].
    pub(super) fn on_transport_error(&mut self, error: Error, explained: bool) -> Result<(), Error> {
        let now = Instant::now();
        self.monitor.transport_failed(now, error, explained);
        self.observe(now);
        self.evaluate(now, false)
    }

    /// Returns everything that this rank waits for. `suspect`: a rank that made a different call.
    fn pending_operations(
        &mut self,
        now: Instant,
        moving: bool,
        suspect: Option<usize>,
    ) -> Result<Pending, Error> {
        let call = self.queue.front_mut().map(|op| {
            let since = *op.submitted.get_or_insert(now);
            op.pending_call(since)
        });
        let on_device = self.enqueued.iter_mut().map(|enqueued| PendingCall {
            collective: enqueued.collective,
            seq: enqueued.seq,
            fingerprint: CallFingerprint::default(),
            since: *enqueued.submitted.get_or_insert(now),
            timeout: enqueued.timeout,
            begun: true,
        });
        let on_device = on_device.collect();
        let messages = self.pending_messages(now, call.as_ref(), suspect)?;
        Ok(Pending { call, on_device, messages, moving, advanced: self.advanced })
    }

    fn pending_messages(
        &mut self,
        now: Instant,
        call: Option<&PendingCall>,
        suspect: Option<usize>,
    ) -> Result<PendingMessages, Error> {
        let sources = self.messages.awaited_sources();
        if call.is_none() && sources.iter().any(|&rank| departs(rank, &self.facts)) {
            // Messages that the departed rank sent before.
            self.messages.poll(&mut self.group, &self.name)?;
        }
        let draining = self.monitor.draining_rank();
        let leaves = |rank: usize| {
            let is_left = self.facts.ranks[rank].liveness == Liveness::Left;
            is_left || departs(rank, &self.facts) || [suspect, draining].contains(&Some(rank))
        };
        let me = self.names.me;
        let leaving: Vec<usize> =
            (0..self.facts.ranks.len()).filter(|&rank| rank != me && leaves(rank)).collect();
        for &rank in &leaving {
            self.facts.ranks[rank].last_error = self.group.health().last_error(rank);
        }
        let has_faults = self.facts.has_faults();
        let mut pending = PendingMessages { any: self.messages.pending(), ..PendingMessages::default() };
        if call.is_some_and(PendingCall::is_leaving) || !self.facts.mismatches.is_empty() || suspect.is_some()
        {
            pending.unconfirmed = self.messages.unconfirmed(&mut self.group);
        }
        for rank in leaving {
            let messages = self.messages.with_peer(rank, &mut self.group, &self.name);
            pending.departed.push(messages);
        }
        if has_faults || !pending.departed.is_empty() || self.monitor.holds_calls() {
            pending.oldest = self.messages.oldest();
        }
        if pending.any {
            (pending.expired, pending.deadline) = self.messages.deadlines(now);
            pending.waited = self.messages.longest_wait(&self.recorder.waited.messages());
        }
        Ok(pending)
    }

    /// Announces the end of this rank's messages to their receivers when it leaves. Short messages are buffered, so
    /// their sends complete before a recv is posted. A recv that waits for another message then fails, and this
    /// rank can still receive that report.
    fn announce_last_messages(&mut self) {
        let is_leaving = self.queue.front().is_some_and(|op| op.is_leaving());
        if !self.announced_last && is_leaving && self.messages.all_announced() {
            self.announced_last = true;
            for rank in self.messages.message_log.receivers() {
                self.group.messages().announce_last(rank);
            }
        }
    }

    /// Returns the name of the pending operation that this group waits for.
    pub(super) fn oldest(&self) -> String {
        let first = self.queue.front().map(|op| op.name());
        let on_device = || self.enqueued.front().map(|call| numbered(call.collective, call.seq));
        let first = first.or_else(on_device).or_else(|| self.messages.oldest());
        first.unwrap_or_else(|| "send or recv".to_owned())
    }

    /// Ends the call by which this rank leaves: no other rank takes part in the comparison.
    pub(crate) fn end_leaving(&mut self, reason: &str) {
        if self.queue.front().is_some_and(|op| op.is_leaving())
            && let Some(op) = self.queue.pop_front()
        {
            self.recorder.ended(op.seq, Outcome::Failed, ticks(), None);
            let Some(work) = op.work else { return };
            work.finish(Err(Error::Closed { group: self.name.clone(), reason: reason.to_owned() }));
        }
    }
}
