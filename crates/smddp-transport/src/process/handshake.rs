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
pub(crate) type ProcessUid = [u8; 16];

/// How the processes of its host reach a process, and the bytes of its memory.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProcessAddress {
    pub(crate) id: ProcessUid,
    pub(super) socket: Vec<u8>,
    pub(super) memory: u64,
}

const MAGIC: &[u8; 8] = b"smddp-in";
const HELLO: usize = 8 + 4 + 16 + 16;
/// After its hello a caller says what it wants: the memory, or what is lent under that number; and its token's name.
const GREETING_BYTES: usize = HELLO + 8 + 16;
const MEMORY: u64 = 0;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

fn hello(from: &ProcessUid, to: &ProcessUid) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&PROTOCOL.to_le_bytes());
    bytes[12..28].copy_from_slice(from);
    bytes[28..].copy_from_slice(to);
    bytes
}

/// (who speaks, whom it means).
fn parse(bytes: &[u8; HELLO]) -> io::Result<(ProcessUid, ProcessUid)> {
    if &bytes[..8] != MAGIC {
        return Err(io::Error::other("the other end does not speak smddp"));
    }
    let version = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
    if version != PROTOCOL {
        return Err(io::Error::other(format!("protocol version {PROTOCOL} here, {version} there")));
    }
    let (mut from, mut to) = (ProcessUid::default(), ProcessUid::default());
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
pub(crate) struct ProcessHost {
    pub(crate) me: ProcessUid,
    pub(crate) memory: OwnedFd,
    pub(crate) doorbell: Doorbell,
    pub(crate) exports: Arc<Exports>,
    pub(crate) tokens: Arc<TokenRegistry>,
}

impl incoming::IncomingHost for ProcessHost {
    fn greeting_bytes(&self) -> usize {
        GREETING_BYTES + NONCE
    }

    fn check_allowed(&self, caller: BorrowedFd<'_>) -> io::Result<()> {
        check_user(caller).map(drop)
    }

    /// Whoever means another process is not answered either.
    fn is_greeting(&self, greeting: &[u8]) -> bool {
        let magic = greeting.len().min(MAGIC.len());
        greeting[..magic] == MAGIC[..magic]
            && greeting.first_chunk().is_none_or(|hello| parse(hello).is_ok_and(|(_, to)| to == self.me))
    }

    fn token(&self, greeting: &[u8]) -> Option<Arc<Token>> {
        self.tokens.find(greeting.get(HELLO + 8..)?.first_chunk()?)
    }

    fn name(&self, caller: BorrowedFd<'_>) -> String {
        name_of(caller)
    }

    fn accept(
        &self,
        caller: CloseOnFork<OwnedFd>,
        greeting: &[u8],
        _: Option<&Responder>,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)> {
        let (from, _) = parse(greeting.first_chunk()?).ok()?;
        let wanted = u64::from_le_bytes(*greeting.get(HELLO..)?.first_chunk()?);
        let reply = hello(&self.me, &from);
        let stage = if wanted == MEMORY {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [self.memory.as_fd(), self.doorbell.event()];
            control.push(SendAncillaryMessage::ScmRights(&fds));
            let greeting = [io::IoSlice::new(&reply)];
            rustix::net::sendmsg(&*caller, &greeting, &mut control, SendFlags::NOSIGNAL).ok()?;
            Stage::Linger
        } else {
            Stage::Reply(send_export(caller.as_fd(), &reply, self.exports.create(wanted)).ok()?)
        };
        Some((caller, stage))
    }

    fn resource_error(&self, error: &io::Error) -> String {
        format!(
            "process {} cannot answer other ranks of this host: {error}; they wait (raise the limit on open files, \
             `ulimit -n`, if that is what it lacks)",
            std::process::id()
        )
    }
}

/// What the listener handed over.
pub(crate) struct MemoryReply {
    pub(crate) memory: OwnedFd,
    pub(crate) event: OwnedFd,
    /// `None` in another PID namespace.
    pub(crate) pid: Option<Pid>,
    pub(crate) stream: UnixStream,
}

/// Hands over what is lent, or says why not: the reply, a byte (1: it is handed over), the length of what follows. What
/// the socket has no room for comes back.
fn send_export(
    stream: BorrowedFd<'_>,
    reply: &[u8; HELLO],
    receive_export: io::Result<MemoryExport>,
) -> io::Result<Vec<u8>> {
    let (given, text, fds) = match receive_export {
        Ok(receive_export) => (1, receive_export.bytes, receive_export.fds),
        Err(error) => (0, error.to_string().into_bytes(), Vec::new()),
    };
    let mut greeting = reply.to_vec();
    greeting.push(given);
    greeting.extend((text.len() as u32).to_le_bytes());
    greeting.extend(text);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MemoryExport::MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    if !borrowed.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(stream, &[io::IoSlice::new(&greeting)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(greeting.split_off(sent))
}

/// Asks for what another process lends under that number.
pub(crate) fn request_export(
    address: &ProcessAddress,
    me: &ProcessUid,
    token: &Arc<Token>,
    number: u64,
) -> io::Result<MemoryExport> {
    let (stream, _) = connect(address, me, token, number)?;
    receive_export(&stream, &address.id)
}

/// What comes of such a question.
pub(crate) fn receive_export(stream: &UnixStream, them: &ProcessUid) -> io::Result<MemoryExport> {
    let mut fds = Vec::new();
    let mut greeting = Vec::new();
    let mut part = vec![0; 4096];
    while greeting.len() < HELLO + 5 || greeting.len() < HELLO + 5 + length(&greeting) {
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
        greeting.extend(&part[..got.bytes]);
        if greeting.len() >= HELLO + 5 && length(&greeting) > MemoryExport::MOST_BYTES {
            return Err(io::Error::other("an answer that is too long"));
        }
    }
    let mut first = [0; HELLO];
    first.copy_from_slice(&greeting[..HELLO]);
    if parse(&first)?.0 != *them {
        return Err(io::Error::other("another process answers under this name"));
    }
    let text = greeting[HELLO + 5..].to_vec();
    if greeting[HELLO] == 0 {
        return Err(io::Error::other(String::from_utf8_lossy(&text).into_owned()));
    }
    Ok(MemoryExport { bytes: text, fds })
}

/// What an answer says of the length of what follows it.
fn length(greeting: &[u8]) -> usize {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&greeting[HELLO + 1..HELLO + 5]);
    u32::from_le_bytes(bytes) as usize
}

/// Connects, says what is wanted and proves that it may be; the other end's pid comes back too.
fn connect(
    address: &ProcessAddress,
    me: &ProcessUid,
    token: &Arc<Token>,
    wanted: u64,
) -> io::Result<(UnixStream, Option<Pid>)> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&address.socket)?)?;
    let pid = check_user(&stream)?.pid;
    stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
    let claim = Initiator::new(token, &greeting(me, &address.id, wanted, token))?;
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

