//! TCP wire: the connections of one communicator.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use super::address::Purpose;
use super::class_sink::ClassSink;
use super::connecting::{ConnectError, Connecting};
use super::connection::{Connection, required_send_buffer};
use super::dial::SILENT;
use super::frame_reader::ReadOutcome;
use super::host_liveness::{HostLiveness, HostLivenessLimits};
use super::sideband::Sideband;
use crate::CloseOnFork;
use crate::net::frame::{CLASSES, Frame, Kind, MESSAGES};
use crate::net::wire::{Broken, Sink, Ticket, Wire};

/// State of a peer.
#[derive(Default)]
struct PeerState {
    /// Connection for sending to the peer, by class.
    sends: [Option<usize>; CLASSES],
    /// The peer has switched from its own connection to the connection that this rank opened, by class.
    move_received: [bool; CLASSES],
    /// A connection to the peer ended: the time of the first check after that, and the reason. The peer may have left
    /// in good order over another connection.
    ended: Option<(Option<Instant>, String)>,
    left: bool,
    /// Time of the last call of `watch` for the peer.
    awaited: Option<Instant>,
    broken: Option<String>,
    /// Local error because of which this process cannot reach the peer.
    local_error: Option<String>,
}

impl PeerState {
    /// Records the end of a connection to the peer.
    fn end(&mut self, reason: String) {
        self.ended.get_or_insert((None, reason));
    }
}

/// Wire over TCP connections.
pub(crate) struct TcpWire {
    sideband: Arc<Sideband>,
    peers: Vec<PeerState>,
    conns: Vec<Option<Connection>>,
    /// Reports connections with received data, by their index in `conns`.
    epoll: CloseOnFork<OwnedFd>,
    /// Tickets to report at the next poll.
    sent_tickets: Vec<Ticket>,
    host_liveness: HostLiveness,
    send_closed: bool,
    polls: u32,
    /// Size of the kernel's send buffer to request, for paths with a large bandwidth-delay product.
    send_buffer: Option<usize>,
}

/// Number of connections up to which each poll tries all of them. With more, one epoll call finds those with data.
const MAX_POLLED_DIRECTLY: usize = 2;
/// Without epoll, one poll in this many tries a connection on which no frame is expected.
const UNEXPECTED_INTERVAL: u32 = 8;
/// Maximum number of events of one epoll call.
const MAX_EVENTS: usize = 256;
/// Time after the last call of `watch` until a peer no longer counts as awaited. A rank that waits calls it more often.
const AWAIT_EXPIRY: Duration = Duration::from_secs(1);
/// Time to wait for a leave frame after a connection of the peer ended. The frame may arrive over another connection,
/// also if the wire has none yet: the service thread may not have passed it on.
pub(super) const LEAVE_GRACE: Duration = Duration::from_millis(250);

impl TcpWire {
    pub(crate) fn new(sideband: Arc<Sideband>) -> io::Result<Self> {
        let limits = HostLivenessLimits::within(sideband.peer_timeout());
        Self::with(sideband, limits)
    }

    /// Creates a wire with these limits.
    pub(super) fn with(sideband: Arc<Sideband>, limits: HostLivenessLimits) -> io::Result<Self> {
        Ok(Self {
            peers: (0..sideband.size()).map(|_| PeerState::default()).collect(),
            sideband,
            conns: Vec::new(),
            epoll: CloseOnFork::new(epoll::create(epoll::CreateFlags::CLOEXEC)?),
            sent_tickets: Vec::new(),
            host_liveness: HostLiveness::new(limits),
            send_closed: false,
            polls: 0,
            send_buffer: None,
        })
    }

    /// Stores a connection, and returns its index.
    fn insert(&mut self, conn: Connection) -> usize {
        if let Some(bytes) = self.send_buffer {
            conn.set_send_buffer(bytes);
        }
        if let Some(free) = self.conns.iter().position(Option::is_none) {
            self.conns[free] = Some(conn);
            return free;
        }
        self.conns.push(Some(conn));
        self.conns.len() - 1
    }

