//! Asking ranks that do not drive how far they are: their processes' service threads answer.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::address::{Credential, Purpose, TcpAddress};
use super::dial::{Dial, lacking, silent};
use super::seal::{Decryptor, Encryptor};
use crate::process::status::MAX_ACTIVITY_BYTES;
use crate::token::Keys;

/// A host that has not taken up a connection by then is silent: a first packet that was lost is sent again after a second.
const PATIENCE: Duration = Duration::from_millis(1500);
/// And a process that has not answered by then is not known.
const ANSWER: Duration = Duration::from_secs(5);
/// So many are asked at once: each takes a descriptor here, and one there.
const AT_ONCE: usize = 64;
/// Of one process: others ask it, too.
const OF_ONE: usize = 2;

/// One rank that is asked.
struct Question {
    peer: usize,
    address: TcpAddress,
    dial: Dial,
    since: Instant,
    answer: Vec<u8>,
    /// Where it is sealed.
    opener: Option<Decryptor>,
}

/// Of an answer: operations begun, and the length of what it does, in words.
const FIRST: usize = 8 + 2;

/// What a rank says that is asked: the operations that it has begun, and what it does.
pub(super) fn answer(begun: u64, doing: &str, keys: Option<Keys>) -> Vec<u8> {
    let mut answer = begun.to_le_bytes().to_vec();
    answer.extend((doing.len() as u16).to_le_bytes());
    answer.extend(doing.bytes());
    let Some(keys) = keys else { return answer };
    let mut sealer = Encryptor::new(keys.listener);
    sealer.take([&answer, &[]]);
    sealer.into_bytes()
}

/// An answer, when all of it is here.
fn parse(answer: &[u8]) -> io::Result<Option<Answer>> {
    let Some((begun, rest)) = answer.split_first_chunk() else { return Ok(None) };
    let Some((length, words)) = rest.split_first_chunk() else { return Ok(None) };
    let length = usize::from(u16::from_le_bytes(*length));
    if length > MAX_ACTIVITY_BYTES || words.len() > length {
        return Err(ErrorKind::InvalidData.into());
    }
    let text = || String::from_utf8_lossy(words).replace(char::is_control, " ");
    Ok((words.len() == length).then(|| Answer { begun: u64::from_le_bytes(*begun), doing: text() }))
}

/// What a rank said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) begun: u64,
    /// In words; empty where it says nothing.
    pub(crate) doing: String,
}

impl Question {
    /// Without waiting for the connection.
    fn new(credential: &Credential, peer: usize, address: TcpAddress, now: Instant) -> io::Result<Self> {
        let dial = Dial::new(credential, (peer, &address), Purpose::Ask, ANSWER)?;
        Ok(Self { peer, address, dial, since: now, answer: Vec::new(), opener: None })
    }

    /// What there is to do now that the socket is ready; the answer when all of it is here.
    fn go_on(&mut self) -> io::Result<Option<Answer>> {
        if !self.dial.connected() {
            if !self.dial.say()? {
                return Ok(None);
            }
            self.opener = self.dial.keys().map(|keys| Decryptor::new(keys.listener));
        }
        let mut part = [0; FIRST + MAX_ACTIVITY_BYTES];
        let read = match &mut self.opener {
            Some(opener) => opener.over(&self.dial.socket).read(&mut part),
            None => (&*self.dial.socket).read(&mut part),
        };
        match read {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => self.answer.extend(&part[..bytes]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        parse(&self.answer)
    }
}

/// What came of a question to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Said(Answer),
    /// Its host is there, and the process does not say anything: it is stopped, or has no time.
    Mute,
    /// Nothing came of its host.
    Silent,
}

/// A round of questions, some of them under way. Who refuses or hangs up gives no answer.
pub(crate) struct Survey {
    credential: Credential,
    waiting: VecDeque<(usize, TcpAddress)>,
    calls: Vec<Question>,
    found: Vec<(usize, Heard)>,
}

impl Survey {
    /// `peers` are asked in that order.
    pub(super) fn new(credential: Credential, peers: impl IntoIterator<Item = (usize, TcpAddress)>) -> Self {
        let waiting = peers.into_iter().collect();
        Self { credential, waiting, calls: Vec::new(), found: Vec::new() }
    }

    /// Asks at `now`, and hears for at most that long; the answers that came.
    pub(crate) fn go_on(&mut self, at_most: Duration, now: Instant) -> Vec<(usize, Heard)> {
        self.call(now);
        let ready = self.ready(at_most);
        let mut next = ready.into_iter();
        let Self { calls, found, .. } = self;
        calls.retain_mut(|call| {
            let outcome = if next.next() == Some(true) { call.go_on() } else { Ok(None) };
            let waited = now.duration_since(call.since);
            match outcome {
                // That says nothing of what it has begun.
                Ok(None) if call.dial.taken_up() && waited >= ANSWER => found.push((call.peer, Heard::Mute)),
                Ok(None) if call.dial.taken_up() || waited < PATIENCE => return true,
                Ok(None) => found.push((call.peer, Heard::Silent)),
                Ok(Some(answer)) => found.push((call.peer, Heard::Said(answer))),
                Err(error) if silent(&error) => found.push((call.peer, Heard::Silent)),
                Err(_) => {}
            }
            false
        });
        std::mem::take(&mut self.found)
    }

