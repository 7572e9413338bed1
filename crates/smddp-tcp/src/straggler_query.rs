//! Straggler query: requests the state of ranks that make no progress. The service threads of their processes reply.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::time::{Duration, Instant};

use rustix::event::{self, PollFd, PollFlags, Timespec};
use smddp_net::handshake::Purpose;
use smddp_net::token::Keys;
use smddp_process::status::MAX_ACTIVITY_BYTES;

use super::address::{Credential, TcpAddress};
use super::dial::{Dial, is_host_silent, is_local_error};
use super::seal::{Decryptor, Encryptor};

/// Time after which a host that has not accepted the connection counts as silent. The kernel retransmits a lost SYN
/// after 1 s.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
/// Time after which a process that has not replied counts as unresponsive.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of concurrent queries. Each takes one descriptor on both sides.
const MAX_QUERIES: usize = 64;
/// Maximum number of concurrent queries to one process, which other ranks query, too.
const MAX_PER_PROCESS: usize = 2;

/// Query of one rank.
struct PendingQuery {
    peer: usize,
    address: TcpAddress,
    dial: Dial,
    started: Instant,
    reply: Vec<u8>,
    /// Decryption of the reply, if the connection is encrypted.
    decryptor: Option<Decryptor>,
}

/// Size of the reply's header, in bytes: number of started operations, and length of the status text.
const REPLY_HEADER: usize = 8 + 2;

/// Encodes a reply: the number of operations that the rank has started, and its status text.
pub(super) fn encode_reply(begun: u64, doing: &str, keys: Option<Keys>) -> Vec<u8> {
    let mut reply = begun.to_le_bytes().to_vec();
    reply.extend((doing.len() as u16).to_le_bytes());
    reply.extend(doing.bytes());
    let Some(keys) = keys else { return reply };
    Encryptor::new(keys.responder).encrypt_all(&reply)
}

/// Decodes a reply. Returns `None` if it is incomplete.
fn parse(reply: &[u8]) -> io::Result<Option<QueryReply>> {
    let Some((begun, rest)) = reply.split_first_chunk() else { return Ok(None) };
    let Some((length, text)) = rest.split_first_chunk() else { return Ok(None) };
    let length = usize::from(u16::from_le_bytes(*length));
    if length > MAX_ACTIVITY_BYTES || text.len() > length {
        return Err(ErrorKind::InvalidData.into());
    }
    let doing = || String::from_utf8_lossy(text).replace(char::is_control, " ");
    Ok((text.len() == length).then(|| QueryReply { begun: u64::from_le_bytes(*begun), doing: doing() }))
}

/// Reply of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueryReply {
    /// Number of operations that the rank has started.
    pub begun: u64,
    /// Status text; empty if the process has none.
    pub doing: String,
}

impl PendingQuery {
    /// Starts the connection without waiting for it.
    fn new(credential: &Credential, peer: usize, address: TcpAddress, now: Instant) -> io::Result<Self> {
        let dial = Dial::new(credential, (peer, &address), Purpose::Query, REPLY_TIMEOUT)?;
        Ok(Self { peer, address, dial, started: now, reply: Vec::new(), decryptor: None })
    }

    /// Advances the query after its socket became ready. Returns the reply once it is complete.
    fn poll(&mut self) -> io::Result<Option<QueryReply>> {
        if !self.dial.handshake.is_complete() {
            if !self.dial.advance()? {
                return Ok(None);
            }
            self.decryptor = self.dial.keys().map(|keys| Decryptor::new(keys.responder));
        }
        let mut part = [0; REPLY_HEADER + MAX_ACTIVITY_BYTES];
        let read = match &mut self.decryptor {
            Some(decryptor) => decryptor.reader(&self.dial.socket).read(&mut part),
            None => (&*self.dial.socket).read(&mut part),
        };
        match read {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => self.reply.extend(&part[..bytes]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        parse(&self.reply)
    }
}

/// Result of the query of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueryResult {
    /// The process replied.
    Replied(QueryReply),
    /// The host responds, but the process does not: it is stopped, or gets no CPU time.
    ProcessUnresponsive,
    /// The host did not respond.
    HostSilent,
}

/// Queries of several ranks, some of them in progress. A rank that refuses or closes the connection has no result.
pub struct StragglerQuery {
    credential: Credential,
    waiting: VecDeque<(usize, TcpAddress)>,
    queries: Vec<PendingQuery>,
    results: Vec<(usize, QueryResult)>,
}

impl StragglerQuery {
    /// Queries `peers` in that order.
    pub(super) fn new(credential: Credential, peers: impl IntoIterator<Item = (usize, TcpAddress)>) -> Self {
        let waiting = peers.into_iter().collect();
        Self { credential, waiting, queries: Vec::new(), results: Vec::new() }
    }

