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
//! to say is handed to whoever drives this ([`RankTree::take_relay`]), who may carry it some other way.
//!
//! Rank 0's address also has what makes the group's token, which nothing else carries. Both ends of each connection show that
//! they have it before a card moves, from the root down: so what the store still has of an earlier attempt unites nobody.
//!
//! Nobody without the token changes what ranks learn of each other: address records carry a code under the job secret
//! ([`address::Records`]), frames one under a key of their connection ([`link`]), and cards that go through the store one under
//! the token.

mod address;
mod claim;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod link;
mod liveness_probe;
mod tree_shape;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::RankInfo;
use crate::close_on_fork::CloseOnFork;
use crate::process::{ProcessUid, listen, random};
use crate::token::{PROTOCOL, TAG, Token, is_unauthenticated};
use crate::warning::warn;
pub use address::rank_label;
use address::{Records, TreeAddress, stated};
pub use claim::{Claim, Holder};
use link::TreeLink;
use liveness_probe::LivenessProbe;

/// Largest card; that of an EFA rank with 32 rails takes a tenth.
const MAX_RANK_INFO: usize = 32 << 10;
/// The same without what a frame adds to each, for the rank that makes it.
pub const MAX_RECORD: usize = MAX_RANK_INFO - 64;
/// Callers that have not shown who they are. The others wait in the listeners' queues.
const MAX_INCOMING: usize = 256;
/// One that has kept others waiting for so long makes room.
const GREETING_TIMEOUT: Duration = Duration::from_secs(1);
/// A parent that cannot be called by then is not reached at all.
pub const PARENT_TIMEOUT: Duration = Duration::from_secs(3);
/// An address that leads nowhere for so long may be of an earlier attempt: there may be another one by now.
const SUSPECT_AFTER: Duration = Duration::from_millis(500);
/// Between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Why there will be no group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartupFailure {
    /// Ranks that did not come in time, if that is why.
    pub missing: Vec<usize>,
    /// The rank that came and is gone, if that is why; then `reason` says how that showed.
    pub lost: Option<usize>,
    pub reason: String,
}

impl StartupFailure {
    pub fn of(reason: String) -> Self {
        Self { missing: Vec::new(), lost: None, reason }
    }

    pub fn lost(rank: usize, reason: String) -> Self {
        Self { missing: Vec::new(), lost: Some(rank), reason }
    }

    /// For the others, by some other way than this.
    pub fn encode(&self, rank: usize) -> Vec<u8> {
        postcard::to_allocvec(&(rank, self)).unwrap_or_default()
    }

    /// Who said it, if it is said in these words, and what.
    pub fn decode(bytes: &[u8]) -> (Option<usize>, Self) {
        match postcard::from_bytes(bytes) {
            Ok((rank, failure)) => (Some(rank), failure),
            Err(_) => (None, Self::of(String::from_utf8_lossy(bytes).into_owned())),
        }
    }
}

/// What goes up: nothing at first, then the cards of a rank and of all below it. What comes down: all. Or a failure.
type Words = Result<Vec<(u32, Vec<u8>)>, StartupFailure>;

/// The cards of all ranks, in rank order.
pub type TreeResult = Result<Vec<Vec<u8>>, StartupFailure>;

/// A rank below this one.
struct ChildLink {
    /// `None`: it has no connection here, or none any more.
    link: Option<TreeLink>,
    /// Whether it has said what it has.
    heard: bool,
    /// Authentication code of what the store carried up for it, which the answer refers to.
    carried: Option<[u8; TAG]>,
}

enum ParentLink {
    /// Rank 0.
    Absent,
    /// Its address is not known yet.
    Unknown,
    Calling {
        call: ParentCall,
        next: Instant,
    },
    Talking {
        call: ParentCall,
        link: TreeLink,
    },
    /// It cannot be reached; `carried`: the authentication code of what went up through the store.
    Unreached {
        carried: Option<[u8; TAG]>,
    },
}

struct ParentCall {
    address: TreeAddress,
    /// As it was read, and when.
    bytes: Vec<u8>,
    read: Instant,
    since: Instant,
    /// A connection to it stood: it is there, or was.
    stood: bool,
}

