//! The wire: a communicator's connections, by peer.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use super::address::Purpose;
use super::class_sink::ClassSink;
use super::connecting::{Call, Failed};
use super::connection::{Connection, room};
use super::dial::SILENT;
use super::frame_reader::ReadOutcome;
use super::host_liveness::{HostLiveness, HostLivenessLimits};
use super::sideband::Sideband;
use crate::close_on_fork::CloseOnFork;
use crate::net::frame::{CLASSES, Frame, Kind, MESSAGES};
use crate::net::wire::{Broken, Sink, Ticket, Wire};

/// What is known of a peer.
#[derive(Default)]
struct PeerState {
    /// The connections over which this rank sends to it, by class.
    sends: [Option<usize>; CLASSES],
    /// It has turned from its own connection to the one that this rank made.
    moved: [bool; CLASSES],
    /// A connection to it ended, and how; it may have left in good order over another one. With the time at which that was first
    /// looked at.
    ended: Option<(Option<Instant>, String)>,
    left: bool,
    /// When this rank last said that it waits for it.
    awaited: Option<Instant>,
    broken: Option<String>,
    /// What this process lacks to reach it.
    unable: Option<String>,
}

impl PeerState {
    /// A connection to it has ended.
    fn end(&mut self, reason: String) {
        self.ended.get_or_insert((None, reason));
    }
}

pub(crate) struct TcpWire {
    listeners: Arc<Sideband>,
    peers: Vec<PeerState>,
    conns: Vec<Option<Connection>>,
    /// Tells which connections have something, by their places in that list.
    epoll: CloseOnFork<OwnedFd>,
    /// Tickets of what was gone at once.
    done: Vec<Ticket>,
    silence: HostLiveness,
    hung_up: bool,
    looks: u32,
    /// What connections ask their kernel for, on long ways.
    room: Option<usize>,
}

/// From so many connections on, one system call asks which of them have something.
const FEW: usize = 2;
/// Where none asks, a connection on which nothing is waited for is tried at one look of so many.
const SELDOM: u32 = 8;
/// It tells of so many at once.
const READY: usize = 256;
/// Who is waited for is named again and again, at intervals shorter than this.
const AWAITED: Duration = Duration::from_secs(1);
/// A goodbye over one connection may come this much later than the end of another, be it the only one so far: the
/// process's service thread may still have the other in its hands.
pub(super) const GOODBYE: Duration = Duration::from_millis(250);

impl TcpWire {
    pub(crate) fn new(listeners: Arc<Sideband>) -> io::Result<Self> {
        let limits = HostLivenessLimits::within(listeners.peer_timeout());
        Self::with(listeners, limits)
    }

    pub(super) fn with(listeners: Arc<Sideband>, limits: HostLivenessLimits) -> io::Result<Self> {
        Ok(Self {
            peers: (0..listeners.size()).map(|_| PeerState::default()).collect(),
            listeners,
            conns: Vec::new(),
            epoll: CloseOnFork::new(epoll::create(epoll::CreateFlags::CLOEXEC)?),
            done: Vec::new(),
            silence: HostLiveness::new(limits),
            hung_up: false,
            looks: 0,
            room: None,
        })
    }

    fn keep(&mut self, conn: Connection) -> usize {
        if let Some(bytes) = self.room {
            conn.make_room(bytes);
        }
        if let Some(free) = self.conns.iter().position(Option::is_none) {
            self.conns[free] = Some(conn);
            return free;
        }
        self.conns.push(Some(conn));
        self.conns.len() - 1
    }

    /// The connection to send to `peer` over, made if need be.
    fn outgoing(&mut self, peer: usize, class: usize) -> Option<usize> {
        let known = &self.peers[peer];
        // A connection that has ended is not made anew: what went over it is lost. Nor is one made after the group was left.
        if self.hung_up || known.broken.is_some() || known.unable.is_some() || known.ended.is_some() {
            return None;
        }
        if let Some(found) = known.sends[class] {
            return Some(found);
        }
        self.welcome();
        let theirs =
            self.conns.iter().position(|c| c.as_ref().is_some_and(|c| c.peer == peer && c.class == class));
        let found = match theirs {
            Some(found) => found,
            // It reads nothing more, and takes no second call.
            None if self.peers[peer].left => return None,
            None => {
                let address = self.listeners.address(peer)?.clone();
                let (credential, patience) =
                    (self.listeners.credential().clone(), self.listeners.peer_timeout());
                let call = Call::new(credential, (peer, address), Purpose::Class(class), patience);
                self.keep(Connection::call(peer, class, call))
            }
        };
        self.peers[peer].sends[class] = Some(found);
        self.step(found);
        self.peers[peer].sends[class]
    }

