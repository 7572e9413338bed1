//! Status queries to a process. Its service thread replies regardless of its other threads. A query uses an abstract
//! unix socket whose name contains the pid, the PID namespace and a random number. Ranks of other nodes send queries
//! to the listener of their group.

use std::io::{self, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::credentials::{check_user, proc_is_ours};
use super::incoming::{self, Stage};
use super::memory_request::{ProcessAddress, describe_peer, listen};
use crate::CloseOnFork;
use crate::handshake::unauthenticated;
use crate::socket_io::send_all;
use crate::warning::warn;

const MAGIC: &[u8; 8] = b"smddp-q1";
/// Bytes of a query: magic, kind, and the key of a rank and its group.
const QUERY_BYTES: usize = 8 + 8 + 8;
/// Maximum bytes of an activity text.
pub(crate) const MAX_ACTIVITY_BYTES: usize = 600;

/// Status query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusQuery {
    /// Activity of a rank of a group, as text.
    Activity(u64),
    /// State of all groups, as JSON.
    Status,
    /// State of all groups with their latest operations, as JSON.
    Dump,
}

impl StatusQuery {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..at + 8)?.first_chunk()?));
        let (kind, key) = (number(8)?, number(16)?);
        match kind {
            _ if !bytes.starts_with(MAGIC) => None,
            1 => Some(Self::Activity(key)),
            2 => Some(Self::Status),
            3 => Some(Self::Dump),
            _ => None,
        }
    }

    fn bytes(self) -> [u8; QUERY_BYTES] {
        let (kind, key) = match self {
            Self::Activity(key) => (1u64, key),
            Self::Status => (2, 0),
            Self::Dump => (3, 0),
        };
        let mut bytes = [0; QUERY_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&kind.to_le_bytes());
        bytes[16..].copy_from_slice(&key.to_le_bytes());
        bytes
    }
}

static RESPONDER: OnceLock<fn(StatusQuery) -> String> = OnceLock::new();

/// Registers the function that answers queries. Later registrations are ignored.
pub fn set_responder(responder: fn(StatusQuery) -> String) {
    let _ = RESPONDER.set(responder);
}

/// Returns this process's reply; an activity text is truncated to [`MAX_ACTIVITY_BYTES`].
pub(crate) fn respond(request: StatusQuery) -> String {
    let mut text = RESPONDER.get().map_or_else(String::new, |responder| responder(request));
    if matches!(request, StatusQuery::Activity(_)) {
        let end = (0..=text.len().min(MAX_ACTIVITY_BYTES)).rev().find(|&at| text.is_char_boundary(at));
        text.truncate(end.unwrap_or(0));
    }
    text
}

/// Returns the name of a process's status socket.
fn name(process: &ProcessAddress) -> Vec<u8> {
    let suffix = process.socket.strip_prefix(b"smddp").unwrap_or(&process.socket);
    [b"smddp-status", suffix].concat()
}

/// Host of the status socket; open to processes of the same user.
struct StatusHost;

impl incoming::IncomingHost for StatusHost {
    /// No token is required: `smddp status` belongs to no group.
    fn first_stage(&self) -> Stage {
        Stage::Query(Vec::new())
    }

    fn check_allowed(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        check_user(socket).map(drop)
    }

    fn name(&self, socket: BorrowedFd<'_>) -> String {
        describe_peer(socket)
    }

    fn answer(&self, query: &[u8]) -> io::Result<Option<String>> {
        let magic = query.len().min(MAGIC.len());
        if query[..magic] != MAGIC[..magic] {
            return Err(unauthenticated("it uses another protocol or another version of smddp"));
        }
        if query.len() < QUERY_BYTES {
            return Ok(None);
        }
        let query = StatusQuery::parse(query).ok_or_else(|| unauthenticated("its query is unknown"))?;
        Ok(Some(respond(query)))
    }

    fn resource_error(&self, error: &io::Error) -> String {
        format!("`smddp status` waits for a reply of this process, which cannot accept connections: {error}")
    }
}

/// Opens the status socket of this process, whose address is `me`.
pub(super) fn open(
    me: &ProcessAddress,
) -> Option<(CloseOnFork<OwnedFd>, impl incoming::IncomingHost + use<>)> {
    let listener = listen(&name(me)).inspect_err(|error| {
        warn(&format!("`smddp status` cannot show this process: it cannot listen on its socket ({error})"));
    });
    Some((CloseOnFork::new(OwnedFd::from(listener.ok()?)), StatusHost))
}

/// Sends a query to a process of this machine and user. Fails after `limit` if the thread is stopped, or if the
/// process belongs to another user.
fn query(process: &ProcessAddress, request: StatusQuery, limit: Duration) -> io::Result<String> {
    let until = Instant::now() + limit;
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name(process))?)?;
    check_user(&stream)?;
    stream.set_write_timeout(Some(limit))?;
    send_all(&stream, &request.bytes())?;
    let (mut text, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match (&stream).read(&mut part) {
            Ok(0) => return Ok(String::from_utf8_lossy(&text).into_owned()),
            Ok(_) if text.len() > MAX_ACTIVITY_BYTES && matches!(request, StatusQuery::Activity(_)) => {
                return Err(io::Error::other("the reply is too long"));
            }
            Ok(bytes) => text.extend(&part[..bytes]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted && !left.is_zero() => {}
            Err(error) => return Err(error),
        }
    }
}

/// Describes the activity of a process of this node if it is known. `about` identifies the rank and its group.
pub(crate) fn activity(process: &ProcessAddress, pid: Option<Pid>, about: u64) -> String {
    if pid.is_some_and(is_stopped) {
        return STOPPED.to_owned();
    }
    match query(process, StatusQuery::Activity(about), QUERY_TIMEOUT) {
        Ok(text) if !text.is_empty() => text,
        Ok(_) => "does not report its activity".to_owned(),
        Err(_) => "does not reply (stopped, or without CPU time?)".to_owned(),
    }
}

/// Time limit of a query; even with a stack a reply takes a fraction of it.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

/// Activity text of a stopped process.
pub(crate) const STOPPED: &str = "is stopped (by a signal or a debugger)";

/// Returns true if the process with that id in this PID namespace is stopped.
pub(crate) fn is_stopped(pid: Pid) -> bool {
    if !proc_is_ours() {
        return false;
    }
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    // The process name, in parentheses, may contain any characters.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_round_trip_and_other_bytes_are_rejected() {
        for request in [StatusQuery::Activity(7), StatusQuery::Status, StatusQuery::Dump] {
            assert_eq!(StatusQuery::parse(&request.bytes()), Some(request));
            for end in 0..QUERY_BYTES {
                assert_eq!(StatusQuery::parse(&request.bytes()[..end]), None);
            }
        }
        let mut bytes = StatusQuery::Status.bytes();
        bytes[8] = 9;
        assert_eq!(StatusQuery::parse(&bytes), None);
        bytes = StatusQuery::Status.bytes();
        bytes[0] = b'S';
        assert_eq!(StatusQuery::parse(&bytes), None);
    }

    #[test]
    fn query_to_an_absent_process_fails_immediately() {
        let begun = Instant::now();
        assert!(query(&ProcessAddress::default(), StatusQuery::Status, Duration::from_secs(9)).is_err());
        assert!(begun.elapsed() < Duration::from_secs(3) && !Pid::from_raw(i32::MAX).is_some_and(is_stopped));
    }
}