/// One rank's part of the tree.
pub struct RankTree {
    rank: usize,
    size: usize,
    address: TreeAddress,
    records: Records,
    token: Option<Arc<Token>>,
    /// A connection was rejected, and that was logged.
    met: bool,
    listeners: Vec<CloseOnFork<OwnedFd>>,
    callers: Vec<TreeLink>,
    /// Connections of second processes of connected ranks. They are kept open and not read.
    duplicates: Vec<TreeLink>,
    children: BTreeMap<usize, ChildLink>,
    above: ParentLink,
    /// Ranks that have no connection here and may be gone.
    knocks: BTreeMap<usize, LivenessProbe>,
    /// Whether everything has gone up.
    told: bool,
    /// Why the last call to the parent came to nothing.
    trouble: String,
    /// Cards of this rank and of those below.
    rank_infos: BTreeMap<usize, Vec<u8>>,
    outcome: Option<TreeResult>,
}

impl RankTree {
    /// For the rank with that card. Nobody is called yet. `token`: rank 0's; `secret`: the job's own, if there is one.
    pub(crate) fn new(
        rank_info: &RankInfo,
        token: Option<Arc<Token>>,
        secret: Option<&[u8]>,
    ) -> io::Result<Self> {
        let (rank, size, id) = (rank_info.rank as usize, rank_info.size as usize, random());
        let socket = [b"smddp-cards-", ProcessUid::as_slice(&id)].concat();
        let mut listeners = vec![CloseOnFork::new(listen(&socket)?.into())];
        // The path that the group's own connections will take.
        let ip = rank_info.offer.tcp.as_ref().ok().map(|(address, _)| address.socket.ip());
        let tcp = ip.and_then(|ip| listen_at(ip).ok());
        let address = tcp.as_ref().and_then(|listener| listener.local_addr().ok());
        listeners.extend(tcp.map(|listener| CloseOnFork::new(listener.into())));
        let (boot, netns, version) = (rank_info.boot.clone(), rank_info.netns, rank_info.version.clone());
        Ok(Self {
            rank,
            size,
            address: TreeAddress {
                protocol: PROTOCOL,
                version,
                host: rank_info.host.clone(),
                pid: rank_info.pid,
                process_id: address::process_id(),
                size: rank_info.size,
                made: address::now(),
                id,
                boot,
                netns,
                uid: rank_info.uid,
                socket,
                tcp: address,
                shared: rank_info.token.clone(),
            },
            records: Records { size, key: secret.map(Token::from_secret) },
            token,
            met: false,
            listeners,
            callers: Vec::new(),
            duplicates: Vec::new(),
            children: BTreeMap::new(),
            above: if rank == 0 { ParentLink::Absent } else { ParentLink::Unknown },
            knocks: BTreeMap::new(),
            told: false,
            trouble: String::new(),
            rank_infos: BTreeMap::from([(rank, rank_info.without_token())]),
            outcome: None,
        })
    }

    /// What this rank's children must get, for [`RankTree::set_parent`].
    pub fn address(&self) -> Vec<u8> {
        self.records.seal(self.rank, &self.address)
    }

    /// The token that rank 0 shares, out of its address. An error continues "rank 0 has ...".
    pub(crate) fn shared(&self, first: &[u8]) -> Result<Token, String> {
        self.records.open(0, first)?.shared.ok_or_else(|| "an address without a token".to_owned())
    }

    /// This process, as errors name it.
    pub fn process(&self) -> String {
        self.address.process()
    }

    /// Another process that has stored its address as this rank's, and this one: "pid 5 on host a and pid 7 on host b".
    pub fn rank_conflict(&self, stored: &[u8]) -> Option<String> {
        let other = stated(stored).filter(|other| other.id != self.address.id)?;
        Some(format!("{} and {}", self.address.process(), other.process()))
    }

    /// The difference, where the address of `rank` belongs to a group of another size than this one.
    pub fn size_conflict(&self, rank: usize, address: &[u8]) -> Option<String> {
        let (mine, other) = (&self.address, stated(address)?);
        (mine.size != other.size).then(|| {
            format!(
                "has two world sizes: {} on rank {rank} ({}) and {} on rank {} ({})",
                other.size,
                other.process(),
                mine.size,
                self.rank,
                mine.process()
            )
        })
    }

    pub fn parent(&self) -> Option<usize> {
        tree_shape::parent(self.rank)
    }

    /// Whether the addresses of rank 0 and of the parent are still to come, or to be read again.
    pub fn needs_addresses(&self, now: Instant) -> bool {
        match &self.above {
            ParentLink::Unknown => true,
            ParentLink::Calling { call, .. } => now.duration_since(call.read) >= SUSPECT_AFTER,
            _ => false,
        }
    }

