//! One connection for frames: its link, its send queue and its frame reader.

#[allow(unsafe_code)]
mod queue;
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{AddressFamily, SocketType, sockopt};
use smddp_base::CloseOnFork;
use smddp_net::frame::{Frame, HEADER};
use smddp_net::socket_io::send;
use smddp_net::wire::{INLINE_PAYLOAD, Sink, Ticket};

use self::queue::{QueuedFrame, QueuedPayload};
use super::connecting::{ConnectError, Connecting};
use super::dial::{Keepalive, configure, zero_if_blocked};
use super::endpoint::FrameConnection;
use super::frame_reader::{ReadOutcome, Reader};
use super::links::{KernelInfo, OpenLinks};
use super::seal::Seal;

enum Link {
    /// Not established; it carries no frames yet.
    Connecting(Box<Connecting>),
    Open(Arc<CloseOnFork<TcpStream>>),
}

impl Link {
    /// Returns the socket, also while connecting; `None` between two attempts.
    fn socket(&self) -> Option<&TcpStream> {
        match self {
            Self::Connecting(connecting) => connecting.socket(),
            Self::Open(socket) => Some(socket),
        }
    }
}

/// Connection with one peer for the frames of one class.
pub(super) struct Connection {
    pub(super) peer: usize,
    pub(super) class: usize,
    link: Link,
    /// Encryption, if the connection is encrypted.
    seal: Option<Box<Seal>>,
    queue: VecDeque<QueuedFrame>,
    /// A write failed. Frames that the peer sent before are still read, because they may have the reason.
    send_failed: bool,
    /// This rank opened the connection, and no frame of the peer has arrived over it.
    pub(super) awaits_first_frame: bool,
    /// This rank has switched to another connection, so the end of this one is not a failure.
    pub(super) retired: bool,
    reader: Reader,
    /// Epoll reported the socket as readable.
    pub(super) ready: bool,
    /// Events registered with the wire's epoll.
    registered_events: Cell<i16>,
}

// SAFETY: borrowed payloads are plain memory that outlives its queue entry; one thread at a time owns the wire.
unsafe impl Send for Connection {}

/// Maximum number of frames in one system call.
const MAX_GATHERED: usize = 16;

impl Connection {
    /// Creates a connection that this rank opens.
    pub(crate) fn connect(peer: usize, class: usize, connecting: Connecting) -> Self {
        Self { awaits_first_frame: true, ..Self::new(peer, class, Link::Connecting(Box::new(connecting))) }
    }

    /// Creates a connection that the peer opened, after its handshake. `peer_timeout`: time without any answer after
    /// which the peer's host counts as lost.
    pub(super) fn accept(accepted: FrameConnection, peer_timeout: Duration) -> io::Result<Self> {
        configure(&accepted.stream, peer_timeout, Keepalive::Slow)?;
        Ok(Self {
            seal: accepted.seal,
            ..Self::new(accepted.rank, accepted.class, Link::Open(Arc::new(accepted.stream)))
        })
    }

    fn new(peer: usize, class: usize, link: Link) -> Self {
        Self {
            peer,
            class,
            link,
            seal: None,
            queue: VecDeque::new(),
            send_failed: false,
            awaits_first_frame: false,
            retired: false,
            reader: Reader::new(),
            ready: false,
            registered_events: Cell::new(0),
        }
    }

    /// Advances the connection attempt. Returns true if the connection is established.
    pub(super) fn step(&mut self) -> Result<bool, ConnectError> {
        let Link::Connecting(connecting) = &mut self.link else { return Ok(true) };
        if let Some((seal, socket)) = connecting.poll()? {
            (self.seal, self.link) = (seal, Link::Open(Arc::new(socket)));
            return Ok(true);
        }
        Ok(false)
    }

    /// Adds the connection to the table of open connections, if it is established.
    pub(super) fn publish(&self, links: &OpenLinks) {
        if let Link::Open(socket) = &self.link {
            links.add(self.peer, socket);
        }
    }

    /// Does what is due for a connection attempt by `now`: a retry, or its failure.
    pub(super) fn check(&mut self, now: Instant) -> Result<(), ConnectError> {
        match &mut self.link {
            Link::Connecting(connecting) => connecting.check(now),
            Link::Open(_) => Ok(()),
        }
    }

    /// Returns the poll events of a connection attempt.
    pub(super) fn connect_events(&self) -> i16 {
        match &self.link {
            Link::Connecting(connecting) => connecting.events(),
            Link::Open(_) => 0,
        }
    }

