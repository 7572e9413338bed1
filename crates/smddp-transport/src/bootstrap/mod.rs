//! How the cards of a new group's ranks reach all of them: up a tree of connections and down again.
//!
//! ```text
//! store      each rank sets its address, and reads its parent's             small values, each read a few times
//! tree       the cards of a rank and of all below it  -> parent
//!            parent  -> all cards                                           every rank talks to a few others
//! ```
//!
//! So a store with one server carries the same few bytes for every rank, however many there are; all else goes from
//! rank to rank: through unix sockets on a host, over TCP between hosts. What a rank without such a way to its parent has
//! to say is handed to whoever drives this ([`CardTree::to_carry_up`]), who may carry it some other way.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod shape;
mod talk;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::Card;
use crate::own::Uninherited;
use crate::process::{Id, listen, random};
use talk::Talk;

/// Largest card; that of an EFA rank with 32 rails takes a tenth.
const LARGEST_CARD: usize = 32 << 10;
/// Callers that have not said who they are.
const CALLERS: usize = 64;
/// A parent that cannot be called by then is not reached at all.
pub const UNREACHED: Duration = Duration::from_secs(3);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Where a rank's children find it.
#[derive(Serialize, Deserialize)]
struct TreeAddress {
    token: Id,
    /// Where its unix socket can be reached: kernel boot and network namespace.
    boot: String,
    netns: u64,
    socket: Vec<u8>,
    tcp: Option<SocketAddr>,
}

/// Why there will be no group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Ranks that did not come in time, if that is why.
    pub missing: Vec<usize>,
    pub why: String,
}

impl Failure {
    fn of(why: String) -> Self {
        Self { missing: Vec::new(), why }
    }
}

/// What goes up: nothing at first, then the cards of a rank and of all below it. What comes down: all. Or a failure.
type Words = Result<Vec<(u32, Vec<u8>)>, Failure>;

/// The cards of all ranks, in rank order.
pub type Outcome = Result<Vec<Vec<u8>>, Failure>;

/// A rank below this one.
struct Child {
    /// `None`: it has no connection here, or none any more.
    talk: Option<Talk>,
    /// Whether it has said what it has.
    heard: bool,
}

enum Above {
    /// Rank 0.
    Nobody,
    /// Its address is not known yet.
    Unknown,
    Calling {
        call: ParentCall,
        next: Instant,
    },
    Talking {
        call: ParentCall,
        talk: Talk,
    },
    /// There is no connection to it; `carried`: what goes up was taken.
    Unreached {
        carried: bool,
    },
}

struct ParentCall {
    address: TreeAddress,
    since: Instant,
}

/// One rank's part of the tree.
pub struct CardTree {
    rank: usize,
    size: usize,
    address: TreeAddress,
    listeners: Vec<Uninherited<OwnedFd>>,
    callers: Vec<Talk>,
    children: BTreeMap<usize, Child>,
    above: Above,
    /// Whether everything has gone up.
    told: bool,
    /// Why the last call to the parent came to nothing.
    trouble: String,
    /// Cards of this rank and of those below.
    cards: BTreeMap<usize, Vec<u8>>,
    outcome: Option<Outcome>,
}

impl CardTree {
    /// For the rank with that card. Nobody is called yet.
    pub fn new(card: &Card) -> io::Result<Self> {
        let (rank, size, token) = (card.rank as usize, card.size as usize, random());
        let socket = [b"smddp-cards-", token.as_slice()].concat();
        let mut listeners = vec![Uninherited::new(listen(&socket)?.into())];
        // The way that the group's own connections will take; a loopback address says nothing to other hosts.
        let ip = card.offer.tcp.as_ref().ok().map(|(address, _)| address.socket.ip());
        let tcp = ip.filter(|ip| !ip.is_loopback()).and_then(|ip| listen_at(ip).ok());
        let address = tcp.as_ref().and_then(|listener| listener.local_addr().ok());
        listeners.extend(tcp.map(|listener| Uninherited::new(listener.into())));
        let (boot, netns) = (card.boot.clone(), card.netns);
        Ok(Self {
            rank,
            size,
            address: TreeAddress { token, boot, netns, socket, tcp: address },
            listeners,
            callers: Vec::new(),
            children: BTreeMap::new(),
            above: if rank == 0 { Above::Nobody } else { Above::Unknown },
            told: false,
            trouble: String::new(),
            cards: BTreeMap::from([(rank, card.to_bytes())]),
            outcome: None,
        })
    }

