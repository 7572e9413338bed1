//! State of one group at an endpoint.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use smddp_net::wire::Ticket;

use super::pair::Pair;

/// Rank of a group in another process.
pub(super) struct Peer {
    pub(super) peer: usize,
    /// Group number at the peer's endpoint.
    pub(super) group: u32,
    /// Sequence number of the next ordered message to it.
    pub(super) next: u64,
}

/// State of one group at the endpoint.
pub(super) struct EndpointGroup {
    pub(super) me: u32,
    pub(super) size: usize,
    /// Number of ranks expected to write to this rank, before `connect`.
    pub(super) expected: usize,
    /// Peers by rank; empty before `connect`.
    pub(super) members: Vec<Option<Peer>>,
    pub(super) pairs: HashMap<u32, Pair>,
    /// Every frame has a checksum, which is checked before the frame is delivered.
    pub(super) checks: bool,
    /// Ranks that sent corrupted data, and descriptions of the data.
    pub(super) corrupted: Vec<(u32, String)>,
    /// Ranks with received frames to deliver.
    pub(super) waiting: VecDeque<u32>,
    pub(super) sent: Vec<Ticket>,
    /// Offers that are not fetched yet.
    pub(super) offers: usize,
    /// Operations in flight that write into this process's memory.
    pub(super) transfers: usize,
    doorbell: Option<OwnedFd>,
    notified: bool,
}

impl EndpointGroup {
    pub(super) fn new(me: u32, size: usize, expected: usize) -> Self {
        let doorbell = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
        );
        Self {
            me,
            size,
            expected,
            members: Vec::new(),
            pairs: HashMap::new(),
            checks: false,
            corrupted: Vec::new(),
            waiting: VecDeque::new(),
            sent: Vec::new(),
            offers: 0,
            transfers: 0,
            doorbell: doorbell.ok(),
            notified: false,
        }
    }

    /// Adds the descriptor that ends a sleep for this group. Returns false if events wait for the next poll, or without a
    /// descriptor.
    pub(super) fn wait_source(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        let Some(doorbell) = self.doorbell.as_ref().filter(|_| self.sent.is_empty() && !self.notified) else {
            return false;
        };
        fds.push((doorbell.as_raw_fd(), libc::POLLIN));
        true
    }

    /// Wakes a thread that sleeps for this group: a poll for another group has made progress for this one.
    pub(super) fn notify(&mut self) {
        if !self.notified
            && let Some(doorbell) = &self.doorbell
        {
            self.notified = rustix::io::write(doorbell, &1u64.to_ne_bytes()).is_ok();
        }
    }

    /// Records that a rank sent corrupted data.
    pub(super) fn report_corruption(&mut self, rank: u32, detail: String) {
        if !self.is_corrupted(rank) {
            self.corrupted.push((rank, detail));
            self.notify();
        }
    }

    /// Returns true if a rank sent corrupted data. Nothing more is delivered from it.
    pub(super) fn is_corrupted(&self, rank: u32) -> bool {
        self.corrupted.iter().any(|(known, _)| *known == rank)
    }

    pub(super) fn clear_notification(&mut self) {
        if std::mem::take(&mut self.notified)
            && let Some(doorbell) = &self.doorbell
        {
            let _ = rustix::io::read(doorbell, &mut [0u8; 8]);
        }
    }
}
