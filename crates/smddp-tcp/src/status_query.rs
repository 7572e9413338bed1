//! Status query: requests the state of processes of other nodes, for `smddp status`. Their service threads reply with
//! the JSON that they also send to queries of their host.
//!
//! ```text
//! after the verdict: length of the text (u32, little endian) | text
//! ```

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smddp_net::handshake::{ACCEPTED, Purpose, is_closed, is_unauthenticated};
use smddp_net::token::Keys;

use super::address::{Credential, TcpAddress};
use super::dial::{Dial, SILENT, is_host_silent, is_local_error};
use super::links::{LinkStats, OpenLinks};
use super::seal::{Decryptor, Encryptor};

/// Maximum bytes of a reply, for some thousand groups.
pub const MAX_STATUS_BYTES: usize = 4 << 20;
/// Time after which a host that has not accepted the connection counts as silent. The kernel retransmits a lost SYN
/// after 1 s.
const CONNECT_LIMIT: Duration = Duration::from_millis(1500);
/// Time without a byte after which a process counts as unresponsive.
const REPLY_LIMIT: Duration = Duration::from_secs(2);
/// Time limit of all queries. `smddp status` waits longer than that.
pub const TOTAL_LIMIT: Duration = Duration::from_secs(8);
/// Maximum bytes of all replies as JSON strings. `smddp status` accepts an answer of 64 MiB, with the members of the groups.
const MAX_TOTAL_BYTES: usize = 40 << 20;
/// Reason for a process that has closed the group or does not have it.
pub const CLOSED: &str = "it has closed its end of the group";
/// Maximum number of concurrent queries. Each takes one descriptor on both sides.
const MAX_QUERIES: usize = 64;
/// Bytes of the length before the text.
const LENGTH: usize = 4;
/// Reason for a process that accepted the connection and does not reply.
const UNRESPONSIVE: &str = "no reply within 2 s: it is stopped, or gets no processor time";

/// Encodes a reply with the verdict before it. A text above the limit is replaced by its length.
pub(super) fn encode_reply(text: &str, keys: Option<Keys>) -> Vec<u8> {
    let length = u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes();
    let text = if text.len() > MAX_STATUS_BYTES { "" } else { text };
    let reply = [&length, text.as_bytes()].concat();
    let reply = match keys {
        Some(keys) => Encryptor::new(keys.responder).encrypt_all(&reply),
        None => reply,
    };
    [&[ACCEPTED][..], &reply].concat()
}

/// Decodes a reply. Returns `None` if it is incomplete.
fn parse(reply: &[u8]) -> Result<Option<String>, String> {
    let Some((length, text)) = reply.split_first_chunk::<LENGTH>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_STATUS_BYTES {
        return Err(format!("its reply has more than {} MiB", MAX_STATUS_BYTES >> 20));
    }
    match text.len() {
        bytes if bytes < length => Ok(None),
        bytes if bytes > length => Err("its reply is longer than announced".to_owned()),
        _ => Ok(Some(String::from_utf8_lossy(text).into_owned())),
    }
}

/// Ranks of other nodes in a group, for status queries from any thread.
#[derive(Clone)]
pub struct StatusPeers {
    pub(super) credential: Credential,
    /// Addresses by rank; `None` for a rank of this node.
    pub(super) addresses: Arc<[Option<TcpAddress>]>,
    /// Open connections of this rank.
    pub(super) links: Arc<OpenLinks>,
}

impl StatusPeers {
    /// Returns the ranks of other nodes, with the socket address that identifies their processes.
    pub fn ranks(&self) -> impl Iterator<Item = (usize, SocketAddr)> + '_ {
        let socket = |(rank, address): (usize, &Option<TcpAddress>)| Some((rank, address.as_ref()?.socket));
        self.addresses.iter().enumerate().filter_map(socket)
    }

    /// Returns the kernel's statistics of this rank's open TCP connections with ranks of other nodes.
    pub fn links(&self) -> Vec<LinkStats> {
        self.links.stats()
    }
}

/// Reply of a process, or the reason why there is none.
pub type StatusReply = Result<String, String>;

