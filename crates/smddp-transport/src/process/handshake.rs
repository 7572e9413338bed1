//! Strangers become peers: one exchange over an abstract unix socket that hands over the shared memory.
//!
//! The caller says who it is, whom it means to reach, what it wants and under which token it speaks. Both ends show that they
//! have that ([`crate::token`]); then the listener answers with its identity and either its memory and its eventfd, or with
//! something that it lends under a number. Both check magic, protocol version and that the other end runs as the same user.

use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::credentials::{PeerCredentials, check_user};
use super::doorbell::Doorbell;
use super::exports::{Exports, MemoryExport};
use super::incoming::{self, Stage};
use super::token_registry::TokenRegistry;
use crate::close_on_fork::CloseOnFork;
use crate::socket_io::send_all;
use crate::token::{Initiator, NONCE, PROTOCOL, REPLY, Responder, Token};

/// A process's number among all.
pub(crate) type Id = [u8; 16];

/// How the processes of its host reach a process, and the bytes of its memory.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProcessAddress {
    pub(crate) id: Id,
    pub(super) socket: Vec<u8>,
    pub(super) memory: u64,
}

const MAGIC: &[u8; 8] = b"smddp-in";
const HELLO: usize = 8 + 4 + 16 + 16;
/// After its hello a caller says what it wants: the memory, or what is lent under that number; and its token's name.
const WORDS: usize = HELLO + 8 + 16;
const MEMORY: u64 = 0;
const PATIENCE: Duration = Duration::from_secs(5);

fn hello(from: &Id, to: &Id) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&PROTOCOL.to_le_bytes());
    bytes[12..28].copy_from_slice(from);
    bytes[28..].copy_from_slice(to);
    bytes
}

/// (who speaks, whom it means).
fn parse(bytes: &[u8; HELLO]) -> io::Result<(Id, Id)> {
    if &bytes[..8] != MAGIC {
        return Err(io::Error::other("the other end does not speak smddp"));
    }
    let version = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
    if version != PROTOCOL {
        return Err(io::Error::other(format!("protocol version {PROTOCOL} here, {version} there")));
    }
    let (mut from, mut to) = (Id::default(), Id::default());
    from.copy_from_slice(&bytes[12..28]);
    to.copy_from_slice(&bytes[28..]);
    Ok((from, to))
}

/// Credentials of the other end of a unix socket, for a log.
pub(super) fn name_of(caller: BorrowedFd<'_>) -> String {
    PeerCredentials::of(caller).map_or_else(|error| error.to_string(), |found| found.to_string())
}

/// A listener that does not block.
pub(crate) fn listen(name: &[u8]) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// What callers are given here.
pub(crate) struct Host {
    pub(crate) me: Id,
    pub(crate) memory: OwnedFd,
    pub(crate) doorbell: Doorbell,
    pub(crate) lending: Arc<Exports>,
    pub(crate) trusted: Arc<TokenRegistry>,
}

impl incoming::Host for Host {
    fn words(&self) -> usize {
        WORDS + NONCE
    }

    fn admits(&self, caller: BorrowedFd<'_>) -> io::Result<()> {
        check_user(caller).map(drop)
    }

    /// Whoever means another process is not answered either.
    fn heeds(&self, words: &[u8]) -> bool {
        let magic = words.len().min(MAGIC.len());
        words[..magic] == MAGIC[..magic]
            && words.first_chunk().is_none_or(|hello| parse(hello).is_ok_and(|(_, to)| to == self.me))
    }

    fn token(&self, words: &[u8]) -> Option<Arc<Token>> {
        self.trusted.find(words.get(HELLO + 8..)?.first_chunk()?)
    }

    fn name(&self, caller: BorrowedFd<'_>) -> String {
        name_of(caller)
    }

    fn answer(
        &self,
        caller: CloseOnFork<OwnedFd>,
        words: &[u8],
        _: Option<&Responder>,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)> {
        let (from, _) = parse(words.first_chunk()?).ok()?;
        let wanted = u64::from_le_bytes(*words.get(HELLO..)?.first_chunk()?);
        let reply = hello(&self.me, &from);
        let stage = if wanted == MEMORY {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [self.memory.as_fd(), self.doorbell.event()];
            control.push(SendAncillaryMessage::ScmRights(&fds));
            let words = [io::IoSlice::new(&reply)];
            rustix::net::sendmsg(&*caller, &words, &mut control, SendFlags::NOSIGNAL).ok()?;
            Stage::Looking
        } else {
            Stage::Answer(lend(caller.as_fd(), &reply, self.lending.make(wanted)).ok()?)
        };
        Some((caller, stage))
    }

    fn lacking(&self, error: &io::Error) -> String {
        format!(
            "process {} cannot answer other ranks of this host: {error}; they wait (raise the limit on open files, \
             `ulimit -n`, if that is what it lacks)",
            std::process::id()
        )
    }
}

/// What the listener handed over.
pub(crate) struct Answer {
    pub(crate) memory: OwnedFd,
    pub(crate) event: OwnedFd,
    /// `None` in another PID namespace.
    pub(crate) pid: Option<Pid>,
    pub(crate) stream: UnixStream,
}