    /// What this rank's children must get, for [`CardTree::call`].
    pub fn address(&self) -> Vec<u8> {
        postcard::to_allocvec(&self.address).unwrap_or_default()
    }

    pub fn parent(&self) -> Option<usize> {
        shape::parent(self.rank)
    }

    /// Whether the parent's address is still to come.
    pub fn is_lost(&self) -> bool {
        matches!(self.above, Above::Unknown)
    }

    /// `address`: that of the parent.
    pub fn call(&mut self, address: &[u8]) -> Result<(), String> {
        let address: TreeAddress = postcard::from_bytes(address)
            .map_err(|_| format!("{} bytes that are no address", address.len()))?;
        let now = Instant::now();
        self.above = Above::Calling { call: ParentCall { address, since: now }, next: now };
        Ok(())
    }

    /// Children that have not been heard.
    fn awaited(&self) -> Vec<usize> {
        let heard = |child: &usize| self.children.get(child).is_some_and(|child| child.heard);
        shape::children(self.rank, self.size).filter(|child| !heard(child)).collect()
    }

    /// Children that have not been heard and have no connection here.
    pub fn unconnected(&self) -> Vec<usize> {
        let mut awaited = self.awaited();
        awaited.retain(|child| !self.children.contains_key(child));
        awaited
    }

    /// Whom this rank waits for: children that have something to say, or to hear; else the parent.
    pub fn waits_for(&self) -> Vec<usize> {
        let deaf = |child: &Child| child.talk.as_ref().is_some_and(|talk| !talk.said());
        let mut ranks = self.awaited();
        ranks.extend(
            self.children.iter().filter(|(_, child)| child.heard && deaf(child)).map(|(rank, _)| *rank),
        );
        if ranks.is_empty() { self.parent().into_iter().collect() } else { ranks }
    }

    /// What goes up, once, and why: where there is no connection to the parent.
    pub fn to_carry_up(&mut self) -> Option<(Vec<u8>, String)> {
        let unreached = matches!(self.above, Above::Unreached { carried: false });
        if !unreached || !self.awaited().is_empty() {
            return None;
        }
        (self.above, self.told) = (Above::Unreached { carried: true }, true);
        Some((self.upward(), std::mem::take(&mut self.trouble)))
    }

    /// Whether what comes down has to be carried here.
    pub fn is_unreached(&self) -> bool {
        matches!(self.above, Above::Unreached { carried: true }) && self.outcome.is_none()
    }

    /// What the parent says, where there is no connection to it.
    pub fn carried_down(&mut self, bytes: &[u8]) {
        self.settle(bytes);
    }

    /// Why there will be no group, as far as it is known.
    pub fn failure(&self) -> Option<&Failure> {
        self.outcome.as_ref()?.as_ref().err()
    }

    /// What that child says, which has no connection here.
    pub fn carried_up(&mut self, child: usize, bytes: &[u8]) {
        self.children.insert(child, Child { talk: None, heard: true });
        self.take(child, bytes);
    }

    /// Children that have no connection here, and what they are to hear; once it is known.
    pub fn to_carry_down(&self) -> Option<(Vec<usize>, Vec<u8>)> {
        let carried = self.children.iter().filter(|(_, child)| child.talk.is_none()).map(|(rank, _)| *rank);
        self.outcome.as_ref().map(|outcome| (carried.collect(), downward(outcome)))
    }

