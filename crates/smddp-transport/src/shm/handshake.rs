//! Strangers become peers: one exchange over an abstract unix socket that hands over the shared memory.
//!
//! The caller says who it is and whom it means to reach; the listener answers with its identity, its memory and its
//! eventfd.
//! Both check magic, protocol version and that the other end runs as the same user.

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::card::{Id, PROTOCOL};

const MAGIC: &[u8; 8] = b"smddp-in";
const HELLO: usize = 8 + 4 + 16 + 16;
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

/// (pid, uid) of the other end, as the kernel saw them.
fn credentials(stream: &UnixStream) -> io::Result<(u32, u32)> {
    let found = rustix::net::sockopt::socket_peercred(stream)?;
    Ok((found.pid.as_raw_nonzero().get().cast_unsigned(), found.uid.as_raw()))
}

fn same_user(uid: u32) -> io::Result<()> {
    let mine = rustix::process::geteuid().as_raw();
    if uid == mine {
        return Ok(());
    }
    Err(io::Error::other(format!("the other end runs as user {uid}, this process as user {mine}")))
}

pub(super) fn listen(name: &[u8]) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// One caller at the listener. Errors concern this caller only. A caller that cannot watch this process by its
/// pid asks to keep the connection; its end then tells of this process's end.
pub(super) fn answer(
    mut stream: UnixStream,
    me: &Id,
    (memory, event): (BorrowedFd<'_>, BorrowedFd<'_>),
) -> io::Result<Option<UnixStream>> {
    same_user(credentials(&stream)?.1)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut bytes = [0; HELLO];
    stream.read_exact(&mut bytes)?;
    let (from, to) = parse(&bytes)?;
    if to != *me {
        return Err(io::Error::other("a caller meant another process"));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [memory, event];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let reply = hello(me, &from);
    rustix::net::sendmsg(&stream, &[io::IoSlice::new(&reply)], &mut control, SendFlags::NOSIGNAL)?;
    // The caller looks up this process by its pid before it hangs up.
    let keep = matches!(stream.read(&mut [0]), Ok(1));
    Ok(keep.then_some(stream))
}

/// What the listener handed over.
pub(super) struct Answer {
    pub(super) memory: OwnedFd,
    pub(super) event: OwnedFd,
    pub(super) pid: u32,
    pub(super) stream: UnixStream,
}

pub(super) fn call(name: &[u8], me: &Id, them: &Id) -> io::Result<Answer> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    let (pid, uid) = credentials(&stream)?;
    same_user(uid)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&hello(me, them))?;
    let mut bytes = [0; HELLO];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(
        stream.as_fd(),
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL,
    )?;
    if got.bytes != HELLO {
        return Err(io::Error::other(
            "the other end hung up in the handshake (another user or another version?)",
        ));
    }
    let (from, _) = parse(&bytes)?;
    if from != *them {
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
