//! One connection: what waits to be written, and the reader.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::connecting::{ConnectError, Connecting};
use super::dial::{Keepalive, configure, zero_if_blocked};
use super::endpoint::FrameConnection;
use super::frame_reader::{ReadOutcome, Reader};
use super::seal::Seal;
use crate::close_on_fork::CloseOnFork;
use crate::net::frame::{Frame, HEADER};
use crate::net::wire::{INLINE_PAYLOAD, Sink, Ticket};
use crate::socket_io::send;

/// The head of a frame, and its payload.
struct QueuedFrame {
    head: [u8; HEADER],
    payload: QueuedPayload,
    written: usize,
    ticket: Option<Ticket>,
}

impl QueuedFrame {
    /// What is lent is its owner's again.
    fn copy_payload(&mut self) {
        if let QueuedPayload::Borrowed(..) = self.payload {
            self.payload = QueuedPayload::Owned(self.payload.bytes().into());
        }
    }
}

enum QueuedPayload {
    Owned(Box<[u8]>),
    /// Memory that stays as it is until the ticket is told, or all of it is let go.
    Borrowed(*const u8, usize),
}

impl QueuedPayload {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            // SAFETY: readable and unchanged until its ticket is told or it is let go, which is the promise of `Wire::send`.
            Self::Borrowed(address, bytes) => unsafe { std::slice::from_raw_parts(*address, *bytes) },
        }
    }
}

enum Link {
    /// Nothing goes over it yet.
    Connecting(Box<Connecting>),
    Open(CloseOnFork<TcpStream>),
}

impl Link {
    /// Also while it is being made; `None` between two attempts.
    fn socket(&self) -> Option<&TcpStream> {
        match self {
            Self::Connecting(connecting) => connecting.socket(),
            Self::Open(socket) => Some(socket),
        }
    }
}

pub(super) struct Connection {
    pub(super) peer: usize,
    pub(super) class: usize,
    link: Link,
    /// What its bytes are sealed with, if they are.
    seal: Option<Box<Seal>>,
    queue: VecDeque<QueuedFrame>,
    /// The peer takes nothing any more. What it sent before is still to be read: it may say why.
    send_closed: bool,
    /// This rank has made it, and the peer has not sent anything over it yet.
    pub(super) first_frame_due: bool,
    /// This rank has turned to another connection: the end of this one means nothing.
    pub(super) retired: bool,
    reader: Reader,
    /// The kernel says that there is something to read.
    pub(super) ready: bool,
    /// Events of which the wire's epoll tells.
    registered_events: Cell<i16>,
}

// SAFETY: lent payloads are plain memory that outlives its entry; one thread at a time owns the wire.
unsafe impl Send for Connection {}

/// Payloads that one system call takes.
const MAX_GATHERED: usize = 16;

impl Connection {
    /// Calls a peer.
    pub(super) fn connect(peer: usize, class: usize, connecting: Connecting) -> Self {
        Self { first_frame_due: true, ..Self::new(peer, class, Link::Connecting(Box::new(connecting))) }
    }

    /// A peer that has called and said hello. `peer_timeout`: its host is gone if it answers nothing for so long.
    pub(super) fn accept(accepted: FrameConnection, peer_timeout: Duration) -> io::Result<Self> {
        configure(&accepted.stream, peer_timeout, Keepalive::Slow)?;
        Ok(Self {
            seal: accepted.seal,
            ..Self::new(accepted.rank, accepted.class, Link::Open(accepted.stream))
        })
    }

    fn new(peer: usize, class: usize, link: Link) -> Self {
        Self {
            peer,
            class,
            link,
            seal: None,
            queue: VecDeque::new(),
            send_closed: false,
            first_frame_due: false,
            retired: false,
            reader: Reader::new(),
            ready: false,
            registered_events: Cell::new(0),
        }
    }

    /// Goes on making the connection. `Ok`: whether it is made, now or before.
    pub(super) fn step(&mut self) -> Result<bool, ConnectError> {
        let Link::Connecting(connecting) = &mut self.link else { return Ok(true) };
        if let Some((seal, socket)) = connecting.poll()? {
            (self.seal, self.link) = (seal, Link::Open(socket));
            return Ok(true);
        }
        Ok(false)
    }

    /// What the time brings for a connection that is being made.
    pub(super) fn check(&mut self, now: Instant) -> Result<(), ConnectError> {
        match &mut self.link {
            Link::Connecting(connecting) => connecting.check(now),
            Link::Open(_) => Ok(()),
        }
    }