    pub(super) fn is_connecting(&self) -> bool {
        matches!(self.link, Link::Connecting(_))
    }

    /// Returns true for a connection attempt that the peer's group cannot have received yet.
    pub(super) fn is_unreceived(&self) -> bool {
        matches!(&self.link, Link::Connecting(connecting) if connecting.is_unreceived())
    }

    /// Takes the send queue of another connection, over which nothing was sent.
    pub(super) fn take_over(&mut self, other: Self) {
        self.queue = other.queue;
    }

    /// Returns the socket of an established connection.
    fn open(&self) -> Option<&TcpStream> {
        match &self.link {
            Link::Open(socket) => Some(socket),
            Link::Connecting(_) => None,
        }
    }

    /// Sends a frame, or appends it to the send queue. Returns true if the payload's memory is free.
    ///
    /// # Safety
    /// `payload` points to `frame.bytes` readable bytes. More than [`INLINE_PAYLOAD`] bytes do not change until the ticket is
    /// reported or the user buffers are released.
    pub(super) unsafe fn send(&mut self, frame: &Frame, payload: *const u8, ticket: Ticket) -> bool {
        if self.send_failed {
            return true;
        }
        let (head, bytes) = (frame.encode(), frame.bytes as usize);
        let borrowed = QueuedPayload::Borrowed(payload, bytes);
        let mut written = 0;
        let body = if bytes > 0 { borrowed.bytes() } else { &[] };
        // An announcement of the next frame is queued, so that the next poll sends both together.
        if self.queue.is_empty()
            && !frame.announces()
            && let Link::Open(socket) = &self.link
        {
            let sent = match &mut self.seal {
                Some(seal) => {
                    let encrypted = seal.encryptor.encrypt([&head, body]);
                    seal.encryptor.write_to(socket).map(|_| encrypted)
                }
                None => zero_if_blocked(send(&***socket, &[IoSlice::new(&head), IoSlice::new(body)])),
            };
            match sent {
                Ok(n) => written = n,
                Err(_) => {
                    self.send_failed = true;
                    return true;
                }
            }
            if written == HEADER + bytes {
                return true;
            }
        }
        let copied = bytes <= INLINE_PAYLOAD;
        let payload = if copied { QueuedPayload::Owned(body.into()) } else { borrowed };
        let ticket = (!copied).then_some(ticket);
        self.queue.push_back(QueuedFrame { head, payload, written, ticket });
        copied
    }

    /// Appends a frame to the queue and sends what the kernel accepts. Copies the rest of the payload.
    ///
    /// # Safety
    /// `payload` points to `frame.bytes` readable bytes.
    pub(super) unsafe fn send_copied(
        &mut self,
        frame: &Frame,
        payload: *const u8,
        sent: &mut dyn FnMut(Ticket),
    ) {
        if self.send_failed {
            return;
        }
        let payload = QueuedPayload::Borrowed(payload, frame.bytes as usize);
        self.queue.push_back(QueuedFrame { head: frame.encode(), payload, written: 0, ticket: None });
        self.flush(sent);
        if let Some(item) = self.queue.back_mut() {
            item.copy_payload();
        }
    }

    /// Writes queued frames and reports the tickets of sent frames. Returns true if there was progress.
    pub(super) fn flush(&mut self, sent: &mut dyn FnMut(Ticket)) -> bool {
        let mut moved = false;
        if self.seal.is_some() {
            return self.flush_encrypted(sent);
        }
        let Link::Open(socket) = &self.link else { return false };
        while !self.queue.is_empty() {
            let mut slices = [IoSlice::new(&[]); 2 * MAX_GATHERED];
            let mut wanted = 0;
            for (pair, item) in slices.chunks_exact_mut(2).zip(&self.queue) {
                let (head, body) = (&item.head, item.payload.bytes());
                pair[0] = IoSlice::new(&head[item.written.min(head.len())..]);
                pair[1] = IoSlice::new(&body[item.written.saturating_sub(head.len())..]);
                wanted += pair[0].len() + pair[1].len();
            }
            let Ok(written) = zero_if_blocked(send(&***socket, &slices)) else {
                self.fail_send(sent);
                return true;
            };
            moved |= written > 0;
            let mut left = written;
            while let Some(item) = self.queue.front_mut() {
                let rest = HEADER + item.payload.bytes().len() - item.written;
                if left < rest {
                    item.written += left;
                    break;
                }
                left -= rest;
                item.ticket.into_iter().for_each(&mut *sent);
                self.queue.pop_front();
            }
            if written < wanted {
                break;
            }
        }
        moved
    }