/// Query of one process.
struct PendingQuery {
    index: usize,
    dial: Dial,
    started: Instant,
    /// Time of the last progress.
    advanced: Instant,
    reply: Vec<u8>,
    decryptor: Option<Decryptor>,
}

impl PendingQuery {
    fn new(peers: &StatusPeers, rank: usize, index: usize, now: Instant) -> io::Result<Self> {
        let address = peers.addresses.get(rank).and_then(Option::as_ref).ok_or(ErrorKind::NotFound)?;
        let dial = Dial::new(&peers.credential, (rank, address), Purpose::Status, REPLY_LIMIT)?;
        Ok(Self { index, dial, started: now, advanced: now, reply: Vec::new(), decryptor: None })
    }

    /// Advances the query after its socket became ready. Returns the reply once it is complete.
    fn poll(&mut self, now: Instant) -> Result<Option<String>, String> {
        if !self.dial.handshake.is_complete() {
            let sent = self.dial.handshake.has_sent();
            let complete = self.dial.advance().map_err(|error| describe(&error))?;
            if self.dial.handshake.has_sent() != sent {
                self.advanced = now;
            }
            if !complete {
                return Ok(None);
            }
            self.decryptor = self.dial.keys().map(|keys| Decryptor::new(keys.responder));
        }
        let mut part = [0; 16 << 10];
        loop {
            let read = match &mut self.decryptor {
                Some(decryptor) => decryptor.reader(&self.dial.socket).read(&mut part),
                None => (&*self.dial.socket).read(&mut part),
            };
            match read {
                Ok(0) => return Err("it closed the connection".to_owned()),
                Ok(bytes) => self.reply.extend(&part[..bytes]),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(describe(&error)),
            }
            self.advanced = now;
            if let Some(text) = parse(&self.reply)? {
                return Ok(Some(text));
            }
        }
    }

    /// Returns the reason why the query has taken too long.
    fn expired(&self, now: Instant) -> Option<&'static str> {
        if !self.dial.handshake.has_sent() {
            return (now.duration_since(self.started) >= CONNECT_LIMIT).then_some(SILENT);
        }
        (now.duration_since(self.advanced) >= REPLY_LIMIT).then_some(UNRESPONSIVE)
    }
}

fn describe(error: &io::Error) -> String {
    match error {
        error if is_host_silent(error) => SILENT.to_owned(),
        error if is_closed(error) => CLOSED.to_owned(),
        error if is_unauthenticated(error) => error.to_string(),
        error if error.kind() == ErrorKind::ConnectionRefused => {
            "it has ended: its host refuses the connection".to_owned()
        }
        error if error.kind() == ErrorKind::ConnectionReset => {
            "it has ended: the connection was reset".to_owned()
        }
        error => format!("no connection: {error}"),
    }
}

/// Queries in progress.
struct Queries<'a> {
    waiting: VecDeque<(usize, &'a StatusPeers, usize)>,
    active: Vec<PendingQuery>,
    replies: Vec<Option<StatusReply>>,
    /// Bytes of all replies as JSON strings.
    bytes: usize,
}

/// Returns the maximum bytes of the JSON string of a text.
fn json_bytes(text: &str) -> usize {
    let escaped = |byte: u8| match byte {
        b'"' | b'\\' => 2,
        // "\u001b"
        0..0x20 => 6,
        _ => 1,
    };
    text.bytes().map(escaped).sum()
}

/// Queries the processes of these ranks, and waits for at most [`TOTAL_LIMIT`]. Returns their replies in the order of
/// `ranks`.
pub fn query(ranks: &[(&StatusPeers, usize)]) -> Vec<StatusReply> {
    query_until(ranks, Instant::now() + TOTAL_LIMIT)
}

/// Queries the processes of these ranks, [`MAX_QUERIES`] at a time, until that time. Returns their replies in the order of
/// `ranks`.
pub fn query_until(ranks: &[(&StatusPeers, usize)], until: Instant) -> Vec<StatusReply> {
    let waiting = ranks.iter().enumerate().map(|(index, &(peers, rank))| (index, peers, rank)).collect();
    let mut queries =
        Queries { waiting, active: Vec::new(), replies: ranks.iter().map(|_| None).collect(), bytes: 0 };
    loop {
        let now = Instant::now();
        queries.start(now);
        if queries.active.is_empty() || now >= until {
            break;
        }
        queries.advance(until);
    }
    let late = || Err(format!("no reply within {} s of all queries", TOTAL_LIMIT.as_secs()));
    queries.replies.into_iter().map(|reply| reply.unwrap_or_else(late)).collect()
}

