//! The last error of a process, as it goes with its goodbye to ranks that cannot read its memory.

use std::time::{Duration, Instant};

use crate::net::frame::Frame;

/// What a `Leave` has of an error: its bytes, its age in nanoseconds, and where the text lies.
pub(super) fn words(ago: Duration, text: &str) -> (u64, u64, *const u8) {
    (text.len() as u64, u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX), text.as_ptr())
}

/// What a peer said so.
#[derive(Clone)]
pub(super) struct LastError {
    /// Made once, since it may be written to for as long as the wire is.
    text: Box<[u8]>,
    /// Its age when the peer left.
    ago: Duration,
    whole: bool,
    /// When this rank first looked at it: the peer has other clocks.
    seen: Option<Instant>,
}

impl LastError {
    /// For the payload of this frame, whose size is bounded.
    pub(super) fn new(frame: &Frame) -> Self {
        let text = vec![0; frame.bytes as usize].into();
        Self { text, ago: Duration::from_nanos(frame.total), whole: false, seen: None }
    }

    pub(super) fn place(&mut self) -> *mut u8 {
        self.text.as_mut_ptr()
    }

    pub(super) fn came(&mut self) {
        self.whole = true;
    }

    pub(super) fn seen(&mut self, now: Instant) {
        if self.whole {
            self.seen.get_or_insert(now);
        }
    }

    /// How long ago that error was, and its words; `None` until all of it is here.
    pub(super) fn told(&self) -> Option<(Duration, String)> {
        let since = self.seen.map_or(Duration::ZERO, |seen| seen.elapsed());
        self.whole.then(|| (self.ago.saturating_add(since), String::from_utf8_lossy(&self.text).into_owned()))
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn text(&self) -> &[u8] {
        &self.text
    }
}
