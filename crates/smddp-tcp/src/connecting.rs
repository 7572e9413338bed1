//! Connection attempts to a peer, until the connection can carry frames. Retries transient errors, and distinguishes
//! local errors from the loss of the peer.

use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use smddp_base::CloseOnFork;
use smddp_net::handshake::Purpose;

use super::address::{Credential, TcpAddress};
use super::dial::{Dial, Keepalive, advice, is_local_error, set_keepalive, set_user_timeout};
use super::seal::Seal;

/// Time to retry after a local error, which may pass: other threads close files, and ports become free.
pub const LOCAL_ERROR_RETRY: Duration = Duration::from_secs(5);
/// Time to retry a refused connection. A full accept queue or a firewall may refuse once. A process that ended refuses
/// for ever, and has to be detected.
pub const REFUSED_RETRY: Duration = Duration::from_millis(400);
/// Time to retry after the listener closed the connection in the handshake. Its process is alive, but has too many
/// incoming connections, or no longer has a record of the group.
const RESET_RETRY: Duration = Duration::from_secs(2);
/// Time between two attempts.
pub const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Reason for a failed connection.
#[derive(Debug)]
pub enum ConnectError {
    /// The peer is no longer reachable.
    PeerLost(String),
    /// Local error, such as a missing descriptor. The peer's state is unknown.
    Local(String),
}

/// Established connection, and its encryption if it is encrypted.
pub(super) type Connected = (Option<Box<Seal>>, CloseOnFork<TcpStream>);

/// Connection to a peer while it is being established.
pub struct Connecting {
    credential: Credential,
    peer: usize,
    address: TcpAddress,
    purpose: Purpose,
    /// Time without an answer after which a host counts as lost.
    peer_timeout: Duration,
    attempt: Attempt,
    /// In an earlier attempt the peer's process had the group.
    group_seen: bool,
    /// Time of the first failed attempt.
    failing_since: Option<Instant>,
}

enum Attempt {
    /// Starts at the next poll.
    Due,
    Dialing(Dial),
    /// Failed with an error that may be transient. `local`: it is an error of this process or host.
    Failed {
        error: io::Error,
        local: bool,
    },
    /// The next attempt starts at this time.
    Waiting(Instant),
}

impl Connecting {
    /// Prepares the first attempt. `peer_timeout`: time after which a host that does not respond counts as lost.
    pub fn new(
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

    /// Returns the socket of the attempt in progress.
    pub fn socket(&self) -> Option<&TcpStream> {
        self.dial_in_progress().map(|dial| &*dial.socket)
    }

    /// Returns true if the peer's group cannot have received the connection yet.
    pub(super) fn is_unreceived(&self) -> bool {
        self.dial_in_progress().is_none_or(|dial| !dial.handshake.proof_sent())
    }

    /// Returns the poll events that it waits for, if it has a socket.
    pub(super) fn events(&self) -> i16 {
        self.dial_in_progress().map_or(libc::POLLOUT, Dial::events)
    }

    /// Advances the attempt. Returns the connection once both ends are authenticated.
    ///
    /// # Errors
    /// [`ConnectError`]: the attempt failed for good. Errors that may pass start another attempt.
    pub fn poll(&mut self) -> Result<Option<Connected>, ConnectError> {
        let mut dial = match std::mem::replace(&mut self.attempt, Attempt::Due) {
            Attempt::Dialing(dial) => dial,
            Attempt::Due => match self.dial() {
                Ok(dial) => dial,
                // The local system call failed; nothing was sent to the peer.
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
                    self.group_seen |= dial.handshake.proof_sent();
                    let local = is_local_error(&error);
                    self.attempt_failed(error, local).map(|()| None)
                }
            },
        }
    }

    /// Sets the options of a connection that carries frames from now on.
    fn open(&self, socket: &TcpStream) -> io::Result<()> {
        set_user_timeout(socket, None)?;
        set_keepalive(socket, self.peer_timeout, Keepalive::Slow)
    }

    /// Starts another attempt if one is due, or returns the error once the time for retries has passed.
    ///
    /// # Errors
    /// [`ConnectError`]: the time for retries has passed.
    pub fn check(&mut self, now: Instant) -> Result<(), ConnectError> {
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

    /// Records a failed attempt for the next check, which has the time. Returns an error that is never retried at once.
    fn attempt_failed(&mut self, error: io::Error, local: bool) -> Result<(), ConnectError> {
        if self.retry_limit(&error, local).is_zero() {
            return Err(self.error(&error, local));
        }
        self.attempt = Attempt::Failed { error, local };
        Ok(())
    }

    /// Returns how long attempts that fail with this error are repeated.
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
    /// Opens the socket and sends nothing, like a rank that is stopped before its first bytes.
    pub(super) fn connect_only(&mut self) -> io::Result<()> {
        self.attempt = Attempt::Dialing(self.dial()?);
        Ok(())
    }

    /// Acts as if an attempt had failed with this error.
    pub(super) fn simulate_failure(&mut self, error: io::Error) -> Result<(), ConnectError> {
        let local = is_local_error(&error);
        self.attempt_failed(error, local)
    }
}