    /// Takes up connections that peers have made: one for each class of each, as the inbox sees to.
    fn welcome(&mut self) -> bool {
        let callers = self.listeners.group_listener.inbox.take();
        let any = !callers.is_empty();
        for call in callers {
            let peer = call.rank;
            if self.listeners.address(peer).is_none() {
                self.listeners.group_listener.inbox.refuse(peer, &call.stream, "that rank is on this node");
                continue;
            }
            match Connection::answer(call, self.listeners.peer_timeout()) {
                Ok(conn) => {
                    let at = self.keep(conn);
                    if !self.take_over(at) && peer < self.listeners.me {
                        self.turn_to(at);
                    }
                }
                Err(error) => self.peers[peer].end(error.to_string()),
            }
        }
        any
    }

    /// Goes on making a connection; whether it is made, now or before.
    fn step(&mut self, at: usize) -> bool {
        let Some(conn) = &mut self.conns[at] else { return false };
        let peer = conn.peer;
        match conn.step() {
            Ok(made) => return made,
            Err(failed) => self.give_up(at, peer, failed),
        }
        false
    }

    /// No connection comes about.
    fn give_up(&mut self, at: usize, peer: usize, failed: Failed) {
        match failed {
            Failed::Lost(reason) => self.end(at, reason),
            Failed::Unable(reason) => {
                self.peers[peer].unable.get_or_insert(reason);
                self.drop_conn(at);
            }
        }
    }

    /// Goes on over this connection, which the peer made, where this rank is still calling: nobody has heard of that call.
    fn take_over(&mut self, at: usize) -> bool {
        let Some((peer, class)) = self.conns[at].as_ref().map(|conn| (conn.peer, conn.class)) else {
            return false;
        };
        let sends = &mut self.peers[peer].sends[class];
        let Some(call) = sends.and_then(|old| self.conns[old].take_if(|conn| conn.is_unheard())) else {
            return false;
        };
        *sends = Some(at);
        if let Some(conn) = &mut self.conns[at] {
            conn.take_over(call);
        }
        true
    }

    /// Goes on over this connection, which the peer made, where this rank has made one, too.
    fn turn_to(&mut self, at: usize) {
        let Some((peer, class)) = self.conns[at].as_ref().map(|conn| (conn.peer, conn.class)) else { return };
        let Some(old) = self.peers[peer].sends[class].replace(at) else { return };
        for (at, kind) in [(old, Kind::Move), (at, Kind::Moved)] {
            if let Some(conn) = &mut self.conns[at] {
                conn.retired = kind == Kind::Move;
                // SAFETY: there is no payload.
                unsafe { conn.send(&Frame::new(kind, 0), std::ptr::null(), 0) };
            }
        }
    }

    /// Forgets a connection, and tells of what will never be sent.
    fn drop_conn(&mut self, at: usize) -> Option<Connection> {
        let conn = self.conns[at].take()?;
        conn.enlist(&self.epoll, at, 0);
        self.done.extend(conn.tickets());
        let sends = &mut self.peers[conn.peer].sends[conn.class];
        if *sends == Some(at) {
            *sends = None;
        }
        Some(conn)
    }

    fn end(&mut self, at: usize, reason: String) {
        if let Some(conn) = self.drop_conn(at).filter(|conn| !conn.retired) {
            self.peers[conn.peer].end(reason);
        }
    }