    /// Returns the connection for sending to `peer`, and opens it if needed.
    fn outgoing(&mut self, peer: usize, class: usize) -> Option<usize> {
        let known = &self.peers[peer];
        // A connection that ended is not reopened, because its frames are lost. After leaving the group none is opened.
        if self.send_closed || known.broken.is_some() || known.local_error.is_some() || known.ended.is_some()
        {
            return None;
        }
        if let Some(found) = known.sends[class] {
            return Some(found);
        }
        self.accept_pending();
        let theirs =
            self.conns.iter().position(|c| c.as_ref().is_some_and(|c| c.peer == peer && c.class == class));
        let found = match theirs {
            Some(found) => found,
            // The peer has left: it reads nothing more, and accepts no second connection.
            None if self.peers[peer].left => return None,
            None => {
                let address = self.sideband.address(peer)?.clone();
                let (credential, peer_timeout) =
                    (self.sideband.credential().clone(), self.sideband.peer_timeout());
                let connecting =
                    Connecting::new(credential, (peer, address), Purpose::Frames(class), peer_timeout);
                self.insert(Connection::connect(peer, class, connecting))
            }
        };
        self.peers[peer].sends[class] = Some(found);
        self.step(found);
        self.peers[peer].sends[class]
    }

    /// Takes over connections that peers opened. `PendingConnections` accepts only one per peer and class.
    fn accept_pending(&mut self) -> bool {
        let connections = self.sideband.group_listener.pending.take();
        let any = !connections.is_empty();
        for accepted in connections {
            let peer = accepted.rank;
            if self.sideband.address(peer).is_none() {
                self.sideband.group_listener.pending.reject(
                    peer,
                    &accepted.stream,
                    "that rank is on this node",
                );
                continue;
            }
            match Connection::accept(accepted, self.sideband.peer_timeout()) {
                Ok(conn) => {
                    let at = self.insert(conn);
                    if !self.take_over(at) && peer < self.sideband.me {
                        self.switch_to(at);
                    }
                }
                Err(error) => self.peers[peer].end(error.to_string()),
            }
        }
        any
    }

    /// Advances a connection attempt. Returns true if the connection is established.
    fn step(&mut self, at: usize) -> bool {
        let Some(conn) = &mut self.conns[at] else { return false };
        let peer = conn.peer;
        match conn.step() {
            Ok(established) => return established,
            Err(error) => self.connect_failed(at, peer, error),
        }
        false
    }

    /// Handles a failed connection attempt.
    fn connect_failed(&mut self, at: usize, peer: usize, error: ConnectError) {
        match error {
            ConnectError::PeerLost(reason) => self.end(at, reason),
            ConnectError::Local(reason) => {
                self.peers[peer].local_error.get_or_insert(reason);
                self.remove(at);
            }
        }
    }

    /// Uses this connection, which the peer opened, instead of this rank's connection attempt, if the peer cannot have
    /// received it.
    fn take_over(&mut self, at: usize) -> bool {
        let Some((peer, class)) = self.conns[at].as_ref().map(|conn| (conn.peer, conn.class)) else {
            return false;
        };
        let sends = &mut self.peers[peer].sends[class];
        let Some(attempt) = sends.and_then(|old| self.conns[old].take_if(|conn| conn.is_unreceived())) else {
            return false;
        };
        *sends = Some(at);
        if let Some(conn) = &mut self.conns[at] {
            conn.take_over(attempt);
        }
        true
    }

    /// Switches to this connection, which the peer opened, if this rank has opened one, too.
    fn switch_to(&mut self, at: usize) {
        let Some((peer, class)) = self.conns[at].as_ref().map(|conn| (conn.peer, conn.class)) else { return };
        let Some(old) = self.peers[peer].sends[class].replace(at) else { return };
        for (at, kind) in [(old, Kind::Move), (at, Kind::Moved)] {
            if let Some(conn) = &mut self.conns[at] {
                conn.retired = kind == Kind::Move;
                // SAFETY: no payload.
                unsafe { conn.send(&Frame::new(kind, 0), std::ptr::null(), 0) };
            }
        }
    }

    /// Removes a connection, and reports the tickets of frames that will never be sent.
    fn remove(&mut self, at: usize) -> Option<Connection> {
        let conn = self.conns[at].take()?;
        conn.register(&self.epoll, at, 0);
        self.sent_tickets.extend(conn.tickets());
        let sends = &mut self.peers[conn.peer].sends[conn.class];
        if *sends == Some(at) {
            *sends = None;
        }
        Some(conn)
    }

    /// Removes a connection that ended, and records its end unless this rank had switched to another one.
    fn end(&mut self, at: usize, reason: String) {
        if let Some(conn) = self.remove(at).filter(|conn| !conn.retired) {
            self.peers[conn.peer].end(reason);
        }
    }

    /// Marks the connections with received data, if one epoll call costs less than trying each. Returns true if it did.
    fn poll_epoll(&mut self) -> bool {
        if self.conns.len() <= MAX_POLLED_DIRECTLY
            && self.conns.iter().flatten().count() <= MAX_POLLED_DIRECTLY
        {
            return false;
        }
        let mut buffer = [const { MaybeUninit::uninit() }; MAX_EVENTS];
        let Ok((events, _)) = epoll::wait(&*self.epoll, &mut buffer, Some(&Timespec::default())) else {
            return false;
        };
        for event in events {
            let (at, flags) = (event.data.u64() as usize, event.flags);
            if flags != epoll::EventFlags::OUT
                && let Some(Some(conn)) = self.conns.get_mut(at)
            {
                conn.ready = true;
            }
        }
        true
    }

