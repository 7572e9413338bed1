//! End of a group. The owner of the engine first releases the callers' memory, empties the queues and reports to the
//! other ranks. Once the report has left this process, or after [`FLUSH_TIME`], the group has failed. The owner then
//! releases the engine and completes the calls with the error. A rank that closes the group then leaves it.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_process::record_error;

use super::Engine;
use super::shared::{DESTROYED, SharedState};
use crate::error::Error;
use crate::failure::error_text;
use crate::failure::report;
use crate::log::{self, Level};
use crate::observe::recorder::{self, Outcome, ticks};
use crate::sync::completion::Completion;

/// Time for which the streams of a dead group are released. Work that they had queued has usually finished by then;
/// the callers' streams no longer wait for it.
const RELEASE_TIME: Duration = Duration::from_secs(5);

/// Maximum time to wait until the abort report has left this process. The process may exit with the error that the
/// pending call is about to raise. Peers without the report would then report this rank as the first failure.
const FLUSH_TIME: Duration = Duration::from_millis(50);
/// Interval between two polls for events that no descriptor signals: the end of the report, acknowledgements, and
/// empty streams.
const PHASE_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Interval between two polls while this rank leaves and data is unsent.
const LEAVE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// State of a group.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Phase {
    Running,
    /// The queues are empty, and the abort report is being sent until this time at most.
    Failing {
        flush_until: Instant,
    },
    /// The calls end with the error of the group.
    Failed,
    /// The group has failed by a panic in the transport, which is not polled again.
    Abandoned,
    /// This rank closes the group: its last frames are being sent, within the time limit of the transport.
    Leaving,
    /// This rank has left. Its streams are released until they are empty, within [`RELEASE_TIME`].
    Releasing,
    Left,
}

/// Calls that a failed group removed from its queues. They complete after the release of the engine, because their
/// completion runs callbacks of the callers.
#[derive(Default)]
pub(crate) struct EndedCalls {
    works: Vec<Arc<Completion>>,
    /// The failure is logged and dumped.
    is_reported: bool,
}

impl EndedCalls {
    /// Completes the calls with the error of the group.
    #[cold]
    pub(super) fn complete(self, state: &SharedState) {
        let Some(error) = state.failure.get() else { return };
        if self.is_reported {
            log::say(Level::Info, &format!("group `{}` failed: {error}", state.name));
        }
        for work in self.works {
            work.finish(Err(error.clone()));
        }
        if self.is_reported
            && let Some(folder) = &state.config.dump_dir
        {
            recorder::write(folder);
        }
    }
}

impl Engine {
    /// Returns true until the group fails or is closed.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Returns true once the calls end with the error of the group.
    pub(crate) fn has_failed(&self) -> bool {
        !matches!(self.phase, Phase::Running | Phase::Failing { .. })
    }

    /// Returns the longest sleep before the next poll while the group ends.
    pub(super) fn max_phase_sleep(&self) -> Duration {
        match self.phase {
            Phase::Failing { .. } | Phase::Releasing => PHASE_POLL_INTERVAL,
            Phase::Leaving if self.group.is_flushed() => PHASE_POLL_INTERVAL,
            Phase::Leaving => LEAVE_POLL_INTERVAL,
            _ => Duration::MAX,
        }
    }

    /// Returns true if operations are on devices or will be. Their calls have returned; only streams wait for them.
    pub(crate) fn has_device_calls(&self) -> bool {
        !self.enqueued.is_empty() || self.queue.iter().any(|op| op.device.is_some())
    }

    /// Releases all streams of a dead group. Repeated, because a resuming stream may write smaller sequence numbers.
    fn keep_releasing(&mut self, now: Instant) {
        let Some(since) = self.release_started else { return };
        let is_late = now.duration_since(since) >= RELEASE_TIME;
        // A stream that was stalled for so long overwrites the released numbers when it resumes.
        let is_empty = self.sites.iter_mut().map(|site| site.release()).filter(|empty| !empty).count() == 0;
        let is_over = if self.phase == Phase::Releasing { is_late || is_empty } else { is_late && is_empty };
        if is_over {
            self.release_started = None;
        }
    }

