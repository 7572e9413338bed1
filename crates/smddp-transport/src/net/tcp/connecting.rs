//! Calling a peer: a connection on its way, until frames may go over it. What may pass is tried again; and trouble of this process
//! is told from the loss of a peer.

use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::address::{Credential, Purpose, TcpAddress};
use super::dial::{Dial, Probes, advice, end_after, lacking, probe};
use super::seal::Seal;
use crate::close_on_fork::CloseOnFork;

/// What this process lacks may come back: other threads close files, ports are given back.
pub(super) const LACKING: Duration = Duration::from_secs(5);
/// A full queue or a firewall may refuse a caller once; a process that is gone does so for ever, and has to be noticed.
pub(super) const REFUSED: Duration = Duration::from_millis(400);
/// Who hangs up is there. It has too many callers, who may be sent away for their silence; or it has forgotten the group.
const FORGOTTEN: Duration = Duration::from_secs(2);
/// Between two attempts.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum Failed {
    /// The peer cannot be reached any more.
    Lost(String),
    /// This process lacks something; nothing is known of the peer.
    Unable(String),
}

/// A connection, and what its bytes are sealed with, if they are.
pub(super) type Made = (Option<Box<Seal>>, CloseOnFork<TcpStream>);

pub(super) struct Call {
    credential: Credential,
    peer: usize,
    address: TcpAddress,
    purpose: Purpose,
    /// A host that answers no call for so long is gone.
    patience: Duration,
    attempt: Attempt,
    /// The group was there at one of the attempts.
    known: bool,
    /// Since when it fails.
    failing: Option<Instant>,
}

enum Attempt {
    /// It is made when the call goes on.
    QueuedMessage,
    Dialled(Dial),
    /// It came to this, which may pass. `here`: this process lacks something.
    Failed {
        error: io::Error,
        here: bool,
    },
    /// The next one is not before that.
    Resting(Instant),
}

impl Call {
    pub(super) fn new(
        credential: Credential,
        (peer, address): (usize, TcpAddress),
        purpose: Purpose,
        patience: Duration,
    ) -> Self {
        Self {
            credential,
            peer,
            address,
            purpose,
            patience,
            attempt: Attempt::QueuedMessage,
            known: false,
            failing: None,
        }
    }

    fn dialled(&self) -> Option<&Dial> {
        match &self.attempt {
            Attempt::Dialled(dial) => Some(dial),
            _ => None,
        }
    }

    pub(super) fn socket(&self) -> Option<&TcpStream> {
        self.dialled().map(|dial| &*dial.socket)
    }

    /// Whether the peer's group cannot have it yet.
    pub(super) fn unheard(&self) -> bool {
        self.dialled().is_none_or(|dial| !dial.proved())
    }

    /// What it waits for, where there is a socket.
    pub(super) fn events(&self) -> i16 {
        self.dialled().map_or(libc::POLLOUT, Dial::events)
    }

    /// The connection, once both ends have shown who they are.
    pub(super) fn go_on(&mut self) -> Result<Option<Made>, Failed> {
        let mut dial = match std::mem::replace(&mut self.attempt, Attempt::QueuedMessage) {
            Attempt::Dialled(dial) => dial,
            Attempt::QueuedMessage => match self.dial() {
                Ok(dial) => dial,
                // Found out without asking anybody.
                Err(error) => {
                    let here = lacking(&error) || error.raw_os_error() == Some(libc::ENETUNREACH);
                    return self.failed(error, here).map(|()| None);
                }
            },
            waits => {
                self.attempt = waits;
                return Ok(None);
            }
        };
        match dial.say() {
            Ok(false) => {
                self.attempt = Attempt::Dialled(dial);
                Ok(None)
            }
            said => match said.and_then(|_| self.made(&dial.socket)) {
                Ok(()) => Ok(Some((dial.keys().map(Seal::of_caller), dial.socket))),
                Err(error) => {
                    self.known |= dial.proved();
                    let here = lacking(&error);
                    self.failed(error, here).map(|()| None)
                }
            },
        }
    }

    /// From now on frames go over it.
    fn made(&self, socket: &TcpStream) -> io::Result<()> {
        end_after(socket, None)?;
        probe(socket, self.patience, Probes::Late)
    }

    /// What the time brings: another attempt is due, or there were enough of them.
    pub(super) fn check(&mut self, now: Instant) -> Result<(), Failed> {
        match &self.attempt {
            Attempt::Failed { error, here } => {
                let since = *self.failing.get_or_insert(now);
                if now.duration_since(since) >= self.patience_with(error, *here) {
                    return Err(self.given_up(error, *here));
                }
                self.attempt = Attempt::Resting(now + PAUSE);
            }
            Attempt::Resting(until) if *until <= now => self.attempt = Attempt::QueuedMessage,
            _ => {}
        }
        Ok(())
    }

    fn dial(&self) -> io::Result<Dial> {
        Dial::new(&self.credential, (self.peer, &self.address), self.purpose, self.patience)
    }

    /// What may pass is held against the time at the next check.
    fn failed(&mut self, error: io::Error, here: bool) -> Result<(), Failed> {
        if self.patience_with(&error, here).is_zero() {
            return Err(self.given_up(&error, here));
        }
        self.attempt = Attempt::Failed { error, here };
        Ok(())
    }

    fn patience_with(&self, error: &io::Error, here: bool) -> Duration {
        match error.kind() {
            _ if here => LACKING,
            ErrorKind::ConnectionRefused => REFUSED,
            ErrorKind::ConnectionReset if self.known => self.patience,
            ErrorKind::ConnectionReset => FORGOTTEN.min(self.patience),
            _ => Duration::ZERO,
        }
    }

    fn given_up(&self, error: &io::Error, here: bool) -> Failed {
        let reason = format!("no connection to {}: {error}", self.address.socket);
        if here { Failed::Unable(format!("{reason}; {}", advice(error))) } else { Failed::Lost(reason) }
    }
}

#[cfg(test)]
impl Call {
    /// As if the rank were stopped before it says anything.
    pub(super) fn connect_only(&mut self) -> io::Result<()> {
        self.attempt = Attempt::Dialled(self.dial()?);
        Ok(())
    }

    /// As if an attempt had failed with this error.
    pub(super) fn fails_with(&mut self, error: io::Error) -> Result<(), Failed> {
        let here = lacking(&error);
        self.failed(error, here)
    }
}