    /// Variant of `flush` for an encrypted connection. A payload's memory is free once its last byte is encrypted.
    fn flush_encrypted(&mut self, sent: &mut dyn FnMut(Ticket)) -> bool {
        let mut moved = false;
        loop {
            let (Link::Open(socket), Some(seal)) = (&self.link, &mut self.seal) else { return moved };
            match seal.encryptor.write_to(socket) {
                Ok(written) => moved |= written > 0,
                Err(_) => {
                    self.fail_send(sent);
                    return true;
                }
            }
            if !seal.encryptor.is_empty() || self.queue.is_empty() {
                return moved;
            }
            while let Some(item) = self.queue.front_mut() {
                let (head, body) = (&item.head, item.payload.bytes());
                let rest = [&head[item.written.min(HEADER)..], &body[item.written.saturating_sub(HEADER)..]];
                let length = rest[0].len() + rest[1].len();
                let encrypted = seal.encryptor.encrypt(rest);
                item.written += encrypted;
                if encrypted < length {
                    break;
                }
                item.ticket.into_iter().for_each(&mut *sent);
                self.queue.pop_front();
            }
        }
    }

    /// Handles a failed write: frees the queue and reports all its tickets.
    fn fail_send(&mut self, sent: &mut dyn FnMut(Ticket)) {
        self.send_failed = true;
        self.queue.drain(..).filter_map(|item| item.ticket).for_each(sent);
        self.seal.iter_mut().for_each(|seal| seal.encryptor.discard());
    }

    /// Implements [`smddp_net::wire::Wire::release_user_buffers`].
    pub(super) fn release_user_buffers(&mut self) {
        self.queue.iter_mut().for_each(QueuedFrame::copy_payload);
        self.reader.release_user_buffers();
    }

