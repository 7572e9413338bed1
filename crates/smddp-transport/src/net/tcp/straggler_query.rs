//! Asking ranks that do not drive how far they are: their processes' service threads answer.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::time::{Duration, Instant};

use rustix::event::{self, PollFd, PollFlags, Timespec};

use super::address::{Credential, Purpose, TcpAddress};
use super::dial::{Dial, is_host_silent, is_local_error};
use super::seal::{Decryptor, Encryptor};
use crate::process::status::MAX_ACTIVITY_BYTES;
use crate::token::Keys;

/// A host that has not taken up a connection by then is silent: a first packet that was lost is sent again after a second.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
/// And a process that has not answered by then is not known.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// So many are asked at once: each takes a descriptor here, and one there.
const MAX_QUERIES: usize = 64;
/// Of one process: others ask it, too.
const MAX_PER_PROCESS: usize = 2;

/// One rank that is asked.
struct PendingQuery {
    peer: usize,
    address: TcpAddress,
    dial: Dial,
    started: Instant,
    reply: Vec<u8>,
    /// Where it is sealed.
    decryptor: Option<Decryptor>,
}

/// Of an answer: operations begun, and the length of what it does, in words.
const REPLY_HEADER: usize = 8 + 2;

/// What a rank says that is asked: the operations that it has begun, and what it does.
pub(super) fn encode_reply(begun: u64, doing: &str, keys: Option<Keys>) -> Vec<u8> {
    let mut reply = begun.to_le_bytes().to_vec();
    reply.extend((doing.len() as u16).to_le_bytes());
    reply.extend(doing.bytes());
    let Some(keys) = keys else { return reply };
    let mut encryptor = Encryptor::new(keys.responder);
    encryptor.encrypt([&reply, &[]]);
    encryptor.into_bytes()
}

/// An answer, when all of it is here.
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

/// What a rank said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueryReply {
    pub(crate) begun: u64,
    /// In words; empty where it says nothing.
    pub(crate) doing: String,
}

impl PendingQuery {
    /// Without waiting for the connection.
    fn new(credential: &Credential, peer: usize, address: TcpAddress, now: Instant) -> io::Result<Self> {
        let dial = Dial::new(credential, (peer, &address), Purpose::Query, REPLY_TIMEOUT)?;
        Ok(Self { peer, address, dial, started: now, reply: Vec::new(), decryptor: None })
    }

