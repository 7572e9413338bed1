//! Last error of a process, sent with `Leave` to ranks that cannot read its memory.

use std::time::{Duration, Instant};

use smddp_net::frame::Frame;
use smddp_net::wire::Payload;

/// Returns the fields of a `Leave` for an error: its size in bytes, its age in nanoseconds, and its text.
pub(super) fn payload(ago: Duration, text: &str) -> (u64, u64, Payload) {
    let nanoseconds = u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX);
    (text.len() as u64, nanoseconds, Payload::Copied { at: text.as_ptr() })
}

/// Last error received from a peer.
#[derive(Clone)]
pub(super) struct PeerLastError {
    /// Allocated once and never replaced: the wire may write to it at any time.
    text: Box<[u8]>,
    /// Age of the error when the peer left.
    ago: Duration,
    received: bool,
    /// Time at which this rank first observed the error: the clocks of the two hosts differ.
    observed_at: Option<Instant>,
}

impl PeerLastError {
    /// Allocates memory for the payload of this frame, whose size the caller has checked.
    pub(super) fn new(frame: &Frame) -> Self {
        let text = vec![0; frame.bytes as usize].into();
        Self { text, ago: Duration::from_nanos(frame.total), received: false, observed_at: None }
    }

    pub(super) fn target(&mut self) -> *mut u8 {
        self.text.as_mut_ptr()
    }

    pub(super) fn mark_received(&mut self) {
        self.received = true;
    }

    pub(super) fn observe(&mut self, now: Instant) {
        if self.received {
            self.observed_at.get_or_insert(now);
        }
    }

    /// Returns the age of the error and its text; `None` until all of it has arrived.
    pub(super) fn text(&self) -> Option<(Duration, String)> {
        let since = self.observed_at.map_or(Duration::ZERO, |observed_at| observed_at.elapsed());
        self.received
            .then(|| (self.ago.saturating_add(since), String::from_utf8_lossy(&self.text).into_owned()))
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn bytes(&self) -> &[u8] {
        &self.text
    }
}
