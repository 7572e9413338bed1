//! Calling a peer: a connection on its way, up to the hello. What may pass is tried again; and trouble of this process
//! is told from the loss of a peer.

use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::conn::retried;
use super::hello::HELLO;
use super::own::Own;

/// What this process lacks may come back: other threads close files, ports are given back.
const LACKING: Duration = Duration::from_secs(5);
/// A full queue or a firewall may refuse a caller once; a process that is gone does so for ever, and has to be noticed.
const REFUSED: Duration = Duration::from_millis(400);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(20);
/// A host that answers no call at all is gone.
const UNANSWERED: Duration = Duration::from_secs(20);

/// A connection that is being made; what comes of it shows when it is used.
pub(crate) fn connect(address: SocketAddr) -> io::Result<Own<TcpStream>> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(Own::new(TcpStream::from(socket))),
        Err(error) => Err(error.into()),
    }
}

/// How a connection is to behave. A host that vanishes sends nothing: on one over which nothing is under way, probes tell;
/// where something is, `silence` finds out.
pub(super) fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(socket, 5)?;
    Ok(())
}

/// Ends a connection on which bytes are not acknowledged for that long. The kernel does so as well where the peer
/// acknowledges everything and takes nothing more: so this is for calls and for what always finds room, and `None` for the
/// rest.
pub(super) fn end_after(socket: &TcpStream, limit: Option<Duration>) -> io::Result<()> {
    let millis = limit.map_or(0, |limit| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX));
    Ok(sockopt::set_tcp_user_timeout(socket, millis)?)
}

/// Before the first word: who was stopped meanwhile may find that the other end has hung up. Nothing is lost then. And what
/// became of the call itself is told once, to whoever asks first.
pub(super) fn is_wanted(socket: &TcpStream) -> io::Result<()> {
    use ErrorKind::{Interrupted, NotConnected, WouldBlock};
    match socket.peek(&mut [0]) {
        Ok(0) => Err(ErrorKind::ConnectionReset.into()),
        Err(error) if !matches!(error.kind(), WouldBlock | NotConnected | Interrupted) => Err(error),
        _ => Ok(()),
    }
}

/// What a look at a call found.
pub(super) enum Called {
    NotYet,
    /// The hello is said.
    Open(Own<TcpStream>),
    /// The peer cannot be reached any more.
    Lost(String),
    /// This process lacks something; nothing is known of the peer.
    Unable(String),
}

pub(super) struct Call {
    address: SocketAddr,
    hello: [u8; HELLO],
    socket: Option<Own<TcpStream>>,
    said: usize,
    /// Since when it fails.
    failing: Option<Instant>,
    /// The next attempt is not before that.
    next: Instant,
}

impl Call {
    pub(super) fn new(address: SocketAddr, hello: [u8; HELLO]) -> Self {
        Self { address, hello, socket: None, said: 0, failing: None, next: Instant::now() }
    }

    pub(super) fn socket(&self) -> Option<&TcpStream> {
        self.socket.as_deref()
    }

    pub(super) fn go_on(&mut self) -> Called {
        if self.socket.is_none() {
            if Instant::now() < self.next {
                return Called::NotYet;
            }
            match self.dial() {
                Ok(socket) => self.socket = Some(socket),
                // Found out without asking anybody.
                Err(error) => {
                    let here = lacking(&error) || error.raw_os_error() == Some(libc::ENETUNREACH);
                    return self.failed(&error, here);
                }
            }
        }
        match self.say() {
            Ok(false) => Called::NotYet,
            Ok(true) => self.socket.take().map_or(Called::NotYet, Called::Open),
            Err(error) => self.failed(&error, lacking(&error)),
        }
    }

    fn dial(&self) -> io::Result<Own<TcpStream>> {
        let socket = connect(self.address)?;
        prepare(&socket)?;
        end_after(&socket, Some(UNANSWERED))?;
        Ok(socket)
    }

    /// Says the hello, or what is left of it; whether all of it is said.
    fn say(&mut self) -> io::Result<bool> {
        let Some(socket) = &self.socket else { return Ok(false) };
        if self.said == 0 {
            is_wanted(socket)?;
        }
        self.said += retried((&**socket).write(&self.hello[self.said..]))?;
        if self.said < HELLO {
            return Ok(false);
        }
        end_after(socket, None)?;
        Ok(true)
    }

    fn failed(&mut self, error: &io::Error, here: bool) -> Called {
        (self.socket, self.said) = (None, 0);
        let now = Instant::now();
        let tried = now - *self.failing.get_or_insert(now);
        let again = matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset);
        let patience = if here { LACKING } else { REFUSED };
        if (here || again) && tried < patience {
            self.next = now + PAUSE;
            return Called::NotYet;
        }
        let why = format!("no connection to {}: {error}", self.address);
        if here { Called::Unable(format!("{why}; {}", advice(error))) } else { Called::Lost(why) }
    }
}

#[cfg(test)]
impl Call {
    /// As if the rank were stopped before it says anything.
    pub(super) fn connect_only(&mut self) -> io::Result<()> {
        self.socket = Some(self.dial()?);
        Ok(())
    }

    /// As if attempts had failed with this error for so long.
    pub(super) fn fails_with(&mut self, error: &io::Error, since: Duration) -> Called {
        self.failing = Instant::now().checked_sub(since);
        self.failed(error, lacking(error))
    }
}

/// Whether an error says something of this process or host alone.
pub(super) fn lacking(error: &io::Error) -> bool {
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
