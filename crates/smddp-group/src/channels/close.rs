//! The end of a group on this rank: abort reports and leave frames.

use std::time::{Duration, Instant};

use smddp_base::MAX_ABORT_REPORT;
use smddp_net::frame::{ALL_CLASSES, CLASSES, Classes, Frame, Kind, MESSAGES};
use smddp_net::wire::{Close, Payload};
use smddp_process::last_error;

use super::{RemoteChannels, leave_notice};

/// Maximum time from the first `leave` until the last bytes are sent.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
/// The same for an aborted group, from the time when the last connection is established.
const ABORTED_LEAVE_TIMEOUT: Duration = Duration::from_millis(100);
/// Poll interval of a leave.
const LEAVE_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Largest group in which an aborting rank sends the reason to all other ranks directly.
const MAX_DIRECT_ABORTS: usize = 256;

impl RemoteChannels {
    /// Sends the abort reason. `remote`: all ranks of other nodes. A rank without traffic yet may still wait for this rank in another
    /// call.
    pub(crate) fn abort(&mut self, reason: &str, remote: &[usize]) {
        if std::mem::replace(&mut self.aborted, true) {
            return;
        }
        let abort_text = &reason.as_bytes()[..reason.len().min(MAX_ABORT_REPORT)];
        let connected: Vec<Classes> = self.wire.peers().iter().map(|peer| peer.connected).collect();
        for rank in self.abort_recipients(remote) {
            // The class of messages always carries the reason, as for `Leave`. If it has no connection yet, this process may
            // exit before one is established. The reason therefore also goes to each class that has a connection.
            let classes = self.state.peers[rank].classes | connected[rank] | 1 << MESSAGES;
            for class in (0..CLASSES).filter(|class| classes >> class & 1 == 1) {
                let (bytes, channel) = (abort_text.len() as u64, class as u32);
                let frame = Frame { bytes, channel, ..Frame::new(Kind::Abort, self.state.seq) };
                self.send_frame(rank, &frame, Payload::Copied { at: abort_text.as_ptr() });
            }
        }
        self.wire.poll(&mut self.state);
        self.wire.close(Close::Abort);
    }

    /// Returns true if the abort reason has left this process.
    pub(crate) fn is_abort_flushed(&self) -> bool {
        self.wire.is_flushed(1 << MESSAGES)
    }

    /// Returns the ranks that get the abort reason from this rank: all others in a small group. In a large group: all contacted
    /// ranks, and those at distance 1, 2, 4, ... Each recipient forwards the reason, so all ranks receive it.
    pub(super) fn abort_recipients(&self, remote: &[usize]) -> Vec<usize> {
        let state = &self.state;
        let size = state.peers.len();
        let distance = |rank: usize| rank.abs_diff(state.me).min(size - rank.abs_diff(state.me));
        let chosen = |rank: usize| {
            state.peers[rank].contacted || size <= MAX_DIRECT_ABORTS || distance(rank).is_power_of_two()
        };
        remote.iter().copied().filter(|&rank| !state.peers[rank].left && chosen(rank)).collect()
    }

    /// Ranks with traffic in either direction that have not left.
    pub(super) fn contacted_ranks(&self) -> Vec<usize> {
        let state = &self.state;
        (0..state.peers.len())
            .filter(|&rank| state.peers[rank].contacted && !state.peers[rank].left)
            .collect()
    }

    /// Leaves the group: sends `Leave` to all contacted ranks at the first call. Returns true once everything has arrived, or the
    /// time limit has expired. Until then, the caller repeats the call. Does not block.
    pub(crate) fn leave(&mut self, now: Instant) -> bool {
        if self.leave_times.is_none() {
            self.send_leave();
        }
        let (begun, mut connecting) = self.leave_times.unwrap_or((now, now));
        if self.wire.peers().iter().any(|peer| peer.connecting) {
            connecting = now;
        }
        self.leave_times = Some((begun, connecting));
        // A peer may never receive the data of an aborted group. Its listener accepts a connection at any time, so a waiting abort
        // report is still delivered. Without it, the peer would report a lost rank. The short limit therefore begins when the last
        // connection is established.
        let dead = self.aborted || self.state.peers.iter().any(|peer| peer.abort.is_some());
        let expired = now.duration_since(begun) >= LEAVE_TIMEOUT
            || dead && now.duration_since(connecting) >= ABORTED_LEAVE_TIMEOUT;
        let is_over = self.wire.close(Close::Leave) || expired;
        if is_over {
            self.wire.close(Close::Free);
        } else if !self.wire.is_flushed(ALL_CLASSES) && !self.wire.poll(&mut self.state) {
            self.wire.check(now, &[]);
        }
        is_over
    }

    /// Leaves a group that was not closed, and waits until everything has arrived.
    pub(crate) fn leave_and_wait(&mut self) {
        if self.leave_times.is_some() {
            return;
        }
        while !self.leave(Instant::now()) {
            std::thread::sleep(LEAVE_POLL_INTERVAL);
        }
    }

    fn send_leave(&mut self) {
        let error = last_error::own();
        for rank in self.contacted_ranks() {
            // Always on the class of messages: on the other class, `Leave` may queue behind a call that the peer never makes.
            let classes = self.state.peers[rank].classes | 1 << MESSAGES;
            for class in (0..CLASSES).filter(|class| classes >> class & 1 == 1) {
                let (channel, index) = (class as u32, u64::from(classes));
                let mut frame = Frame { channel, index, ..Frame::new(Kind::Leave, self.state.seq) };
                let mut payload = Payload::None;
                if let Some((ago, text)) = error.as_ref().filter(|_| class == MESSAGES) {
                    (frame.bytes, frame.total, payload) = leave_notice::payload(*ago, text);
                }
                self.send_frame(rank, &frame, payload);
            }
        }
    }

    /// Returns true if `rank` has announced all its messages.
    pub(crate) fn all_announced(&self, rank: usize) -> bool {
        let peer = &self.state.peers[rank];
        peer.last_announced || peer.leave_classes >> MESSAGES & 1 == 1
    }

    /// Notifies a rank that all messages to it are announced.
    pub(crate) fn announce_last(&mut self, rank: usize) {
        self.send_queued();
        self.send_frame(rank, &Frame::new(Kind::LastMessage, self.state.seq), Payload::None);
    }

    /// Returns the last error that a rank sent with its `Leave`, and its age.
    pub(crate) fn last_error(&self, rank: usize) -> Option<(Duration, String)> {
        self.state.peers[rank].last_error.as_ref()?.text()
    }
}
