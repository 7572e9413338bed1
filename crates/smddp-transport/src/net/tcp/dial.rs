//! A connection that is being made, until both ends have shown that they have the group's token: nothing waits, and what comes of
//! it shows when it is used. What may pass is told from what
//! this process lacks, and both from a host that is silent.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::address::{ACCEPTED, CLOSED, Credential, Hello, Purpose, REJECTED, TcpAddress};
use crate::close_on_fork::CloseOnFork;
use crate::net::known_hosts;
use crate::token::{Initiator, Keys, PROOF, REPLY};

pub(crate) fn connect(address: SocketAddr) -> io::Result<CloseOnFork<TcpStream>> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(CloseOnFork::new(TcpStream::from(socket))),
        Err(error) => Err(error.into()),
    }
}

/// How soon the kernel gives up a connection over which nothing is under way.
pub(super) enum Keepalive {
    /// Within the time after which a host that answers nothing is gone: nothing is ever under way over it.
    Fast,
    /// Late: where anything is waited for, something is under way or another connection tells. Of hundreds on a busy host that
    /// are probed at the same moments, a few lose all of the first probes, and what the other end sent would be lost with them.
    Slow,
}

/// Sets the options of a connection. Keepalive probes detect a vanished host on an idle connection, and `silence` detects one
/// on a busy connection. `peer_timeout`: time without any answer after which a host counts as lost.
pub(super) fn configure(socket: &TcpStream, peer_timeout: Duration, probes: Keepalive) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    set_keepalive(socket, peer_timeout, probes)
}

/// In whole seconds, at least one of each: half of the time until the first probe, then as many as lie between.
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

/// Ends a connection on which bytes are not acknowledged for that long. The kernel does so as well where the peer
/// acknowledges everything and takes nothing more: so this is for calls and for what always finds room, and `None` for the
/// rest.
pub(super) fn set_user_timeout(socket: &TcpStream, limit: Option<Duration>) -> io::Result<()> {
    let millis = limit.map_or(0, |limit| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX));
    Ok(sockopt::set_tcp_user_timeout(socket, millis)?)
}

/// A connection up to the last of its first words.
pub(super) struct Dial {
    pub(super) socket: CloseOnFork<TcpStream>,
    host: IpAddr,
    initiator: Initiator,
    encrypts: bool,
    /// Of its words.
    sent: usize,
    reply: [u8; REPLY],
    received: usize,
    /// What is said to the reply, and how much of that is.
    proof: Option<([u8; PROOF], usize)>,
    /// The listener has handed it to the group.
    accepted: bool,
}

impl Dial {
    /// From the rank with that credential to rank `to`. A host that answers nothing for `peer_timeout` is not there.
    pub(super) fn new(
        credential: &Credential,
        (to, address): (usize, &TcpAddress),
        purpose: Purpose,
        peer_timeout: Duration,
    ) -> io::Result<Self> {
        let socket = connect(address.socket)?;
        configure(&socket, peer_timeout, Keepalive::Fast)?;
        set_user_timeout(&socket, Some(peer_timeout))?;
        let hello = Hello { group_listener: address.group_listener, from: credential.rank, to, purpose };
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

    /// Of what is said and heard from now on, where it is to be encrypted. Both ends have shown who they are.
    pub(super) fn keys(&self) -> Option<Keys> {
        self.encrypts.then(|| self.initiator.keys(&self.reply))
    }

    /// Goes on with the first words; whether all are said.
    pub(super) fn advance(&mut self) -> io::Result<bool> {
        let words = self.initiator.greeting();
        if self.sent == 0 {
            self.check_open()?;
        }
        if self.sent < words.len() {
            let written = zero_if_blocked((&*self.socket).write(&words[self.sent..]))?;
            if self.sent == 0 && written > 0 {
                known_hosts::record(self.host);
            }
            self.sent += written;
        }
        if self.sent == words.len() && self.proof.is_none() {
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

    /// What the listener answers. One that hangs up instead has no place for this caller now: it may have one later.
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

    /// What the listener says to the proof.
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
                    Err(io::Error::other("it has a connection of this rank already"))
                }
                _ => Err(ErrorKind::InvalidData.into()),
            },
        }
    }

    /// Before words that cannot be said again: who was stopped meanwhile may find that the other end has hung up. Nothing is lost then. And what
    /// became of the call itself is told once, to whoever asks first.
    fn check_open(&self) -> io::Result<()> {
        use ErrorKind::{Interrupted, NotConnected, WouldBlock};
        match self.socket.peek(&mut [0]) {
            Ok(0) => Err(ErrorKind::ConnectionReset.into()),
            Err(error) if !matches!(error.kind(), WouldBlock | NotConnected | Interrupted) => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether its host has taken up the connection.
    pub(super) fn host_accepted(&self) -> bool {
        self.sent > 0
    }

    /// What it waits for: room for its words, or the other end's.
    pub(super) fn events(&self) -> i16 {
        let sending =
            self.sent < self.initiator.greeting().len() || matches!(self.proof, Some((_, 0..PROOF)));
        if sending { libc::POLLOUT } else { libc::POLLIN }
    }

    /// All is said: the listener may hand it to the group at any time.
    pub(super) fn proof_sent(&self) -> bool {
        matches!(self.proof, Some((_, PROOF)))
    }

    /// Both ends have shown who they are, and the listener has handed the connection to the group.
    pub(super) fn connected(&self) -> bool {
        self.accepted
    }
}

/// What a non-blocking write came to; a connection that is still being made takes nothing yet.
pub(super) fn zero_if_blocked(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}

/// The group is closed there, in good order.
fn closed_error() -> io::Error {
    io::Error::new(ErrorKind::ConnectionAborted, "it has closed its end of the group")
}

/// Whether that is how a call ended.
pub(super) fn is_closed(error: &io::Error) -> bool {
    error.kind() == ErrorKind::ConnectionAborted && error.raw_os_error().is_none()
}

/// Whether a connection ended because nobody answers at the other end.
pub(super) fn is_host_silent(error: &io::Error) -> bool {
    use ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(error.kind(), TimedOut | HostUnreachable | NetworkUnreachable)
}

pub(super) const SILENT: &str = "its host does not answer any more";

/// Whether an error says something of this process or host alone.
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

/// What to try where this process lacks something.
pub(super) fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error().unwrap_or(0) {
        libc::EMFILE => {
            "this process has no file descriptor left: raise its limit (`ulimit -n`), or close files that it keeps open"
        }
        libc::ENFILE => "this host has no file descriptor left: raise fs.file-max",
        libc::EADDRNOTAVAIL | libc::EADDRINUSE => {
            "this host has no port left for another connection (net.ipv4.ip_local_port_range), or its address is gone \
             (`ip addr`)"
        }
        libc::ENOBUFS | libc::ENOMEM => {
            "this host's kernel has no memory for another socket: free some, or raise net.ipv4.tcp_mem"
        }
        libc::EACCES | libc::EPERM => "a firewall or a policy of this host forbids it",
        libc::ENETDOWN | libc::ENETUNREACH | libc::EAFNOSUPPORT => {
            "this host has no way there: look at `ip addr` and `ip route`, or name an interface in SMDDP_SOCKET_IFNAME"
        }
        _ => "look at what this host lacks",
    }
}