    /// Moves on what can be moved, waiting for it that long at most; what came of it, once all children have it too.
    pub fn go_on(&mut self, at_most: Duration) -> Option<&Outcome> {
        self.wait(at_most);
        self.admit();
        self.hear_children();
        self.call_parent();
        if self.rank == 0 && self.outcome.is_none() && self.cards.len() == self.size {
            let cards = std::mem::take(&mut self.cards);
            self.finish(Ok(cards.into_values().collect()));
        }
        self.send();
        let busy = self.talks().any(|talk| !talk.said());
        // The parent waits for this rank, and hears of its end too, if it can be reached.
        let unheard = match (&self.outcome, &self.above) {
            (Some(Err(_)), Above::Calling { .. }) => true,
            (Some(Err(_)), Above::Talking { talk, .. }) => !talk.said(),
            _ => false,
        };
        self.outcome.as_ref().filter(|_| !busy && !unheard)
    }

    /// Tells those to whom there is a connection why there will be no group. The first cause goes round, and no other.
    pub fn fail(&mut self, failure: Failure) {
        if self.outcome.is_some() {
            return;
        }
        if let Above::Talking { talk, call } = &mut self.above {
            talk.say(&call.address.token, self.rank, &words(&Err(failure.clone())));
            self.told = true;
        }
        self.finish(Err(failure));
        self.send();
    }

    fn talks(&self) -> impl Iterator<Item = &Talk> {
        self.children.values().filter_map(|child| child.talk.as_ref())
    }

    /// Bytes of the longest frame.
    fn most(&self) -> usize {
        self.size * LARGEST_CARD
    }

