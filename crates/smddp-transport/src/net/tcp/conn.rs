//! One connection: what waits to be written, and the reader.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::own::Own;
use super::reader::{Read1, Reader};
use crate::net::frame::{Frame, HEADER};
use crate::net::wire::{EAGER, Sink, Ticket};

/// The head of a frame (or a hello), and its payload.
struct Outgoing {
    head: [u8; HEADER],
    head_bytes: usize,
    payload: Payload,
    written: usize,
    ticket: Option<Ticket>,
}

enum Payload {
    Owned(Box<[u8]>),
    /// Staging memory that stays as it is until the ticket is told.
    Lent(*const u8, usize),
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            // SAFETY: readable and unchanged until its ticket is told, which is the promise of `Wire::send`.
            Self::Lent(address, bytes) => unsafe { std::slice::from_raw_parts(*address, *bytes) },
        }
    }
}

pub(super) struct Conn {
    pub(super) peer: usize,
    pub(super) lane: usize,
    socket: Own<TcpStream>,
    queue: VecDeque<Outgoing>,
    /// The peer takes nothing any more. What it sent before is still to be read: it may say why.
    deaf: bool,
    /// This rank has turned to another connection: the end of this one means nothing.
    pub(super) retired: bool,
    reader: Reader,
}

// SAFETY: lent payloads are plain memory that outlives its entry; one thread at a time owns the wire.
unsafe impl Send for Conn {}

/// Payloads that one system call takes.
const GATHER: usize = 16;

pub(super) fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    // A host that vanishes sends nothing: probes tell, and so do bytes that nobody acknowledges.
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(socket, 5)?;
    sockopt::set_tcp_user_timeout(socket, 20_000)?;
    Ok(())
}

/// A connection that is being made; what comes of it shows when it is used.
pub(super) fn connect(address: SocketAddr) -> io::Result<Own<TcpStream>> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(Own::new(TcpStream::from(socket))),
        Err(error) => Err(error.into()),
    }
}

impl Conn {
    /// Calls a peer; `hello` is the first thing that it hears.
    pub(super) fn call(peer: usize, lane: usize, address: SocketAddr, hello: &[u8]) -> io::Result<Self> {
        let mut conn = Self::answer(peer, lane, connect(address)?)?;
        let mut head = [0; HEADER];
        head[..hello.len()].copy_from_slice(hello);
        conn.queue.push_back(Outgoing {
            head,
            head_bytes: hello.len(),
            payload: Payload::Owned(Box::default()),
            written: 0,
            ticket: None,
        });
        Ok(conn)
    }

    /// A peer that has called and said hello.
    pub(super) fn answer(peer: usize, lane: usize, socket: Own<TcpStream>) -> io::Result<Self> {
        prepare(&socket)?;
        Ok(Self {
            peer,
            lane,
            socket,
            queue: VecDeque::new(),
            deaf: false,
            retired: false,
            reader: Reader::new(),
        })
    }

    /// Sends a frame, or puts it behind what waits already. `true`: the payload's memory is free.
    ///
    /// # Safety
    /// As for `Wire::send`.
    pub(super) unsafe fn send(&mut self, frame: &Frame, payload: *const u8, ticket: Ticket) -> bool {
        if self.deaf {
            return true;
        }
        let (head, bytes) = (frame.encode(), frame.bytes as usize);
        let lent = Payload::Lent(payload, bytes);
        let mut written = 0;
        // What only announces the next frame goes with it, at the next poll.
        if self.queue.is_empty() && !frame.announces() {
            let whole = if bytes > 0 { lent.bytes() } else { &[] };
            match retried((&*self.socket).write_vectored(&[IoSlice::new(&head), IoSlice::new(whole)])) {
                Ok(n) => written = n,
                Err(_) => {
                    self.deaf = true;
                    return true;
                }
            }
            if written == HEADER + bytes {
                return true;
            }
        }
        let copied = bytes <= EAGER;
        let payload = match copied {
            true if bytes > 0 => Payload::Owned(lent.bytes().into()),
            true => Payload::Owned(Box::default()),
            false => lent,
        };
        let ticket = (!copied).then_some(ticket);
        self.queue.push_back(Outgoing { head, head_bytes: HEADER, payload, written, ticket });
        copied
    }

    /// Writes what waits; tells the tickets of what is gone. Whether anything moved.
    pub(super) fn flush(&mut self, sink: &mut dyn Sink) -> bool {
        let mut moved = false;
        while !self.queue.is_empty() {
            let mut slices = [IoSlice::new(&[]); 2 * GATHER];
            let mut wanted = 0;
            for (pair, item) in slices.chunks_exact_mut(2).zip(&self.queue) {
                let (head, body) = (&item.head[..item.head_bytes], item.payload.bytes());
                pair[0] = IoSlice::new(&head[item.written.min(head.len())..]);
                pair[1] = IoSlice::new(&body[item.written.saturating_sub(head.len())..]);
                wanted += pair[0].len() + pair[1].len();
            }
            let Ok(written) = retried((&*self.socket).write_vectored(&slices)) else {
                self.deaf = true;
                self.queue.drain(..).filter_map(|item| item.ticket).for_each(|ticket| sink.sent(ticket));
                return true;
            };
            moved |= written > 0;
            let mut left = written;
            while let Some(item) = self.queue.front_mut() {
                let rest = item.head_bytes + item.payload.bytes().len() - item.written;
                if left < rest {
                    item.written += left;
                    break;
                }
                left -= rest;
                if let Some(ticket) = item.ticket {
                    sink.sent(ticket);
                }
                self.queue.pop_front();
            }
            if written < wanted {
                break;
            }
        }
        moved
    }

