//! The wire: a communicator's connections, by peer.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::conn::{Conn, room};
use super::endpoint::{Door, TcpAddress};
use super::hello::{Purpose, hello};
use super::reader::Read1;
use super::survey;
use crate::net::frame::{Frame, Kind, LANES};
use crate::net::wire::{Broken, Place, Sink, Ticket, Wire};

/// What is known of a peer.
struct Peer {
    address: Option<TcpAddress>,
    /// The connections over which this rank sends to it, by lane.
    sends: [Option<usize>; LANES],
    /// It has turned from its own connection to the one that this rank made.
    moved: [bool; LANES],
    /// A connection to it ended, when and how; it may have left in good order over another one.
    ended: Option<(Instant, String)>,
    left: bool,
    broken: Option<String>,
}

pub(crate) struct TcpWire {
    me: usize,
    door: Door,
    peers: Vec<Peer>,
    conns: Vec<Option<Conn>>,
    /// Tickets of what was gone at once.
    done: Vec<Ticket>,
    ready: Vec<libc::pollfd>,
    hung_up: bool,
    /// What connections ask their kernel for, on long ways.
    room: Option<usize>,
}

/// From so many connections on, one system call asks which of them have something.
const FEW: usize = 2;
/// A goodbye over one connection may come this much later than the end of another, be it the only one so far: the
/// process's accepting thread may still have the other in its hands.
const GOODBYE: Duration = Duration::from_millis(250);

impl TcpWire {
    /// `addresses` by rank; `None` for ranks that are not reached this way.
    pub(crate) fn new(me: usize, door: Door, addresses: Vec<Option<TcpAddress>>) -> Self {
        let mine = door.endpoint.interface.address;
        let here = |theirs: TcpAddress| TcpAddress { socket: mine.reaches(theirs.socket), ..theirs };
        let peers = addresses
            .into_iter()
            .map(|address| address.map(here))
            .map(|address| Peer {
                address,
                sends: [None; LANES],
                moved: [false; LANES],
                ended: None,
                left: false,
                broken: None,
            })
            .collect();
        Self {
            me,
            door,
            peers,
            conns: Vec::new(),
            done: Vec::new(),
            ready: Vec::new(),
            hung_up: false,
            room: None,
        }
    }

    fn keep(&mut self, conn: Conn) -> usize {
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
    fn outgoing(&mut self, peer: usize, lane: usize) -> Option<usize> {
        if self.peers[peer].broken.is_some() {
            return None;
        }
        if let Some(found) = self.peers[peer].sends[lane] {
            return Some(found);
        }
        self.welcome();
        let theirs =
            self.conns.iter().position(|c| c.as_ref().is_some_and(|c| c.peer == peer && c.lane == lane));
        let found = match theirs {
            Some(found) => found,
            None => {
                let address = self.peers[peer].address.clone()?;
                match Conn::call(
                    peer,
                    lane,
                    address.socket,
                    &hello(&address.token, self.me, Purpose::Lane(lane)),
                ) {
                    Ok(conn) => self.keep(conn),
                    Err(error) => {
                        self.peers[peer].broken =
                            Some(format!("no connection to {}: {error}", address.socket));
                        return None;
                    }
                }
            }
        };
        self.peers[peer].sends[lane] = Some(found);
        Some(found)
    }

    /// Takes up connections that peers have made.
    fn welcome(&mut self) -> bool {
        let callers = self.door.inbox.take();
        let any = !callers.is_empty();
        for (peer, lane, socket) in callers {
            if peer < self.peers.len()
                && let Ok(conn) = Conn::answer(peer, lane, socket)
            {
                let at = self.keep(conn);
                if peer < self.me {
                    self.turn_to(at);
                }
            }
        }
        any
    }

    /// Goes on over this connection, which the peer made, where this rank has made one, too.
    fn turn_to(&mut self, at: usize) {
        let Some((peer, lane)) = self.conns[at].as_ref().map(|conn| (conn.peer, conn.lane)) else { return };
        let Some(old) = self.peers[peer].sends[lane].replace(at) else { return };
        for (at, kind) in [(old, Kind::Move), (at, Kind::Moved)] {
            if let Some(conn) = &mut self.conns[at] {
                conn.retired = kind == Kind::Move;
                // SAFETY: there is no payload.
                unsafe { conn.send(&Frame::new(kind, 0), std::ptr::null(), 0) };
            }
        }
    }

    fn end(&mut self, at: usize, why: String) {
        let Some(conn) = self.conns[at].take() else { return };
        self.done.extend(conn.tickets());
        if conn.retired {
            return;
        }
        let peer = &mut self.peers[conn.peer];
        if peer.sends[conn.lane] == Some(at) {
            peer.sends[conn.lane] = None;
        }
        peer.ended.get_or_insert_with(|| (Instant::now(), why));
    }

    /// Which connections have something to read, where asking is cheaper than trying.
    fn look(&mut self) -> bool {
        self.ready.clear();
        let live = self.conns.iter().flatten().count();
        if live <= FEW {
            return false;
        }
        let entry = |conn: &Option<Conn>| libc::pollfd {
            fd: conn.as_ref().map_or(-1, Conn::fd),
            events: libc::POLLIN,
            revents: 0,
        };
        self.ready.extend(self.conns.iter().map(entry));
        // SAFETY: the list is ours and as long as we say; negative descriptors are skipped; no waiting.
        unsafe { libc::poll(self.ready.as_mut_ptr(), self.ready.len() as libc::nfds_t, 0) };
        true
    }

    fn judge(&mut self) {
        for peer in &mut self.peers {
            let Some((since, why)) = &peer.ended else { continue };
            if peer.left || peer.broken.is_some() {
                peer.ended = None;
                continue;
            }
            if since.elapsed() > GOODBYE {
                peer.broken = Some(why.clone());
                peer.ended = None;
            }
        }
    }
}

/// Notes who says goodbye, and hands everything on.
struct Ears<'a> {
    sink: &'a mut dyn Sink,
    left: bool,
    /// Its last frame over the connection that it turned from was heard: over this one, or before.
    moves: bool,
    moved: bool,
}