fn greeting(from: &ProcessUid, to: &ProcessUid, wanted: u64, token: &Token) -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[..HELLO].copy_from_slice(&hello(from, to));
    greeting[HELLO..HELLO + 8].copy_from_slice(&wanted.to_le_bytes());
    greeting[HELLO + 8..].copy_from_slice(&token.id());
    greeting
}

fn hung_up() -> io::Error {
    io::Error::other("the other end hung up in the handshake (another user, another job or another version?)")
}

pub(crate) fn request_memory(
    address: &ProcessAddress,
    me: &ProcessUid,
    token: &Arc<Token>,
) -> io::Result<MemoryReply> {
    let (stream, pid) = connect(address, me, token, MEMORY)?;
    receive_memory(stream, pid, &address.id)
}

/// What comes of a question for the memory.
pub(crate) fn receive_memory(
    stream: UnixStream,
    pid: Option<Pid>,
    them: &ProcessUid,
) -> io::Result<MemoryReply> {
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
        (Some(memory), Some(event)) => Ok(MemoryReply { memory, event, pid, stream }),
        _ => Err(io::Error::other("no memory came with the answer")),
    }
}

/// What a caller says.
#[cfg(any(test, fuzzing))]
pub(crate) fn test_greeting(to: &ProcessUid, wanted: u64, token: &Token) -> [u8; GREETING_BYTES] {
    greeting(&[9; 16], to, wanted, token)
}