    /// `token`: what came of what rank 0 shares; `parent`: the address of the parent. Whether it is a new one.
    pub(crate) fn set_parent(
        &mut self,
        token: Arc<Token>,
        parent: &[u8],
        now: Instant,
    ) -> Result<bool, String> {
        let address = self.records.open(self.parent().unwrap_or(0), parent)?;
        self.token = Some(token);
        // The same again is no new beginning.
        let (since, next, stood, new) = match &self.above {
            ParentLink::Calling { call, next } if call.bytes == parent => {
                (call.since, *next, call.stood, false)
            }
            _ => (now, now, false, true),
        };
        let call = ParentCall { address, bytes: parent.to_vec(), read: now, since, stood };
        self.above = ParentLink::Calling { call, next };
        Ok(new)
    }

    /// Children that have not been heard.
    fn awaited(&self) -> Vec<usize> {
        let heard = |child: &usize| self.children.get(child).is_some_and(|child| child.heard);
        tree_shape::children(self.rank, self.size).filter(|child| !heard(child)).collect()
    }

    fn is_connected(&self, child: usize) -> bool {
        self.children.get(&child).is_some_and(|child| child.link.is_some())
    }

    /// Children that have not been heard and have no connection here.
    pub fn unconnected(&self) -> Vec<usize> {
        let mut awaited = self.awaited();
        awaited.retain(|child| !self.children.contains_key(child));
        awaited
    }

    /// Ranks whose address tells whether they are still there, which nothing else does: for [`RankTree::probe`].
    pub fn suspects(&self) -> Vec<usize> {
        if self.outcome.is_some() {
            return Vec::new();
        }
        let above = match &self.above {
            ParentLink::Absent | ParentLink::Talking { .. } => None,
            ParentLink::Unknown | ParentLink::Calling { .. } | ParentLink::Unreached { .. } => self.parent(),
        };
        let mut ranks = self.unconnected();
        ranks.extend(above);
        ranks.retain(|rank| !self.knocks.get(rank).is_some_and(LivenessProbe::stands));
        ranks
    }

    /// What the store has as the address of a rank that is doubted. One at which somebody listened and nobody does any more is of a
    /// rank that is gone; one at which nobody ever did may be of an earlier attempt, and is given so long: `patience`.
    pub fn probe(
        &mut self,
        rank: usize,
        bytes: &[u8],
        patience: Duration,
        now: Instant,
    ) -> Result<(), String> {
        let stood = match &self.above {
            ParentLink::Calling { call, .. } => {
                self.parent() == Some(rank) && call.stood && call.bytes == bytes
            }
            _ => false,
        };
        if !self.knocks.get(&rank).is_some_and(|probe| probe.is_of(bytes)) {
            self.knocks.insert(rank, LivenessProbe::new(bytes, self.records.open(rank, bytes)?));
        }
        if let Some(probe) = self.knocks.get_mut(&rank) {
            probe.stood |= stood || probe.came_after(&self.address);
            if probe.finds_nobody(&self.address, patience, now) {
                self.fail(StartupFailure::lost(
                    rank,
                    "ended, or gave up, before the group was made".to_owned(),
                ));
            }
        }
        Ok(())
    }

    /// Whom this rank waits for: children that have something to say, or to hear; else the parent.
    pub fn missing(&self) -> Vec<usize> {
        let deaf = |child: &ChildLink| child.link.as_ref().is_some_and(|link| !link.said());
        let mut ranks = self.awaited();
        ranks.extend(
            self.children.iter().filter(|(_, child)| child.heard && deaf(child)).map(|(rank, _)| *rank),
        );
        if ranks.is_empty() { self.parent().into_iter().collect() } else { ranks }
    }

    /// What goes up, once, and why: where there is no connection to the parent.
    pub fn take_relay(&mut self) -> Option<(Vec<u8>, String)> {
        let unreached = matches!(self.above, ParentLink::Unreached { carried: None });
        if !unreached || !self.awaited().is_empty() {
            return None;
        }
        let mut bytes = self.upward();
        let tag = self.token.as_ref()?.tag(&[UP, &rank_bytes(self.rank), &bytes]);
        bytes.extend(tag);
        (self.above, self.told) = (ParentLink::Unreached { carried: Some(tag) }, true);
        Some((bytes, std::mem::take(&mut self.trouble)))
    }

