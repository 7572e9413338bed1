//! Whether a rank that has not called yet is still there: a connection to its listener on which nobody says anything, and which
//! the system ends with its process.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::address::TreeAddress;
use super::link::{dial, waits};
use crate::close_on_fork::CloseOnFork;

pub(super) struct LivenessProbe {
    /// As it was read.
    bytes: Vec<u8>,
    address: TreeAddress,
    socket: Option<CloseOnFork<OwnedFd>>,
    /// Somebody listens there, or did.
    pub(super) stood: bool,
    /// Since when nobody does.
    refused: Option<Instant>,
}

impl LivenessProbe {
    /// For the rank with that address, which `bytes` held.
    pub(super) fn new(bytes: &[u8], address: TreeAddress) -> Self {
        Self { bytes: bytes.to_vec(), address, socket: None, stood: false, refused: None }
    }

    pub(super) fn is_of(&self, bytes: &[u8]) -> bool {
        self.bytes == bytes
    }

    pub(super) fn came_after(&self, mine: &TreeAddress) -> bool {
        self.address.came_after(mine)
    }

    /// Whether its end would be seen here.
    pub(super) fn stands(&self) -> bool {
        self.socket.is_some()
    }

    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(|socket| socket.as_fd())
    }

    /// Its address was read once more and is still the same: knocks there. Whether nobody is there any more.
    pub(super) fn finds_nobody(&mut self, mine: &TreeAddress, patience: Duration, now: Instant) -> bool {
        if self.socket.is_some() {
            return false;
        }
        // Refused before that, and again now.
        let twice = self.refused.is_some();
        match dial(&self.address, mine) {
            Ok(socket) => self.socket = Some(socket),
            Err(error) => self.took(&error, now),
        }
        self.look(now);
        twice && self.refused.is_some_and(|since| self.stood || now.duration_since(since) >= patience)
    }

    /// What became of the connection.
    pub(super) fn look(&mut self, now: Instant) {
        let Some(socket) = self.socket.as_deref() else { return };
        let outcome = rustix::io::read(socket, &mut [0_u8; 64]).map_err(io::Error::from);
        match outcome {
            Err(error) if waits(&error) => {
                // One that is still being made has nobody at its other end.
                if rustix::net::getpeername(socket).is_ok() {
                    (self.stood, self.refused) = (true, None);
                }
            }
            Ok(1..) => {}
            Ok(0) => self.socket = None,
            Err(error) => {
                self.socket = None;
                self.took(&error, now);
            }
        }
    }

    /// No connection came of it.
    fn took(&mut self, error: &io::Error, now: Instant) {
        match error.kind() {
            ErrorKind::ConnectionRefused => {
                self.refused.get_or_insert(now);
            }
            // Its queue is full: somebody listens.
            ErrorKind::WouldBlock => (self.stood, self.refused) = (true, None),
            // A way that does not lead there says nothing of the rank.
            _ => {}
        }
    }
}
