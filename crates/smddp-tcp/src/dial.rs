//! One connection attempt: a non-blocking connect and the handshake in which both ends prove that they have the group's
//! token. Classifies errors as transient, local or a host that does not respond.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use smddp_base::CloseOnFork;
use smddp_net::handshake::{HandshakeEnd, Initiator, Purpose};
use smddp_net::known_hosts;
use smddp_net::socket_io;
use smddp_net::token::Keys;

use super::address::{Credential, TcpAddress};

/// Starts a non-blocking connect.
///
/// # Errors
/// The kernel provides no socket, or has no route to the address.
pub fn connect(address: SocketAddr) -> io::Result<CloseOnFork<TcpStream>> {
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
    pub(super) handshake: Box<Initiator>,
    encrypts: bool,
}

impl Dial {
    /// Connects the rank with that credential to a peer. `peer_timeout`: time without any answer after which a host
    /// counts as lost.
    pub(super) fn new(
        credential: &Credential,
        peer: (usize, &TcpAddress),
        purpose: Purpose,
        peer_timeout: Duration,
    ) -> io::Result<Self> {
        let address = peer.1.socket;
        let socket = connect(address)?;
        configure(&socket, peer_timeout, Keepalive::Fast)?;
        set_user_timeout(&socket, Some(peer_timeout))?;
        let handshake = Box::new(credential.initiator(peer, purpose)?);
        Ok(Self { socket, host: address.ip(), handshake, encrypts: credential.encrypts })
    }

    /// Returns the keys for the bytes after the handshake, if the connection is encrypted.
    pub(super) fn keys(&self) -> Option<Keys> {
        self.handshake.keys().filter(|_| self.encrypts)
    }

    /// Advances the handshake. Returns true once the listener has accepted the connection.
    pub(super) fn advance(&mut self) -> io::Result<bool> {
        while !self.handshake.is_complete() {
            if self.handshake.begins_message() {
                self.check_open()?;
            }
            let accepted = self.handshake.has_sent();
            match socket_io::advance(&*self.socket, &mut *self.handshake) {
                Ok(true) if !accepted => known_hosts::record(self.host),
                Ok(true) => {}
                Ok(false) => return Ok(false),
                // A listener that closes the connection has too many incoming ones, and may accept a retry.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    return Err(ErrorKind::ConnectionReset.into());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
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

    /// Returns the poll events that the handshake waits for.
    pub(super) fn events(&self) -> i16 {
        if self.handshake.output().is_empty() { libc::POLLIN } else { libc::POLLOUT }
    }
}

/// Returns 0 bytes for a non-blocking call that would block or was interrupted.
pub(super) fn zero_if_blocked(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if socket_io::would_block(&error) => Ok(0),
        other => other,
    }
}

/// Returns true if a connection failed because the peer's host does not respond.
pub(super) fn is_host_silent(error: &io::Error) -> bool {
    use ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(error.kind(), TimedOut | HostUnreachable | NetworkUnreachable)
}

/// Reason why a connection to a host failed that does not respond.
pub const SILENT: &str = "its host does not respond";

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