    /// Which connections have something to read, where asking is cheaper than trying.
    fn look(&mut self) -> bool {
        if self.conns.len() <= FEW && self.conns.iter().flatten().count() <= FEW {
            return false;
        }
        let mut room = [const { MaybeUninit::uninit() }; READY];
        let Ok((events, _)) = epoll::wait(&*self.epoll, &mut room, Some(&Timespec::default())) else {
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

    /// Whoever has not said goodbye in time is gone.
    fn judge(&mut self, now: Instant) {
        for peer in &mut self.peers {
            if let Some((since, reason)) = &mut peer.ended
                && now.duration_since(*since.get_or_insert(now)) >= GOODBYE
            {
                peer.broken = Some(std::mem::take(reason));
                peer.ended = None;
            }
        }
    }
}

impl Wire for TcpWire {
    fn name(&self) -> String {
        let interface = self.listeners.interface();
        let sealed = if self.listeners.group_listener.endpoint.encrypts { ", encrypted" } else { "" };
        format!("tcp {} {}{sealed}", interface.name, interface.address)
    }

    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        let conn = self.outgoing(peer, frame.class()).and_then(|at| self.conns[at].as_mut());
        // SAFETY: the caller's promise, which is the same.
        if conn.is_none_or(|conn| unsafe { conn.send(frame, payload, ticket) }) {
            self.done.push(ticket);
        }
    }

    unsafe fn post(&mut self, peer: usize, frame: &Frame, payload: *const u8) {
        if let Some(at) = self.outgoing(peer, frame.class())
            && let Some(conn) = self.conns[at].as_mut()
        {
            // SAFETY: the caller's promise, which is the same.
            unsafe { conn.post(frame, payload, &mut |ticket| self.done.push(ticket)) };
        }
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> bool {
        let mut moved = self.welcome();
        for ticket in self.done.drain(..) {
            sink.sent(ticket);
            moved = true;
        }
        let asked = self.look();
        self.looks = self.looks.wrapping_add(1);
        let awaited = match sink.awaited() {
            // Each of these tries would be a system call.
            some if some != 0 && !asked && !self.looks.is_multiple_of(SELDOM) => some,
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
            let silent = match asked && conn.enlisted() {
                true => !std::mem::take(&mut conn.ready),
                false => awaited >> conn.class & 1 == 0 && !conn.has_more(),
            };
            if silent {
                continue;
            }
            let (peer, class) = (conn.peer, conn.class);
            let mut class_sink = ClassSink::new(sink, class, self.peers[peer].moved[class]);
            let outcome = conn.read(&mut class_sink);
            if !conn.enlisted() && conn.events() == libc::POLLIN {
                conn.enlist(&self.epoll, at, libc::POLLIN);
            }
            // What has come already is tried again at each look: the kernel will not tell of it.
            conn.ready |= conn.has_more();
            let ClassSink { heard, left, moves, wrong, .. } = class_sink;
            if heard && std::mem::take(&mut conn.offered) {
                self.listeners.group_listener.inbox.close(peer, class);
            }
            self.peers[peer].left |= left;
            if wrong || moves && self.peers[peer].sends[class] == Some(at) {
                self.end(at, "it sent a frame that does not belong there".to_owned());
                moved = true;
                continue;
            }
            if moves {
                self.peers[peer].moved[class] = true;
                self.drop_conn(at);
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
        // Ends that mean nothing.
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
            let Some(conn) = self.conns[at].as_mut().filter(|conn| conn.is_calling()) else { continue };
            let peer = conn.peer;
            match conn.check(now) {
                Ok(()) => _ = self.step(at),
                Err(failed) => self.give_up(at, peer, failed),
            }
        }
        self.judge(now);
        let awaits = |peer: &PeerState| peer.awaited.is_some_and(|at| now.duration_since(at) < AWAITED);
        let awaited = self.peers.iter().enumerate().filter(|(_, peer)| awaits(peer)).map(|(peer, _)| peer);
        for peer in self.silence.look(&self.listeners, self.conns.iter().flatten(), awaited, now) {
            self.peers[peer].broken.get_or_insert_with(|| SILENT.to_owned());
        }
    }

    fn broken(&self) -> Vec<Broken> {
        let found =
            |(peer, known): (usize, &PeerState)| known.broken.clone().map(|reason| Broken { peer, reason });
        self.peers.iter().enumerate().filter_map(found).collect()
    }

    fn unable(&self) -> Option<(usize, String)> {
        self.peers.iter().enumerate().find_map(|(peer, known)| Some((peer, known.unable.clone()?)))
    }

    fn linked(&self, peer: usize) -> u8 {
        let with = self.conns.iter().flatten().filter(|conn| conn.peer == peer && !conn.is_calling());
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
        self.room = room(bytes);
        if let Some(bytes) = self.room {
            self.conns.iter().flatten().for_each(|conn| conn.make_room(bytes));
        }
    }

    fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        fds.push((self.epoll.as_raw_fd(), libc::POLLIN));
        let mut all = true;
        for (at, conn) in self.conns.iter().enumerate().filter_map(|(at, conn)| Some((at, conn.as_ref()?))) {
            match conn.is_calling() {
                // Between two attempts there is none.
                true => fds.extend((conn.fd() >= 0).then(|| (conn.fd(), conn.calls_for()))),
                false => all &= conn.enlist(&self.epoll, at, conn.events()),
            }
        }
        all
    }

    fn drained(&self) -> bool {
        self.conns.iter().flatten().all(Connection::idle)
    }

    fn spoken(&self) -> bool {
        self.conns.iter().flatten().filter(|conn| conn.class == MESSAGES).all(Connection::idle)
    }

    fn is_connecting(&self) -> bool {
        self.conns.iter().flatten().any(Connection::is_calling)
    }

    fn finish(&mut self) -> bool {
        if !self.drained() {
            return false;
        }
        // An end of the stream is acknowledged at once, and with it all that was before.
        if !std::mem::replace(&mut self.hung_up, true) {
            self.conns.iter().flatten().for_each(Connection::hang_up);
        }
        self.conns.iter().flatten().all(Connection::acknowledged)
    }

    fn close(&mut self) {
        self.hung_up = true;
        (0..self.conns.len()).for_each(|at| drop(self.drop_conn(at)));
        self.listeners.group_listener.inbox.end();
    }
}

impl Drop for TcpWire {
    fn drop(&mut self) {
        // A forked child's copies: hanging up would end the parent's connections.
        if !self.listeners.group_listener.endpoint.ours() {
            return;
        }
        self.conns.iter().flatten().for_each(Connection::hang_up);
        self.listeners.group_listener.inbox.end();
    }
}
