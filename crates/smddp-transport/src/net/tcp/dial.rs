//! One connection attempt: a non-blocking connect and the handshake in which both ends prove that they have the group's
//! token. Classifies errors as transient, local or a host that does not respond.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::address::{ACCEPTED, CLOSED, Credential, Hello, Purpose, REJECTED, TcpAddress};
use crate::CloseOnFork;
use crate::net::known_hosts;
use crate::token::{Initiator, Keys, PROOF, REPLY};

/// Starts a non-blocking connect.
pub(crate) fn connect(address: SocketAddr) -> io::Result<CloseOnFork<TcpStream>> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(CloseOnFork::new(TcpStream::from(socket))),
        Err(error) => Err(error.into()),
    }
}

/// Time after which the kernel ends an idle connection whose probes are not answered.
pub(super) enum Keepalive {
    /// Within the peer timeout. For connections that never have data in flight.
    Fast,
    /// Several times the peer timeout. While this rank waits, data is in flight or a liveness connection detects a lost
    /// host. If a busy host probes hundreds of connections at the same time, a few of them lose all of the first
    /// probes. An earlier end would lose data that the other end sent over them.
    Slow,
}

/// Sets the options of a connection. Keepalive probes detect a lost host on an idle connection, and `host_liveness`
/// detects one on a busy connection. `peer_timeout`: time without any answer after which a host counts as lost.
pub(super) fn configure(socket: &TcpStream, peer_timeout: Duration, probes: Keepalive) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    set_keepalive(socket, peer_timeout, probes)
}

/// Sets the keepalive probes, in whole seconds of at least one. The first probe is sent after half of the timeout. With
/// [`Keepalive::Fast`] the others fill the rest of it.
pub(super) fn set_keepalive(socket: &TcpStream, peer_timeout: Duration, probes: Keepalive) -> io::Result<()> {
    let (idle, total) = ((peer_timeout / 2).as_secs().max(1), peer_timeout.as_secs());
    let (interval, count) = match probes {
        Keepalive::Fast => {
            let interval = (peer_timeout / 10).as_secs().max(1);
            (interval, total.saturating_sub(idle).div_ceil(interval).max(1))
        }
        Keepalive::Slow => (idle, 9),
    };
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(idle))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(interval))?;
    sockopt::set_tcp_keepcnt(socket, u32::try_from(count).unwrap_or(u32::MAX))?;
    Ok(())
}

/// Sets TCP_USER_TIMEOUT, after which the kernel ends a connection with unacknowledged bytes. The kernel also ends one
/// whose peer keeps its receive window closed. So the limit is for connection attempts and liveness connections; others
/// use `None`.
pub(super) fn set_user_timeout(socket: &TcpStream, limit: Option<Duration>) -> io::Result<()> {
    let millis = limit.map_or(0, |limit| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX));
    Ok(sockopt::set_tcp_user_timeout(socket, millis)?)
}

/// Connection attempt, up to the verdict of the listener.
pub(super) struct Dial {
    pub(super) socket: CloseOnFork<TcpStream>,
    host: IpAddr,
    initiator: Initiator,
    encrypts: bool,
    /// Bytes of the greeting that were sent.
    sent: usize,
    reply: [u8; REPLY],
    /// Bytes of the reply that were received.
    received: usize,
    /// Proof that answers the reply, and the number of its bytes that were sent.
    proof: Option<([u8; PROOF], usize)>,
    /// The listener has accepted the connection and passed it to the group.
    accepted: bool,
}

impl Dial {
    /// Connects the rank with that credential to rank `to`. `peer_timeout`: time without any answer after which a host
    /// counts as lost.
    pub(super) fn new(
        credential: &Credential,
        (to, address): (usize, &TcpAddress),
        purpose: Purpose,
        peer_timeout: Duration,
    ) -> io::Result<Self> {
        let socket = connect(address.socket)?;
        configure(&socket, peer_timeout, Keepalive::Fast)?;
        set_user_timeout(&socket, Some(peer_timeout))?;
        let hello = Hello { listener_id: address.listener_id, from: credential.rank, to, purpose };
        let initiator = Initiator::new(&credential.token, &hello.to_bytes())?;
        Ok(Self {
            socket,
            host: address.socket.ip(),
            initiator,
            encrypts: credential.encrypts,
            sent: 0,
            reply: [0; REPLY],
            received: 0,
            proof: None,
            accepted: false,
        })
    }

    /// Returns the keys for the bytes after the handshake, if the connection is encrypted. Valid once both ends are
    /// authenticated.
    pub(super) fn keys(&self) -> Option<Keys> {
        self.encrypts.then(|| self.initiator.keys(&self.reply))
    }

    /// Advances the handshake. Returns true once the listener has accepted the connection.
    pub(super) fn advance(&mut self) -> io::Result<bool> {
        let greeting = self.initiator.greeting();
        if self.sent == 0 {
            self.check_open()?;
        }
        if self.sent < greeting.len() {
            let written = zero_if_blocked((&*self.socket).write(&greeting[self.sent..]))?;
            if self.sent == 0 && written > 0 {
                known_hosts::record(self.host);
            }
            self.sent += written;
        }
        if self.sent == greeting.len() && self.proof.is_none() {
            self.read_reply()?;
        }
        if let Some((proof, sent)) = &mut self.proof
            && *sent < PROOF
        {
            *sent += zero_if_blocked((&*self.socket).write(&proof[*sent..]))?;
        }
        if self.proof_sent() && !self.accepted {
            self.read_verdict()?;
        }
        Ok(self.accepted)
    }

