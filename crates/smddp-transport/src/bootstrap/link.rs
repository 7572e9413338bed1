//! One connection of the bootstrap: both ends prove that they have the group's token, then frames go both ways. Nothing blocks.
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
use crate::close_on_fork::CloseOnFork;
use crate::net::known_hosts;
use crate::net::tcp::connect;
use crate::process::{ProcessUid, check_user};
use crate::socket_io::send;
use crate::token::{Initiator, Key, NONCE, PROOF, PROTOCOL, REPLY, Responder, TAG, Token};

/// Of a frame: the bytes that follow.
const HEAD: usize = 4;
/// Room for each read.
const PIECE: usize = 64 << 10;
/// What a caller says first: magic, version, its rank, whom it means; then a nonce.
pub(super) const WORDS: usize = 8 + 4 + 4 + 16 + NONCE;
const MAGIC: &[u8; 8] = b"smddp-cd";

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// What is known of the other end.
enum Standing {
    /// It has called.
    Called,
    Challenged(Responder),
    /// This end calls.
    Calling(Initiator),
    /// It has the token.
    Known(Box<Session>),
}

/// Keys of a proved connection, and the number of the next frame in each direction.
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
    standing: Standing,
    /// Rank of a caller, as it says.
    pub(super) from: usize,
    pub(super) since: Instant,
    out: Vec<u8>,
    sent: usize,
    /// Texts of frames that wait for the other end's proof.
    later: Vec<Vec<u8>>,
    heard: Vec<u8>,
}

/// What rank `from` says to whom that number belongs, up to the nonce.
fn hello(from: usize, to: &ProcessUid) -> Vec<u8> {
    [&MAGIC[..], &PROTOCOL.to_le_bytes(), &(from as u32).to_le_bytes(), to].concat()
}

