//! Questions to a process about itself: its service thread answers, whatever the other threads do. Over an abstract unix
//! socket whose name has the process's pid, its PID namespace and a random number; ranks of other nodes ask over their group's
//! listener.

use std::io::{self, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::credentials::{check_user, proc_is_ours};
use super::handshake::{ProcessAddress, describe_peer, listen};
use super::incoming::{self, Stage};
use crate::close_on_fork::CloseOnFork;
use crate::socket_io::send_all;
use crate::token::{Challenge, Token};
use crate::warning::warn;

const MAGIC: &[u8; 8] = b"smddp-q1";
/// Its magic, what is asked, and about which rank of which group.
const QUERY_BYTES: usize = 8 + 8 + 8;
/// Bytes of what a rank is said to do.
pub(crate) const MAX_ACTIVITY_BYTES: usize = 600;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusQuery {
    /// What that rank of a group does, in words.
    Doing(u64),
    /// All groups, as JSON.
    Status,
    /// The same with the newest operations of each.
    Dump,
}

impl StatusQuery {
    fn parse(words: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(*words.get(at..at + 8)?.first_chunk()?));
        let (what, key) = (word(8)?, word(16)?);
        match what {
            _ if !words.starts_with(MAGIC) => None,
            1 => Some(Self::Doing(key)),
            2 => Some(Self::Status),
            3 => Some(Self::Dump),
            _ => None,
        }
    }

    fn words(self) -> [u8; QUERY_BYTES] {
        let (what, key) = match self {
            Self::Doing(key) => (1u64, key),
            Self::Status => (2, 0),
            Self::Dump => (3, 0),
        };
        let mut words = [0; QUERY_BYTES];
        words[..8].copy_from_slice(MAGIC);
        words[8..16].copy_from_slice(&what.to_le_bytes());
        words[16..].copy_from_slice(&key.to_le_bytes());
        words
    }
}

static RESPONDER: OnceLock<fn(StatusQuery) -> String> = OnceLock::new();

/// Who knows the answers; the first one counts.
pub fn set_responder(responder: fn(StatusQuery) -> String) {
    let _ = RESPONDER.set(responder);
}

/// What this process answers; what a rank does is a line of bounded length.
pub(crate) fn respond(question: StatusQuery) -> String {
    let mut text = RESPONDER.get().map_or_else(String::new, |responder| responder(question));
    if matches!(question, StatusQuery::Doing(_)) {
        let end = (0..=text.len().min(MAX_ACTIVITY_BYTES)).rev().find(|&at| text.is_char_boundary(at));
        text.truncate(end.unwrap_or(0));
    }
    text
}

/// The name of a process's socket for questions.
fn name(process: &ProcessAddress) -> Vec<u8> {
    let own = process.socket.strip_prefix(b"smddp").unwrap_or(&process.socket);
    [b"smddp-status", own].concat()
}

/// Those of the same user may ask.
struct StatusHost;

impl incoming::IncomingHost for StatusHost {
    fn greeting_bytes(&self) -> usize {
        QUERY_BYTES
    }

    fn check_allowed(&self, caller: BorrowedFd<'_>) -> io::Result<()> {
        check_user(caller).map(drop)
    }

    fn is_greeting(&self, words: &[u8]) -> bool {
        let magic = words.len().min(MAGIC.len());
        words[..magic] == MAGIC[..magic]
    }

    /// No group's: `smddp status` is none of its ranks.
    fn token(&self, _: &[u8]) -> Option<Arc<Token>> {
        None
    }

    fn is_public(&self) -> bool {
        true
    }

    fn name(&self, caller: BorrowedFd<'_>) -> String {
        describe_peer(caller)
    }

    fn accept(
        &self,
        caller: CloseOnFork<OwnedFd>,
        words: &[u8],
        _: Option<&Challenge>,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)> {
        let text = respond(StatusQuery::parse(words)?);
        Some((caller, Stage::Reply(text.into_bytes())))
    }

    fn resource_error(&self, error: &io::Error) -> String {
        format!("`smddp status` cannot be answered: {error}; it waits")
    }
}

/// The socket where this process, which has that address, is asked.
pub(super) fn open(
    me: &ProcessAddress,
) -> Option<(CloseOnFork<OwnedFd>, impl incoming::IncomingHost + use<>)> {
    let listener = listen(&name(me)).inspect_err(|error| {
        warn(&format!("`smddp status` does not see this process: it cannot listen at its socket ({error})"));
    });
    Some((CloseOnFork::new(OwnedFd::from(listener.ok()?)), StatusHost))
}

/// Asks a process of this machine and user. Its thread may be stopped, or the process another user's: then it is an error,
/// after that time at most.
fn query(process: &ProcessAddress, question: StatusQuery, patience: Duration) -> io::Result<String> {
    let until = Instant::now() + patience;
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name(process))?)?;
    check_user(&stream)?;
    stream.set_write_timeout(Some(patience))?;
    send_all(&stream, &question.words())?;
    let (mut text, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match (&stream).read(&mut part) {
            Ok(0) => return Ok(String::from_utf8_lossy(&text).into_owned()),
            Ok(_) if text.len() > MAX_ACTIVITY_BYTES && matches!(question, StatusQuery::Doing(_)) => {
                return Err(io::Error::other("an answer that is too long"));
            }
            Ok(bytes) => text.extend(&part[..bytes]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted && !left.is_zero() => {}
            Err(error) => return Err(error),
        }
    }
}

/// What a process of this node does, as far as it can be known: `about` names the rank and its group.
pub(crate) fn doing(process: &ProcessAddress, pid: Option<Pid>, about: u64) -> String {
    if pid.is_some_and(stopped) {
        return STOPPED.to_owned();
    }
    match query(process, StatusQuery::Doing(about), QUERY_TIMEOUT) {
        Ok(text) if !text.is_empty() => text,
        Ok(_) => "does not say what it does".to_owned(),
        Err(_) => "does not answer (stopped, or without time?)".to_owned(),
    }
}

/// One that is asked for its stack answers within a fraction of it.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

/// Of a process that does not run.
pub(crate) const STOPPED: &str = "is stopped (by a signal or a debugger)";

/// Returns true if the process with that id in this PID namespace is stopped.
pub(crate) fn stopped(pid: Pid) -> bool {
    if !proc_is_ours() {
        return false;
    }
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    // Its name, in brackets, may have any characters.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_read_as_it_was_written_and_nothing_else_is_one() {
        for question in [StatusQuery::Doing(7), StatusQuery::Status, StatusQuery::Dump] {
            assert_eq!(StatusQuery::parse(&question.words()), Some(question));
            for end in 0..QUERY_BYTES {
                assert_eq!(StatusQuery::parse(&question.words()[..end]), None);
            }
        }
        let mut words = StatusQuery::Status.words();
        words[8] = 9;
        assert_eq!(StatusQuery::parse(&words), None);
        words = StatusQuery::Status.words();
        words[0] = b'S';
        assert_eq!(StatusQuery::parse(&words), None);
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error_at_once() {
        let begun = Instant::now();
        assert!(query(&ProcessAddress::default(), StatusQuery::Status, Duration::from_secs(9)).is_err());
        assert!(begun.elapsed() < Duration::from_secs(3) && !Pid::from_raw(i32::MAX).is_some_and(stopped));
    }
}
