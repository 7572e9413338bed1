//! Calling a peer: a connection on its way, until frames may go over it. What may pass is tried again; and trouble of this process
//! is told from the loss of a peer.

use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::address::{Credential, Purpose, TcpAddress};
use super::dial::{Dial, Keepalive, advice, is_local_error, set_keepalive, set_user_timeout};
use super::seal::Seal;
use crate::close_on_fork::CloseOnFork;

/// What this process lacks may come back: other threads close files, ports are given back.
pub(super) const LOCAL_ERROR_RETRY: Duration = Duration::from_secs(5);
/// A full queue or a firewall may refuse a caller once; a process that is gone does so for ever, and has to be noticed.
pub(super) const REFUSED_RETRY: Duration = Duration::from_millis(400);
/// Who hangs up is there. It has too many callers, who may be sent away for their silence; or it has forgotten the group.
const RESET_RETRY: Duration = Duration::from_secs(2);
/// Between two attempts.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum ConnectError {
    /// The peer cannot be reached any more.
    PeerLost(String),
    /// This process lacks something; nothing is known of the peer.
    Local(String),
}

/// A connection, and what its bytes are sealed with, if they are.
pub(super) type Connected = (Option<Box<Seal>>, CloseOnFork<TcpStream>);

pub(super) struct Connecting {
    credential: Credential,
    peer: usize,
    address: TcpAddress,
    purpose: Purpose,
    /// A host that answers no call for so long is gone.
    peer_timeout: Duration,
    attempt: Attempt,
    /// The group was there at one of the attempts.
    group_seen: bool,
    /// Since when it fails.
    failing_since: Option<Instant>,
}

enum Attempt {
    /// It is made when the call goes on.
    Due,
    Dialing(Dial),
    /// It came to this, which may pass. `local`: this process lacks something.
    Failed {
        error: io::Error,
        local: bool,
    },
    /// The next one is not before that.
    Waiting(Instant),
}

impl Connecting {
    pub(super) fn new(
        credential: Credential,
        (peer, address): (usize, TcpAddress),
        purpose: Purpose,
        peer_timeout: Duration,
    ) -> Self {
        Self {
            credential,
            peer,
            address,
            purpose,
            peer_timeout,
            attempt: Attempt::Due,
            group_seen: false,
            failing_since: None,
        }
    }

    fn dial_in_progress(&self) -> Option<&Dial> {
        match &self.attempt {
            Attempt::Dialing(dial) => Some(dial),
            _ => None,
        }
    }

    pub(super) fn socket(&self) -> Option<&TcpStream> {
        self.dial_in_progress().map(|dial| &*dial.socket)
    }

    /// Whether the peer's group cannot have it yet.
    pub(super) fn is_unreceived(&self) -> bool {
        self.dial_in_progress().is_none_or(|dial| !dial.proof_sent())
    }

    /// What it waits for, where there is a socket.
    pub(super) fn events(&self) -> i16 {
        self.dial_in_progress().map_or(libc::POLLOUT, Dial::events)
    }

    /// The connection, once both ends have shown who they are.
    pub(super) fn poll(&mut self) -> Result<Option<Connected>, ConnectError> {
        let mut dial = match std::mem::replace(&mut self.attempt, Attempt::Due) {
            Attempt::Dialing(dial) => dial,
            Attempt::Due => match self.dial() {
                Ok(dial) => dial,
                // Found out without asking anybody.
                Err(error) => {
                    let local = is_local_error(&error) || error.raw_os_error() == Some(libc::ENETUNREACH);
                    return self.attempt_failed(error, local).map(|()| None);
                }
            },
            other => {
                self.attempt = other;
                return Ok(None);
            }
        };
        match dial.advance() {
            Ok(false) => {
                self.attempt = Attempt::Dialing(dial);
                Ok(None)
            }
            finished => match finished.and_then(|_| self.open(&dial.socket)) {
                Ok(()) => Ok(Some((dial.keys().map(Seal::for_initiator), dial.socket))),
                Err(error) => {
                    self.group_seen |= dial.proof_sent();
                    let local = is_local_error(&error);
                    self.attempt_failed(error, local).map(|()| None)
                }
            },
        }
    }

    /// From now on frames go over it.
    fn open(&self, socket: &TcpStream) -> io::Result<()> {
        set_user_timeout(socket, None)?;
        set_keepalive(socket, self.peer_timeout, Keepalive::Slow)
    }

    /// What the time brings: another attempt is due, or there were enough of them.
    pub(super) fn check(&mut self, now: Instant) -> Result<(), ConnectError> {
        match &self.attempt {
            Attempt::Failed { error, local } => {
                let since = *self.failing_since.get_or_insert(now);
                if now.duration_since(since) >= self.retry_limit(error, *local) {
                    return Err(self.error(error, *local));
                }
                self.attempt = Attempt::Waiting(now + RETRY_INTERVAL);
            }
            Attempt::Waiting(until) if *until <= now => self.attempt = Attempt::Due,
            _ => {}
        }
        Ok(())
    }

    fn dial(&self) -> io::Result<Dial> {
        Dial::new(&self.credential, (self.peer, &self.address), self.purpose, self.peer_timeout)
    }

    /// What may pass is held against the time at the next check.
    fn attempt_failed(&mut self, error: io::Error, local: bool) -> Result<(), ConnectError> {
        if self.retry_limit(&error, local).is_zero() {
            return Err(self.error(&error, local));
        }
        self.attempt = Attempt::Failed { error, local };
        Ok(())
    }

    fn retry_limit(&self, error: &io::Error, local: bool) -> Duration {
        match error.kind() {
            _ if local => LOCAL_ERROR_RETRY,
            ErrorKind::ConnectionRefused => REFUSED_RETRY,
            ErrorKind::ConnectionReset if self.group_seen => self.peer_timeout,
            ErrorKind::ConnectionReset => RESET_RETRY.min(self.peer_timeout),
            _ => Duration::ZERO,
        }
    }

    fn error(&self, error: &io::Error, local: bool) -> ConnectError {
        let reason = format!("no connection to {}: {error}", self.address.socket);
        if local {
            ConnectError::Local(format!("{reason}; {}", advice(error)))
        } else {
            ConnectError::PeerLost(reason)
        }
    }
}

#[cfg(test)]
impl Connecting {
    /// As if the rank were stopped before it says anything.
    pub(super) fn connect_only(&mut self) -> io::Result<()> {
        self.attempt = Attempt::Dialing(self.dial()?);
        Ok(())
    }

    /// As if an attempt had failed with this error.
    pub(super) fn simulate_failure(&mut self, error: io::Error) -> Result<(), ConnectError> {
        let local = is_local_error(&error);
        self.attempt_failed(error, local)
    }
}
