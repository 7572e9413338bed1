//! End of a failed group: releases memory and devices, notifies the other ranks and ends the pending calls.

use std::time::{Duration, Instant};

use smddp_transport::process::record_error;

use super::Engine;
use crate::error::Error;
use crate::failure::error_text;
use crate::failure::report;
use crate::observe::recorder::{Outcome, ticks};

/// Time for which the streams of a dead group are released. Work that they had queued has usually finished by then;
/// the callers' streams no longer wait for it.
const RELEASE_TIME: Duration = Duration::from_secs(5);

impl Engine {
    /// Returns true if operations are on devices or will be. Their calls have returned; only streams wait for them.
    pub(crate) fn has_device_calls(&self) -> bool {
        !self.enqueued.is_empty() || self.queue.iter().any(|op| op.device.is_some())
    }

    /// Releases all devices. Memory that their streams still use is freed by the streams.
    pub(crate) fn drop_devices(&mut self) {
        while let Some(since) = self.release_started
            && !self.release_streams()
            && since.elapsed() < RELEASE_TIME
        {
            std::thread::sleep(Duration::from_micros(100));
        }
        self.enqueued.clear();
        self.sites.clear();
        self.release_started = None;
    }

    /// Releases all streams of a dead group. Repeated, because a resuming stream may write smaller sequence
    /// numbers.
    pub(crate) fn keep_releasing(&mut self, now: Instant) {
        let Some(since) = self.release_started else { return };
        let late = now.duration_since(since) >= RELEASE_TIME;
        // A stream that was stalled for so long overwrites the released numbers when it resumes.
        if self.release_streams() && late {
            self.release_started = None;
        }
    }

    /// Releases all streams. Returns true if none has pending work.
    fn release_streams(&mut self) -> bool {
        let mut empty = true;
        for site in &mut self.sites {
            empty &= site.release();
        }
        empty
    }

    /// Records the error for processes that later find this process dead. If the error follows from another
    /// process's error, records that one.
    pub(crate) fn leave_error(&mut self, error: &Error) {
        match self.cause_text.take() {
            Some(first) => record_error(&first),
            None => record_error(&error_text::recorded(&self.names, error)),
        }
    }

    /// Ends the group: releases the callers' memory, notifies the other ranks and ends all pending calls with `error`.
    pub(crate) fn fail(&mut self, error: &Error, now: Instant) {
        self.is_abort_sent = true;
        let forwarded_report = self.forwarded_report.take().filter(|(about, _)| about == error);
        self.recorder.failed(&error.to_string());
        // Before the notice: sending it also reads from the sockets, and those bytes must not reach a caller's memory.
        self.group.release_user_buffers();
        self.group.abort(
            &forwarded_report.map_or_else(|| report::own(self.group.rank(), error), |(_, report)| report),
        );
        self.end_all(error, now);
    }

    /// Fails the group because this rank closes it. The other ranks receive the loss of this rank as the reason,
    /// with the last error of this process.
    pub(crate) fn depart(&mut self, error: &Error, now: Instant) {
        let own_error = self.group.health().last_error(self.names.me);
        let reason = error_text::departure(&self.names, &self.oldest(), own_error.as_ref());
        self.forwarded_report = Some((error.clone(), report::own(self.group.rank(), &reason)));
        self.fail(error, now);
    }

    /// Ends all pending operations with `error`.
    pub(crate) fn end_all(&mut self, error: &Error, now: Instant) {
        self.group.release_user_buffers();
        for mut op in self.queue.drain(..) {
            self.recorder.ended(op.seq, Outcome::Failed, ticks(), None);
            if let Some(work) = op.work.take() {
                work.finish(Err(error.clone()));
            }
        }
        self.messages.fail(error);
        for enqueued in self.enqueued.drain(..) {
            if let Some(work) = enqueued.work {
                work.finish(Err(error.clone()));
            }
        }
        if !self.sites.is_empty() {
            self.release_started.get_or_insert(now);
            self.keep_releasing(now);
        }
    }
}