    /// What there is to do now that the socket is ready; the answer when all of it is here.
    fn poll(&mut self) -> io::Result<Option<QueryReply>> {
        if !self.dial.connected() {
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

/// What came of a question to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QueryResult {
    Replied(QueryReply),
    /// Its host is there, and the process does not say anything: it is stopped, or has no time.
    ProcessUnresponsive,
    /// Nothing came of its host.
    HostSilent,
}

/// A round of questions, some of them under way. Who refuses or hangs up gives no answer.
pub(crate) struct StragglerQuery {
    credential: Credential,
    waiting: VecDeque<(usize, TcpAddress)>,
    queries: Vec<PendingQuery>,
    results: Vec<(usize, QueryResult)>,
}

impl StragglerQuery {
    /// `peers` are asked in that order.
    pub(super) fn new(credential: Credential, peers: impl IntoIterator<Item = (usize, TcpAddress)>) -> Self {
        let waiting = peers.into_iter().collect();
        Self { credential, waiting, queries: Vec::new(), results: Vec::new() }
    }

    /// Asks at `now`, and hears for at most that long; the answers that came.
    pub(crate) fn poll(&mut self, at_most: Duration, now: Instant) -> Vec<(usize, QueryResult)> {
        self.query(now);
        let ready = self.ready(at_most);
        let mut next = ready.into_iter();
        let Self { queries, results, .. } = self;
        queries.retain_mut(|query| {
            let outcome = if next.next() == Some(true) { query.poll() } else { Ok(None) };
            let waited = now.duration_since(query.started);
            match outcome {
                // That says nothing of what it has begun.
                Ok(None) if query.dial.host_accepted() && waited >= REPLY_TIMEOUT => {
                    results.push((query.peer, QueryResult::ProcessUnresponsive))
                }
                Ok(None) if query.dial.host_accepted() || waited < CONNECT_TIMEOUT => return true,
                Ok(None) => results.push((query.peer, QueryResult::HostSilent)),
                Ok(Some(reply)) => results.push((query.peer, QueryResult::Replied(reply))),
                Err(error) if is_host_silent(&error) => results.push((query.peer, QueryResult::HostSilent)),
                Err(_) => {}
            }
            false
        });
        std::mem::take(&mut self.results)
    }

    /// Whether nobody is left to ask or to hear.
    pub(crate) fn is_finished(&self) -> bool {
        self.waiting.is_empty() && self.queries.is_empty() && self.results.is_empty()
    }

    fn query(&mut self, now: Instant) {
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
                // Those that hang up make room. Without any, nobody else can be asked.
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

    /// Which calls can go on, after at most this time.
    fn ready(&self, at_most: Duration) -> Vec<bool> {
        if self.queries.is_empty() {
            return Vec::new();
        }
        let events =
            |query: &PendingQuery| PollFlags::from_bits_truncate(query.dial.events().cast_unsigned());
        let mut fds: Vec<PollFd<'_>> =
            self.queries.iter().map(|c| PollFd::new(&*c.dial.socket, events(c))).collect();
        let at_most = Timespec::try_from(at_most).ok();
        // Interrupted or refused: whatever is ready is so the next time, too.
        let _ = event::poll(&mut fds, at_most.as_ref());
        fds.iter().map(|fd| !fd.revents().is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzzing::feed::{accept_peer, credential};
    use std::io::Write;
    use std::net::{SocketAddr, TcpListener};

    fn address(listener: &TcpListener) -> TcpAddress {
        TcpAddress { socket: listener.local_addr().unwrap(), group_listener: Default::default() }
    }

    fn nine() -> QueryReply {
        QueryReply { begun: 9, doing: "waits".to_owned() }
    }

    /// Answers so many callers.
    fn serve(listener: &TcpListener, callers: usize) {
        for _ in 0..callers {
            let mut caller = accept_peer(listener.accept().unwrap().0);
            // In two parts.
            let text = encode_reply(9, "waits", None);
            caller.write_all(&text[..3]).unwrap();
            caller.flush().unwrap();
            caller.write_all(&text[3..]).unwrap();
        }
    }

    #[test]
    fn an_answer_is_whole_or_waited_for_and_a_longer_one_is_none() {
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
    fn who_does_not_answer_keeps_nobody_from_being_heard_and_is_mute_once_his_time_is_up() {
        let [is_host_silent, here, gone] = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let peers = vec![(3, address(&is_host_silent)), (5, address(&here)), (7, address(&gone))];
        drop(gone);
        let answering = std::thread::spawn(move || serve(&here, 1));
        let now = Instant::now();
        let mut straggler_query = StragglerQuery::new(credential(0), peers);
        let mut results = Vec::new();
        let only_one = |straggler_query: &StragglerQuery| matches!(&straggler_query.queries[..], [query] if query.dial.host_accepted());
        while !only_one(&straggler_query) {
            results.extend(straggler_query.poll(Duration::from_millis(20), now));
        }
        answering.join().unwrap();
        assert_eq!(results, [(5, QueryResult::Replied(nine()))]);
        // The one that has taken up the connection may still answer.
        assert_eq!(straggler_query.poll(Duration::ZERO, now + REPLY_TIMEOUT - Duration::from_nanos(1)), []);
        assert!(!straggler_query.is_finished());
        assert_eq!(
            straggler_query.poll(Duration::ZERO, now + REPLY_TIMEOUT),
            [(3, QueryResult::ProcessUnresponsive)]
        );
        assert!(straggler_query.is_finished());
    }

    #[test]
    fn a_host_that_is_not_there_is_silent_and_a_full_hand_waits() {
        // Addresses for documentation: nobody answers, or the network says so at once.
        let address = |i: usize| TcpAddress {
            socket: SocketAddr::from(([192, 0, 2, 1 + (i % 200) as u8], 9)),
            group_listener: Default::default(),
        };
        let mut straggler_query =
            StragglerQuery::new(credential(0), (0..2 * MAX_QUERIES).map(|peer| (peer, address(peer))));
        let mut most = 0;
        let mut results = Vec::new();
        let mut now = Instant::now();
        while !straggler_query.is_finished() {
            results.extend(straggler_query.poll(Duration::ZERO, now));
            most = most.max(straggler_query.queries.len());
            now += CONNECT_TIMEOUT;
        }
        assert!(
            most <= MAX_QUERIES && results.iter().all(|(_, result)| *result == QueryResult::HostSilent),
            "{most}, {results:?}"
        );
    }

    #[test]
    fn any_number_is_asked_and_one_process_a_few_times_at_once() {
        let here = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = address(&here);
        let many = 303;
        let answering = std::thread::spawn(move || serve(&here, many));
        let mut straggler_query =
            StragglerQuery::new(credential(0), (0..many).map(|peer| (peer, address.clone())));
        let (mut result, now) = (vec![false; many], Instant::now());
        while !straggler_query.is_finished() {
            for (peer, said) in straggler_query.poll(Duration::from_millis(20), now) {
                assert!(said == QueryResult::Replied(nine()) && !result[peer], "{peer}: {said:?}");
                result[peer] = true;
            }
            assert!(straggler_query.queries.len() <= MAX_PER_PROCESS);
        }
        answering.join().unwrap();
        assert_eq!(result, vec![true; many]);
    }
}