    /// Whether what comes down has to be carried here.
    pub fn is_unreached(&self) -> bool {
        matches!(self.above, ParentLink::Unreached { carried: Some(_) }) && self.outcome.is_none()
    }

    /// What the parent says, where there is no connection to it.
    pub fn accept_result(&mut self, bytes: &[u8]) {
        let ParentLink::Unreached { carried: Some(up) } = self.above else { return };
        match self.verified(DOWN, &up, bytes) {
            Some((text, _)) => self.settle(text),
            None => self.fail(altered(self.parent().unwrap_or(0))),
        }
    }

    /// Why there will be no group, as far as it is known.
    pub fn failure(&self) -> Option<&StartupFailure> {
        self.outcome.as_ref()?.as_ref().err()
    }

    /// What that child says, which has no connection here.
    pub fn accept_relayed(&mut self, child: usize, bytes: &[u8]) {
        let Some((text, tag)) = self.verified(UP, &rank_bytes(child), bytes) else {
            return self.fail(altered(child));
        };
        self.children.insert(child, ChildLink { link: None, heard: true, carried: Some(*tag) });
        self.take(child, text);
    }

    /// Messages for the children without a connection here, once the outcome is known.
    pub fn result_to_relay(&self) -> Vec<(usize, Vec<u8>)> {
        let (Some(outcome), Some(token)) = (&self.outcome, &self.token) else { return Vec::new() };
        let text = downward(outcome);
        let carried = self.children.iter().filter_map(|(rank, child)| Some((*rank, child.carried?)));
        carried.map(|(rank, up)| (rank, [&text[..], &token.tag(&[DOWN, &up, &text])].concat())).collect()
    }