    /// Starts due queries at `now`, and waits for replies for at most `at_most`. Returns the new results.
    pub fn poll(&mut self, at_most: Duration, now: Instant) -> Vec<(usize, QueryResult)> {
        self.start_queries(now);
        let ready = self.ready(at_most);
        let mut next = ready.into_iter();
        let Self { queries, results, .. } = self;
        queries.retain_mut(|query| {
            let outcome = if next.next() == Some(true) { query.poll() } else { Ok(None) };
            let waited = now.duration_since(query.started);
            match outcome {
                // The number of operations that the rank has started remains unknown.
                Ok(None) if query.dial.handshake.has_sent() && waited >= REPLY_TIMEOUT => {
                    results.push((query.peer, QueryResult::ProcessUnresponsive))
                }
                Ok(None) if query.dial.handshake.has_sent() || waited < CONNECT_TIMEOUT => return true,
                Ok(None) => results.push((query.peer, QueryResult::HostSilent)),
                Ok(Some(reply)) => results.push((query.peer, QueryResult::Replied(reply))),
                Err(error) if is_host_silent(&error) => results.push((query.peer, QueryResult::HostSilent)),
                Err(_) => {}
            }
            false
        });
        std::mem::take(&mut self.results)
    }

    /// Returns true if no query and no result is left.
    pub fn is_finished(&self) -> bool {
        self.waiting.is_empty() && self.queries.is_empty() && self.results.is_empty()
    }

    fn start_queries(&mut self, now: Instant) {
        while self.queries.len() < MAX_QUERIES {
            let free = |(_, address): &(usize, TcpAddress)| {
                self.queries.iter().filter(|query| query.address.socket == address.socket).count()
                    < MAX_PER_PROCESS
            };
            let Some((peer, address)) =
                self.waiting.iter().position(free).and_then(|next| self.waiting.remove(next))
            else {
                return;
            };
            match PendingQuery::new(&self.credential, peer, address.clone(), now) {
                Ok(query) => self.queries.push(query),
                Err(error) if is_host_silent(&error) => self.results.push((peer, QueryResult::HostSilent)),
                // Queries that end free descriptors. Without any, no other rank can be queried.
                Err(error) if is_local_error(&error) => {
                    match self.queries.is_empty() {
                        true => self.waiting.clear(),
                        false => self.waiting.push_front((peer, address)),
                    }
                    return;
                }
                Err(_) => {}
            }
        }
    }

