//! Status queries to a process. Its service thread replies regardless of its other threads. A query uses an abstract
//! unix socket whose name contains the pid, the PID namespace and a random number. Ranks of other nodes send queries
//! to the listener of their group.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::process::Pid;
use smddp_base::CloseOnFork;
use smddp_base::warning::warn;
use smddp_net::handshake::unauthenticated;

use super::credentials::{check_user, proc_is_ours};
use super::deadlock_probe;
use super::incoming::{self, Stage};
use super::memory_request::{ProcessAddress, describe_peer, listen};

const MAGIC: &[u8; 8] = b"smddp-q1";
/// Maximum bytes of an activity text.
pub const MAX_ACTIVITY_BYTES: usize = 600;

/// Status query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusQuery {
    /// Activity of a rank of a group, as text.
    Activity(u64),
    /// State of all groups, as JSON.
    Status,
    /// State of all groups with their latest operations, as JSON.
    Dump,
    /// State of the processes of other nodes in the groups of this process, as JSON. The answer takes seconds.
    Job,
}

impl StatusQuery {
    /// Bytes of a query: magic, kind, and the key of a rank and its group.
    pub(super) const BYTES: usize = 8 + 8 + 8;

    fn parse(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..at + 8)?.first_chunk()?));
        let (kind, key) = (number(8)?, number(16)?);
        match kind {
            _ if !bytes.starts_with(MAGIC) => None,
            1 => Some(Self::Activity(key)),
            2 => Some(Self::Status),
            3 => Some(Self::Dump),
            4 => Some(Self::Job),
            _ => None,
        }
    }

    pub(super) fn bytes(self) -> [u8; Self::BYTES] {
        let (kind, key) = match self {
            Self::Activity(key) => (1u64, key),
            Self::Status => (2, 0),
            Self::Dump => (3, 0),
            Self::Job => (4, 0),
        };
        let mut bytes = [0; Self::BYTES];
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
pub fn respond(request: StatusQuery) -> String {
    let mut text = RESPONDER.get().map_or_else(String::new, |responder| responder(request));
    if matches!(request, StatusQuery::Activity(_)) {
        let end = (0..=text.len().min(MAX_ACTIVITY_BYTES)).rev().find(|&at| text.is_char_boundary(at));
        text.truncate(end.unwrap_or(0));
    }
    text
}

/// Returns the name of a process's status socket.
pub(super) fn name(process: &ProcessAddress) -> Vec<u8> {
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

    fn max_query_bytes(&self) -> usize {
        deadlock_probe::MAX_FRAME_BYTES
    }

    fn answer(&self, query: &[u8]) -> io::Result<Option<String>> {
        if deadlock_probe::is_probe(query) && query.len() >= MAGIC.len() {
            let is_complete = deadlock_probe::take(query)?;
            return Ok(is_complete.then(|| deadlock_probe::QUEUED.to_owned()));
        }
        let magic = query.len().min(MAGIC.len());
        if query[..magic] != MAGIC[..magic] && !deadlock_probe::is_probe(query) {
            return Err(unauthenticated("it uses another protocol or another version of smddp"));
        }
        if query.len() < StatusQuery::BYTES {
            return Ok(None);
        }
        let query = StatusQuery::parse(query).ok_or_else(|| unauthenticated("its query is unknown"))?;
        Ok(Some(respond(query)))
    }

    fn deferred_answer(&self, query: &[u8]) -> Option<fn() -> String> {
        (StatusQuery::parse(query)? == StatusQuery::Job).then_some(|| respond(StatusQuery::Job))
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

/// Returns true if the process with that id in this PID namespace is stopped.
pub fn is_stopped(pid: Pid) -> bool {
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
        for request in [StatusQuery::Activity(7), StatusQuery::Status, StatusQuery::Dump, StatusQuery::Job] {
            assert_eq!(StatusQuery::parse(&request.bytes()), Some(request));
            for end in 0..StatusQuery::BYTES {
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
    fn absent_process_is_not_stopped() {
        assert!(!Pid::from_raw(i32::MAX).is_some_and(is_stopped));
    }
}
