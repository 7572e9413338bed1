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
use smddp_base::CloseOnFork;
use smddp_net::handshake::{
    HandshakeEnd, Initiator, Listener, Party, ProcessUid, Purpose, Responder, unauthenticated,
};
use smddp_net::known_hosts;
use smddp_net::socket_io::{self, exchange, send};
use smddp_net::token::{Key, Keys, TAG, Token};
use smddp_process::check_user;
use smddp_tcp::connect;

use super::address::TreeAddress;

/// Bytes of the length field of a frame.
const LENGTH_BYTES: usize = 4;
/// Maximum bytes of each read.
const READ_BYTES: usize = 64 << 10;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Authentication state of a connection.
enum LinkState {
    Accepted(Box<Responder>),
    /// This end has connected.
    Connecting(Box<Initiator>),
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

impl TreeLink {
    fn new(socket: CloseOnFork<OwnedFd>, state: LinkState, now: Instant) -> Self {
        // Unix sockets have nothing to delay.
        let _ = sockopt::set_tcp_nodelay(&*socket, true);
        let (out, queued, received) = (Vec::new(), Vec::new(), Vec::new());
        Self { socket, state, from: 0, since: now, out, sent: 0, queued, received }
    }

    /// Accepts a connection at a non-blocking listener. An error means that there is none, or that this process has reached a limit.
    pub(super) fn accept(listener: impl AsFd, now: Instant) -> io::Result<Self> {
        let socket = CloseOnFork::new(rustix::net::accept_with(listener, FLAGS)?);
        Ok(Self::new(socket, LinkState::Accepted(Box::new(Responder::new(Listener::Bootstrap))), now))
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
        let handshake = initiator(from, &to.id, token)?;
        Ok(Self::new(dial(to, mine)?, LinkState::Connecting(Box::new(handshake)), now))
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
        match &self.state {
            LinkState::Connecting(handshake) => handshake.has_sent(),
            LinkState::Accepted(_) | LinkState::Authenticated(_) => true,
        }
    }

    pub(super) fn is_flushed(&self) -> bool {
        self.sent == self.out.len() && self.queued.is_empty()
    }

    pub(super) fn events(&self) -> PollFlags {
        let sends = match &self.state {
            LinkState::Accepted(handshake) => !handshake.output().is_empty(),
            LinkState::Connecting(handshake) => !handshake.output().is_empty(),
            LinkState::Authenticated(_) => self.sent < self.out.len(),
        };
        if sends { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
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
            let session = match &mut self.state {
                LinkState::Authenticated(_) => return Ok(true),
                LinkState::Accepted(handshake) => {
                    let Some(token) = token else { return Ok(false) };
                    if !exchange(&*self.socket, &mut **handshake)? {
                        return Ok(false);
                    }
                    match (handshake.keys(), handshake.greeting()) {
                        (Some(Keys { initiator, responder }), _) => Session::new(responder, initiator),
                        (None, Some(greeting)) if greeting.to.id == *me => {
                            self.from = greeting.from.rank;
                            handshake.answer(token.clone())?;
                            continue;
                        }
                        _ => return Err(unauthenticated("it connects to another rank")),
                    }
                }
                LinkState::Connecting(handshake) => {
                    let complete = exchange(&*self.socket, &mut **handshake)?;
                    let keys = handshake.keys().filter(|_| complete);
                    let Some(Keys { initiator, responder }) = keys else { return Ok(false) };
                    Session::new(initiator, responder)
                }
            };
            self.set_authenticated(session);
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
    socket_io::would_block(error) || error.kind() == ErrorKind::NotConnected
}

/// Starts the handshake of rank `from` with the rank that has the id `to`.
pub(super) fn initiator(from: usize, to: &ProcessUid, token: &Arc<Token>) -> io::Result<Initiator> {
    let from = Party { id: ProcessUid::default(), rank: from };
    Initiator::new(token, Purpose::Bootstrap, from, Party { id: *to, rank: 0 })
}
