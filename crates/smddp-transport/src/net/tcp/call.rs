//! Calling a peer: a connection on its way, until frames may go over it. What may pass is tried again; and trouble of this process
//! is told from the loss of a peer.

use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::dial::{Dial, advice, end_after, lacking};
use super::hello::{Credential, Purpose, TcpAddress};
use super::seal::Seal;
use crate::own::Uninherited;

/// What this process lacks may come back: other threads close files, ports are given back.
const LACKING: Duration = Duration::from_secs(5);
/// A full queue or a firewall may refuse a caller once; a process that is gone does so for ever, and has to be noticed.
const REFUSED: Duration = Duration::from_millis(400);
/// Who hangs up is there. It has too many callers, who may be sent away for their silence; or it has forgotten the group.
const FORGOTTEN: Duration = Duration::from_secs(2);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum Failed {
    /// The peer cannot be reached any more.
    Lost(String),
    /// This process lacks something; nothing is known of the peer.
    Unable(String),
}

/// A connection, and what its bytes are sealed with, if they are.
pub(super) type Made = (Option<Box<Seal>>, Uninherited<TcpStream>);

pub(super) struct Call {
    credential: Credential,
    address: TcpAddress,
    purpose: Purpose,
    /// A host that answers no call for so long is gone.
    patience: Duration,
    /// `None` between two attempts.
    dial: Option<Dial>,
    /// The group was there at one of the attempts.
    known: bool,
    /// Since when it fails.
    failing: Option<Instant>,
    /// The next attempt is not before that.
    next: Instant,
}

impl Call {
    pub(super) fn new(
        credential: Credential,
        address: TcpAddress,
        purpose: Purpose,
        patience: Duration,
    ) -> Self {
        Self {
            credential,
            address,
            purpose,
            patience,
            dial: None,
            known: false,
            failing: None,
            next: Instant::now(),
        }
    }

    pub(super) fn socket(&self) -> Option<&TcpStream> {
        self.dial.as_ref().map(|dial| &*dial.socket)
    }

    /// Whether the peer's group cannot have it yet.
    pub(super) fn unheard(&self) -> bool {
        self.dial.as_ref().is_none_or(|dial| !dial.proved())
    }

    /// What it waits for, where there is a socket.
    pub(super) fn events(&self) -> i16 {
        self.dial.as_ref().map_or(libc::POLLOUT, Dial::events)
    }

    /// The connection, once both ends have shown who they are.
    pub(super) fn go_on(&mut self) -> Result<Option<Made>, Failed> {
        let mut dial = match self.dial.take() {
            Some(dial) => dial,
            None if Instant::now() < self.next => return Ok(None),
            None => match self.dial() {
                Ok(dial) => dial,
                // Found out without asking anybody.
                Err(error) => {
                    let here = lacking(&error) || error.raw_os_error() == Some(libc::ENETUNREACH);
                    return self.failed(&error, here);
                }
            },
        };
        match dial.say() {
            Ok(false) => {
                self.dial = Some(dial);
                Ok(None)
            }
            said => match said.and_then(|_| end_after(&dial.socket, None)) {
                Ok(()) => Ok(Some((dial.keys().map(Seal::of_caller), dial.socket))),
                Err(error) => {
                    self.known |= dial.proved();
                    self.failed(&error, lacking(&error))
                }
            },
        }
    }

    fn dial(&self) -> io::Result<Dial> {
        Dial::new(&self.credential, &self.address, self.purpose, self.patience)
    }

    fn failed(&mut self, error: &io::Error, here: bool) -> Result<Option<Made>, Failed> {
        let now = Instant::now();
        let tried = now - *self.failing.get_or_insert(now);
        let patience = match error.kind() {
            _ if here => LACKING,
            ErrorKind::ConnectionRefused => REFUSED,
            ErrorKind::ConnectionReset if self.known => self.patience,
            ErrorKind::ConnectionReset => FORGOTTEN.min(self.patience),
            _ => Duration::ZERO,
        };
        if tried < patience {
            self.next = now + PAUSE;
            return Ok(None);
        }
        let why = format!("no connection to {}: {error}", self.address.socket);
        Err(if here { Failed::Unable(format!("{why}; {}", advice(error))) } else { Failed::Lost(why) })
    }
}

#[cfg(test)]
impl Call {
    /// As if the rank were stopped before it says anything.
    pub(super) fn connect_only(&mut self) -> io::Result<()> {
        self.dial = Some(self.dial()?);
        Ok(())
    }

    /// As if attempts had failed with this error for so long.
    pub(super) fn fails_with(&mut self, error: &io::Error, since: Duration) -> Result<Option<Made>, Failed> {
        self.failing = Instant::now().checked_sub(since);
        self.failed(error, lacking(error))
    }
}