    /// Reads the listener's reply. A listener that closes the connection instead has too many incoming ones, and may
    /// accept a retry.
    fn read_reply(&mut self) -> io::Result<()> {
        match (&*self.socket).read(&mut self.reply[self.received..]) {
            Ok(0) => return Err(ErrorKind::ConnectionReset.into()),
            outcome => self.received += zero_if_blocked(outcome)?,
        }
        self.initiator.check_reply_prefix(&self.reply[..self.received])?;
        if self.received == REPLY {
            self.check_open()?;
            self.proof = Some((self.initiator.prove(&self.reply)?, 0));
        }
        Ok(())
    }

    /// Reads the listener's verdict on the proof.
    fn read_verdict(&mut self) -> io::Result<()> {
        let mut verdict = [0];
        match (&*self.socket).read(&mut verdict) {
            Ok(0) => Err(ErrorKind::ConnectionReset.into()),
            outcome => match zero_if_blocked(outcome)? {
                0 => Ok(()),
                _ if verdict == [ACCEPTED] => {
                    self.accepted = true;
                    Ok(())
                }
                _ if verdict == [CLOSED] => Err(closed_error()),
                _ if verdict == [REJECTED] => {
                    Err(io::Error::other("it already has a connection of this rank"))
                }
                _ => Err(ErrorKind::InvalidData.into()),
            },
        }
    }

    /// Checks that the connection is still open, before bytes that cannot be sent again. If this process was stopped in
    /// between, the listener may have closed the connection, and then nothing is lost. The check also returns the
    /// result of the connect, which the socket reports only once.
    fn check_open(&self) -> io::Result<()> {
        use ErrorKind::{Interrupted, NotConnected, WouldBlock};
        match self.socket.peek(&mut [0]) {
            Ok(0) => Err(ErrorKind::ConnectionReset.into()),
            Err(error) if !matches!(error.kind(), WouldBlock | NotConnected | Interrupted) => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns true if the peer's host has accepted the TCP connection.
    pub(super) fn host_accepted(&self) -> bool {
        self.sent > 0
    }

    /// Returns the poll events that the handshake waits for.
    pub(super) fn events(&self) -> i16 {
        let sending =
            self.sent < self.initiator.greeting().len() || matches!(self.proof, Some((_, 0..PROOF)));
        if sending { libc::POLLOUT } else { libc::POLLIN }
    }

    /// Returns true if the whole proof is sent, so that the listener may pass the connection to the group at any time.
    pub(super) fn proof_sent(&self) -> bool {
        matches!(self.proof, Some((_, PROOF)))
    }

    /// Returns true if both ends are authenticated and the listener has passed the connection to the group.
    pub(super) fn connected(&self) -> bool {
        self.accepted
    }
}

/// Returns 0 bytes for a non-blocking call that would block or was interrupted.
pub(super) fn zero_if_blocked(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

/// Returns the error for a group that the peer closed in good order.
fn closed_error() -> io::Error {
    io::Error::new(ErrorKind::ConnectionAborted, "it has closed its end of the group")
}

/// Returns true for an error of [`closed_error`].
pub(super) fn is_closed(error: &io::Error) -> bool {
    error.kind() == ErrorKind::ConnectionAborted && error.raw_os_error().is_none()
}

/// Returns true if a connection failed because the peer's host does not respond.
pub(super) fn is_host_silent(error: &io::Error) -> bool {
    use ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(error.kind(), TimedOut | HostUnreachable | NetworkUnreachable)
}

pub(super) const SILENT: &str = "its host does not respond";

/// Returns true for an error of this process or host, which does not depend on the peer.
pub(super) fn is_local_error(error: &io::Error) -> bool {
    const HERE: [i32; 10] = [
        libc::EMFILE,
        libc::ENFILE,
        libc::EADDRNOTAVAIL,
        libc::EADDRINUSE,
        libc::ENOBUFS,
        libc::ENOMEM,
        libc::EACCES,
        libc::EPERM,
        libc::ENETDOWN,
        libc::EAFNOSUPPORT,
    ];
    error.raw_os_error().is_some_and(|code| HERE.contains(&code))
}

/// Returns advice for a local error.
pub(super) fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error().unwrap_or(0) {
        libc::EMFILE => {
            "this process has no file descriptor left: raise its limit (`ulimit -n`), or close files that it keeps open"
        }
        libc::ENFILE => "this host has no file descriptor left: raise fs.file-max",
        libc::EADDRNOTAVAIL | libc::EADDRINUSE => {
            "this host has no free port for another connection (net.ipv4.ip_local_port_range), or its address was removed \
             (`ip addr`)"
        }
        libc::ENOBUFS | libc::ENOMEM => {
            "this host's kernel has no memory for another socket: free some, or raise net.ipv4.tcp_mem"
        }
        libc::EACCES | libc::EPERM => "a firewall or a security policy of this host forbids it",
        libc::ENETDOWN | libc::ENETUNREACH | libc::EAFNOSUPPORT => {
            "this host has no route to it: check `ip addr` and `ip route`, or name an interface in SMDDP_SOCKET_IFNAME"
        }
        _ => "check the resource limits of this host",
    }
}
