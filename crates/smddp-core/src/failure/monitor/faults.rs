//! Evaluation of faults: lost and unreachable ranks, abort reports, departures, mismatched calls.

use std::time::Instant;

use smddp_group::{Facts, Liveness};

use super::{Failure, FailureMonitor, Verdict, departs};
use crate::call::fingerprint::LEAVING_CALL;
use crate::failure::pending::Pending;
use crate::failure::{error_text, report};

/// Report or departure of a rank.
enum Notice<'a> {
    Aborted(usize, &'a str, bool),
    Left(usize),
}

impl FailureMonitor {
    /// Turns faults into the verdict that ends the group, causes before consequences. `moving`: messages still
    /// arrive, perhaps from ranks that have left.
    pub(super) fn evaluate_faults(
        &mut self,
        now: Instant,
        facts: &Facts,
        pending: &Pending,
        moving: bool,
    ) -> Option<Verdict> {
        for mismatch in &facts.mismatches {
            let call = (mismatch.seq, mismatch.mine, mismatch.found);
            if let Some(verdict) = self.differ(now, call, facts, pending) {
                return Some(verdict);
            }
        }
        if !facts.has_faults() {
            return None;
        }
        // Corruption is found here and follows from no other fault.
        if let Some((rank, what)) = corrupted(facts) {
            let operation = pending.oldest();
            return Some(Failure::verdict(error_text::corrupted(&self.names, operation, rank, what)));
        }
        if pending.is_leaving() {
            return self.evaluate_leaving(facts, pending);
        }
        let operation = pending.oldest();
        // Deaths come first: they are the cause, and the reports of other ranks are the consequence.
        let lost = facts.lost();
        if let Some(&(rank, reason)) = lost.first() {
            let others: Vec<usize> = lost[1..].iter().map(|&(other, _)| other).collect();
            let reason = error_text::with_others(&self.names, reason, &others);
            return Some(self.lost(operation, rank, &reason, facts));
        }
        // Unreachable ranks come before reports: the problem of this process may have caused a report of another rank.
        if let Some((rank, reason)) = unreachable(facts) {
            return Some(Failure::verdict(error_text::unreachable(&self.names, &operation, rank, reason)));
        }
        for notice in notices(facts) {
            match notice {
                Notice::Aborted(_, _, is_later) if is_later && self.may_complete(now, pending) => {}
                Notice::Aborted(rank, report, _) => {
                    let cause = self.unreceived_of_lost(&operation, report, facts, pending);
                    return Some(cause.unwrap_or_else(|| self.forward(operation, rank, report)));
                }
                Notice::Left(rank) => {
                    let needed = pending.call.is_some() && facts.ranks[rank].missing;
                    let message = || !moving && pending.with(rank).is_some_and(|messages| messages.needed);
                    if needed || self.abandoned_data(now, rank, facts, pending) || message() {
                        return Some(self.needed_rank_left(now, operation, rank, facts, pending));
                    }
                }
            }
        }
        None
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
                Notice::Aborted(rank, report, _) if report::is_error_of_calls_or_data(report) => {
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
}

/// Returns the first rank that sent corrupted data, and the description of the data.
fn corrupted(facts: &Facts) -> Option<(usize, &str)> {
    let mut ranks = facts.ranks.iter().enumerate();
    ranks.find_map(|(rank, facts)| Some((rank, facts.corrupted.as_deref()?)))
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
