//! TCP wire: the connections of one communicator.

#[allow(unsafe_code)]
mod connections;

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use smddp_base::CloseOnFork;
use smddp_net::frame::{ALL_CLASSES, CLASSES, COLLECTIVES, Classes, Frame};
use smddp_net::wire::{Capabilities, Close, ConnectionStats, Payload, PeerState, Sink, Ticket, Wire};

use super::class_sink::ClassSink;
use super::connection::{Connection, required_send_buffer};
use super::dial::SILENT;
use super::frame_reader::ReadOutcome;
use super::host_liveness::{HostLiveness, HostLivenessLimits};
use super::sideband::Sideband;

/// Connections with one peer.
#[derive(Default)]
struct PeerConnections {
    /// Connection for sending to the peer, by class.
    sends: [Option<usize>; CLASSES],
    /// The peer has switched from its own connection to the connection that this rank opened, by class.
    move_received: [bool; CLASSES],
    /// A connection to the peer ended: the time of the first check after that, and the reason. The peer may have left
    /// in good order over another connection.
    ended: Option<(Option<Instant>, String)>,
    left: bool,
    /// Time of the last check for which this rank waited for the peer.
    awaited: Option<Instant>,
}

impl PeerConnections {
    /// Records the end of a connection to the peer.
    fn end(&mut self, reason: String) {
        self.ended.get_or_insert((None, reason));
    }
}

/// Wire over TCP connections.
pub struct TcpWire {
    sideband: Arc<Sideband>,
    capabilities: Capabilities,
    /// By rank.
    peers: Vec<PeerConnections>,
    /// By rank. `Wire::peers` updates the connections in it.
    states: Vec<PeerState>,
    conns: Vec<Option<Connection>>,
    /// Reports connections with received data, by their index in `conns`.
    epoll: CloseOnFork<OwnedFd>,
    /// Tickets to report at the next poll.
    sent_tickets: Vec<Ticket>,
    host_liveness: HostLiveness,
    send_closed: bool,
    /// Every frame has a checksum.
    checks: bool,
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
/// Time after the last check for which this rank waited for a peer until the peer no longer counts as awaited. A rank that
/// waits calls `check` more often.
const AWAIT_EXPIRY: Duration = Duration::from_secs(1);
/// Time to wait for a leave frame after a connection of the peer ended. The frame may arrive over another connection,
/// also if the wire has none yet: the service thread may not have passed it on.
pub const LEAVE_GRACE: Duration = Duration::from_millis(250);

impl TcpWire {
    /// Creates the wire without connections.
    ///
    /// # Errors
    /// The kernel has no descriptor for the epoll instance.
    pub fn new(sideband: Arc<Sideband>) -> io::Result<Self> {
        let limits = HostLivenessLimits::within(sideband.peer_timeout());
        Self::with(sideband, limits)
    }

    /// Creates a wire with these limits.
    ///
    /// # Errors
    /// The kernel has no descriptor for the epoll instance.
    pub fn with(sideband: Arc<Sideband>, limits: HostLivenessLimits) -> io::Result<Self> {
        let interface = sideband.interface();
        let encrypted = if sideband.group_listener.endpoint.encrypts { ", encrypted" } else { "" };
        let name = format!("tcp {} {}{encrypted}", interface.name, interface.address);
        Ok(Self {
            // Frames that a process sent before its end arrive before the end of its connection.
            capabilities: Capabilities { name, copies_payloads: true, drain_grace: Duration::ZERO },
            peers: (0..sideband.size()).map(|_| PeerConnections::default()).collect(),
            states: vec![PeerState::default(); sideband.size()],
            sideband,
            conns: Vec::new(),
            epoll: CloseOnFork::new(epoll::create(epoll::CreateFlags::CLOEXEC)?),
            sent_tickets: Vec::new(),
            host_liveness: HostLiveness::new(limits),
            send_closed: false,
            checks: false,
            polls: 0,
            send_buffer: None,
        })
    }