    /// What a connection that is being made waits for.
    pub(super) fn connect_events(&self) -> i16 {
        match &self.link {
            Link::Connecting(connecting) => connecting.events(),
            Link::Open(_) => 0,
        }
    }

    pub(super) fn is_connecting(&self) -> bool {
        matches!(self.link, Link::Connecting(_))
    }

    /// A call of which the peer's group cannot know yet.
    pub(super) fn is_unreceived(&self) -> bool {
        matches!(&self.link, Link::Connecting(connecting) if connecting.is_unreceived())
    }

    /// Sends what waits on another connection, over which nothing went.
    pub(super) fn take_over(&mut self, other: Self) {
        self.queue = other.queue;
    }

    /// Connected, with nothing in the way of what is sent next.
    fn open(&self) -> Option<&TcpStream> {
        match &self.link {
            Link::Open(socket) => Some(socket),
            Link::Connecting(_) => None,
        }
    }

    /// Sends a frame, or puts it behind what waits already. `true`: the payload's memory is free.
    ///
    /// # Safety
    /// As for `Wire::send`.
    pub(super) unsafe fn send(&mut self, frame: &Frame, payload: *const u8, ticket: Ticket) -> bool {
        if self.send_closed {
            return true;
        }
        let (head, bytes) = (frame.encode(), frame.bytes as usize);
        let borrowed = QueuedPayload::Borrowed(payload, bytes);
        let mut written = 0;
        let whole = if bytes > 0 { borrowed.bytes() } else { &[] };
        // What only announces the next frame goes with it, at the next poll.
        if self.queue.is_empty()
            && !frame.announces()
            && let Link::Open(socket) = &self.link
        {
            let sent = match &mut self.seal {
                Some(seal) => {
                    let taken = seal.encryptor.encrypt([&head, whole]);
                    seal.encryptor.write_to(socket).map(|_| taken)
                }
                None => zero_if_blocked(send(&**socket, &[IoSlice::new(&head), IoSlice::new(whole)])),
            };
            match sent {
                Ok(n) => written = n,
                Err(_) => {
                    self.send_closed = true;
                    return true;
                }
            }
            if written == HEADER + bytes {
                return true;
            }
        }
        let copied = bytes <= INLINE_PAYLOAD;
        let payload = if copied { QueuedPayload::Owned(whole.into()) } else { borrowed };
        let ticket = (!copied).then_some(ticket);
        self.queue.push_back(QueuedFrame { head, payload, written, ticket });
        copied
    }

    /// Sends a frame behind what waits already, all at once as far as the kernel takes it; what is left of it is copied.
    ///
    /// # Safety
    /// As for `Wire::post`.
    pub(super) unsafe fn post(&mut self, frame: &Frame, payload: *const u8, sent: &mut dyn FnMut(Ticket)) {
        if self.send_closed {
            return;
        }
        let payload = QueuedPayload::Borrowed(payload, frame.bytes as usize);
        self.queue.push_back(QueuedFrame { head: frame.encode(), payload, written: 0, ticket: None });
        self.flush(sent);
        if let Some(item) = self.queue.back_mut() {
            item.copy_payload();
        }
    }