    /// Implements [`smddp_net::wire::Wire::relocate`].
    pub(super) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.queue.iter_mut().for_each(QueuedFrame::copy_payload);
        self.reader.relocate(moved);
    }

    /// Implements `TcpWire::check_checksums`.
    pub(super) fn check_checksums(&mut self) {
        self.reader.check_checksums();
    }

    pub(super) fn read(&mut self, sink: &mut dyn Sink) -> ReadOutcome {
        match (&self.link, &mut self.seal) {
            (Link::Open(socket), None) => self.reader.poll(&mut &***socket, self.peer, sink),
            (Link::Open(socket), Some(seal)) => {
                self.reader.poll(&mut seal.decryptor.reader(socket), self.peer, sink)
            }
            (Link::Connecting(_), _) => ReadOutcome::Nothing,
        }
    }

    /// Returns true if received data is pending that the kernel no longer reports: decrypted bytes, or a frame for
    /// which the sink had no target.
    pub(super) fn has_buffered(&self) -> bool {
        self.reader.blocked() || self.seal.as_ref().is_some_and(|seal| seal.decryptor.has_plaintext())
    }

    /// Returns true if the kernel has accepted everything that was sent.
    fn is_written(&self) -> bool {
        self.queue.is_empty() && self.seal.as_ref().is_none_or(|seal| seal.encryptor.is_empty())
    }

    pub(super) fn idle(&self) -> bool {
        self.is_written() && self.open().is_some()
    }

    /// Returns the descriptor; -1, which `poll` skips, between two connection attempts.
    pub(super) fn fd(&self) -> RawFd {
        self.link.socket().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Returns true if epoll reports incoming data.
    pub(super) fn is_registered(&self) -> bool {
        self.registered_events.get() & libc::POLLIN != 0
    }

    /// Registers these events with epoll, under the number `at`. Without events it removes the connection, so that
    /// epoll does not report even its end. Does nothing for a connection that is not established. Returns false if
    /// epoll failed.
    pub(super) fn register(&self, epoll: &OwnedFd, at: usize, events: i16) -> bool {
        let Some(socket) = self.open().filter(|_| events != self.registered_events.get()) else {
            return true;
        };
        let data = EventData::new_u64(at as u64);
        // Epoll and poll use the same event numbers.
        let flags = EventFlags::from_bits_truncate(u32::from(events.cast_unsigned()));
        let done = match (self.registered_events.get(), events) {
            (0, _) => epoll::add(epoll, socket, data, flags),
            (_, 0) => epoll::delete(epoll, socket),
            _ => epoll::modify(epoll, socket, data, flags),
        };
        // If the kernel has no memory for it, every poll tries the connection.
        self.registered_events.set(if done.is_ok() { events } else { 0 });
        done.is_ok()
    }

    /// Returns the events that should end a sleep.
    pub(super) fn events(&self) -> i16 {
        if self.open().is_none() {
            return libc::POLLOUT;
        }
        let read = if self.reader.blocked() { 0 } else { libc::POLLIN };
        let write = if self.is_written() { 0 } else { libc::POLLOUT };
        read | write
    }

    /// Returns the tickets of frames that will never be sent.
    pub(super) fn tickets(&self) -> impl Iterator<Item = Ticket> + '_ {
        self.queue.iter().filter_map(|item| item.ticket)
    }

    /// Returns true if the peer's kernel has acknowledged everything that was sent. Closing earlier can lose data: if
    /// unread data of the peer is pending, the kernel resets the connection. A connection that was reset acknowledges
    /// nothing more.
    pub(super) fn acknowledged(&self) -> bool {
        /// State number in the kernel.
        const TCP_CLOSE: u8 = 7;
        !self.open().is_some_and(unacknowledged)
            || tcp_info(self.fd()).is_none_or(|i| i.tcpi_state == TCP_CLOSE)
    }

    /// Returns the time since the peer's host last sent anything, if it should send something: bytes are in flight to
    /// it or queued for it. (A host with a zero receive window answers window probes, at increasing intervals.)
    pub(super) fn silent_time(&self) -> Option<Duration> {
        let waits = self.open().is_some_and(|socket| !self.is_written() || unacknowledged(socket));
        waits.then(|| self.since_last_receive()).flatten()
    }

    /// Returns the time since the peer's host last sent data or an acknowledgement.
    pub(super) fn since_last_receive(&self) -> Option<Duration> {
        let info = tcp_info(self.open()?.as_raw_fd())?;
        let last = info.tcpi_last_ack_recv.min(info.tcpi_last_data_recv);
        Some(Duration::from_millis(last.into()))
    }

    /// Returns the largest payload of a packet, in bytes, if the kernel has retransmitted at least twice without an
    /// acknowledgement.
    pub(super) fn retransmitted_packet(&self) -> Option<u32> {
        let info = tcp_info(self.open()?.as_raw_fd())?;
        (info.tcpi_unacked > 0 && info.tcpi_retransmits >= 2).then_some(info.tcpi_snd_mss)
    }

    /// Returns the kernel's minimum round-trip time on this connection.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        KernelInfo::of(self.open()?.as_raw_fd())?.min_round_trip()
    }

    /// Sets the size of the kernel's send buffer.
    pub(super) fn set_send_buffer(&self, bytes: usize) {
        // An error leaves the buffer as it is.
        if let Some(socket) = self.link.socket() {
            let _ = sockopt::set_socket_send_buffer_size(socket, bytes);
        }
    }

    /// Ends the sending direction of the connection.
    pub(super) fn shut_down_send(&self) {
        if let Some(socket) = self.open() {
            let _ = socket.shutdown(std::net::Shutdown::Write);
        }
    }
}

/// Returns true if sent bytes are not acknowledged.
fn unacknowledged(socket: &TcpStream) -> bool {
    let mut waiting: libc::c_int = 0;
    // SAFETY: TIOCOUTQ writes one int; the socket is open.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut waiting) };
    result == 0 && waiting > 0
}

/// Returns the kernel's state of a connection.
fn tcp_info(fd: RawFd) -> Option<libc::tcp_info> {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut bytes = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: TCP_INFO writes at most `bytes` bytes, the size of the structure.
    let result = unsafe {
        libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut bytes)
    };
    // SAFETY: the structure has integers only, for which zero is valid. An older kernel does not write its last fields.
    (result == 0).then(|| unsafe { info.assume_init() })
}

/// Returns the send buffer size to request so that `bytes` bytes may be in flight. Returns `None` if the kernel's
/// autotuning allows as much, or more than a request may set: a request turns autotuning off.
pub(super) fn required_send_buffer(bytes: usize) -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_wmem").ok()?;
    let tuned: usize = limits.split_whitespace().nth(2)?.parse().ok()?;
    // The kernel counts its bookkeeping too, and doubles a requested size.
    if 2 * bytes <= tuned {
        return None;
    }
    let trial = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).ok()?;
    sockopt::set_socket_send_buffer_size(&trial, bytes).ok()?;
    (sockopt::socket_send_buffer_size(&trial).ok()? > tuned).then_some(bytes)
}