    /// Waits for at most that time. Returns, for each query, true if its socket is ready.
    fn ready(&self, at_most: Duration) -> Vec<bool> {
        if self.queries.is_empty() {
            return Vec::new();
        }
        let events =
            |query: &PendingQuery| PollFlags::from_bits_truncate(query.dial.events().cast_unsigned());
        let mut fds: Vec<PollFd<'_>> =
            self.queries.iter().map(|c| PollFd::new(&*c.dial.socket, events(c))).collect();
        let at_most = Timespec::try_from(at_most).ok();
        // After an error, sockets that are ready are found at the next poll.
        let _ = event::poll(&mut fds, at_most.as_ref());
        fds.iter().map(|fd| !fd.revents().is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{SocketAddr, TcpListener};

    use smddp_net::fuzzing::accept_peer;

    use super::*;
    use crate::fuzzing::credential;

    fn address(listener: &TcpListener) -> TcpAddress {
        TcpAddress { socket: listener.local_addr().unwrap(), listener_id: Default::default() }
    }

    fn nine() -> QueryReply {
        QueryReply { begun: 9, doing: "waits".to_owned() }
    }

    /// Replies to that many queries.
    fn serve(listener: &TcpListener, connections: usize) {
        for _ in 0..connections {
            let mut stream = accept_peer(listener.accept().unwrap().0);
            // Send the reply in two parts.
            let text = encode_reply(9, "waits", None);
            stream.write_all(&text[..3]).unwrap();
            stream.flush().unwrap();
            stream.write_all(&text[3..]).unwrap();
        }
    }

    #[test]
    fn incomplete_reply_is_awaited_and_overlong_reply_is_an_error() {
        let text = encode_reply(7, "in step\n", None);
        let whole = QueryReply { begun: 7, doing: "in step ".to_owned() };
        assert_eq!(parse(&text).unwrap(), Some(whole));
        for end in 0..text.len() {
            assert_eq!(parse(&text[..end]).unwrap(), None);
        }
        assert!(parse(&[&text[..], &[0]].concat()).is_err());
        assert!(parse(&encode_reply(7, &"x".repeat(MAX_ACTIVITY_BYTES + 1), None)).is_err());
    }

    #[test]
    fn unresponsive_process_does_not_delay_other_replies_and_is_reported_after_the_timeout() {
        let [silent, here, closed] = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let peers = vec![(3, address(&silent)), (5, address(&here)), (7, address(&closed))];
        drop(closed);
        let responder = std::thread::spawn(move || serve(&here, 1));
        let now = Instant::now();
        let mut queries = StragglerQuery::new(credential(0), peers);
        let mut results = Vec::new();
        let only_one = |queries: &StragglerQuery| matches!(&queries.queries[..], [query] if query.dial.handshake.has_sent());
        while !only_one(&queries) {
            results.extend(queries.poll(Duration::from_millis(20), now));
        }
        responder.join().unwrap();
        assert_eq!(results, [(5, QueryResult::Replied(nine()))]);
        // The process whose host accepted the connection may still reply.
        assert_eq!(queries.poll(Duration::ZERO, now + REPLY_TIMEOUT - Duration::from_nanos(1)), []);
        assert!(!queries.is_finished());
        assert_eq!(
            queries.poll(Duration::ZERO, now + REPLY_TIMEOUT),
            [(3, QueryResult::ProcessUnresponsive)]
        );
        assert!(queries.is_finished());
    }

    #[test]
    fn missing_hosts_are_silent_and_concurrency_is_limited() {
        // Addresses reserved for documentation: no host answers, or the network reports it at once.
        let address = |i: usize| TcpAddress {
            socket: SocketAddr::from(([192, 0, 2, 1 + (i % 200) as u8], 9)),
            listener_id: Default::default(),
        };
        let mut queries =
            StragglerQuery::new(credential(0), (0..2 * MAX_QUERIES).map(|peer| (peer, address(peer))));
        let mut most = 0;
        let mut results = Vec::new();
        let mut now = Instant::now();
        while !queries.is_finished() {
            results.extend(queries.poll(Duration::ZERO, now));
            most = most.max(queries.queries.len());
            now += CONNECT_TIMEOUT;
        }
        assert!(
            most <= MAX_QUERIES && results.iter().all(|(_, result)| *result == QueryResult::HostSilent),
            "{most}, {results:?}"
        );
    }

    #[test]
    fn queries_to_one_process_are_limited_and_all_complete() {
        let here = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = address(&here);
        let many = 303;
        let responder = std::thread::spawn(move || serve(&here, many));
        let mut queries = StragglerQuery::new(credential(0), (0..many).map(|peer| (peer, address.clone())));
        let (mut replied, now) = (vec![false; many], Instant::now());
        while !queries.is_finished() {
            for (peer, result) in queries.poll(Duration::from_millis(20), now) {
                assert!(result == QueryResult::Replied(nine()) && !replied[peer], "{peer}: {result:?}");
                replied[peer] = true;
            }
            assert!(queries.queries.len() <= MAX_PER_PROCESS);
        }
        responder.join().unwrap();
        assert_eq!(replied, vec![true; many]);
    }
}