/// Hands over what is lent, or says why not: the reply, a byte (1: it is handed over), the length of what follows. What
/// the socket has no room for comes back.
fn lend(stream: BorrowedFd<'_>, reply: &[u8; HELLO], lent: io::Result<MemoryExport>) -> io::Result<Vec<u8>> {
    let (given, text, fds) = match lent {
        Ok(lent) => (1, lent.bytes, lent.fds),
        Err(error) => (0, error.to_string().into_bytes(), Vec::new()),
    };
    let mut words = reply.to_vec();
    words.push(given);
    words.extend((text.len() as u32).to_le_bytes());
    words.extend(text);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MemoryExport::MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    if !borrowed.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(stream, &[io::IoSlice::new(&words)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(words.split_off(sent))
}

/// Asks for what another process lends under that number.
pub(crate) fn borrow(
    address: &ProcessAddress,
    me: &Id,
    token: &Arc<Token>,
    number: u64,
) -> io::Result<MemoryExport> {
    let (stream, _) = routes(address, me, token, number)?;
    lent(&stream, &address.id)
}

/// What comes of such a question.
pub(crate) fn lent(stream: &UnixStream, them: &Id) -> io::Result<MemoryExport> {
    let mut fds = Vec::new();
    let mut words = Vec::new();
    let mut part = vec![0; 4096];
    while words.len() < HELLO + 5 || words.len() < HELLO + 5 + length(&words) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MemoryExport::MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut part)];
        // A signal to this thread is no reason to give up.
        let got = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(stream.as_fd(), into, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if got.bytes == 0 {
            return Err(io::Error::other("the other end hung up"));
        }
        words.extend(&part[..got.bytes]);
        if words.len() >= HELLO + 5 && length(&words) > MemoryExport::MOST_BYTES {
            return Err(io::Error::other("an answer that is too long"));
        }
    }
    let mut first = [0; HELLO];
    first.copy_from_slice(&words[..HELLO]);
    if parse(&first)?.0 != *them {
        return Err(io::Error::other("another process answers under this name"));
    }
    let text = words[HELLO + 5..].to_vec();
    if words[HELLO] == 0 {
        return Err(io::Error::other(String::from_utf8_lossy(&text).into_owned()));
    }
    Ok(MemoryExport { bytes: text, fds })
}

/// What an answer says of the length of what follows it.
fn length(words: &[u8]) -> usize {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&words[HELLO + 1..HELLO + 5]);
    u32::from_le_bytes(bytes) as usize
}

/// Connects, says what is wanted and proves that it may be; the other end's pid comes back too.
fn routes(
    address: &ProcessAddress,
    me: &Id,
    token: &Arc<Token>,
    wanted: u64,
) -> io::Result<(UnixStream, Option<Pid>)> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&address.socket)?)?;
    let pid = check_user(&stream)?.pid;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let claim = Initiator::new(token, &words(me, &address.id, wanted, token))?;
    send_all(&stream, claim.greeting())?;
    let (mut reply, mut got) = ([0; REPLY], 0);
    while got < REPLY {
        match stream.read(&mut reply[got..]) {
            Ok(0) => return Err(hung_up()),
            Ok(bytes) => got += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        claim.check_reply_prefix(&reply[..got])?;
    }
    send_all(&stream, &claim.prove(&reply)?)?;
    Ok((stream, pid))
}

fn words(from: &Id, to: &Id, wanted: u64, token: &Token) -> [u8; WORDS] {
    let mut words = [0; WORDS];
    words[..HELLO].copy_from_slice(&hello(from, to));
    words[HELLO..HELLO + 8].copy_from_slice(&wanted.to_le_bytes());
    words[HELLO + 8..].copy_from_slice(&token.id());
    words
}

fn hung_up() -> io::Error {
    io::Error::other("the other end hung up in the handshake (another user, another job or another version?)")
}

pub(crate) fn call(address: &ProcessAddress, me: &Id, token: &Arc<Token>) -> io::Result<Answer> {
    let (stream, pid) = routes(address, me, token, MEMORY)?;
    handed(stream, pid, &address.id)
}

/// What comes of a question for the memory.
pub(crate) fn handed(stream: UnixStream, pid: Option<Pid>, them: &Id) -> io::Result<Answer> {
    let mut bytes = [0; HELLO];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let into = &mut [IoSliceMut::new(&mut bytes)];
    let got = rustix::io::retry_on_intr(|| rustix::net::recvmsg(stream.as_fd(), into, &mut control, flags))?;
    if got.bytes != HELLO {
        return Err(hung_up());
    }
    if parse(&bytes)?.0 != *them {
        return Err(io::Error::other("another process answers under this name"));
    }
    let mut fds = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let mut next = || fds.as_mut().and_then(Iterator::next);
    match (next(), next()) {
        (Some(memory), Some(event)) => Ok(Answer { memory, event, pid, stream }),
        _ => Err(io::Error::other("no memory came with the answer")),
    }
}

/// What a caller says.
#[cfg(any(test, fuzzing))]
pub(crate) fn words_of_a_caller(to: &Id, wanted: u64, token: &Token) -> [u8; WORDS] {
    words(&[9; 16], to, wanted, token)
}