impl Sink for Ears<'_> {
    fn place(&mut self, peer: usize, frame: &Frame) -> Place {
        match frame.kind {
            Kind::Moved if !self.moved => Place::Later,
            Kind::Moved | Kind::Move => Place::Drop,
            _ => self.sink.place(peer, frame),
        }
    }
    fn arrived(&mut self, peer: usize, frame: &Frame) {
        match frame.kind {
            Kind::Move => self.moves = true,
            Kind::Moved => {}
            kind => {
                self.left |= kind == Kind::Leave;
                self.sink.arrived(peer, frame);
            }
        }
    }
    fn sent(&mut self, ticket: Ticket) {
        self.sink.sent(ticket);
    }
}

impl Wire for TcpWire {
    fn name(&self) -> String {
        let interface = &self.door.endpoint.interface;
        format!("tcp {} {}", interface.name, interface.address)
    }

    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        let conn = self.outgoing(peer, frame.lane()).and_then(|at| self.conns[at].as_mut());
        // SAFETY: the caller's promise, which is the same.
        if conn.is_none_or(|conn| unsafe { conn.send(frame, payload, ticket) }) {
            self.done.push(ticket);
        }
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> bool {
        let mut moved = self.welcome();
        for ticket in self.done.drain(..) {
            sink.sent(ticket);
            moved = true;
        }
        let asked = self.look();
        for at in 0..self.conns.len() {
            let Some(conn) = &mut self.conns[at] else { continue };
            if !conn.idle() {
                moved |= conn.flush(sink);
            }
            if asked
                && conn.events() & libc::POLLIN != 0
                && self.ready.get(at).is_some_and(|r| r.revents == 0)
            {
                continue;
            }
            let (peer, lane) = (conn.peer, conn.lane);
            let mut ears = Ears { sink, left: false, moves: false, moved: self.peers[peer].moved[lane] };
            let outcome = conn.read(&mut ears);
            let (left, moves) = (ears.left, ears.moves);
            self.peers[peer].left |= left;
            if moves {
                self.peers[peer].moved[lane] = true;
                self.conns[at] = None;
                moved = true;
                continue;
            }
            match outcome {
                Read1::Moved => moved = true,
                Read1::Nothing => {}
                Read1::Ended(why) => {
                    self.end(at, why);
                    moved = true;
                }
            }
        }
        if self.peers.iter().any(|peer| peer.ended.is_some()) {
            self.judge();
        }
        moved
    }

    fn watch(&mut self, peer: usize) {
        let connected = self.conns.iter().flatten().any(|conn| conn.peer == peer);
        if !connected && !self.peers[peer].left {
            self.outgoing(peer, 0);
        }
    }

    fn survey(&mut self, peers: &[usize]) -> Vec<(usize, Option<u64>)> {
        let address = |&peer: &usize| Some((peer, self.peers[peer].address.clone()?));
        survey::ask(self.me, peers.iter().filter_map(address).collect())
    }

    fn begun(&mut self, operations: u64) {
        self.door.inbox.begun.store(operations, Ordering::Release);
    }

    fn broken(&self) -> Vec<Broken> {
        let found = |(peer, known): (usize, &Peer)| known.broken.clone().map(|why| Broken { peer, why });
        self.peers.iter().enumerate().filter_map(found).collect()
    }

    fn copies(&self) -> bool {
        true
    }

    fn round_trip(&self, peer: usize) -> Option<Duration> {
        let conns = self.conns.iter().flatten().filter(|conn| conn.peer == peer);
        conns.filter_map(Conn::round_trip).min()
    }

    fn expect(&mut self, bytes: usize) {
        self.room = room(bytes);
        if let Some(bytes) = self.room {
            self.conns.iter().flatten().for_each(|conn| conn.make_room(bytes));
        }
    }

    fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        fds.extend(
            self.conns.iter().flatten().map(|conn| (conn.fd(), conn.events())).filter(|(_, e)| *e != 0),
        );
        true
    }

    fn drained(&self) -> bool {
        self.conns.iter().flatten().all(Conn::idle)
    }

    fn finish(&mut self) -> bool {
        if !self.drained() {
            return false;
        }
        // An end of the stream is acknowledged at once, and with it all that was before.
        if !std::mem::replace(&mut self.hung_up, true) {
            self.conns.iter().flatten().for_each(Conn::hang_up);
        }
        self.conns.iter().flatten().all(Conn::acknowledged)
    }
}

impl Drop for TcpWire {
    fn drop(&mut self) {
        // A forked child's copies: hanging up would end the parent's connections.
        if !self.door.endpoint.ours() {
            return;
        }
        self.conns.iter().flatten().for_each(Conn::hang_up);
    }
}