    /// Whether nobody is left to ask or to hear.
    pub(crate) fn over(&self) -> bool {
        self.waiting.is_empty() && self.calls.is_empty() && self.found.is_empty()
    }

    fn call(&mut self, now: Instant) {
        while self.calls.len() < AT_ONCE {
            let free = |(_, address): &(usize, TcpAddress)| {
                self.calls.iter().filter(|call| call.address.socket == address.socket).count() < OF_ONE
            };
            let Some((peer, address)) =
                self.waiting.iter().position(free).and_then(|next| self.waiting.remove(next))
            else {
                return;
            };
            match Question::new(&self.credential, peer, address.clone(), now) {
                Ok(call) => self.calls.push(call),
                Err(error) if silent(&error) => self.found.push((peer, Heard::Silent)),
                // Those that hang up make room. Without any, nobody else can be asked.
                Err(error) if lacking(&error) => {
                    match self.calls.is_empty() {
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
        if self.calls.is_empty() {
            return Vec::new();
        }
        let events = |call: &Question| PollFlags::from_bits_truncate(call.dial.events().cast_unsigned());
        let mut fds: Vec<PollFd<'_>> =
            self.calls.iter().map(|c| PollFd::new(&*c.dial.socket, events(c))).collect();
        let at_most = Timespec::try_from(at_most).ok();
        // Interrupted or refused: whatever is ready is so the next time, too.
        let _ = poll(&mut fds, at_most.as_ref());
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

    fn nine() -> Answer {
        Answer { begun: 9, doing: "waits".to_owned() }
    }

    /// Answers so many callers.
    fn serve(listener: &TcpListener, callers: usize) {
        for _ in 0..callers {
            let mut caller = accept_peer(listener.accept().unwrap().0);
            // In two parts.
            let words = answer(9, "waits", None);
            caller.write_all(&words[..3]).unwrap();
            caller.flush().unwrap();
            caller.write_all(&words[3..]).unwrap();
        }
    }

    #[test]
    fn an_answer_is_whole_or_waited_for_and_a_longer_one_is_none() {
        let words = answer(7, "in step\n", None);
        let whole = Answer { begun: 7, doing: "in step ".to_owned() };
        assert_eq!(parse(&words).unwrap(), Some(whole));
        for end in 0..words.len() {
            assert_eq!(parse(&words[..end]).unwrap(), None);
        }
        assert!(parse(&[&words[..], &[0]].concat()).is_err());
        assert!(parse(&answer(7, &"x".repeat(MAX_ACTIVITY_BYTES + 1), None)).is_err());
    }

    #[test]
    fn who_does_not_answer_keeps_nobody_from_being_heard_and_is_mute_once_his_time_is_up() {
        let [silent, here, gone] = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let peers = vec![(3, address(&silent)), (5, address(&here)), (7, address(&gone))];
        drop(gone);
        let answering = std::thread::spawn(move || serve(&here, 1));
        let now = Instant::now();
        let mut straggler_query = Survey::new(credential(0), peers);
        let mut found = Vec::new();
        let only_one =
            |straggler_query: &Survey| matches!(&straggler_query.calls[..], [call] if call.dial.taken_up());
        while !only_one(&straggler_query) {
            found.extend(straggler_query.go_on(Duration::from_millis(20), now));
        }
        answering.join().unwrap();
        assert_eq!(found, [(5, Heard::Said(nine()))]);
        // The one that has taken up the connection may still answer.
        assert_eq!(straggler_query.go_on(Duration::ZERO, now + ANSWER - Duration::from_nanos(1)), []);
        assert!(!straggler_query.over());
        assert_eq!(straggler_query.go_on(Duration::ZERO, now + ANSWER), [(3, Heard::Mute)]);
        assert!(straggler_query.over());
    }

    #[test]
    fn a_host_that_is_not_there_is_silent_and_a_full_hand_waits() {
        // Addresses for documentation: nobody answers, or the network says so at once.
        let address = |i: usize| TcpAddress {
            socket: SocketAddr::from(([192, 0, 2, 1 + (i % 200) as u8], 9)),
            group_listener: Default::default(),
        };
        let mut straggler_query =
            Survey::new(credential(0), (0..2 * AT_ONCE).map(|peer| (peer, address(peer))));
        let mut most = 0;
        let mut found = Vec::new();
        let mut now = Instant::now();
        while !straggler_query.over() {
            found.extend(straggler_query.go_on(Duration::ZERO, now));
            most = most.max(straggler_query.calls.len());
            now += PATIENCE;
        }
        assert!(
            most <= AT_ONCE && found.iter().all(|(_, heard)| *heard == Heard::Silent),
            "{most}, {found:?}"
        );
    }

    #[test]
    fn any_number_is_asked_and_one_process_a_few_times_at_once() {
        let here = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = address(&here);
        let many = 303;
        let answering = std::thread::spawn(move || serve(&here, many));
        let mut straggler_query = Survey::new(credential(0), (0..many).map(|peer| (peer, address.clone())));
        let (mut heard, now) = (vec![false; many], Instant::now());
        while !straggler_query.over() {
            for (peer, said) in straggler_query.go_on(Duration::from_millis(20), now) {
                assert!(said == Heard::Said(nine()) && !heard[peer], "{peer}: {said:?}");
                heard[peer] = true;
            }
            assert!(straggler_query.calls.len() <= OF_ONE);
        }
        answering.join().unwrap();
        assert_eq!(heard, vec![true; many]);
    }
}
