//! Liveness probe of a rank that has not connected yet: an idle connection to its listener, which the system closes when its process
//! ends.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use smddp_base::CloseOnFork;

use super::address::TreeAddress;
use super::link::{dial, would_block};

pub(super) struct LivenessProbe {
    /// Bytes of the address record.
    bytes: Vec<u8>,
    address: TreeAddress,
    socket: Option<CloseOnFork<OwnedFd>>,
    /// Set once the listener was seen.
    pub(super) was_reachable: bool,
    /// Time since when connections are refused.
    refused_since: Option<Instant>,
}

impl LivenessProbe {
    /// Creates the probe of a rank. `bytes`: its address record; `address`: the decoded record.
    pub(super) fn new(bytes: &[u8], address: TreeAddress) -> Self {
        Self { bytes: bytes.to_vec(), address, socket: None, was_reachable: false, refused_since: None }
    }

    pub(super) fn has_record(&self, bytes: &[u8]) -> bool {
        self.bytes == bytes
    }

    pub(super) fn is_not_older_than(&self, mine: &TreeAddress) -> bool {
        self.address.is_not_older_than(mine)
    }

    /// Returns true if this connection would show the end of the process.
    pub(super) fn is_connected(&self) -> bool {
        self.socket.is_some()
    }

    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(|socket| socket.as_fd())
    }

    /// Probes the address after it was read again and is unchanged. Returns true if the rank has ended.
    pub(super) fn is_dead(&mut self, mine: &TreeAddress, patience: Duration, now: Instant) -> bool {
        if self.socket.is_some() {
            return false;
        }
        // Refused before, so a second refusal now confirms it.
        let twice = self.refused_since.is_some();
        match dial(&self.address, mine) {
            Ok(socket) => self.socket = Some(socket),
            Err(error) => self.record_error(&error, now),
        }
        self.poll(now);
        twice
            && self
                .refused_since
                .is_some_and(|since| self.was_reachable || now.duration_since(since) >= patience)
    }

    /// Checks the state of the connection.
    pub(super) fn poll(&mut self, now: Instant) {
        let Some(socket) = self.socket.as_deref() else { return };
        let outcome = rustix::io::read(socket, &mut [0_u8; 64]).map_err(io::Error::from);
        match outcome {
            Err(error) if would_block(&error) => {
                // A connection that is not established yet has no peer name.
                if rustix::net::getpeername(socket).is_ok() {
                    (self.was_reachable, self.refused_since) = (true, None);
                }
            }
            Ok(1..) => {}
            Ok(0) => self.socket = None,
            Err(error) => {
                self.socket = None;
                self.record_error(&error, now);
            }
        }
    }

    /// Records the error of a connection attempt.
    fn record_error(&mut self, error: &io::Error, now: Instant) {
        match error.kind() {
            ErrorKind::ConnectionRefused => {
                self.refused_since.get_or_insert(now);
            }
            // The queue is full, so the listener exists.
            ErrorKind::WouldBlock => (self.was_reachable, self.refused_since) = (true, None),
            // Other errors concern the path, not the rank.
            _ => {}
        }
    }
}