    /// Marks peers as broken whose connection ended without a leave frame within the grace period.
    fn fail_ended_peers(&mut self, now: Instant) {
        for peer in &mut self.peers {
            if let Some((since, reason)) = &mut peer.ended
                && now.duration_since(*since.get_or_insert(now)) >= LEAVE_GRACE
            {
                peer.broken = Some(std::mem::take(reason));
                peer.ended = None;
            }
        }
    }
}

impl Wire for TcpWire {
    fn name(&self) -> String {
        let interface = self.sideband.interface();
        let encrypted = if self.sideband.group_listener.endpoint.encrypts { ", encrypted" } else { "" };
        format!("tcp {} {}{encrypted}", interface.name, interface.address)
    }

    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        let conn = self.outgoing(peer, frame.class()).and_then(|at| self.conns[at].as_mut());
        // SAFETY: this function has the same contract.
        if conn.is_none_or(|conn| unsafe { conn.send(frame, payload, ticket) }) {
            self.sent_tickets.push(ticket);
        }
    }

    unsafe fn post(&mut self, peer: usize, frame: &Frame, payload: *const u8) {
        if let Some(at) = self.outgoing(peer, frame.class())
            && let Some(conn) = self.conns[at].as_mut()
        {
            // SAFETY: this function has the same contract.
            unsafe { conn.post(frame, payload, &mut |ticket| self.sent_tickets.push(ticket)) };
        }
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> bool {
        let mut moved = self.accept_pending();
        for ticket in self.sent_tickets.drain(..) {
            sink.sent(ticket);
            moved = true;
        }
        let epoll_polled = self.poll_epoll();
        self.polls = self.polls.wrapping_add(1);
        let awaited = match sink.expected() {
            // Skip classes without expected frames, because each try is a system call.
            some if some != 0 && !epoll_polled && !self.polls.is_multiple_of(UNEXPECTED_INTERVAL) => some,
            _ => u8::MAX,
        };
        for at in 0..self.conns.len() {
            if !self.step(at) {
                continue;
            }
            let Some(conn) = &mut self.conns[at] else { continue };
            if !conn.idle() {
                moved |= conn.flush(&mut |ticket| sink.sent(ticket));
            }
            let skip = match epoll_polled && conn.is_registered() {
                true => !std::mem::take(&mut conn.ready),
                false => awaited >> conn.class & 1 == 0 && !conn.has_buffered(),
            };
            if skip {
                continue;
            }
            let (peer, class) = (conn.peer, conn.class);
            let mut class_sink = ClassSink::new(sink, class, self.peers[peer].move_received[class]);
            let outcome = conn.read(&mut class_sink);
            if !conn.is_registered() && conn.events() == libc::POLLIN {
                conn.register(&self.epoll, at, libc::POLLIN);
            }
            // Try buffered data again at each poll, because the kernel does not report it.
            conn.ready |= conn.has_buffered();
            let ClassSink { received_any, left, peer_moved, malformed, .. } = class_sink;
            if received_any && std::mem::take(&mut conn.awaits_first_frame) {
                self.sideband.group_listener.pending.mark_connected(peer, class);
            }
            self.peers[peer].left |= left;
            if malformed || peer_moved && self.peers[peer].sends[class] == Some(at) {
                self.end(at, "it sent a frame that is invalid on this connection".to_owned());
                moved = true;
                continue;
            }
            if peer_moved {
                self.peers[peer].move_received[class] = true;
                self.remove(at);
                moved = true;
                continue;
            }
            match outcome {
                ReadOutcome::Moved => moved = true,
                ReadOutcome::Nothing => {}
                ReadOutcome::Ended(reason) => {
                    self.end(at, reason);
                    moved = true;
                }
            }
        }
        // After a leave frame, the end of a connection is not a failure.
        for peer in &mut self.peers {
            if peer.ended.is_some() && (peer.left || peer.broken.is_some()) {
                peer.ended = None;
            }
        }
        moved
    }

    fn push(&mut self, sink: &mut dyn Sink) {
        for conn in self.conns.iter_mut().flatten().filter(|conn| !conn.idle()) {
            conn.flush(&mut |ticket| sink.sent(ticket));
        }
    }

    fn watch(&mut self, peer: usize, _: bool, now: Instant) {
        self.peers[peer].awaited = Some(now);
        let connected = self.conns.iter().flatten().any(|conn| conn.peer == peer);
        if !connected && !self.peers[peer].left {
            self.outgoing(peer, 0);
        }
    }

    fn check(&mut self, now: Instant) {
        for at in 0..self.conns.len() {
            let Some(conn) = self.conns[at].as_mut().filter(|conn| conn.is_connecting()) else { continue };
            let peer = conn.peer;
            match conn.check(now) {
                Ok(()) => _ = self.step(at),
                Err(error) => self.connect_failed(at, peer, error),
            }
        }
        self.fail_ended_peers(now);
        let awaits = |peer: &PeerState| peer.awaited.is_some_and(|at| now.duration_since(at) < AWAIT_EXPIRY);
        let awaited = self.peers.iter().enumerate().filter(|(_, peer)| awaits(peer)).map(|(peer, _)| peer);
        for peer in self.host_liveness.poll(&self.sideband, self.conns.iter().flatten(), awaited, now) {
            self.peers[peer].broken.get_or_insert_with(|| SILENT.to_owned());
        }
    }

    fn broken(&self) -> Vec<Broken> {
        let found =
            |(peer, known): (usize, &PeerState)| known.broken.clone().map(|reason| Broken { peer, reason });
        self.peers.iter().enumerate().filter_map(found).collect()
    }

    fn local_error(&self) -> Option<(usize, String)> {
        self.peers.iter().enumerate().find_map(|(peer, known)| Some((peer, known.local_error.clone()?)))
    }

    fn connected_classes(&self, peer: usize) -> u8 {
        let with = self.conns.iter().flatten().filter(|conn| conn.peer == peer && !conn.is_connecting());
        with.fold(0, |bits, conn| bits | 1 << conn.class)
    }

    fn copies(&self) -> bool {
        true
    }

    fn release_user_buffers(&mut self) {
        self.conns.iter_mut().flatten().for_each(Connection::release_user_buffers);
    }

    fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.conns.iter_mut().flatten().for_each(|conn| conn.relocate(moved));
    }

    fn round_trip(&self, peer: usize) -> Option<Duration> {
        let conns = self.conns.iter().flatten().filter(|conn| conn.peer == peer);
        conns.filter_map(Connection::round_trip).min()
    }

    fn unacknowledged(&self) -> Vec<(usize, u32)> {
        let conns = self.conns.iter().flatten();
        conns.filter_map(|conn| Some((conn.peer, conn.retransmitted_packet()?))).collect()
    }

    fn expect(&mut self, bytes: usize) {
        self.send_buffer = required_send_buffer(bytes);
        if let Some(bytes) = self.send_buffer {
            self.conns.iter().flatten().for_each(|conn| conn.set_send_buffer(bytes));
        }
    }

    fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        fds.push((self.epoll.as_raw_fd(), libc::POLLIN));
        let mut all = true;
        for (at, conn) in self.conns.iter().enumerate().filter_map(|(at, conn)| Some((at, conn.as_ref()?))) {
            match conn.is_connecting() {
                // Between two connection attempts no descriptor exists.
                true => fds.extend((conn.fd() >= 0).then(|| (conn.fd(), conn.connect_events()))),
                false => all &= conn.register(&self.epoll, at, conn.events()),
            }
        }
        all
    }

    fn drained(&self) -> bool {
        self.conns.iter().flatten().all(Connection::idle)
    }

    fn messages_drained(&self) -> bool {
        self.conns.iter().flatten().filter(|conn| conn.class == MESSAGES).all(Connection::idle)
    }

    fn is_connecting(&self) -> bool {
        self.conns.iter().flatten().any(Connection::is_connecting)
    }

    fn finish(&mut self) -> bool {
        if !self.drained() {
            return false;
        }
        // The kernel acknowledges the end of the stream at once, and with it all data before.
        if !std::mem::replace(&mut self.send_closed, true) {
            self.conns.iter().flatten().for_each(Connection::shut_down_send);
        }
        self.conns.iter().flatten().all(Connection::acknowledged)
    }

    fn close(&mut self) {
        self.send_closed = true;
        (0..self.conns.len()).for_each(|at| drop(self.remove(at)));
        self.sideband.group_listener.pending.close();
    }
}

impl Drop for TcpWire {
    fn drop(&mut self) {
        // In a forked child these are copies: a shutdown would end the parent's connections.
        if !self.sideband.group_listener.endpoint.is_own_process() {
            return;
        }
        self.conns.iter().flatten().for_each(Connection::shut_down_send);
        self.sideband.group_listener.pending.close();
    }
}
