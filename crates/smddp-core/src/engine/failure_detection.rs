//! Failure detection for pending operations: dead peers, departed ranks, mismatched calls, expired deadlines.

use std::time::{Duration, Instant};

use smddp_plan::Collective;
use smddp_transport::{CallFingerprint, Fault, Mismatch};

use super::Engine;
use crate::call::fingerprint;
use crate::call::numbered;
use crate::error::Error;
use crate::failure::error_text;
use crate::failure::report;
use crate::log::{self, Level};
use crate::observe::recorder::{Outcome, ticks};

/// Description of a rank that left the group.
const LEFT: &str = "left the group (destroyed it or exited) before this operation";

/// Time within which all processes of a node detect the death of one of them.
const DEATH_REPORT_LIMIT: Duration = Duration::from_secs(1);

/// Time to wait for messages that a departed peer sent before its leave frame, and for the acknowledgement of data that
/// this rank sent to it. Between nodes, messages and leave frames travel on separate connections. `Kind::LastMessage` ends
/// the messages; this limit applies if the sender died before it sent that.
const MESSAGE_GRACE: Duration = Duration::from_secs(1);

/// Time to wait for another rank's report, or for data of a rank that failed in a later call.
const REPORT_TIME: Duration = Duration::from_millis(250);

/// Wait after which a call logs the late ranks.
const LATE_LOG: Duration = Duration::from_secs(2);

impl Engine {
    /// Returns the error that the known faults give, if any.
    pub(super) fn examine_faults(&mut self, now: Instant) -> Option<Error> {
        let faults = self.group.faults(now);
        self.evaluate(&faults, false).err()
    }

