//! One connection of the bootstrap. Both ends prove that they have the group's token, then exchange frames. Nothing blocks.
//!
//! ```text
//! length of the text (u32, little endian) | the text | authentication code: key of this connection and direction, number, text
//! ```
//!
//! A relay that passes on the proofs therefore cannot change, repeat or omit a frame.

use std::io::{self, ErrorKind, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::address::TreeAddress;
use crate::CloseOnFork;
use crate::net::known_hosts;
use crate::net::tcp::connect;
use crate::process::{ProcessUid, check_user};
use crate::socket_io::send;
use crate::token::{Initiator, Key, NONCE, PROOF, PROTOCOL, REPLY, Responder, TAG, Token};

/// Bytes of the length field of a frame.
const LENGTH_BYTES: usize = 4;
/// Maximum bytes of each read.
const READ_BYTES: usize = 64 << 10;
/// Bytes of the greeting of a connecting rank: magic, version, its rank, the id of its peer, and a nonce.
pub(super) const GREETING_BYTES: usize = 8 + 4 + 4 + 16 + NONCE;
const MAGIC: &[u8; 8] = b"smddp-cd";

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Authentication state of a connection.
enum LinkState {
    /// Accepted; the greeting is not complete.
    Accepted,
    Challenged(Responder),
    /// This end has connected and waits for the reply.
    Connecting(Initiator),
    /// The other end has proved that it has the token.
    Authenticated(Box<Session>),
}

/// Keys of an authenticated connection, and the number of the next frame in each direction.
pub(super) struct Session {
    send: (Key, u64),
    receive: (Key, u64),
}

impl Session {
    pub(super) fn new(send: Key, receive: Key) -> Self {
        Self { send: (send, 0), receive: (receive, 0) }
    }

    /// Appends the frame with that text.
    pub(super) fn seal(&mut self, text: &[u8], out: &mut Vec<u8>) {
        let (key, number) = &mut self.send;
        out.extend_from_slice(&(text.len() as u32).to_le_bytes());
        out.extend_from_slice(text);
        out.extend_from_slice(&key.tag(*number, text));
        *number += 1;
    }

    fn verifies(&mut self, text: &[u8], tag: &[u8]) -> bool {
        let (key, number) = &mut self.receive;
        *number += 1;
        key.verifies(*number - 1, text, tag)
    }
}

pub(super) struct TreeLink {
    socket: CloseOnFork<OwnedFd>,
    state: LinkState,
    /// Rank of the other end of an accepted connection, according to its greeting.
    pub(super) from: usize,
    pub(super) since: Instant,
    out: Vec<u8>,
    sent: usize,
    /// Texts of frames that are sent once the other end is authenticated.
    queued: Vec<Vec<u8>>,
    received: Vec<u8>,
}

/// Returns the greeting of rank `from` to the rank with id `to`, without the nonce.
fn greeting(from: usize, to: &ProcessUid) -> Vec<u8> {
    [&MAGIC[..], &PROTOCOL.to_le_bytes(), &(from as u32).to_le_bytes(), to].concat()
}

fn unauthenticated(reason: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

impl TreeLink {
    fn new(socket: CloseOnFork<OwnedFd>, state: LinkState, now: Instant) -> Self {
        // Unix sockets have nothing to delay.
        let _ = sockopt::set_tcp_nodelay(&*socket, true);
        let out = match &state {
            LinkState::Connecting(claim) => claim.greeting().to_vec(),
            _ => Vec::new(),
        };
        let (queued, received) = (Vec::new(), Vec::new());
        Self { socket, state, from: 0, since: now, out, sent: 0, queued, received }
    }

    /// Accepts a connection at a non-blocking listener. An error means that there is none, or that this process has reached a limit.
    pub(super) fn accept(listener: impl AsFd, now: Instant) -> io::Result<Self> {
        let socket = CloseOnFork::new(rustix::net::accept_with(listener, FLAGS)?);
        Ok(Self::new(socket, LinkState::Accepted, now))
    }

    /// Checks that the process at the other end of a unix socket runs as this process's user.
    pub(super) fn check_user(&self) -> io::Result<()> {
        match sockopt::socket_domain(&*self.socket)? {
            AddressFamily::UNIX => check_user(&*self.socket).map(drop),
            _ => Ok(()),
        }
    }

    /// Connects rank `from`, whose address is `mine`, to the rank with the address `to`.
    pub(super) fn connect(
        to: &TreeAddress,
        mine: &TreeAddress,
        from: usize,
        token: &Arc<Token>,
        now: Instant,
    ) -> io::Result<Self> {
        let claim = Initiator::new(token, &greeting(from, &to.id))?;
        Ok(Self::new(dial(to, mine)?, LinkState::Connecting(claim), now))
    }

    /// Sends a frame with that text once the other end is authenticated.
    pub(super) fn send_text(&mut self, bytes: &[u8]) {
        match &mut self.state {
            LinkState::Authenticated(session) => session.seal(bytes, &mut self.out),
            _ => self.queued.push(bytes.to_vec()),
        }
    }

    /// Returns true if the other end has proved that it has the token.
    pub(super) fn is_authenticated(&self) -> bool {
        matches!(self.state, LinkState::Authenticated(_))
    }

    /// Returns true if the other end existed: bytes were sent on the connection.
    pub(super) fn was_reachable(&self) -> bool {
        self.sent > 0
    }

    pub(super) fn is_flushed(&self) -> bool {
        self.sent == self.out.len() && self.queued.is_empty()
    }

    pub(super) fn events(&self) -> PollFlags {
        if self.sent < self.out.len() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }

    /// Sends pending bytes until the socket accepts no more.
    pub(super) fn write(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() {
            let rest = &self.out[self.sent..];
            match send(&*self, &[IoSlice::new(rest)]) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if would_block(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Advances the handshake. Returns true once the other end is authenticated. `me`: id that a greeting must contain. `token`: token
    /// that the other end must prove; without it an accepted connection waits.
    pub(super) fn handshake(&mut self, me: &ProcessUid, token: Option<&Arc<Token>>) -> io::Result<bool> {
        loop {
            match &self.state {
                LinkState::Authenticated(_) => return Ok(true),
                LinkState::Accepted => {
                    let Some(token) = token else { return Ok(false) };
                    let complete = self.receive_exact(GREETING_BYTES)?;
                    self.check_greeting(me)?;
                    if !complete {
                        return Ok(false);
                    }
                    let received = std::mem::take(&mut self.received);
                    self.from =
                        u32::from_le_bytes([received[12], received[13], received[14], received[15]]) as usize;
                    let (challenge, reply) = Responder::new(token.clone(), received)?;
                    self.out.extend_from_slice(&reply);
                    self.state = LinkState::Challenged(challenge);
                    self.write()?;
                }
                LinkState::Challenged(_) => {
                    if !self.receive_exact(PROOF)? {
                        return Ok(false);
                    }
                    let LinkState::Challenged(challenge) = &self.state else { continue };
                    if !challenge.verifies_proof(&self.received) {
                        return Err(unauthenticated("it does not have the token of this job"));
                    }
                    let keys = challenge.keys();
                    self.received = Vec::new();
                    self.set_authenticated(Session::new(keys.responder, keys.initiator));
                }
                LinkState::Connecting(_) => {
                    self.write()?;
                    let complete = self.receive_exact(REPLY)?;
                    let LinkState::Connecting(claim) = &self.state else { continue };
                    claim.check_reply_prefix(&self.received)?;
                    let Some(reply) = self.received.first_chunk().filter(|_| complete) else {
                        return Ok(false);
                    };
                    self.out.extend_from_slice(&claim.prove(reply)?);
                    let keys = claim.keys(reply);
                    self.received = Vec::new();
                    self.set_authenticated(Session::new(keys.initiator, keys.responder));
                }
            }
        }
    }

    fn set_authenticated(&mut self, mut session: Session) {
        if let Ok(Some(other)) = rustix::net::getpeername(&*self.socket)
            && let Ok(address) = SocketAddr::try_from(other)
        {
            known_hosts::record(address.ip());
        }
        self.queued.drain(..).for_each(|text| session.seal(&text, &mut self.out));
        self.state = LinkState::Authenticated(Box::new(session));
    }

    /// Checks that the received bytes are the beginning of a valid greeting to rank `me`.
    fn check_greeting(&self, me: &ProcessUid) -> io::Result<()> {
        let expected = [&MAGIC[..], &PROTOCOL.to_le_bytes()].concat();
        let both = self.received.len().min(expected.len());
        let is_to_me = self.received.get(16..32).is_none_or(|id| id == me);
        match self.received[..both] == expected[..both] && is_to_me {
            true => Ok(()),
            false => Err(unauthenticated(
                "it is not an smddp rank, has another version, or connects to another rank",
            )),
        }
    }

    /// Reads until `bytes` bytes are buffered and none beyond. Returns true if all have arrived.
    fn receive_exact(&mut self, bytes: usize) -> io::Result<bool> {
        while self.received.len() < bytes {
            if !self.receive(bytes - self.received.len())? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads up to `max_bytes` more bytes. Returns true if any arrived.
    fn receive(&mut self, max_bytes: usize) -> io::Result<bool> {
        let at = self.received.len();
        self.received.resize(at + max_bytes, 0);
        let outcome = rustix::io::read(&*self.socket, &mut self.received[at..]).map_err(io::Error::from);
        self.received.truncate(at + *outcome.as_ref().unwrap_or(&0));
        match outcome {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(true),
            Err(error) if would_block(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the text of the next frame of an authenticated connection, once it is complete. A text of more than `max_bytes` bytes
    /// is an error.
    pub(super) fn read(&mut self, max_bytes: usize) -> io::Result<Option<Vec<u8>>> {
        if !self.is_authenticated() {
            return Ok(None);
        }
        loop {
            let frame = self.frame(max_bytes)?;
            if frame.is_some() || !self.receive(READ_BYTES)? {
                return Ok(frame);
            }
        }
    }

    fn frame(&mut self, max_bytes: usize) -> io::Result<Option<Vec<u8>>> {
        let Some((head, _)) = self.received.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = u32::from_le_bytes(*head) as usize;
        if length > max_bytes {
            return Err(unauthenticated("its message is longer than the information of all ranks"));
        }
        let (text, end) = (LENGTH_BYTES + length, LENGTH_BYTES + length + TAG);
        if self.received.len() < end {
            return Ok(None);
        }
        let LinkState::Authenticated(session) = &mut self.state else { return Ok(None) };
        if !session.verifies(&self.received[LENGTH_BYTES..text], &self.received[text..end]) {
            return Err(unauthenticated("a message was changed in transit"));
        }
        let rest = self.received.split_off(end);
        let mut bytes = std::mem::replace(&mut self.received, rest);
        bytes.truncate(text);
        bytes.drain(..LENGTH_BYTES);
        Ok(Some(bytes))
    }
}

impl AsFd for TreeLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Connects the rank with the address `mine` to the rank with the address `to`, on the same host through its unix socket. There a
/// full listener queue is an error, too, because the call does not wait for room. Errors of a TCP connection appear on first use.
pub(super) fn dial(to: &TreeAddress, mine: &TreeAddress) -> io::Result<CloseOnFork<OwnedFd>> {
    if to.is_local(mine) {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(&to.socket)?)?;
        return Ok(CloseOnFork::new(socket));
    }
    let nowhere =
        || io::Error::new(ErrorKind::AddrNotAvailable, "it has no TCP address that this rank can reach");
    Ok(connect(to.tcp_from(mine).ok_or_else(nowhere)?)?.map(OwnedFd::from))
}

pub(super) fn would_block(error: &io::Error) -> bool {
    // A connection that is not established yet accepts no data.
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::NotConnected)
}

/// Returns the greeting without the nonce, for tests and fuzz targets.
#[cfg(any(test, fuzzing))]
pub(super) fn greeting_of(from: usize, to: &ProcessUid) -> Vec<u8> {
    greeting(from, to)
}
