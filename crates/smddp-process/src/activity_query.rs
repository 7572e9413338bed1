//! Query of the activity of a process of this node, without blocking.

use std::io::{self, ErrorKind, IoSlice, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::Pid;
use smddp_net::socket_io::send;

use super::credentials::check_user;
use super::memory_request::ProcessAddress;
use super::status::{MAX_ACTIVITY_BYTES, StatusQuery, is_stopped, name};

/// Time limit of a query; even with a stack a reply takes a fraction of it.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

/// Description of a stopped process of this node.
pub const STOPPED: &str = "is stopped (by a signal or a debugger)";

/// Query in progress. The service thread of the process replies regardless of its other threads.
pub struct ActivityQuery {
    /// Name of the status socket of the process.
    name: Vec<u8>,
    request: [u8; StatusQuery::BYTES],
    started: Instant,
    /// Connection to the process. `None` before the connection, for example while the listener's backlog is full.
    stream: Option<UnixStream>,
    is_sent: bool,
    reply: Vec<u8>,
    is_stopped: bool,
}

impl ActivityQuery {
    /// Queries the process at `address`. `about`: identifies the rank and its group.
    pub fn new(address: &ProcessAddress, pid: Option<Pid>, about: u64, now: Instant) -> Self {
        Self {
            name: name(address),
            request: StatusQuery::Activity(about).bytes(),
            started: now,
            stream: None,
            is_sent: false,
            reply: Vec::new(),
            is_stopped: pid.is_some_and(is_stopped),
        }
    }

    /// Continues the query. Returns the activity once it is known, or a text that explains why it is not.
    pub fn poll(&mut self, now: Instant) -> Option<String> {
        if self.is_stopped {
            return Some(STOPPED.to_owned());
        }
        match self.advance() {
            Ok(None) if now.duration_since(self.started) < QUERY_TIMEOUT => None,
            Ok(Some(text)) if !text.is_empty() => Some(text),
            Ok(Some(_)) => Some("does not report its activity".to_owned()),
            Ok(None) | Err(_) => Some("sent no reply: its process is stopped or gets no CPU time".to_owned()),
        }
    }

    /// Returns the reply once it is complete.
    fn advance(&mut self) -> io::Result<Option<String>> {
        let stream = match &self.stream {
            Some(stream) => stream,
            None => match open(&self.name) {
                Ok(stream) => self.stream.insert(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        if !self.is_sent {
            check_user(stream)?;
            // The buffer of a new connection has room for the request.
            if send(stream, &[IoSlice::new(&self.request)])? < self.request.len() {
                return Err(ErrorKind::WriteZero.into());
            }
            self.is_sent = true;
        }
        let mut part = [0; 4096];
        loop {
            match (&*stream).read(&mut part) {
                Ok(0) => return Ok(Some(String::from_utf8_lossy(&self.reply).into_owned())),
                Ok(_) if self.reply.len() > MAX_ACTIVITY_BYTES => {
                    return Err(io::Error::other("the reply is too long"));
                }
                Ok(bytes) => self.reply.extend(&part[..bytes]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Connects to an abstract unix socket without blocking.
pub(super) fn open(name: &[u8]) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(UnixStream::from(socket))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};

    use super::*;

    const UNANSWERED: &str = "sent no reply: its process is stopped or gets no CPU time";

    fn query(of: &str, now: Instant) -> ActivityQuery {
        let mut query = ActivityQuery::new(&ProcessAddress::default(), None, 7, now);
        query.name = format!("smddp-test-{}-{of}", std::process::id()).into_bytes();
        query
    }

    fn listener(query: &ActivityQuery) -> UnixListener {
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(&query.name).unwrap()).unwrap()
    }

    #[test]
    fn reply_is_complete_once_the_process_closes_the_connection() {
        let now = Instant::now();
        let mut query = query("reply", now);
        let listener = listener(&query);
        assert_eq!(query.poll(now), None);
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; StatusQuery::BYTES];
        stream.read_exact(&mut request).unwrap();
        assert_eq!(request, StatusQuery::Activity(7).bytes());
        stream.write_all(b"is in ").unwrap();
        assert_eq!(query.poll(now), None);
        stream.write_all(b"train.py:88").unwrap();
        drop(stream);
        assert_eq!(query.poll(now).as_deref(), Some("is in train.py:88"));
    }

    #[test]
    fn missing_reply_is_reported_exactly_after_the_timeout() {
        let now = Instant::now();
        let mut query = query("silent", now);
        let _listener = listener(&query);
        assert_eq!(query.poll(now), None);
        assert_eq!(query.poll(now + QUERY_TIMEOUT - Duration::from_nanos(1)), None);
        assert_eq!(query.poll(now + QUERY_TIMEOUT).as_deref(), Some(UNANSWERED));
    }

    #[test]
    fn query_of_an_absent_process_ends_immediately() {
        let now = Instant::now();
        assert_eq!(query("absent", now).poll(now).as_deref(), Some(UNANSWERED));
    }

    #[test]
    fn empty_and_overlong_replies_are_reported() {
        for (bytes, text) in [(0, "does not report its activity"), (64 << 10, UNANSWERED)] {
            let now = Instant::now();
            let mut query = query(&format!("odd-{bytes}"), now);
            let listener = listener(&query);
            assert_eq!(query.poll(now), None);
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; StatusQuery::BYTES]).unwrap();
            stream.write_all(&vec![b'x'; bytes]).unwrap();
            drop(stream);
            assert_eq!(query.poll(now).as_deref(), Some(text), "{bytes}");
        }
    }
}