    /// Waits up to `DEATH_REPORT_LIMIT` for a death report that explains a transport error.
    pub(super) fn await_faults(&mut self) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            let now = Instant::now();
            if let Some(error) = self.examine_faults(now) {
                return Err(error);
            }
            if now - begun >= DEATH_REPORT_LIMIT {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Checks for reasons that block pending operations: dead ranks, departed ranks, mismatches and expired
    /// deadlines. Called when blocked, and periodically during continuous progress.
    pub(crate) fn examine(&mut self, now: Instant) -> Result<(), Error> {
        self.announce_last_messages();
        if let Some(op) = self.queue.front().filter(|op| op.begun) {
            let (seq, mine) = (op.seq, op.bound.fingerprint);
            if let Some(found) = self.group.settle().err().or_else(|| self.other_call(seq, mine)) {
                self.on_mismatch(seq, mine, found)?;
            }
        }
        let mut faults = self.group.faults(now);
        if !faults.is_empty() {
            // The departed rank may have published the awaited data just before.
            let moved = self.poll()?;
            if !self.pending() {
                return Ok(());
            }
            if moved {
                // The same poll may have received a rank's report, which explains the end of its connection.
                faults = self.group.faults(now);
            }
            // Continuous message traffic must not keep a collective waiting for a dead rank.
            if !moved || !self.queue.is_empty() && !self.advanced {
                self.evaluate(&faults, moved)?;
            }
        }
        if let Some(op) = self.queue.front_mut() {
            let since = *op.submitted.get_or_insert(now);
            if now.duration_since(since) >= LATE_LOG && self.logged_late != Some(op.seq) {
                self.logged_late = Some(op.seq);
                if let Some(text) =
                    error_text::late(&self.group, &self.name, op.pending_call(), now.duration_since(since))
                {
                    log::say(Level::Info, &text);
                }
            }
            if now.duration_since(since) >= op.timeout {
                self.group.straggler_query();
                // Another rank may have found the cause during the query, which takes time.
                let faults = self.group.faults(Instant::now());
                self.evaluate(&faults, false)?;
                let Some(op) = self.queue.front() else { return Ok(()) };
                return Err(error_text::timeout(&self.group, &self.name, op.pending_call()));
            }
        }
        for enqueued in &mut self.enqueued {
            if now.duration_since(*enqueued.submitted.get_or_insert(now)) >= enqueued.timeout {
                return Err(error_text::device_timeout(&self.name, enqueued));
            }
        }
        self.check_departed()?;
        let Some(late) = self.messages.late(now) else { return Ok(()) };
        self.group.straggler_query_of(&late);
        // The query took time, as above.
        let faults = self.group.faults(Instant::now());
        self.evaluate(&faults, false)?;
        self.messages.expire(&self.group, &self.name, now)
    }

    /// Compares the call with those of the other ranks. In mismatched calls all ranks may be sending only, so that
    /// none compares the fingerprints it receives.
    fn other_call(&self, seq: u64, mine: CallFingerprint) -> Option<Mismatch> {
        (0..self.group.info().size).filter(|&rank| rank != self.group.info().rank).find_map(|rank| {
            let theirs = self.group.fingerprint_of(rank, seq).filter(|&theirs| theirs != mine)?;
            Some(Mismatch { rank, theirs, bytes: None })
        })
    }

    /// Announces the end of this rank's messages to their receivers when it leaves. Short messages are buffered, so
    /// their sends complete before a recv is posted. A recv that waits for another message then fails, and this
    /// rank can still receive that report.
    fn announce_last_messages(&mut self) {
        if !self.announced_last && self.is_leaving() && self.messages.all_announced() {
            self.announced_last = true;
            for rank in self.messages.message_log.receivers() {
                self.group.messages().announce_last(rank);
            }
        }
    }

    /// Fails receives from ranks that have left. Within a node all messages of a rank are visible before its
    /// departure. Between nodes messages use another connection, which ends with a marker.
    fn check_departed(&mut self) -> Result<(), Error> {
        if !self.queue.is_empty() {
            return Ok(());
        }
        if let Some(rank) =
            self.messages.awaited_sources().into_iter().find(|&rank| self.departs(rank, self.next))
        {
            self.messages.poll(&mut self.group, &self.name)?;
            if self.messages.awaited_sources().contains(&rank) {
                let what = self.messages.oldest().unwrap_or_else(|| "recv".to_owned());
                return Err(self.needed_rank_error(what, rank));
            }
        }
        Ok(())
    }

    /// Returns the error for the departure of a rank that a pending operation needs.
    fn needed_rank_error(&mut self, what: String, rank: usize) -> Error {
        let wrong_tag = self.messages.wrong_tag_error(rank, &self.group, &self.name);
        wrong_tag.unwrap_or_else(|| self.departed_rank_error(what, rank))
    }

    /// Returns the error for a rank that left before operation `what`. It may have sent a message instead, to this
    /// rank or to another one.
    fn departed_rank_error(&mut self, what: String, rank: usize) -> Error {
        let begun = Instant::now();
        loop {
            if let Some(error) = self.unreceived(&what, rank) {
                return error;
            }
            if let Some((from, reason)) = self.reported_mismatch() {
                return self.forward_report(what, from, &reason);
            }
            let is_drained = self.group.info().is_local(rank) || self.group.p2p_is_finished(rank);
            let limit = match self.group.info().size {
                2 if is_drained => Duration::ZERO,
                _ if is_drained => REPORT_TIME,
                _ => MESSAGE_GRACE,
            };
            if begun.elapsed() >= limit {
                break;
            }
            self.group.poll();
            std::thread::sleep(Duration::from_millis(1));
        }
        let how = format!("{LEFT}{}", error_text::last_error(&self.group, rank));
        self.cause_text = self.group.last_error(rank).map(|(_, text)| text);
        error_text::lost(&self.group, &self.name, what, rank, &how)
    }

    /// Returns the error of the call `what` for a message of departed rank `rank` that this rank did not receive.
    fn unreceived(&mut self, what: &str, rank: usize) -> Option<Error> {
        let description = self.messages.first_unexpected(rank, &mut self.group)?;
        let peer = self.group.info().describe(rank);
        let detail =
            format!("{peer} {LEFT}; its last message to this rank has no matching recv: it {description}");
        Some(Error::Mismatch { what: what.to_owned(), group: self.name.clone(), rank, detail })
    }

    /// Returns the same error if another rank reported the departure first.
    fn unreceived_of_lost(&mut self, what: &str, report: &str) -> Option<Error> {
        let seq = self.queue.front().map_or(self.next, |op| op.seq);
        let rank = report::lost_rank(report)
            .filter(|&rank| rank != self.group.info().rank && rank < self.group.info().size)?;
        self.departs(rank, seq).then(|| self.unreceived(what, rank)).flatten()
    }

    /// Returns true if rank `rank` is known to send no more messages: it leaves in call `seq`.
    fn departs(&self, rank: usize, seq: u64) -> bool {
        self.group.info().is_local(rank)
            && self.group.fingerprint_of(rank, seq).is_some_and(fingerprint::is_leaving)
            || self.group.p2p_is_finished(rank)
    }

    /// Returns true if rank `rank` reports the departure of this rank while a receiver of this rank's messages may
    /// still report an unreceived one.
    fn awaits_receivers(&mut self, rank: usize, faults: &[Fault]) -> bool {
        let me = self.group.info().rank;
        let reports = |fault: &Fault| matches!(fault, Fault::Aborted { rank: by, reason } if *by == rank && report::lost_rank(reason) == Some(me));
        let seq = self.queue.front().map_or(self.next, |op| op.seq);
        let unconfirmed = self.messages.unconfirmed(&mut self.group);
        let answered =
            |&to: &usize| self.departs(to, seq) || faults.iter().any(|fault| fault.rank() == Some(to));
        faults.iter().any(reports) && !unconfirmed.iter().all(answered)
    }

    /// Returns the rank that reports mismatched calls, with its report.
    fn reported_mismatch(&mut self) -> Option<(usize, String)> {
        self.group.faults(Instant::now()).into_iter().find_map(|fault| match fault {
            Fault::Aborted { rank, reason } if report::is_mismatch(&reason) => Some((rank, reason)),
            _ => None,
        })
    }

    /// Returns the name of the pending operation that this group waits for.
    pub(super) fn oldest(&self) -> String {
        match (self.queue.front(), self.enqueued.front()) {
            (Some(op), _) => numbered(op.collective, op.seq),
            (None, Some(enqueued)) => numbered(enqueued.collective, enqueued.seq),
            (None, None) => self.messages.oldest().unwrap_or_else(|| "send or recv".to_owned()),
        }
    }

    /// Turns faults into the error that ends the group, causes before consequences. `moving`: messages still
    /// arrive, perhaps from ranks that have left.
    fn evaluate(&mut self, faults: &[Fault], moving: bool) -> Result<(), Error> {
        let what = self.oldest();
        for fault in faults {
            if let Fault::Mismatch { seq, mine, found } = *fault {
                self.on_mismatch(seq, mine, found)?;
            }
        }
        if self.is_leaving() {
            return self.evaluate_leaving(faults);
        }
        // Deaths come first: they are the cause, and the reports of other ranks are the consequence.
        let mut lost = faults.iter().filter_map(|fault| match fault {
            Fault::Lost { rank, how } => Some((*rank, how)),
            _ => None,
        });
        if let Some((rank, how)) = lost.next() {
            let others: Vec<usize> = lost.map(|(other, _)| other).filter(|&other| other != rank).collect();
            let how = error_text::with_others(&self.group, how, &others)
                + &error_text::last_error(&self.group, rank);
            self.cause_text = self.group.last_error(rank).map(|(_, text)| text);
            return Err(error_text::lost(&self.group, &self.name, what, rank, &how));
        }
        // A report of another rank may be a consequence of this process's own problem, so that comes first.
        for fault in faults {
            if let Fault::Unreachable { rank, reason } = fault {
                return Err(error_text::unreachable(&self.group, &self.name, &what, *rank, reason));
            }
        }
        for fault in faults {
            match fault {
                Fault::Aborted { rank, .. } if self.may_complete(*rank) => {}
                Fault::Aborted { rank, reason } => {
                    let cause = self.unreceived_of_lost(&what, reason);
                    return Err(cause.unwrap_or_else(|| self.forward_report(what, *rank, reason)));
                }
                Fault::Left { rank } => {
                    let needed = self.queue.front().is_some_and(|op| self.group.waits_for(*rank, op.seq));
                    if needed || self.abandoned_data(*rank) || !moving && self.messages.needs(*rank) {
                        return Err(self.needed_rank_error(what, *rank));
                    }
                }
                Fault::Lost { .. } | Fault::Mismatch { .. } | Fault::Unreachable { .. } => {}
            }
        }
        Ok(())
    }

    /// Returns true if the active collective may still complete although `rank` aborted the group: `rank` failed in a
    /// later collective, so its data for this one may be in flight. For at most `REPORT_TIME`.
    fn may_complete(&mut self, rank: usize) -> bool {
        let Some(seq) = self.queue.front().map(|op| op.seq) else { return false };
        if !self.group.failed_after(rank, seq) {
            return false;
        }
        match self.trailing_since {
            Some((when, since)) if when == seq => since.elapsed() < REPORT_TIME,
            _ => {
                self.trailing_since = Some((seq, Instant::now()));
                true
            }
        }
    }

    /// Returns true if a rank left without receiving this rank's data of the active operation. Its final
    /// acknowledgement may still be in flight, so this waits for `MESSAGE_GRACE`.
    fn abandoned_data(&mut self, rank: usize) -> bool {
        let Some(seq) =
            self.queue.front().map(|op| op.seq).filter(|&seq| self.group.has_unfinished_sends(rank, seq))
        else {
            return false;
        };
        match self.undelivered_since {
            Some((peer, when, since)) if (peer, when) == (rank, seq) => since.elapsed() >= MESSAGE_GRACE,
            // One such rank suffices.
            Some((_, when, _)) if when == seq => false,
            _ => {
                self.undelivered_since = Some((rank, seq, Instant::now()));
                false
            }
        }
    }

    /// Returns another rank's report as an error of operation `what`, and keeps the report to forward it unchanged.
    fn forward_report(&mut self, what: String, from: usize, report: &str) -> Error {
        let error = report::to_error(&self.group, &self.name, what, from, report);
        self.forwarded_report = Some((error.clone(), report.to_owned()));
        error
    }

    /// Handles mismatched calls of two ranks. They end the group, unless one of the ranks is leaving and the other
    /// one reports that.
    pub(super) fn on_mismatch(
        &mut self,
        seq: u64,
        mine: CallFingerprint,
        found: Mismatch,
    ) -> Result<(), Error> {
        let collective = fingerprint::collective(mine).unwrap_or(Collective::Barrier);
        let (leaving, peer_leaving) = (fingerprint::is_leaving(mine), fingerprint::is_leaving(found.theirs));
        if peer_leaving
            && !leaving
            && !collective.has_root()
            && self.queue.front().is_some_and(|op| op.seq == seq)
        {
            let what = numbered(collective, seq);
            return Err(self.departed_rank_error(what, found.rank));
        }
        // A collective without a root fails on the other rank. A rooted one may have completed without this rank.
        if leaving
            && !peer_leaving
            && fingerprint::collective(found.theirs).is_some_and(|theirs| !theirs.has_root())
        {
            // If a message of this rank was not received, the other rank reports that. The caller's time limit ends
            // the wait for the report.
            if self.messages.unconfirmed(&mut self.group).is_empty() {
                self.end_leaving(&format!(
                    "{} waits in {}",
                    self.group.info().describe(found.rank),
                    fingerprint::call(found.theirs)
                ));
            }
            return Ok(());
        }
        Err(error_text::mismatch(&self.group, &self.name, collective, seq, mine, found))
    }

    /// Returns true if the active call is the one by which this rank leaves.
    fn is_leaving(&self) -> bool {
        self.queue.front().is_some_and(|op| fingerprint::is_leaving(op.bound.fingerprint))
    }

    /// Ends the call by which this rank leaves: no other rank takes part in the comparison.
    pub(crate) fn end_leaving(&mut self, reason: &str) {
        if self.is_leaving()
            && let Some(op) = self.queue.pop_front()
        {
            self.recorder.ended(op.seq, Outcome::Failed, ticks(), None);
            let Some(work) = op.work else { return };
            work.finish(Err(Error::Closed { group: self.name.clone(), reason: reason.to_owned() }));
        }
    }

    /// Handles faults while this rank leaves. A lost rank ends the shutdown comparison without an error; only mismatched calls
    /// are an error.
    fn evaluate_leaving(&mut self, faults: &[Fault]) -> Result<(), Error> {
        let seq = self.queue.front().map_or(0, |op| op.seq);
        for fault in faults {
            match fault {
                Fault::Aborted { rank, reason } if report::is_mismatch(reason) => {
                    return Err(self.forward_report("destroy_process_group".to_owned(), *rank, reason));
                }
                Fault::Left { rank } if !self.group.waits_for(*rank, seq) => {}
                Fault::Aborted { rank, .. } | Fault::Left { rank }
                    if self.awaits_receivers(*rank, faults) => {}
                Fault::Lost { rank, how } => {
                    // Other ranks may wait for this rank's part in the shutdown comparison without monitoring the lost one.
                    let what = "destroy_process_group".to_owned();
                    let error = error_text::lost(&self.group, &self.name, what, *rank, how);
                    self.group.abort(&report::own(self.group.info().rank, &error));
                    self.end_leaving(&format!("{} has left or is lost", self.group.info().describe(*rank)));
                    break;
                }
                Fault::Aborted { rank, .. } | Fault::Left { rank } => {
                    let report = if let Fault::Aborted { reason, .. } = fault { reason } else { "" };
                    if let Some(error) = self.unreceived_of_lost("destroy_process_group", report) {
                        return Err(error);
                    }
                    self.end_leaving(&format!("{} has left or is lost", self.group.info().describe(*rank)));
                    break;
                }
                Fault::Unreachable { rank, reason } => {
                    self.end_leaving(&format!(
                        "{} is unreachable: {reason}",
                        self.group.info().describe(*rank)
                    ));
                    break;
                }
                Fault::Mismatch { .. } => {}
            }
        }
        Ok(())
    }
}