    /// Requires and checks the checksum of each received frame, before the frame is delivered. Called before the first
    /// frame.
    pub fn check_checksums(&mut self) {
        self.checks = true;
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
        for (peer, state) in self.peers.iter_mut().zip(&mut self.states) {
            if let Some((since, reason)) = &mut peer.ended
                && now.duration_since(*since.get_or_insert(now)) >= LEAVE_GRACE
            {
                state.broken = Some(std::mem::take(reason));
                peer.ended = None;
            }
        }
    }
}

impl Wire for TcpWire {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: Payload) {
        let conn = self.outgoing(peer, frame.class()).and_then(|at| self.conns[at].as_mut());
        match payload {
            Payload::None => {
                if let Some(conn) = conn {
                    // SAFETY: no payload.
                    unsafe { conn.send(frame, std::ptr::null(), 0) };
                }
            }
            Payload::Borrowed { at, ticket } => {
                // SAFETY: this function has the same contract.
                if conn.is_none_or(|conn| unsafe { conn.send(frame, at, ticket) }) {
                    self.sent_tickets.push(ticket);
                }
            }
            Payload::Copied { at } => {
                if let Some(conn) = conn {
                    // SAFETY: this function has the same contract.
                    unsafe { conn.send_copied(frame, at, &mut |ticket| self.sent_tickets.push(ticket)) };
                }
            }
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
            _ => ALL_CLASSES,
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
                // The connection still sends this rank's report.
                ReadOutcome::Corrupted(detail) => {
                    self.states[peer].corrupted.get_or_insert(detail);
                    moved = true;
                }
            }
        }
        // After a leave frame, the end of a connection is not a failure.
        for (peer, state) in self.peers.iter_mut().zip(&self.states) {
            if peer.ended.is_some() && (peer.left || state.broken.is_some()) {
                peer.ended = None;
            }
        }
        moved
    }

    fn flush(&mut self, sink: &mut dyn Sink) {
        for conn in self.conns.iter_mut().flatten().filter(|conn| !conn.idle()) {
            conn.flush(&mut |ticket| sink.sent(ticket));
        }
    }

    fn check(&mut self, now: Instant, waiting: &[usize]) {
        for &peer in waiting {
            self.peers[peer].awaited = Some(now);
            let connected = self.conns.iter().flatten().any(|conn| conn.peer == peer);
            if !connected && !self.peers[peer].left {
                self.outgoing(peer, COLLECTIVES);
            }
        }
        for at in 0..self.conns.len() {
            let Some(conn) = self.conns[at].as_mut().filter(|conn| conn.is_connecting()) else { continue };
            let peer = conn.peer;
            match conn.check(now) {
                Ok(()) => _ = self.step(at),
                Err(error) => self.connect_failed(at, peer, error),
            }
        }
        self.fail_ended_peers(now);
        let awaits =
            |peer: &PeerConnections| peer.awaited.is_some_and(|at| now.duration_since(at) < AWAIT_EXPIRY);
        let awaited = self.peers.iter().enumerate().filter(|(_, peer)| awaits(peer)).map(|(peer, _)| peer);
        for peer in self.host_liveness.poll(&self.sideband, self.conns.iter().flatten(), awaited, now) {
            self.states[peer].broken.get_or_insert_with(|| SILENT.to_owned());
        }
    }

    fn peers(&mut self) -> &[PeerState] {
        self.states.iter_mut().for_each(|state| (state.connected, state.connecting) = (0, false));
        for conn in self.conns.iter().flatten() {
            let state = &mut self.states[conn.peer];
            match conn.is_connecting() {
                true => state.connecting = true,
                false => state.connected |= 1 << conn.class,
            }
        }
        &self.states
    }

    fn connection_stats(&self, peer: usize) -> ConnectionStats {
        let conns = || self.conns.iter().flatten().filter(|conn| conn.peer == peer);
        ConnectionStats {
            round_trip: conns().filter_map(Connection::round_trip).min(),
            unacknowledged_packet: conns().find_map(Connection::retransmitted_packet),
        }
    }

    fn release_user_buffers(&mut self) {
        self.conns.iter_mut().flatten().for_each(Connection::release_user_buffers);
    }

    fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.conns.iter_mut().flatten().for_each(|conn| conn.relocate(moved));
    }

    fn set_in_flight(&mut self, bytes: usize) {
        self.send_buffer = required_send_buffer(bytes);
        if let Some(bytes) = self.send_buffer {
            self.conns.iter().flatten().for_each(|conn| conn.set_send_buffer(bytes));
        }
    }

    fn wait_sources(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
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

    fn is_flushed(&self, classes: Classes) -> bool {
        self.conns.iter().flatten().filter(|conn| classes >> conn.class & 1 == 1).all(Connection::idle)
    }

    fn close(&mut self, how: Close) -> bool {
        match how {
            // Received payloads end with their connections.
            Close::Abort => self.is_flushed(ALL_CLASSES),
            Close::Leave if !self.is_flushed(ALL_CLASSES) => false,
            Close::Leave => {
                // The kernel acknowledges the end of the stream at once, and with it all data before.
                if !std::mem::replace(&mut self.send_closed, true) {
                    self.conns.iter().flatten().for_each(Connection::shut_down_send);
                }
                self.conns.iter().flatten().all(Connection::acknowledged)
            }
            Close::Free => {
                self.send_closed = true;
                (0..self.conns.len()).for_each(|at| drop(self.remove(at)));
                self.sideband.group_listener.pending.close();
                true
            }
        }
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