impl Queries<'_> {
    fn start(&mut self, now: Instant) {
        while self.active.len() < MAX_QUERIES {
            let Some((index, peers, rank)) = self.waiting.pop_front() else { return };
            match PendingQuery::new(peers, rank, index, now) {
                Ok(query) => self.active.push(query),
                // Queries that end free descriptors.
                Err(error) if is_local_error(&error) && !self.active.is_empty() => {
                    return self.waiting.push_front((index, peers, rank));
                }
                Err(error) => self.replies[index] = Some(Err(describe(&error))),
            }
        }
    }

    /// Waits for the next events, and takes replies and failures.
    fn advance(&mut self, until: Instant) {
        let events =
            |query: &PendingQuery| PollFlags::from_bits_truncate(query.dial.events().cast_unsigned());
        let mut fds: Vec<PollFd<'_>> =
            self.active.iter().map(|query| PollFd::new(&*query.dial.socket, events(query))).collect();
        // Short enough for the limits of single queries.
        let rest = until.saturating_duration_since(Instant::now()).min(Duration::from_millis(100));
        let _ = poll(&mut fds, Timespec::try_from(rest).ok().as_ref());
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (now, mut next) = (Instant::now(), ready.into_iter());
        let Self { active, replies, bytes, .. } = self;
        active.retain_mut(|query| {
            let outcome = if next.next() == Some(true) { query.poll(now) } else { Ok(None) };
            replies[query.index] = match outcome {
                Ok(Some(text)) => Some(take(text, bytes)),
                Err(reason) => Some(Err(reason)),
                Ok(None) => query.expired(now).map(|reason| Err(reason.to_owned())),
            };
            replies[query.index].is_none()
        });
    }
}

