//! Handshake over an abstract unix socket that hands over the shared memory of a process.
//!
//! The initiator sends its id, the id of the target process, its request and the name of its token. Both ends prove
//! that they know the token ([`crate::token`]). Then the listener replies with its id, and either its memory and
//! eventfd or the export of the requested number. Both ends check the magic, the protocol version and that the peer
//! runs as the same user.

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
use crate::CloseOnFork;
use crate::socket_io::send_all;
use crate::token::{Initiator, NONCE, PROTOCOL, REPLY, Responder, Token};

/// Unique id of a process.
pub(crate) type ProcessUid = [u8; 16];

/// Address under which processes of the same host reach a process, and the size of its memory in bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProcessAddress {
    pub(crate) id: ProcessUid,
    pub(super) socket: Vec<u8>,
    pub(super) memory: u64,
}

const MAGIC: &[u8; 8] = b"smddp-in";
const HELLO: usize = 8 + 4 + 16 + 16;
/// Bytes of a greeting: hello, request (the memory or the number of an export) and name of the token.
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

/// Parses a hello into (sender, target).
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

/// Returns the credentials of the peer of a unix socket, for a log.
pub(super) fn describe_peer(socket: BorrowedFd<'_>) -> String {
    PeerCredentials::of(socket).map_or_else(|error| error.to_string(), |found| found.to_string())
}

/// Creates a non-blocking listener.
pub(crate) fn listen(name: &[u8]) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// State that incoming connections can request from this process.
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

    fn check_allowed(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        check_user(socket).map(drop)
    }

    /// A connection for another process gets no reply either.
    fn is_greeting(&self, greeting: &[u8]) -> bool {
        let magic = greeting.len().min(MAGIC.len());
        greeting[..magic] == MAGIC[..magic]
            && greeting.first_chunk().is_none_or(|hello| parse(hello).is_ok_and(|(_, to)| to == self.me))
    }

    fn token(&self, greeting: &[u8]) -> Option<Arc<Token>> {
        self.tokens.find(greeting.get(HELLO + 8..)?.first_chunk()?)
    }

    fn name(&self, socket: BorrowedFd<'_>) -> String {
        describe_peer(socket)
    }

    fn accept(
        &self,
        socket: CloseOnFork<OwnedFd>,
        greeting: &[u8],
        _: Option<&Responder>,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)> {
        let (from, _) = parse(greeting.first_chunk()?).ok()?;
        let request = u64::from_le_bytes(*greeting.get(HELLO..)?.first_chunk()?);
        let reply = hello(&self.me, &from);
        let stage = if request == MEMORY {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [self.memory.as_fd(), self.doorbell.event()];
            control.push(SendAncillaryMessage::ScmRights(&fds));
            let bytes = [io::IoSlice::new(&reply)];
            rustix::net::sendmsg(&*socket, &bytes, &mut control, SendFlags::NOSIGNAL).ok()?;
            Stage::Linger
        } else {
            Stage::Reply(send_export(socket.as_fd(), &reply, self.exports.create(request)).ok()?)
        };
        Some((socket, stage))
    }

    fn resource_error(&self, error: &io::Error) -> String {
        format!(
            "process {} cannot accept connections from other ranks of this host: {error}; they wait. If the limit on open \
             files is the cause, raise it (`ulimit -n`)",
            std::process::id()
        )
    }
}

/// Memory and eventfd of a peer.
pub(crate) struct MemoryReply {
    pub(crate) memory: OwnedFd,
    pub(crate) event: OwnedFd,
    /// `None` in another PID namespace.
    pub(crate) pid: Option<Pid>,
    pub(crate) stream: UnixStream,
}