    /// Records the error for the log, the dump, and processes that later find this process dead. These get the error of
    /// another process instead if that error is the cause.
    pub(super) fn record_failure(&mut self, error: &Error) {
        self.ended.get_or_insert_default().is_reported = true;
        match self.cause_text.take() {
            Some(first) => record_error(&first),
            None => record_error(&error_text::recorded(&self.names, error)),
        }
    }

    /// Ends the group: releases the callers' memory, empties the queues and starts to report `error` to the other ranks.
    pub(crate) fn fail(&mut self, error: &Error, now: Instant) {
        if !self.is_running() {
            return;
        }
        let forwarded_report = self.forwarded_report.take().filter(|(about, _)| about == error);
        self.recorder.failed(&error.to_string());
        self.phase = Phase::Failing { flush_until: now + FLUSH_TIME };
        // Before the report: sending it also reads from the sockets, and those bytes must not reach a caller's memory.
        self.end_all();
        self.group.abort(
            &forwarded_report
                .map_or_else(|| report::own(self.group.info().rank, error), |(_, report)| report),
        );
        // After the report: a rank of this node whose streams are released looks for it.
        self.start_releasing(now);
        self.advance_phase(now);
    }

    /// Ends the group without polling it: the transport panicked.
    pub(crate) fn abandon(&mut self, now: Instant) {
        self.end_all();
        self.start_releasing(now);
        self.phase = if self.is_closing { Phase::Releasing } else { Phase::Abandoned };
    }

    /// Ends the group because this rank closes it with `error`.
    pub(super) fn close(&mut self, error: &Error, now: Instant) {
        match error {
            _ if !self.is_running() => {}
            Error::Closed { reason, .. } if reason == DESTROYED => match self.has_calls() {
                true => self.depart(error, now),
                // Without an abort report.
                false => {
                    self.next_check = None;
                    self.phase = Phase::Leaving;
                }
            },
            // Any other error is the reason of an abort, whose command follows.
            _ => self.fail(error, now),
        }
    }

    /// Continues a group that is no longer running. Returns true if anything moved.
    #[cold]
    pub(crate) fn poll_failed(&mut self, now: Instant) -> bool {
        // Calls may have been submitted while the group failed.
        let had_calls = self.has_calls();
        if had_calls {
            self.end_all();
            self.start_releasing(now);
        }
        self.keep_releasing(now);
        // Frames that notify the other ranks may still be queued, and only polls send them.
        let sends = matches!(self.phase, Phase::Failing { .. } | Phase::Failed);
        let moved = sends && !self.group.is_flushed() && self.group.poll();
        had_calls | moved | self.advance_phase(now)
    }

    /// Enters the next phase of a group that is no longer running, if its time has come.
    fn advance_phase(&mut self, now: Instant) -> bool {
        let next = match self.phase {
            Phase::Failing { flush_until } if self.group.is_abort_flushed() || now >= flush_until => {
                Phase::Failed
            }
            Phase::Failed | Phase::Abandoned if self.is_closing => Phase::Leaving,
            Phase::Leaving if self.group.leave(now) => Phase::Releasing,
            Phase::Releasing if self.release_started.is_none() => Phase::Left,
            _ => return false,
        };
        self.phase = next;
        true
    }

    /// Fails the group because this rank closes it. The other ranks receive the loss of this rank as the reason,
    /// with the last error of this process.
    pub(crate) fn depart(&mut self, error: &Error, now: Instant) {
        let own_error = self.group.health().last_error(self.names.me);
        let reason = error_text::departure(&self.names, &self.oldest(), own_error.as_ref());
        self.forwarded_report = Some((error.clone(), report::own(self.names.me, &reason)));
        self.fail(error, now);
    }

    /// Releases the callers' memory and empties the queues.
    fn end_all(&mut self) {
        self.group.release_user_buffers();
        // A failed group is no longer checked.
        self.next_check = None;
        let works = &mut self.ended.get_or_insert_default().works;
        for mut op in self.queue.drain(..) {
            self.recorder.ended(op.seq, Outcome::Failed, ticks(), None);
            works.extend(op.work.take());
        }
        works.extend(self.messages.end_all());
        works.extend(self.enqueued.drain(..).filter_map(|enqueued| enqueued.work));
        self.detaching.clear();
    }

    /// Starts to release the streams of all devices.
    fn start_releasing(&mut self, now: Instant) {
        if !self.sites.is_empty() {
            self.release_started.get_or_insert(now);
            self.keep_releasing(now);
        }
    }
}