fn stranger(reason: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

impl TreeLink {
    fn new(socket: CloseOnFork<OwnedFd>, standing: Standing, now: Instant) -> Self {
        // Unix sockets have nothing to delay.
        let _ = sockopt::set_tcp_nodelay(&*socket, true);
        let out = match &standing {
            Standing::Calling(claim) => claim.greeting().to_vec(),
            _ => Vec::new(),
        };
        let (later, heard) = (Vec::new(), Vec::new());
        Self { socket, standing, from: 0, since: now, out, sent: 0, later, heard }
    }

    /// Accepts a connection at that listener, which does not block; an error: there is none, or this process lacks something.
    pub(super) fn accept(listener: impl AsFd, now: Instant) -> io::Result<Self> {
        let socket = CloseOnFork::new(rustix::net::accept_with(listener, FLAGS)?);
        Ok(Self::new(socket, Standing::Called, now))
    }

    /// Checks that the process at the other end of a unix socket runs as this process's user.
    pub(super) fn check_user(&self) -> io::Result<()> {
        match sockopt::socket_domain(&*self.socket)? {
            AddressFamily::UNIX => check_user(&*self.socket).map(drop),
            _ => Ok(()),
        }
    }

    /// Rank `from`, with the address `mine`, calls whoever has that one.
    pub(super) fn call(
        to: &TreeAddress,
        mine: &TreeAddress,
        from: usize,
        token: &Arc<Token>,
        now: Instant,
    ) -> io::Result<Self> {
        let claim = Initiator::new(token, &hello(from, &to.id))?;
        Ok(Self::new(dial(to, mine)?, Standing::Calling(claim), now))
    }

    /// One frame, which goes to nobody who has not the token.
    pub(super) fn say(&mut self, bytes: &[u8]) {
        match &mut self.standing {
            Standing::Known(session) => session.seal(bytes, &mut self.out),
            _ => self.later.push(bytes.to_vec()),
        }
    }

    /// Whether the other end has shown that it has the token.
    pub(super) fn known(&self) -> bool {
        matches!(self.standing, Standing::Known(_))
    }

    /// Whether somebody took a connection from here: bytes went out.
    pub(super) fn stood(&self) -> bool {
        self.sent > 0
    }

    pub(super) fn said(&self) -> bool {
        self.sent == self.out.len() && self.later.is_empty()
    }

    pub(super) fn events(&self) -> PollFlags {
        if self.sent < self.out.len() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }

    /// Sends what is left; `Ok`: as far as it goes now.
    pub(super) fn write(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() {
            let rest = &self.out[self.sent..];
            match send(&*self, &[IoSlice::new(rest)]) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if waits(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Goes on with the first words of both ends; whether the other end is known. `me`: whom callers mean, and what they must
    /// have; before that is known here, they wait.
    pub(super) fn greet(&mut self, me: &ProcessUid, token: Option<&Arc<Token>>) -> io::Result<bool> {
        loop {
            match &self.standing {
                Standing::Known(_) => return Ok(true),
                Standing::Called => {
                    let Some(token) = token else { return Ok(false) };
                    let whole = self.hear_words(WORDS)?;
                    self.heeds(me)?;
                    if !whole {
                        return Ok(false);
                    }
                    let words = std::mem::take(&mut self.heard);
                    self.from = u32::from_le_bytes([words[12], words[13], words[14], words[15]]) as usize;
                    let (challenge, reply) = Responder::new(token.clone(), words)?;
                    self.out.extend_from_slice(&reply);
                    self.standing = Standing::Challenged(challenge);
                    self.write()?;
                }
                Standing::Challenged(_) => {
                    if !self.hear_words(PROOF)? {
                        return Ok(false);
                    }
                    let Standing::Challenged(challenge) = &self.standing else { continue };
                    if !challenge.verifies_proof(&self.heard) {
                        return Err(stranger("it does not know the token of this job"));
                    }
                    let keys = challenge.keys();
                    self.heard = Vec::new();
                    self.become_known(Session::new(keys.responder, keys.initiator));
                }
                Standing::Calling(_) => {
                    self.write()?;
                    let whole = self.hear_words(REPLY)?;
                    let Standing::Calling(claim) = &self.standing else { continue };
                    claim.check_reply_prefix(&self.heard)?;
                    let Some(reply) = self.heard.first_chunk().filter(|_| whole) else { return Ok(false) };
                    self.out.extend_from_slice(&claim.prove(reply)?);
                    let keys = claim.keys(reply);
                    self.heard = Vec::new();
                    self.become_known(Session::new(keys.initiator, keys.responder));
                }
            }
        }
    }

    fn become_known(&mut self, mut session: Session) {
        if let Ok(Some(other)) = rustix::net::getpeername(&*self.socket)
            && let Ok(address) = SocketAddr::try_from(other)
        {
            known_hosts::record(address.ip());
        }
        self.later.drain(..).for_each(|text| session.seal(&text, &mut self.out));
        self.standing = Standing::Known(Box::new(session));
    }

    /// Whether what came so far may begin a caller's words.
    fn heeds(&self, me: &ProcessUid) -> io::Result<()> {
        let expected = [&MAGIC[..], &PROTOCOL.to_le_bytes()].concat();
        let both = self.heard.len().min(expected.len());
        let meant = self.heard.get(16..32).is_none_or(|meant| meant == me);
        match self.heard[..both] == expected[..both] && meant {
            true => Ok(()),
            false => Err(stranger("it speaks no smddp, or of another version, or means another rank")),
        }
    }

    /// Reads up to `all` bytes and none beyond; whether all are here.
    fn hear_words(&mut self, all: usize) -> io::Result<bool> {
        while self.heard.len() < all {
            if !self.hear(all - self.heard.len())? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// At most so many more bytes; whether any came.
    fn hear(&mut self, most: usize) -> io::Result<bool> {
        let at = self.heard.len();
        self.heard.resize(at + most, 0);
        let outcome = rustix::io::read(&*self.socket, &mut self.heard[at..]).map_err(io::Error::from);
        self.heard.truncate(at + *outcome.as_ref().unwrap_or(&0));
        match outcome {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(true),
            Err(error) if waits(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The bytes of the next frame of somebody who is known, once it is here; one of more than `most` is an error.
    pub(super) fn read(&mut self, most: usize) -> io::Result<Option<Vec<u8>>> {
        if !self.known() {
            return Ok(None);
        }
        loop {
            let frame = self.frame(most)?;
            if frame.is_some() || !self.hear(PIECE)? {
                return Ok(frame);
            }
        }
    }

    fn frame(&mut self, most: usize) -> io::Result<Option<Vec<u8>>> {
        let Some((head, _)) = self.heard.split_first_chunk::<HEAD>() else { return Ok(None) };
        let length = u32::from_le_bytes(*head) as usize;
        if length > most {
            return Err(stranger("its words are longer than all cards"));
        }
        let (text, end) = (HEAD + length, HEAD + length + TAG);
        if self.heard.len() < end {
            return Ok(None);
        }
        let Standing::Known(session) = &mut self.standing else { return Ok(None) };
        if !session.verifies(&self.heard[HEAD..text], &self.heard[text..end]) {
            return Err(stranger("a message was changed in transit"));
        }
        let rest = self.heard.split_off(end);
        let mut bytes = std::mem::replace(&mut self.heard, rest);
        bytes.truncate(text);
        bytes.drain(..HEAD);
        Ok(Some(bytes))
    }
}

impl AsFd for TreeLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A connection from the rank with the address `mine`, on the same host by its unix socket: there a listener whose queue is full
/// is an error, too, as nobody waits for room in it. What comes of one over TCP shows when it is used.
pub(super) fn dial(to: &TreeAddress, mine: &TreeAddress) -> io::Result<CloseOnFork<OwnedFd>> {
    if to.is_local(mine) {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(&to.socket)?)?;
        return Ok(CloseOnFork::new(socket));
    }
    let nowhere =
        || io::Error::new(ErrorKind::AddrNotAvailable, "it has no TCP address that this rank reaches");
    Ok(connect(to.tcp_from(mine).ok_or_else(nowhere)?)?.map(OwnedFd::from))
}

pub(super) fn waits(error: &io::Error) -> bool {
    // A connection that is still being made takes nothing.
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::NotConnected)
}

/// What a caller says in a test or to a fuzzed rank, up to the nonce.
#[cfg(any(test, fuzzing))]
pub(super) fn hello_of(from: usize, to: &ProcessUid) -> Vec<u8> {
    hello(from, to)
}