    pub(super) fn read(&mut self, sink: &mut dyn Sink) -> Read1 {
        self.reader.turn(&self.socket, self.peer, sink)
    }

    pub(super) fn idle(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Events worth waking up for.
    pub(super) fn events(&self) -> i16 {
        let read = if self.reader.blocked() { 0 } else { libc::POLLIN };
        let write = if self.queue.is_empty() { 0 } else { libc::POLLOUT };
        read | write
    }

    /// Tickets of what will never be sent.
    pub(super) fn tickets(&self) -> impl Iterator<Item = Ticket> + '_ {
        self.queue.iter().filter_map(|item| item.ticket)
    }

    /// Whether the peer's kernel has all that was sent. Closing before that loses it where the peer has sent something
    /// that nobody read: the kernel then resets the connection. On one that was reset nothing more is acknowledged.
    pub(super) fn acknowledged(&self) -> bool {
        let mut waiting: libc::c_int = 0;
        // SAFETY: TIOCOUTQ writes one int; the socket is open.
        let told = unsafe { libc::ioctl(self.fd(), libc::TIOCOUTQ, &raw mut waiting) };
        told != 0 || waiting == 0 || self.closed()
    }

    /// Whether the kernel is done with the connection.
    fn closed(&self) -> bool {
        /// As the kernel numbers the states.
        const TCP_CLOSE: u8 = 7;
        // The state comes first in what it tells; no more is asked for.
        let (mut state, mut bytes) = (0u8, 1 as libc::socklen_t);
        // SAFETY: TCP_INFO writes at most `bytes` bytes; the socket is open.
        let told = unsafe {
            libc::getsockopt(
                self.fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                (&raw mut state).cast(),
                &raw mut bytes,
            )
        };
        told != 0 || state == TCP_CLOSE
    }

    /// The quickest there and back that the kernel has seen on this connection.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        /// Where the kernel's account has it, in microseconds; all ones: nothing was acknowledged yet.
        const MIN_RTT: usize = 148;
        let mut account = [0u8; MIN_RTT + 4];
        let mut bytes = account.len() as libc::socklen_t;
        // SAFETY: TCP_INFO writes at most `bytes` bytes; the socket is open.
        let told = unsafe {
            libc::getsockopt(
                self.fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                account.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let known = told == 0 && bytes as usize == account.len();
        let quickest = u32::from_ne_bytes(*account.last_chunk()?);
        (known && quickest != u32::MAX).then(|| Duration::from_micros(quickest.into()))
    }

    /// The kernel may keep so many bytes that are on their way.
    pub(super) fn make_room(&self, bytes: usize) {
        // Refused, the connection goes on as it is.
        let _ = sockopt::set_socket_send_buffer_size(&*self.socket, bytes);
    }

    /// Nothing more will be sent.
    pub(super) fn hang_up(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
    }
}

/// What a non-blocking write came to; a connection that is still being made takes nothing yet.
pub(super) fn retried(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

/// What a connection has to ask for so that `bytes` may be on their way; `None` where the kernel's own tuning gives as
/// much, or more than may be asked for: who asks gives it up.
pub(super) fn room(bytes: usize) -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_wmem").ok()?;
    let tuned: usize = limits.split_whitespace().nth(2)?.parse().ok()?;
    // Its own records of the bytes count too; of what is asked for it gives twice as much.
    if 2 * bytes <= tuned {
        return None;
    }
    let trial = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).ok()?;
    sockopt::set_socket_send_buffer_size(&trial, bytes).ok()?;
    (sockopt::socket_send_buffer_size(&trial).ok()? > tuned).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::frame::Kind;
    use std::net::TcpListener;
    use std::time::Instant;

    #[test]
    fn the_kernel_tells_how_long_the_way_is_once_something_was_acknowledged() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = Conn::answer(1, 0, Own::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap()))
            .unwrap();
        let quickest = ours.round_trip().unwrap();
        assert!(quickest < Duration::from_secs(10), "{quickest:?}");
    }

    #[test]
    fn a_connection_asks_for_room_only_where_that_gives_more() {
        assert_eq!(room(64 << 10), None);
        if let Some(bytes) = room(1 << 30) {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let ours = Conn::answer(1, 0, Own::new(socket)).unwrap();
            let before = sockopt::socket_send_buffer_size(&*ours.socket).unwrap();
            ours.make_room(bytes);
            assert!(sockopt::socket_send_buffer_size(&*ours.socket).unwrap() > before);
        }
    }

    #[test]
    fn bytes_for_an_end_that_is_closed_are_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut ours = Conn::answer(1, 0, Own::new(socket)).unwrap();
        drop(listener.accept().unwrap());
        // SAFETY: no payload.
        assert!(unsafe { ours.send(&Frame::new(Kind::Leave, 0), std::ptr::null(), 0) });
        ours.hang_up();
        let until = Instant::now() + Duration::from_secs(10);
        while !ours.acknowledged() {
            assert!(Instant::now() < until, "an answer is waited for that never comes");
            std::thread::yield_now();
        }
    }
}
