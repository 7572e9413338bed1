//! One connection of the bootstrap: frames both ways, nothing blocks.

use std::io::{self, ErrorKind, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::net::tcp::connect;
use crate::own::Uninherited;
use crate::process::Id;
use crate::send::send;

/// Token, rank of the sender, bytes that follow.
const HEAD: usize = 24;
/// Room for each read.
const PIECE: usize = 64 << 10;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

pub(super) struct Talk {
    socket: Uninherited<OwnedFd>,
    out: Vec<u8>,
    sent: usize,
    heard: Vec<u8>,
}

impl Talk {
    fn new(socket: Uninherited<OwnedFd>) -> Self {
        // Unix sockets have nothing to delay.
        let _ = sockopt::set_tcp_nodelay(&*socket, true);
        Self { socket, out: Vec::new(), sent: 0, heard: Vec::new() }
    }

    /// Whoever waits at that listener, which does not block; an error: nobody, or this process lacks something.
    pub(super) fn accept(listener: impl AsFd) -> io::Result<Self> {
        Ok(Self::new(Uninherited::new(rustix::net::accept_with(listener, FLAGS)?)))
    }

    /// An error where the listener's queue is full, too: nobody waits for room in it.
    pub(super) fn unix(name: &[u8]) -> io::Result<Self> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        Ok(Self::new(Uninherited::new(socket)))
    }

    /// What comes of it shows when it is used.
    pub(super) fn tcp(address: SocketAddr) -> io::Result<Self> {
        Ok(Self::new(connect(address)?.map(OwnedFd::from)))
    }

    pub(super) fn say(&mut self, token: &Id, from: usize, bytes: &[u8]) {
        self.out.extend_from_slice(token);
        self.out.extend_from_slice(&(from as u32).to_le_bytes());
        self.out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        self.out.extend_from_slice(bytes);
    }

    /// Whether the connection stands, as far as it was used.
    pub(super) fn began(&self) -> bool {
        self.sent > 0
    }

    pub(super) fn said(&self) -> bool {
        self.sent == self.out.len()
    }

    /// Sends what is left; `Ok`: as far as it goes now.
    pub(super) fn write(&mut self) -> io::Result<()> {
        while !self.said() {
            let rest = &self.out[self.sent..];
            match send(&*self, &[IoSlice::new(rest)]) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if waits(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The next frame's sender and bytes, once it is here; one of more than `most`, or with another token, is an error.
    pub(super) fn read(&mut self, token: &Id, most: usize) -> io::Result<Option<(usize, Vec<u8>)>> {
        loop {
            let frame = self.frame(token, most)?;
            if frame.is_some() {
                return Ok(frame);
            }
            let at = self.heard.len();
            self.heard.resize(at + PIECE, 0);
            let outcome = rustix::io::read(&*self.socket, &mut self.heard[at..]).map_err(io::Error::from);
            self.heard.truncate(at + *outcome.as_ref().unwrap_or(&0));
            match outcome {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if waits(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    fn frame(&mut self, expected: &Id, most: usize) -> io::Result<Option<(usize, Vec<u8>)>> {
        let Some((head, _)) = self.heard.split_first_chunk::<HEAD>() else { return Ok(None) };
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (from, length) = (number(16) as usize, number(20) as usize);
        if head[..16] != *expected || length > most {
            return Err(io::Error::new(ErrorKind::InvalidData, "it is not one of this group"));
        }
        let end = HEAD + length;
        if self.heard.len() < end {
            return Ok(None);
        }
        let rest = self.heard.split_off(end);
        let mut bytes = std::mem::replace(&mut self.heard, rest);
        bytes.drain(..HEAD);
        Ok(Some((from, bytes)))
    }
}

impl AsFd for Talk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn waits(error: &io::Error) -> bool {
    // A connection that is still being made takes nothing.
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::NotConnected)
}