/// Sends an export or its error: the hello, one byte (1: exported), the length of the rest, then bytes or error text.
/// Returns the bytes for which the socket had no room.
fn send_export(
    stream: BorrowedFd<'_>,
    reply: &[u8; HELLO],
    export: io::Result<MemoryExport>,
) -> io::Result<Vec<u8>> {
    let (exported, text, fds) = match export {
        Ok(export) => (1, export.bytes, export.fds),
        Err(error) => (0, error.to_string().into_bytes(), Vec::new()),
    };
    let mut bytes = reply.to_vec();
    bytes.push(exported);
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend(text);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MemoryExport::MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    if !borrowed.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(stream, &[io::IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(bytes.split_off(sent))
}

/// Requests the export `number` from another process.
pub(crate) fn request_export(
    address: &ProcessAddress,
    me: &ProcessUid,
    token: &Arc<Token>,
    number: u64,
) -> io::Result<MemoryExport> {
    let (stream, _) = connect(address, me, token, number)?;
    receive_export(&stream, &address.id)
}

/// Receives the reply to a request for an export.
pub(crate) fn receive_export(stream: &UnixStream, peer: &ProcessUid) -> io::Result<MemoryExport> {
    let mut fds = Vec::new();
    let mut reply = Vec::new();
    let mut part = vec![0; 4096];
    while reply.len() < HELLO + 5 || reply.len() < HELLO + 5 + length(&reply) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MemoryExport::MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut part)];
        // Retried: signals may interrupt this thread.
        let got = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(stream.as_fd(), into, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if got.bytes == 0 {
            return Err(io::Error::other("the peer closed the connection"));
        }
        reply.extend(&part[..got.bytes]);
        if reply.len() >= HELLO + 5 && length(&reply) > MemoryExport::MOST_BYTES {
            return Err(io::Error::other("the reply is too long"));
        }
    }
    let mut first = [0; HELLO];
    first.copy_from_slice(&reply[..HELLO]);
    if parse(&first)?.0 != *peer {
        return Err(io::Error::other("another process replied under this socket name"));
    }
    let bytes = reply[HELLO + 5..].to_vec();
    if reply[HELLO] == 0 {
        return Err(io::Error::other(String::from_utf8_lossy(&bytes).into_owned()));
    }
    Ok(MemoryExport { bytes, fds })
}

/// Returns the length field of a reply.
fn length(reply: &[u8]) -> usize {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&reply[HELLO + 1..HELLO + 5]);
    u32::from_le_bytes(bytes) as usize
}

/// Connects, sends the greeting and proves knowledge of the token. Also returns the peer's pid.
fn connect(
    address: &ProcessAddress,
    me: &ProcessUid,
    token: &Arc<Token>,
    request: u64,
) -> io::Result<(UnixStream, Option<Pid>)> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&address.socket)?)?;
    let pid = check_user(&stream)?.pid;
    stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
    let claim = Initiator::new(token, &greeting(me, &address.id, request, token))?;
    send_all(&stream, claim.greeting())?;
    let (mut reply, mut got) = ([0; REPLY], 0);
    while got < REPLY {
        match stream.read(&mut reply[got..]) {
            Ok(0) => return Err(connection_closed()),
            Ok(bytes) => got += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        claim.check_reply_prefix(&reply[..got])?;
    }
    send_all(&stream, &claim.prove(&reply)?)?;
    Ok((stream, pid))
}

fn greeting(from: &ProcessUid, to: &ProcessUid, request: u64, token: &Token) -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[..HELLO].copy_from_slice(&hello(from, to));
    greeting[HELLO..HELLO + 8].copy_from_slice(&request.to_le_bytes());
    greeting[HELLO + 8..].copy_from_slice(&token.id());
    greeting
}

fn connection_closed() -> io::Error {
    io::Error::other(
        "the peer closed the connection during the handshake (another user, another job or another version?)",
    )
}

pub(crate) fn request_memory(
    address: &ProcessAddress,
    me: &ProcessUid,
    token: &Arc<Token>,
) -> io::Result<MemoryReply> {
    let (stream, pid) = connect(address, me, token, MEMORY)?;
    receive_memory(stream, pid, &address.id)
}

/// Receives the reply to a request for the memory.
pub(crate) fn receive_memory(
    stream: UnixStream,
    pid: Option<Pid>,
    peer: &ProcessUid,
) -> io::Result<MemoryReply> {
    let mut bytes = [0; HELLO];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let into = &mut [IoSliceMut::new(&mut bytes)];
    let got = rustix::io::retry_on_intr(|| rustix::net::recvmsg(stream.as_fd(), into, &mut control, flags))?;
    if got.bytes != HELLO {
        return Err(connection_closed());
    }
    if parse(&bytes)?.0 != *peer {
        return Err(io::Error::other("another process replied under this socket name"));
    }
    let mut fds = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let mut next = || fds.as_mut().and_then(Iterator::next);
    match (next(), next()) {
        (Some(memory), Some(event)) => Ok(MemoryReply { memory, event, pid, stream }),
        _ => Err(io::Error::other("the reply contained no memory")),
    }
}

/// Returns a greeting with an arbitrary sender.
#[cfg(any(test, fuzzing))]
pub(crate) fn test_greeting(to: &ProcessUid, request: u64, token: &Token) -> [u8; GREETING_BYTES] {
    greeting(&[9; 16], to, request, token)
}
