//! Connections of a wire: opened by this rank or accepted from its peers, at most one per peer and class in the end.

use smddp_net::frame::{Frame, Kind, payload_checksum};

use super::super::address::Purpose;
use super::super::connecting::{ConnectError, Connecting};
use super::super::connection::Connection;
use super::TcpWire;

impl TcpWire {
    /// Stores a connection, and returns its index.
    pub(super) fn insert(&mut self, mut conn: Connection) -> usize {
        if self.checks {
            conn.check_checksums();
        }
        if let Some(bytes) = self.send_buffer {
            conn.set_send_buffer(bytes);
        }
        conn.publish(&self.sideband.links);
        if let Some(free) = self.conns.iter().position(Option::is_none) {
            self.conns[free] = Some(conn);
            return free;
        }
        self.conns.push(Some(conn));
        self.conns.len() - 1
    }

    /// Returns the connection for sending to `peer`, and opens it if needed.
    pub(super) fn outgoing(&mut self, peer: usize, class: usize) -> Option<usize> {
        let (known, state) = (&self.peers[peer], &self.states[peer]);
        // A connection that ended is not reopened, because its frames are lost. After leaving the group none is opened.
        if self.send_closed || state.broken.is_some() || state.local_error.is_some() || known.ended.is_some()
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
    pub(super) fn accept_pending(&mut self) -> bool {
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
    pub(super) fn step(&mut self, at: usize) -> bool {
        let Some(conn) = &mut self.conns[at] else { return false };
        let (peer, is_new) = (conn.peer, conn.is_connecting());
        match conn.step() {
            Ok(established) => {
                if established && is_new {
                    conn.publish(&self.sideband.links);
                }
                return established;
            }
            Err(error) => self.connect_failed(at, peer, error),
        }
        false
    }

    /// Handles a failed connection attempt.
    pub(super) fn connect_failed(&mut self, at: usize, peer: usize, error: ConnectError) {
        match error {
            ConnectError::PeerLost(reason) => self.end(at, reason),
            ConnectError::Local(reason) => {
                self.states[peer].local_error.get_or_insert(reason);
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
                let checksum = self.checks.then(|| payload_checksum(&[]));
                let frame = Frame { checksum, ..Frame::new(kind, 0) };
                // SAFETY: no payload.
                unsafe { conn.send(&frame, std::ptr::null(), 0) };
            }
        }
    }

    /// Removes a connection, and reports the tickets of frames that will never be sent.
    pub(super) fn remove(&mut self, at: usize) -> Option<Connection> {
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
    pub(super) fn end(&mut self, at: usize, reason: String) {
        if let Some(conn) = self.remove(at).filter(|conn| !conn.retired) {
            self.peers[conn.peer].end(reason);
        }
    }
}