    fn wait(&self, at_most: Duration) {
        let (parent, at_most) = match &self.above {
            Above::Talking { talk, .. } => (Some(talk), at_most),
            Above::Calling { next, .. } => {
                (None, at_most.min(next.saturating_duration_since(Instant::now())))
            }
            _ => (None, at_most),
        };
        let talks = self.talks().chain(parent).chain(&self.callers);
        let events = |talk: &Talk| if talk.said() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        let talks = talks.map(|talk| PollFd::from_borrowed_fd(talk.as_fd(), events(talk)));
        let listeners = self.listeners.iter().map(|one| PollFd::from_borrowed_fd(one.as_fd(), PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = talks.chain(listeners).collect();
        // Interrupted or refused: whatever is ready is so the next time, too.
        let _ = poll(&mut fds, Timespec::try_from(at_most).ok().as_ref());
    }

    /// Callers that say whose child they are, and what it has.
    fn admit(&mut self) {
        for listener in &self.listeners {
            // What this process lacks (descriptors) may come back: whoever waits goes on waiting.
            while let Ok(talk) = Talk::accept(listener.as_fd()) {
                if self.callers.len() == CALLERS {
                    self.callers.remove(0);
                }
                self.callers.push(talk);
            }
        }
        for mut talk in std::mem::take(&mut self.callers) {
            match talk.read(&self.address.token, self.most()) {
                Ok(None) => self.callers.push(talk),
                // In place of an earlier connection of its own that came to nothing.
                Ok(Some((child, _))) if self.awaited().contains(&child) => {
                    self.children.insert(child, Child { talk: Some(talk), heard: false });
                }
                // A stranger, or one that was heard before.
                Ok(Some(_)) | Err(_) => {}
            }
        }
    }

    /// Once it has said what it has, a child is silent, unless it fails.
    fn hear_children(&mut self) {
        let (most, mut said) = (self.most(), Vec::new());
        if self.outcome.is_some() {
            return;
        }
        for (rank, child) in &mut self.children {
            let Some(talk) = &mut child.talk else { continue };
            match talk.read(&self.address.token, most) {
                Ok(None) => {}
                Ok(Some((_, bytes))) => {
                    child.heard = true;
                    said.push((*rank, Ok(bytes)));
                }
                Err(error) => said.push((*rank, Err(hung_up(*rank, &error)))),
            }
        }
        for (rank, words) in said {
            match words {
                Ok(bytes) => self.take(rank, &bytes),
                Err(failure) => self.fail(failure),
            }
        }
    }

    /// A call that did not come through is made again for a while.
    fn call_parent(&mut self) {
        let now = Instant::now();
        if let Above::Talking { talk, call } = &self.above
            && !talk.began()
            && now.duration_since(call.since) >= UNREACHED
        {
            self.trouble = "it does not answer".to_owned();
            self.above = Above::Unreached { carried: false };
        }
        if let Above::Calling { call: ParentCall { address, .. }, next } = &mut self.above
            && now >= *next
        {
            let near = (&address.boot, address.netns) == (&self.address.boot, self.address.netns);
            let talk = match (near, address.tcp) {
                (true, _) => Talk::unix(&address.socket),
                (false, Some(tcp)) => Talk::tcp(tcp),
                (false, None) => Err(io::Error::new(
                    ErrorKind::AddrNotAvailable,
                    "it is on another host and has no TCP address",
                )),
            };
            let above = std::mem::replace(&mut self.above, Above::Unreached { carried: false });
            let Above::Calling { call, .. } = above else { return };
            match talk {
                Ok(mut talk) => {
                    // Who calls.
                    talk.say(&call.address.token, self.rank, &[]);
                    self.above = Above::Talking { call, talk };
                }
                Err(error) => {
                    self.trouble = error.to_string();
                    if now.duration_since(call.since) < UNREACHED {
                        self.above = Above::Calling { call, next: now + PAUSE };
                    }
                }
            }
        }
        self.talk_to_parent();
    }

    fn talk_to_parent(&mut self) {
        let failed = matches!(self.outcome, Some(Err(_)));
        let (most, ready) = (self.most(), !self.told && (failed || self.awaited().is_empty()));
        let upward = if ready { self.upward() } else { Vec::new() };
        let Above::Talking { talk, call } = &mut self.above else { return };
        if ready {
            talk.say(&call.address.token, self.rank, &upward);
            self.told = true;
        }
        if self.outcome.is_some() {
            return;
        }
        let outcome = talk.write().and_then(|()| talk.read(&call.address.token, most));
        let began = talk.began();
        match outcome {
            Ok(None) => {}
            Ok(Some((_, bytes))) => self.settle(&bytes),
            Err(error) if began => self.fail(hung_up(self.parent().unwrap_or(0), &error)),
            Err(error) => {
                let above = std::mem::replace(&mut self.above, Above::Nobody);
                let Above::Talking { call, .. } = above else { return };
                (self.told, self.trouble) = (false, error.to_string());
                self.above = Above::Calling { call, next: Instant::now() + PAUSE };
            }
        }
    }

    fn send(&mut self) {
        // Who does not take it is not there any more, and needs nothing.
        for child in self.children.values_mut() {
            if child.talk.as_mut().is_some_and(|talk| talk.write().is_err()) {
                child.talk = None;
            }
        }
        if let Above::Talking { talk, .. } = &mut self.above {
            let _ = talk.write();
        }
    }

    fn upward(&self) -> Vec<u8> {
        if let Some(Err(failure)) = &self.outcome {
            return words(&Err(failure.clone()));
        }
        let cards = self.cards.iter().map(|(rank, card)| (*rank as u32, card.clone()));
        words(&Ok(cards.collect()))
    }

    /// What a child has.
    fn take(&mut self, child: usize, bytes: &[u8]) {
        match parse(child, bytes) {
            Ok(cards) => {
                for (rank, card) in cards {
                    if (rank as usize) < self.size {
                        self.cards.entry(rank as usize).or_insert(card);
                    }
                }
            }
            Err(failure) => self.fail(failure),
        }
    }

    /// What the parent says.
    fn settle(&mut self, bytes: &[u8]) {
        let parent = self.parent().unwrap_or(0);
        let outcome = parse(parent, bytes).and_then(|cards| {
            let cards: BTreeMap<u32, Vec<u8>> = cards.into_iter().collect();
            match cards.len() == self.size {
                true => Ok(cards.into_values().collect()),
                false => Err(Failure::of(format!(
                    "rank {parent} has {} cards for {} ranks",
                    cards.len(),
                    self.size
                ))),
            }
        });
        self.finish(outcome);
    }

    fn finish(&mut self, outcome: Outcome) {
        let bytes = downward(&outcome);
        for talk in self.children.values_mut().filter_map(|child| child.talk.as_mut()) {
            talk.say(&self.address.token, self.rank, &bytes);
        }
        self.outcome = Some(outcome);
    }
}

fn listen_at(ip: IpAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind((ip, 0))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn words(words: &Words) -> Vec<u8> {
    postcard::to_allocvec(words).unwrap_or_default()
}

/// What that rank says.
fn parse(from: usize, bytes: &[u8]) -> Words {
    let nonsense = || Failure::of(format!("rank {from} sent {} bytes that are no cards", bytes.len()));
    postcard::from_bytes(bytes).unwrap_or_else(|_| Err(nonsense()))
}

fn hung_up(rank: usize, error: &io::Error) -> Failure {
    Failure::of(format!("rank {rank} is gone: it hung up before all cards were there ({error})"))
}

fn downward(outcome: &Outcome) -> Vec<u8> {
    let numbered = |cards: &Vec<Vec<u8>>| {
        cards.iter().enumerate().map(|(rank, card)| (rank as u32, card.clone())).collect()
    };
    words(&outcome.as_ref().map(numbered).map_err(Clone::clone))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::fuzzing::feed::means;
    use crate::joint::Prepared;

    fn trees(size: usize) -> Vec<CardTree> {
        let rank = |rank| Prepared::new(rank, size, Vec::new(), &means(rank)).unwrap();
        (0..size).map(|one| CardTree::new(rank(one).card()).unwrap()).collect()
    }

    /// All ranks take turns until each has an outcome.
    fn outcomes(trees: &mut [CardTree]) -> Vec<Outcome> {
        let begun = Instant::now();
        let mut found = vec![None; trees.len()];
        while found.iter().any(Option::is_none) {
            assert!(begun.elapsed() < Duration::from_secs(60), "it goes on for ever");
            for (tree, found) in trees.iter_mut().zip(&mut found) {
                *found = tree.go_on(Duration::from_micros(100)).cloned().or(found.take());
            }
        }
        found.into_iter().flatten().collect()
    }

    fn call_parents(trees: &mut [CardTree]) {
        for rank in 1..trees.len() {
            let parent = trees[rank].parent().unwrap();
            let address = trees[parent].address();
            trees[rank].call(&address).unwrap();
        }
    }

    fn stranger(tree: &CardTree) -> UnixStream {
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&tree.address.socket).unwrap();
        UnixStream::connect_addr(&address).unwrap()
    }

    #[test]
    fn strangers_keep_nobody_from_meeting() {
        let mut trees = trees(12);
        let mut callers = Vec::new();
        for length in 0..80 {
            let mut caller = stranger(&trees[0]);
            // No token, a token cut off, and frames of any length.
            let mut bytes = trees[0].address.token.to_vec();
            bytes.truncate(length);
            bytes.resize(length, 0xff);
            caller.write_all(&bytes).unwrap();
            callers.push(caller);
        }
        call_parents(&mut trees);
        for outcome in outcomes(&mut trees) {
            assert_eq!(outcome.unwrap().len(), 12);
        }
    }

    #[test]
    fn nonsense_from_a_child_is_a_failure_of_all_and_no_more() {
        for words in [&[0xff; 40][..], &[0], &[0, 3, 1, 2], &[1, 0, 200]] {
            let mut trees = trees(10);
            call_parents(&mut trees);
            // In the name of rank 9, whose parent is rank 8.
            let mut child = Talk::unix(&trees[8].address.socket).unwrap();
            let token = trees[8].address.token;
            child.say(&token, 9, &[]);
            child.say(&token, 9, words);
            trees.truncate(9);
            child.write().unwrap();
            for outcome in outcomes(&mut trees) {
                let why = format!("rank 9 sent {} bytes that are no cards", words.len());
                assert_eq!(outcome.unwrap_err(), Failure::of(why), "{words:?}");
            }
        }
    }

    #[test]
    fn a_child_that_dies_ends_the_meeting_at_once() {
        let mut trees = trees(10);
        call_parents(&mut trees);
        trees[9].go_on(Duration::ZERO);
        trees[8].go_on(Duration::ZERO);
        trees.truncate(9);
        for outcome in outcomes(&mut trees) {
            assert!(outcome.unwrap_err().why.contains("rank 9 is gone"));
        }
    }
}