    /// Writes what waits; tells the tickets of what is gone. Whether anything moved.
    pub(super) fn flush(&mut self, sent: &mut dyn FnMut(Ticket)) -> bool {
        let mut moved = false;
        if self.seal.is_some() {
            return self.flush_sealed(sent);
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
            let Ok(written) = zero_if_blocked(send(&**socket, &slices)) else {
                self.close_send(sent);
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

    /// The same, sealed: whose records hold a frame's last byte, that frame's memory is free.
    fn flush_sealed(&mut self, sent: &mut dyn FnMut(Ticket)) -> bool {
        let mut moved = false;
        loop {
            let (Link::Open(socket), Some(seal)) = (&self.link, &mut self.seal) else { return moved };
            match seal.encryptor.write_to(socket) {
                Ok(pushed) => moved |= pushed > 0,
                Err(_) => {
                    self.close_send(sent);
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
                let taken = seal.encryptor.encrypt(rest);
                item.written += taken;
                if taken < length {
                    break;
                }
                item.ticket.into_iter().for_each(&mut *sent);
                self.queue.pop_front();
            }
        }
    }

    /// The peer takes nothing any more.
    fn close_send(&mut self, sent: &mut dyn FnMut(Ticket)) {
        self.send_closed = true;
        self.queue.drain(..).filter_map(|item| item.ticket).for_each(sent);
        self.seal.iter_mut().for_each(|seal| seal.encryptor.discard());
    }

    /// Lent memory is its owner's again.
    pub(super) fn release_user_buffers(&mut self) {
        self.queue.iter_mut().for_each(QueuedFrame::copy_payload);
        self.reader.release_user_buffers();
    }

    /// Memory of collectives has moved.
    pub(super) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.queue.iter_mut().for_each(QueuedFrame::copy_payload);
        self.reader.relocate(moved);
    }

    pub(super) fn read(&mut self, sink: &mut dyn Sink) -> ReadOutcome {
        match (&self.link, &mut self.seal) {
            (Link::Open(socket), None) => self.reader.poll(&mut &**socket, self.peer, sink),
            (Link::Open(socket), Some(seal)) => {
                self.reader.poll(&mut seal.decryptor.reader(socket), self.peer, sink)
            }
            (Link::Connecting(_), _) => ReadOutcome::Nothing,
        }
    }

    /// Whether something that has come is still to be read, of which the kernel knows nothing any more: sealed bytes that were
    /// opened, or a frame that the sink had no place for.
    pub(super) fn has_buffered(&self) -> bool {
        self.reader.blocked() || self.seal.as_ref().is_some_and(|seal| seal.decryptor.has_plaintext())
    }

    /// Everything is the kernel's.
    fn written(&self) -> bool {
        self.queue.is_empty() && self.seal.as_ref().is_none_or(|seal| seal.encryptor.is_empty())
    }

    pub(super) fn idle(&self) -> bool {
        self.written() && self.open().is_some()
    }

    /// Of nobody's, which `poll` skips, between two attempts to make it.
    pub(super) fn fd(&self) -> RawFd {
        self.link.socket().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Whether epoll tells what comes in.
    pub(super) fn is_registered(&self) -> bool {
        self.registered_events.get() & libc::POLLIN != 0
    }

    /// From now on epoll tells of these events (none: not even of the end) of this connection, which is made, as number `at`; whether it
    /// does, or there is none.
    pub(super) fn register(&self, epoll: &OwnedFd, at: usize, events: i16) -> bool {
        let Some(socket) = self.open().filter(|_| events != self.registered_events.get()) else {
            return true;
        };
        let data = EventData::new_u64(at as u64);
        // The events' numbers are those of poll.
        let flags = EventFlags::from_bits_truncate(u32::from(events.cast_unsigned()));
        let done = match (self.registered_events.get(), events) {
            (0, _) => epoll::add(epoll, socket, data, flags),
            (_, 0) => epoll::delete(epoll, socket),
            _ => epoll::modify(epoll, socket, data, flags),
        };
        // Where the kernel has no room for it, the connection is tried at every look.
        self.registered_events.set(if done.is_ok() { events } else { 0 });
        done.is_ok()
    }

    /// Events worth waking up for.
    pub(super) fn events(&self) -> i16 {
        if self.open().is_none() {
            return libc::POLLOUT;
        }
        let read = if self.reader.blocked() { 0 } else { libc::POLLIN };
        let write = if self.written() { 0 } else { libc::POLLOUT };
        read | write
    }

    /// Tickets of what will never be sent.
    pub(super) fn tickets(&self) -> impl Iterator<Item = Ticket> + '_ {
        self.queue.iter().filter_map(|item| item.ticket)
    }

    /// Whether the peer's kernel has all that was sent. Closing before that loses it where the peer has sent something
    /// that nobody read: the kernel then resets the connection. On one that was reset nothing more is acknowledged.
    pub(super) fn acknowledged(&self) -> bool {
        /// As the kernel numbers the states.
        const TCP_CLOSE: u8 = 7;
        !self.open().is_some_and(unacknowledged)
            || tcp_info(self.fd()).is_none_or(|i| i.tcpi_state == TCP_CLOSE)
    }

    /// How long the peer's host has said nothing, where it has something to say: bytes are under way to it, or wait for
    /// room. (Where its room is used up, it answers a question for more at ever longer intervals.)
    pub(super) fn silent_time(&self) -> Option<Duration> {
        let waits = self.open().is_some_and(|socket| !self.written() || unacknowledged(socket));
        waits.then(|| self.since_last_receive()).flatten()
    }

    /// How long nothing has come from the peer's host, neither bytes nor an acknowledgement.
    pub(super) fn since_last_receive(&self) -> Option<Duration> {
        let info = tcp_info(self.open()?.as_raw_fd())?;
        let last = info.tcpi_last_ack_recv.min(info.tcpi_last_data_recv);
        Some(Duration::from_millis(last.into()))
    }

    /// Largest payload of a packet, in bytes, if the kernel has sent one again at least twice without an acknowledgement.
    pub(super) fn retransmitted_packet(&self) -> Option<u32> {
        let info = tcp_info(self.open()?.as_raw_fd())?;
        (info.tcpi_unacked > 0 && info.tcpi_retransmits >= 2).then_some(info.tcpi_snd_mss)
    }

    /// The quickest there and back that the kernel has seen on this connection.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        /// Where the kernel's account has it, in microseconds; all ones: nothing was acknowledged yet.
        const MIN_RTT: usize = 148;
        let socket = self.open()?.as_raw_fd();
        let mut account = [0u8; MIN_RTT + 4];
        let mut bytes = account.len() as libc::socklen_t;
        // SAFETY: TCP_INFO writes at most `bytes` bytes; the socket is open.
        let result = unsafe {
            libc::getsockopt(
                socket,
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                account.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let known = result == 0 && bytes as usize == account.len();
        let quickest = u32::from_ne_bytes(*account.last_chunk()?);
        (known && quickest != u32::MAX).then(|| Duration::from_micros(quickest.into()))
    }

    /// The kernel may keep so many bytes that are on their way.
    pub(super) fn set_send_buffer(&self, bytes: usize) {
        // Refused, the connection goes on as it is.
        if let Some(socket) = self.link.socket() {
            let _ = sockopt::set_socket_send_buffer_size(socket, bytes);
        }
    }

    /// Nothing more will be sent.
    pub(super) fn shut_down_send(&self) {
        if let Some(socket) = self.open() {
            let _ = socket.shutdown(std::net::Shutdown::Write);
        }
    }
}

/// Whether the peer's kernel lacks bytes that were sent.
fn unacknowledged(socket: &TcpStream) -> bool {
    let mut waiting: libc::c_int = 0;
    // SAFETY: TIOCOUTQ writes one int; the socket is open.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut waiting) };
    result == 0 && waiting > 0
}

/// What the kernel knows of a connection.
fn tcp_info(fd: RawFd) -> Option<libc::tcp_info> {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut bytes = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: TCP_INFO writes at most `bytes` bytes, which the structure has.
    let result = unsafe {
        libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut bytes)
    };
    // SAFETY: numbers alone, of which zero is one; an older kernel leaves the last ones so.
    (result == 0).then(|| unsafe { info.assume_init() })
}

/// What a connection has to ask for so that `bytes` may be on their way; `None` where the kernel's own tuning gives as
/// much, or more than may be asked for: who asks gives it up.
pub(super) fn required_send_buffer(bytes: usize) -> Option<usize> {
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
    use crate::fuzzing::feed::{accept_peer, credential};
    use crate::net::frame::Kind;
    use crate::net::tcp::address::{Purpose, TcpAddress};
    use crate::net::tcp::dial::Dial;
    use crate::net::wire::Target;
    use std::net::TcpListener;

    fn accepted(socket: TcpStream) -> io::Result<Connection> {
        let stream = CloseOnFork::new(socket);
        Connection::accept(FrameConnection { rank: 1, class: 0, stream, seal: None }, Duration::from_secs(20))
    }

    #[test]
    fn the_kernel_tells_how_long_the_way_is_once_something_was_acknowledged() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ours = accepted(socket).unwrap();
        let quickest = ours.round_trip().unwrap();
        assert!(quickest < Duration::from_secs(10), "{quickest:?}");
    }

    /// After how long the kernel gives it up where no probe is answered, at the latest.
    fn detection_time(socket: &TcpStream) -> Duration {
        let between = sockopt::tcp_keepintvl(socket).unwrap() * sockopt::tcp_keepcnt(socket).unwrap();
        sockopt::tcp_keepidle(socket).unwrap() + between
    }

    #[test]
    fn lost_probes_end_a_connection_that_only_watches_in_time_and_one_for_frames_no_sooner_than_four_times_that()
     {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address =
            TcpAddress { socket: listener.local_addr().unwrap(), group_listener: crate::process::random() };
        let peer_timeout = Duration::from_secs(10);
        let dialed = Dial::new(&credential(0), (1, &address), Purpose::Watch, peer_timeout).unwrap();
        assert!(detection_time(&dialed.socket) <= peer_timeout);
        let accepted = Connection::accept(
            FrameConnection {
                rank: 1,
                class: 0,
                stream: CloseOnFork::new(listener.accept().unwrap().0),
                seal: None,
            },
            peer_timeout,
        );
        assert!(detection_time(accepted.unwrap().open().unwrap()) >= 4 * peer_timeout);
        let mut calling = Connecting::new(credential(0), (1, address), Purpose::Frames(0), peer_timeout);
        let called = std::thread::scope(|scope| {
            let answering = scope.spawn(|| accept_peer(listener.accept().unwrap().0));
            let until = Instant::now() + Duration::from_secs(10);
            loop {
                assert!(Instant::now() < until, "nobody answers");
                if let Some((_, socket)) = calling.poll().unwrap() {
                    drop(answering.join().unwrap());
                    break socket;
                }
            }
        });
        assert!(detection_time(&called) >= 4 * peer_timeout);
    }

    #[test]
    fn a_connection_asks_for_room_only_where_that_gives_more() {
        assert_eq!(required_send_buffer(64 << 10), None);
        if let Some(bytes) = required_send_buffer(1 << 30) {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let ours = accepted(socket).unwrap();
            let before = sockopt::socket_send_buffer_size(ours.open().unwrap()).unwrap();
            ours.set_send_buffer(bytes);
            assert!(sockopt::socket_send_buffer_size(ours.open().unwrap()).unwrap() > before);
        }
    }

    #[test]
    fn bytes_for_an_end_that_is_closed_are_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut ours = accepted(socket).unwrap();
        drop(listener.accept().unwrap());
        // SAFETY: no payload.
        assert!(unsafe { ours.send(&Frame::new(Kind::Leave, 0), std::ptr::null(), 0) });
        ours.shut_down_send();
        let until = Instant::now() + Duration::from_secs(10);
        while !ours.acknowledged() {
            assert!(Instant::now() < until, "an answer is waited for that never comes");
            std::thread::yield_now();
        }
    }

    struct Tickets(Vec<Ticket>);

    impl Sink for Tickets {
        fn target(&mut self, _: usize, _: &Frame) -> Target {
            Target::Discard
        }
        fn received(&mut self, _: usize, _: &Frame) {}
        fn sent(&mut self, ticket: Ticket) {
            self.0.push(ticket);
        }
    }

    #[test]
    fn what_is_lent_is_its_owners_again_once_it_is_let_go_and_is_sent_as_it_was() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = accepted(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        // More than the kernel takes while nobody reads.
        let mut borrowed = vec![7u8; 64 << 20];
        let frame = Frame { bytes: borrowed.len() as u64, ..Frame::new(Kind::Data, 0) };
        // SAFETY: unchanged until it is let go.
        assert!(!unsafe { ours.send(&frame, borrowed.as_ptr(), 3) }, "all of it is gone at once");
        ours.release_user_buffers();
        borrowed.fill(9);
        let wanted = HEADER + borrowed.len();
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; wanted];
            io::Read::read_exact(&mut theirs, &mut got).map(|()| got)
        });
        let (mut sink, until) = (Tickets(Vec::new()), Instant::now() + Duration::from_secs(20));
        while !ours.idle() {
            assert!(Instant::now() < until, "it does not get out");
            ours.flush(&mut |ticket| sink.sent(ticket));
        }
        let got = reader.join().unwrap().unwrap();
        assert!(got[HEADER..].iter().all(|&byte| byte == 7), "it was read after it was let go");
        assert_eq!(sink.0, [3]);
    }

    #[test]
    fn writing_to_an_end_that_is_closed_raises_no_signal() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let found = crate::socket_io::tests::signalled(|| {
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut ours = accepted(socket).unwrap();
            drop(listener.accept().unwrap());
            let until = Instant::now() + Duration::from_secs(10);
            while !ours.send_closed {
                assert!(Instant::now() < until, "no error of a connection whose other end is closed");
                // SAFETY: no payload.
                unsafe { ours.send(&Frame::new(Kind::Leave, 0), std::ptr::null(), 0) };
            }
        });
        assert!(!found, "SIGPIPE, which ends a process that does not ignore it");
    }
}
