//! Requests to a process of this node for its shared memory or for one of its exports, over its abstract unix socket.
//!
//! After the handshake ([`smddp_net::handshake`]) the process sends one byte with its memory and eventfd, or the requested
//! export. Both ends check that the peer runs as the same user.

use std::io::{self, ErrorKind, IoSliceMut};
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
use smddp_base::CloseOnFork;
use smddp_net::handshake::{Greeting, Initiator, Listener, Party, ProcessUid, Purpose, Responder};
use smddp_net::socket_io::exchange;
use smddp_net::token::Token;

use super::credentials::{PeerCredentials, check_user};
use super::doorbell::Doorbell;
use super::exports::{Exports, MemoryExport};
use super::incoming::{self, Stage};
use super::token_registry::TokenRegistry;

/// Address under which processes of the same host reach a process, and the size of its memory in bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ProcessAddress {
    /// Id of the process.
    pub id: ProcessUid,
    pub(super) socket: Vec<u8>,
    pub(super) memory: u64,
}

/// First byte of a reply. A failed export has an error text instead of its bytes.
const OK: u8 = 1;
const FAILED: u8 = 0;
/// Bytes of the reply to a request for an export, before the export: first byte, length of the export.
const REPLY_HEADER: usize = 1 + 4;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the credentials of the peer of a unix socket, for a log.
pub(super) fn describe_peer(socket: BorrowedFd<'_>) -> String {
    PeerCredentials::of(socket).map_or_else(|error| error.to_string(), |found| found.to_string())
}

/// Creates a non-blocking listener.
///
/// # Errors
/// The name is in use, or the kernel provides no socket.
pub fn listen(name: &[u8]) -> io::Result<UnixListener> {
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
    fn first_stage(&self) -> Stage {
        Stage::Handshake(Box::new(Responder::new(Listener::Process)))
    }

    fn check_allowed(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        check_user(socket).map(drop)
    }

    fn token(&self, greeting: &Greeting) -> Option<Arc<Token>> {
        self.tokens.find(&greeting.token).filter(|_| greeting.to.id == self.me)
    }

    fn name(&self, socket: BorrowedFd<'_>) -> String {
        describe_peer(socket)
    }

    fn accept(
        &self,
        socket: CloseOnFork<OwnedFd>,
        handshake: &Responder,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)> {
        let stage = match handshake.greeting()?.purpose {
            Purpose::Memory => {
                let fds = [self.memory.as_fd(), self.doorbell.event()];
                send_with_descriptors(socket.as_fd(), &[OK], &fds).ok()?;
                Stage::Linger
            }
            Purpose::Export(number) => {
                Stage::Reply(send_export(socket.as_fd(), self.exports.create(number)).ok()?)
            }
            _ => return None,
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

/// Sends bytes and descriptors with one system call. Returns the number of bytes that it accepted.
fn send_with_descriptors(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MemoryExport::MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let bytes = [io::IoSlice::new(bytes)];
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL))
}

/// Sends an export or its error: the first byte, the length of the rest, then bytes or error text. Returns the bytes
/// for which the socket had no room.
fn send_export(socket: BorrowedFd<'_>, export: io::Result<MemoryExport>) -> io::Result<Vec<u8>> {
    let (first, text, fds) = match export {
        Ok(export) => (OK, export.bytes, export.fds),
        Err(error) => (FAILED, error.to_string().into_bytes(), Vec::new()),
    };
    let mut bytes = [&[first], &(text.len() as u32).to_le_bytes()[..], &text].concat();
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let sent = send_with_descriptors(socket, &bytes, &fds)?;
    Ok(bytes.split_off(sent))
}

/// Receives up to `bytes.len()` bytes and adds the descriptors that arrive with them. Returns the number of bytes.
fn receive_with_descriptors(
    stream: &UnixStream,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MemoryExport::MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [IoSliceMut::new(bytes)];
    // Retried: signals may interrupt this thread.
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(stream, into, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    match received.bytes {
        0 => Err(connection_closed()),
        bytes => Ok(bytes),
    }
}

/// Requests the export `number` from another process.
pub(crate) fn request_export(
    address: &ProcessAddress,
    me: &ProcessUid,
    token: &Arc<Token>,
    number: u64,
) -> io::Result<MemoryExport> {
    let (stream, _) = connect(address, me, token, Purpose::Export(number))?;
    receive_export(&stream)
}

/// Receives the reply to a request for an export.
pub(crate) fn receive_export(stream: &UnixStream) -> io::Result<MemoryExport> {
    let (mut fds, mut reply, mut part) = (Vec::new(), Vec::new(), vec![0; 4096]);
    loop {
        let received = receive_with_descriptors(stream, &mut part, &mut fds)?;
        reply.extend(&part[..received]);
        let Some(header) = reply.first_chunk::<REPLY_HEADER>() else { continue };
        let [first, length @ ..] = *header;
        let length = u32::from_le_bytes(length) as usize;
        if length > MemoryExport::MOST_BYTES {
            return Err(io::Error::other("the reply is too long"));
        }
        if reply.len() < REPLY_HEADER + length {
            continue;
        }
        let bytes = reply.split_off(REPLY_HEADER);
        return match first {
            FAILED => Err(io::Error::other(String::from_utf8_lossy(&bytes).into_owned())),
            _ => Ok(MemoryExport { bytes, fds }),
        };
    }
}

/// Connects and completes the handshake. Also returns the peer's pid.
fn connect(
    address: &ProcessAddress,
    me: &ProcessUid,
    token: &Arc<Token>,
    purpose: Purpose,
) -> io::Result<(UnixStream, Option<Pid>)> {
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&address.socket)?)?;
    let pid = check_user(&stream)?.pid;
    stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
    let [from, to] = [*me, address.id].map(|id| Party { id, rank: 0 });
    match exchange(&stream, &mut Initiator::new(token, purpose, from, to)?) {
        Ok(true) => Ok((stream, pid)),
        Ok(false) => Err(ErrorKind::TimedOut.into()),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(connection_closed()),
        Err(error) => Err(error),
    }
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
    let (stream, pid) = connect(address, me, token, Purpose::Memory)?;
    receive_memory(stream, pid)
}

/// Receives the reply to a request for the memory.
pub(crate) fn receive_memory(stream: UnixStream, pid: Option<Pid>) -> io::Result<MemoryReply> {
    let mut fds = Vec::new();
    receive_with_descriptors(&stream, &mut [0], &mut fds)?;
    let mut fds = fds.into_iter();
    match (fds.next(), fds.next()) {
        (Some(memory), Some(event)) => Ok(MemoryReply { memory, event, pid, stream }),
        _ => Err(io::Error::other("the reply contained no memory")),
    }
}