/// Returns a reply, unless all replies together exceed their maximum. `bytes`: those of the earlier replies.
fn take(text: String, bytes: &mut usize) -> StatusReply {
    let total = bytes.saturating_add(json_bytes(&text));
    if total > MAX_TOTAL_BYTES {
        return Err(format!(
            "its reply is omitted: all replies have more than {} MiB",
            MAX_TOTAL_BYTES >> 20
        ));
    }
    *bytes = total;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;

    use rustix::net::{AddressFamily, SocketType};
    use smddp_net::fuzzing::{known_token, responder_reply};
    use smddp_net::handshake::{GREETING_BYTES, Listener, PROOF_BYTES};

    use super::*;
    use crate::fuzzing::credential;

    fn peers(listeners: &[&TcpListener]) -> StatusPeers {
        let address = |listener: &&TcpListener| {
            Some(TcpAddress { socket: listener.local_addr().unwrap(), listener_id: Default::default() })
        };
        StatusPeers {
            credential: credential(0),
            addresses: listeners.iter().map(address).collect(),
            links: Arc::default(),
        }
    }

    /// Returns a bound socket, and its address.
    fn bound() -> (OwnedFd, SocketAddr) {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = SocketAddr::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
        (socket, address)
    }

    /// Completes one handshake and then writes these bytes, in two parts.
    fn serve(listener: &TcpListener, bytes: &[u8]) {
        let (mut stream, _) = listener.accept().unwrap();
        let mut greeting = [0; GREETING_BYTES];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&responder_reply(Listener::Groups, &greeting, &known_token()).unwrap()).unwrap();
        stream.read_exact(&mut [0; PROOF_BYTES]).unwrap();
        let (first, second) = bytes.split_at(bytes.len() / 2);
        // The querying end may have closed the connection after a malformed part.
        let _ = stream.write_all(first).and_then(|()| stream.write_all(second));
    }

    #[test]
    fn replies_keep_the_order_of_the_ranks_and_failures_have_reasons() {
        let [whole, large, long, short, silent] = [(); 5].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        // A socket that is bound and does not listen refuses connections, and no other process can take its port.
        let refusing = bound();
        let mut addresses = peers(&[&whole, &large, &long, &short, &silent]).addresses.to_vec();
        addresses.insert(4, Some(TcpAddress { socket: refusing.1, listener_id: Default::default() }));
        let peers =
            StatusPeers { credential: credential(0), addresses: addresses.into(), links: Arc::default() };
        let text = "x\u{1b}".repeat(300_000);
        let replies = std::thread::scope(|scope| {
            scope.spawn(|| serve(&whole, &encode_reply(&text, None)));
            scope.spawn(|| serve(&large, &encode_reply(&"x".repeat(MAX_STATUS_BYTES + 1), None)));
            scope.spawn(|| serve(&long, &[&encode_reply("text", None)[..], b"more"].concat()));
            scope.spawn(|| serve(&short, &encode_reply("text", None)[..7]));
            let ranks: Vec<_> = (0..6).map(|rank| (&peers, rank)).collect();
            query(&ranks)
        });
        assert_eq!(replies[0].as_ref(), Ok(&text));
        let reasons: Vec<_> = replies[1..].iter().map(|reply| reply.clone().unwrap_err()).collect();
        let refused = "it has ended: its host refuses the connection";
        let expected = [
            "its reply has more than 4 MiB",
            "its reply is longer than announced",
            "it closed the connection",
            refused,
            UNRESPONSIVE,
        ];
        assert_eq!(reasons, expected);
    }

    #[test]
    fn replies_above_the_total_are_omitted_and_escapes_count() {
        let mut bytes = 0;
        let text = "\u{1}".repeat(MAX_STATUS_BYTES);
        assert_eq!(json_bytes("a\"\\\n\u{1f}ä"), 1 + 2 + 2 + 6 + 6 + 2);
        assert!(take(text.clone(), &mut bytes).is_ok());
        let reason = take(text, &mut bytes).unwrap_err();
        assert_eq!(reason, "its reply is omitted: all replies have more than 40 MiB");
        assert_eq!(take("small".to_owned(), &mut bytes).as_deref(), Ok("small"));
    }

    #[test]
    fn incomplete_text_is_awaited_and_any_bytes_are_text_of_bounded_size() {
        let reply = &encode_reply("äb", None)[1..];
        for end in 0..reply.len() {
            assert_eq!(parse(&reply[..end]), Ok(None));
        }
        assert_eq!(parse(reply), Ok(Some("äb".to_owned())));
        assert_eq!(parse(&[2, 0, 0, 0, 0xff, 0xfe]), Ok(Some("\u{fffd}\u{fffd}".to_owned())));
        assert!(parse(&[0xff; 8]).is_err() && parse(&[0; 5]).is_err());
        assert_eq!(parse(&[0; 4]), Ok(Some(String::new())));
    }

    #[test]
    fn ranks_without_an_address_have_a_reason() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = peers(&[&listener]).addresses[0].clone();
        let peers = StatusPeers {
            credential: credential(0),
            addresses: [None, address].into(),
            links: Arc::default(),
        };
        let socket = listener.local_addr().unwrap();
        assert_eq!(peers.ranks().collect::<Vec<_>>(), [(1, socket)]);
        assert!(query(&[(&peers, 0), (&peers, 7)]).iter().all(Result::is_err));
        assert!(query(&[]).is_empty());
    }

    #[test]
    fn host_that_accepts_no_connection_is_silent_exactly_at_the_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (peers, now) = (peers(&[&listener]), Instant::now());
        // Nothing is sent before the first poll, as if the host had not accepted the connection.
        let mut query = PendingQuery::new(&peers, 0, 0, now).unwrap();
        assert_eq!(query.expired(now + CONNECT_LIMIT - Duration::from_nanos(1)), None);
        assert_eq!(query.expired(now + CONNECT_LIMIT), Some(SILENT));
        let sent = now + CONNECT_LIMIT;
        while !query.dial.handshake.has_sent() {
            assert_eq!(query.poll(sent), Ok(None));
        }
        assert_eq!(query.expired(sent + REPLY_LIMIT - Duration::from_nanos(1)), None);
        assert_eq!(query.expired(sent + REPLY_LIMIT), Some(UNRESPONSIVE));
    }
}