    /// The text and the authentication code of what the store carried, if the code is right for that label and subject.
    fn verified<'a>(
        &self,
        label: &[u8],
        subject: &[u8],
        bytes: &'a [u8],
    ) -> Option<(&'a [u8], &'a [u8; TAG])> {
        let (text, tag) = bytes.split_last_chunk::<TAG>()?;
        self.token.as_ref()?.verifies(&[label, subject, text], tag).then_some((text, tag))
    }

    /// Moves on what can be moved; what came of it, once all children have it too.
    pub fn poll(&mut self, now: Instant) -> Option<&TreeResult> {
        self.admit(now);
        self.hear_children();
        self.call_parent(now);
        self.knocks.values_mut().for_each(|probe| probe.look(now));
        if self.rank == 0 && self.outcome.is_none() && self.rank_infos.len() == self.size {
            let rank_infos = std::mem::take(&mut self.rank_infos);
            self.finish(Ok(rank_infos.into_values().collect()));
        }
        self.send();
        let busy = self.talks().any(|link| !link.said());
        // The parent waits for this rank, and hears of its end too, if it can be reached.
        let unheard = match (&self.outcome, &self.above) {
            (Some(Err(failure)), _) if failure.lost.is_some() && failure.lost == self.parent() => false,
            (Some(Err(_)), ParentLink::Calling { .. }) => true,
            (Some(Err(_)), ParentLink::Talking { link, .. }) => !link.said(),
            _ => false,
        };
        self.outcome.as_ref().filter(|_| !busy && !unheard)
    }

    /// Tells those to whom there is a connection why there will be no group. The first cause goes round, and no other.
    pub fn fail(&mut self, failure: StartupFailure) {
        if self.outcome.is_some() {
            return;
        }
        if let ParentLink::Talking { link, .. } = &mut self.above {
            link.say(&words(&Err(failure.clone())));
            self.told = true;
        }
        self.finish(Err(failure));
        self.send();
    }

    fn talks(&self) -> impl Iterator<Item = &TreeLink> {
        self.children.values().filter_map(|child| child.link.as_ref())
    }

    /// Bytes of the longest frame.
    fn most(&self) -> usize {
        self.size * MAX_RANK_INFO
    }

    /// Waits until something can be moved, from `now` on for that long at most.
    pub fn wait(&self, at_most: Duration, now: Instant) {
        let (parent, at_most) = match &self.above {
            ParentLink::Talking { link, .. } => (Some(link), at_most),
            ParentLink::Calling { next, .. } => (None, at_most.min(next.saturating_duration_since(now))),
            _ => (None, at_most),
        };
        // Callers keep what they say until they can be heard, and listeners their queues.
        let heard = if self.hears(now) { self.callers.as_slice() } else { &[] };
        let talks = self.talks().chain(parent).chain(heard);
        let talks = talks.map(|link| PollFd::from_borrowed_fd(link.as_fd(), link.events()));
        let open = if self.callers.len() < MAX_INCOMING { self.listeners.as_slice() } else { &[] };
        let listeners = open.iter().map(|one| PollFd::from_borrowed_fd(one.as_fd(), PollFlags::IN));
        let knocks = self.knocks.values().filter_map(LivenessProbe::socket);
        let knocks = knocks.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = talks.chain(listeners).chain(knocks).collect();
        // Interrupted or refused: whatever is ready is so the next time, too.
        let _ = poll(&mut fds, Timespec::try_from(at_most).ok().as_ref());
    }

    /// Callers that say whose child they are, and what it has.
    fn admit(&mut self, now: Instant) {
        let mut unauthenticated = Vec::new();
        for listener in &self.listeners {
            // What this process lacks (descriptors) may come back: whoever waits goes on waiting.
            while self.callers.len() < MAX_INCOMING
                && let Ok(link) = TreeLink::accept(listener.as_fd(), now)
            {
                match link.check_user() {
                    Ok(()) => self.callers.push(link),
                    Err(error) => unauthenticated.push(error),
                }
            }
        }
        unauthenticated.iter().for_each(|error| self.reject(error));
        if !self.hears(now) {
            return;
        }
        for mut link in std::mem::take(&mut self.callers) {
            match link.greet(&self.address.id, self.token.as_ref()).map(|known| (known, link.from)) {
                Ok((false, _)) => self.callers.push(link),
                Ok((true, child)) if self.awaited().contains(&child) && !self.is_connected(child) => {
                    // It comes too late for a group that there will not be.
                    if let Some(outcome) = &self.outcome {
                        link.say(&downward(outcome));
                    }
                    self.children.insert(child, ChildLink { link: Some(link), heard: false, carried: None });
                }
                Err(error) if is_unauthenticated(&error) => self.reject(&error),
                // A second process of that rank: the store shows it, and the end of either connection would look like a lost parent.
                Ok((true, _)) if self.duplicates.len() < MAX_INCOMING => self.duplicates.push(link),
                // A second connection of a child, or one that was closed.
                Ok(_) | Err(_) => {}
            }
        }
        if self.callers.len() == MAX_INCOMING {
            self.callers.retain(|caller| now.duration_since(caller.since) < GREETING_TIMEOUT);
        }
    }

    /// Logs the first rejected connection: repeated ones must not fill the log.
    fn reject(&mut self, reason: &io::Error) {
        if !std::mem::replace(&mut self.met, true) {
            warn(&format!(
                "rejected a connection to rank {} while the group is made: {reason}. The job continues; further rejected \
                 connections are not logged (docs/security.md)",
                self.rank,
            ));
        }
    }

    /// Whether callers are answered: once this rank's own way up stands, or it is known that there will be none soon.
    fn hears(&self, now: Instant) -> bool {
        match &self.above {
            ParentLink::Absent | ParentLink::Unreached { .. } => true,
            ParentLink::Unknown => false,
            ParentLink::Calling { call, .. } => now.duration_since(call.since) >= 2 * SUSPECT_AFTER,
            ParentLink::Talking { link, call } => {
                link.known() || now.duration_since(call.since) >= 2 * SUSPECT_AFTER
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
            let Some(link) = &mut child.link else { continue };
            match link.read(most) {
                Ok(None) => {}
                Ok(Some(bytes)) => {
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
    fn call_parent(&mut self, now: Instant) {
        if let ParentLink::Talking { link, call } = &self.above
            && !link.known()
            && now.duration_since(call.since) >= PARENT_TIMEOUT
        {
            self.trouble = "it does not answer".to_owned();
            self.above = ParentLink::Unreached { carried: None };
        }
        if let (ParentLink::Calling { call: ParentCall { address, .. }, next }, Some(token)) =
            (&self.above, &self.token)
            && now >= *next
        {
            let link = TreeLink::call(address, &self.address, self.rank, token, now);
            let above = std::mem::replace(&mut self.above, ParentLink::Unreached { carried: None });
            let ParentLink::Calling { call, .. } = above else { return };
            match link {
                Ok(link) => self.above = ParentLink::Talking { call, link },
                Err(error) => {
                    self.trouble = error.to_string();
                    if now.duration_since(call.since) < PARENT_TIMEOUT {
                        self.above = ParentLink::Calling { call, next: now + RETRY_INTERVAL };
                    }
                }
            }
        }
        self.talk_to_parent(now);
    }

    fn talk_to_parent(&mut self, now: Instant) {
        let failed = matches!(self.outcome, Some(Err(_)));
        let (most, ready) = (self.most(), !self.told && (failed || self.awaited().is_empty()));
        let upward = if ready { self.upward() } else { Vec::new() };
        let ParentLink::Talking { link, .. } = &mut self.above else { return };
        if ready {
            link.say(&upward);
            self.told = true;
        }
        let greeted = link.greet(&self.address.id, None);
        if self.outcome.is_some() {
            // Nobody is left there who could hear of it.
            if greeted.is_err() {
                self.above = ParentLink::Absent;
            }
            return;
        }
        let outcome = greeted.and_then(|_| link.write()).and_then(|()| link.read(most));
        let known = link.known();
        match outcome {
            Ok(None) => {}
            Ok(Some(bytes)) => self.settle(&bytes),
            Err(error) if known => self.fail(hung_up(self.parent().unwrap_or(0), &error)),
            Err(error) => {
                let above = std::mem::replace(&mut self.above, ParentLink::Absent);
                let ParentLink::Talking { mut call, link } = above else { return };
                call.stood |= link.stood();
                (self.told, self.trouble) = (false, error.to_string());
                self.above = ParentLink::Calling { call, next: now + RETRY_INTERVAL };
            }
        }
    }

    fn send(&mut self) {
        // Who does not take it is not there any more, and needs nothing.
        for child in self.children.values_mut() {
            if child.link.as_mut().is_some_and(|link| link.write().is_err()) {
                child.link = None;
            }
        }
        if let ParentLink::Talking { link, .. } = &mut self.above {
            let _ = link.write();
        }
    }

    fn upward(&self) -> Vec<u8> {
        if let Some(Err(failure)) = &self.outcome {
            return words(&Err(failure.clone()));
        }
        let rank_infos = self.rank_infos.iter().map(|(rank, rank_info)| (*rank as u32, rank_info.clone()));
        words(&Ok(rank_infos.collect()))
    }

    /// What a child has.
    fn take(&mut self, child: usize, bytes: &[u8]) {
        match parse(child, bytes) {
            Ok(rank_infos) => {
                for (rank, rank_info) in rank_infos {
                    if (rank as usize) < self.size {
                        self.rank_infos.entry(rank as usize).or_insert(rank_info);
                    }
                }
            }
            Err(failure) => self.fail(failure),
        }
    }

    /// What the parent says.
    fn settle(&mut self, bytes: &[u8]) {
        let parent = self.parent().unwrap_or(0);
        let outcome = parse(parent, bytes).and_then(|rank_infos| {
            let rank_infos: BTreeMap<u32, Vec<u8>> = rank_infos.into_iter().collect();
            match rank_infos.len() == self.size {
                true => Ok(rank_infos.into_values().collect()),
                false => Err(StartupFailure::of(format!(
                    "rank {parent} has {} cards for {} ranks",
                    rank_infos.len(),
                    self.size
                ))),
            }
        });
        self.finish(outcome);
    }

    fn finish(&mut self, outcome: TreeResult) {
        let bytes = downward(&outcome);
        for link in self.children.values_mut().filter_map(|child| child.link.as_mut()) {
            link.say(&bytes);
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
    let nonsense = || StartupFailure::of(format!("rank {from} sent {} bytes that are no cards", bytes.len()));
    postcard::from_bytes(bytes).unwrap_or_else(|_| Err(nonsense()))
}

/// Parts of the authentication code of what the store carries from a child to its parent, and of the answer to it.
const UP: &[u8] = b"smddp carried up";
const DOWN: &[u8] = b"smddp carried down";

fn rank_bytes(rank: usize) -> [u8; 8] {
    (rank as u64).to_le_bytes()
}

fn altered(rank: usize) -> StartupFailure {
    StartupFailure::of(format!(
        "the cards of rank {rank} in the store do not verify under the group's token: they were changed there"
    ))
}

fn hung_up(rank: usize, error: &io::Error) -> StartupFailure {
    if is_unauthenticated(error) {
        return StartupFailure::of(format!("cards of rank {rank}: {error}"));
    }
    StartupFailure::lost(rank, format!("hung up before all cards were there ({error}): it ended, or gave up"))
}

fn downward(outcome: &TreeResult) -> Vec<u8> {
    let numbered = |rank_infos: &Vec<Vec<u8>>| {
        rank_infos.iter().enumerate().map(|(rank, rank_info)| (rank as u32, rank_info.clone())).collect()
    };
    words(&outcome.as_ref().map(numbered).map_err(Clone::clone))
}

#[cfg(test)]
mod tests {
    mod identity;

    use std::io::Write;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::fuzzing::feed::options;
    use crate::joint::Prepared;

    /// The shortest time there is.
    const MOMENT: Duration = Duration::from_nanos(1);

    fn trees(size: usize) -> Vec<RankTree> {
        let rank = |rank| Prepared::new(rank, size, Vec::new(), &options(rank)).unwrap();
        (0..size).map(|one| rank(one).tree().unwrap()).collect()
    }

    /// All ranks take turns until each has an outcome.
    fn outcomes(trees: &mut [RankTree]) -> Vec<TreeResult> {
        let begun = Instant::now();
        let mut found = vec![None; trees.len()];
        while found.iter().any(Option::is_none) {
            assert!(begun.elapsed() < Duration::from_secs(60), "it goes on for ever");
            for (tree, found) in trees.iter_mut().zip(&mut found) {
                let now = Instant::now();
                tree.wait(Duration::from_micros(100), now);
                *found = tree.poll(now).cloned().or(found.take());
            }
        }
        found.into_iter().flatten().collect()
    }

    fn call_parents(trees: &mut [RankTree]) {
        for rank in 1..trees.len() {
            let parent = trees[rank].parent().unwrap();
            let address = trees[parent].address();
            let token = trees[0].token.clone().unwrap();
            assert!(trees[rank].set_parent(token, &address, Instant::now()).unwrap());
        }
    }

    fn stranger(tree: &RankTree) -> UnixStream {
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&tree.address.socket).unwrap();
        UnixStream::connect_addr(&address).unwrap()
    }

    #[test]
    fn strangers_keep_nobody_from_meeting() {
        let mut trees = trees(12);
        let mut callers = Vec::new();
        for length in 0..80 {
            let mut caller = stranger(&trees[0]);
            // No words, some of them, all of them, and more than that.
            let mut bytes = link::hello_of(1, &trees[0].address.id);
            bytes.truncate(length);
            bytes.resize(2 * length, 0xff);
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
            let (token, address) = (trees[0].token.clone().unwrap(), trees[8].address());
            let address = trees[8].records.open(8, &address).unwrap();
            let mut child = TreeLink::call(&address, &trees[9].address, 9, &token, Instant::now()).unwrap();
            child.say(words);
            trees.truncate(9);
            while !(child.greet(&address.id, None).unwrap() && child.said()) {
                child.write().unwrap();
                for tree in &mut trees {
                    let _ = tree.poll(Instant::now());
                }
            }
            for outcome in outcomes(&mut trees) {
                let reason = format!("rank 9 sent {} bytes that are no cards", words.len());
                assert_eq!(outcome.unwrap_err(), StartupFailure::of(reason), "{words:?}");
            }
        }
    }

    #[test]
    fn a_child_that_dies_ends_the_meeting_at_once() {
        let mut trees = trees(10);
        call_parents(&mut trees);
        while !matches!(&trees[9].above, ParentLink::Talking { link, .. } if link.known()) {
            // Without the others, for which rank 0 waits.
            for rank in [0, 8, 9] {
                let _ = trees[rank].poll(Instant::now());
            }
        }
        trees[8].poll(Instant::now());
        trees.truncate(9);
        for outcome in outcomes(&mut trees) {
            assert_eq!(outcome.unwrap_err().lost, Some(9));
        }
    }

    /// Rank 8 of ten, and the address of rank 9, which is gone and came before it: so it may be of an earlier attempt.
    fn without_the_last(seen: Option<Instant>) -> (RankTree, Vec<u8>) {
        let mut trees = trees(10);
        trees[9].address.made = 0;
        let address = trees[9].address();
        assert!(trees[8].suspects().contains(&9));
        if let Some(now) = seen {
            trees[8].probe(9, &address, Duration::MAX, now).unwrap();
            assert!(!trees[8].suspects().contains(&9), "its end would be seen");
        }
        (trees.swap_remove(8), address)
    }

    fn lost(tree: &RankTree) -> Option<usize> {
        tree.failure().and_then(|failure| failure.lost)
    }

    #[test]
    fn a_rank_that_was_seen_and_goes_before_it_has_called_is_lost_at_once() {
        let now = Instant::now();
        let (mut tree, address) = without_the_last(Some(now));
        for _ in 0..4 {
            let _ = tree.poll(now);
            if tree.suspects().contains(&9) {
                tree.probe(9, &address, Duration::MAX, now).unwrap();
            }
        }
        assert_eq!(lost(&tree), Some(9));
    }

    #[test]
    fn a_rank_that_nobody_saw_is_lost_once_nobody_was_there_for_so_long_and_no_moment_earlier() {
        let (now, patience) = (Instant::now(), Duration::from_secs(5));
        let (mut tree, address) = without_the_last(None);
        for waited in [Duration::ZERO, patience - MOMENT] {
            tree.probe(9, &address, patience, now + waited).unwrap();
            assert_eq!(lost(&tree), None, "{waited:?}");
        }
        tree.probe(9, &address, patience, now + patience).unwrap();
        assert_eq!(lost(&tree), Some(9));
    }

    #[test]
    fn a_parent_that_does_not_answer_is_not_reached_once_its_time_is_up_and_no_moment_earlier() {
        let (mut trees, now) = (trees(2), Instant::now());
        let (token, address) = (trees[0].token.clone().unwrap(), trees[0].address());
        assert!(trees[1].set_parent(token.clone(), &address, now).unwrap());
        for (waited, lost) in [(SUSPECT_AFTER - MOMENT, false), (SUSPECT_AFTER, true)] {
            assert_eq!(
                trees[1].needs_addresses(now + waited),
                lost,
                "its address is to be read again: {waited:?}"
            );
        }
        // The same address, read again, is no new beginning.
        assert!(!trees[1].set_parent(token, &address, now + SUSPECT_AFTER).unwrap());
        assert!(!trees[1].needs_addresses(now + SUSPECT_AFTER));
        for waited in [SUSPECT_AFTER, PARENT_TIMEOUT - MOMENT] {
            assert_eq!(trees[1].poll(now + waited), None);
            assert_eq!(trees[1].take_relay(), None, "{waited:?}");
        }
        assert_eq!(trees[1].poll(now + PARENT_TIMEOUT), None);
        assert_eq!(trees[1].take_relay().unwrap().1, "it does not answer");
    }

    #[test]
    fn strangers_that_take_all_the_room_make_some_once_they_were_silent_for_so_long_and_no_moment_earlier() {
        let (mut trees, now) = (trees(2), Instant::now());
        let mut unauthenticated = Vec::new();
        for _ in 0..MAX_INCOMING {
            unauthenticated.push(stranger(&trees[0]));
            let _ = trees[0].poll(now);
        }
        for (waited, left) in [
            (Duration::ZERO, MAX_INCOMING),
            (GREETING_TIMEOUT - MOMENT, MAX_INCOMING),
            (GREETING_TIMEOUT, 0),
            (2 * GREETING_TIMEOUT, 0),
        ] {
            let _ = trees[0].poll(now + waited);
            assert_eq!(trees[0].callers.len(), left, "{waited:?}");
        }
        drop(unauthenticated);
    }

    #[test]
    fn a_rank_of_the_same_host_that_came_after_this_one_is_of_no_earlier_attempt() {
        let mut trees = trees(10);
        let address = trees[9].address();
        trees.truncate(9);
        for _ in 0..2 {
            trees[8].probe(9, &address, Duration::MAX, Instant::now()).unwrap();
        }
        assert_eq!(trees[8].failure().and_then(|failure| failure.lost), Some(9));
    }

    #[test]
    fn a_rank_that_comes_again_is_not_the_one_that_went() {
        let mut trees = trees(10);
        let address = trees[9].address();
        trees[8].probe(9, &address, Duration::MAX, Instant::now()).unwrap();
        trees.truncate(9);
        let again = Prepared::new(9, 10, Vec::new(), &options(9)).unwrap().tree().unwrap();
        for _ in 0..4 {
            let _ = trees[8].poll(Instant::now());
            trees[8].probe(9, &again.address(), Duration::MAX, Instant::now()).unwrap();
        }
        assert_eq!(trees[8].failure(), None);
        assert!(!trees[8].suspects().contains(&9));
    }
}
