//! Exchange of rank information when a group is created: an all-gather over a tree of connections.
//!
//! ```text
//! store      each rank sets its address record and reads its parent's       small values, each read a few times
//! tree       information of a rank and of its subtree  -> parent
//!            parent  -> information of all ranks                            each rank has a few connections
//! ```
//!
//! A store with one server therefore transfers the same few bytes per rank at any group size. All other data goes from rank to
//! rank: through unix sockets on a host, over TCP between hosts. If a rank cannot connect to its parent, the caller relays its
//! message, for example through the store ([`RankTree::take_relay`]).
//!
//! Rank 0's address record also contains the group token, which nothing else transfers. Both ends of each connection prove that
//! they have the token before any rank information moves, from the root down. Records of an earlier attempt that are still in
//! the store therefore cannot connect ranks of different attempts.
//!
//! A process without the token cannot change the exchanged information. Address records have an authentication code under the job
//! secret ([`address::Records`]). Frames have one under a key of their connection ([`link`]). Messages relayed through the store
//! have one under the token.

mod address;
mod claim;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod link;
mod liveness_probe;
mod payload;
#[cfg(test)]
mod tests;
mod tree_shape;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::RankInfo;
use crate::close_on_fork::CloseOnFork;
use crate::handshake::{PROTOCOL, ProcessUid, is_unauthenticated};
use crate::process::{listen, random};
use crate::token::{TAG, Token};
use crate::warning::warn;
pub use address::rank_label;
use address::{Records, TreeAddress, parse_unverified};
pub use claim::{Claim, Holder};
use link::TreeLink;
use liveness_probe::LivenessProbe;
use payload::{DOWN, UP, connection_lost, encode_downward, encode_payload, parse, tampered};
pub use payload::{StartupFailure, TreeResult};

/// Maximum size of one rank's information in bytes. That of an EFA rank with 32 rails takes a tenth.
const MAX_RANK_INFO: usize = 32 << 10;
/// Maximum size of the rank information that a rank provides, in bytes, without the overhead of a frame.
pub const MAX_RECORD: usize = MAX_RANK_INFO - 64;
/// Maximum number of accepted connections that are not authenticated yet. Further ones wait in the listeners' queues.
const MAX_INCOMING: usize = 256;
/// Age at which an unauthenticated connection is closed while the maximum number is reached.
const GREETING_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which a parent without an authenticated connection counts as unreachable.
pub const PARENT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time without a connection after which an address record may belong to an earlier attempt and is read again.
const SUSPECT_AFTER: Duration = Duration::from_millis(500);
/// Interval between two connection attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A child in the tree.
struct ChildLink {
    /// `None` if the child has no connection, or its connection was closed.
    link: Option<TreeLink>,
    /// Set once the child has sent its information.
    reported: bool,
    /// Authentication code of the child's message that was relayed through the store. The reply is bound to it.
    relay_tag: Option<[u8; TAG]>,
}

enum ParentLink {
    /// No parent: this is rank 0, or the parent has closed the connection after a failure.
    Absent,
    /// The address record is not known yet.
    Unknown,
    Connecting {
        attempt: ParentAttempt,
        next: Instant,
    },
    Connected {
        attempt: ParentAttempt,
        link: TreeLink,
    },
    /// The parent is unreachable. `relay_tag`: authentication code of this rank's message, once it was relayed through the store.
    Unreached {
        relay_tag: Option<[u8; TAG]>,
    },
}

struct ParentAttempt {
    address: TreeAddress,
    /// Bytes of the address record, and the time at which they were read.
    bytes: Vec<u8>,
    read: Instant,
    since: Instant,
    /// Set once a connection was established: the parent runs, or ran.
    was_reachable: bool,
}

/// One rank's part of the tree.
pub struct RankTree {
    rank: usize,
    size: usize,
    address: TreeAddress,
    records: Records,
    token: Option<Arc<Token>>,
    /// Set once a rejected connection was logged.
    reject_logged: bool,
    listeners: Vec<CloseOnFork<OwnedFd>>,
    incoming: Vec<TreeLink>,
    /// Connections of second processes of connected ranks. They are kept open and not read.
    duplicates: Vec<TreeLink>,
    children: BTreeMap<usize, ChildLink>,
    parent_link: ParentLink,
    /// Liveness probes of ranks that have no connection here and may have ended.
    probes: BTreeMap<usize, LivenessProbe>,
    /// Set once this rank's message to its parent was sent or relayed.
    sent_up: bool,
    /// Error of the last connection attempt to the parent.
    last_error: String,
    /// Information of this rank and of its subtree.
    rank_infos: BTreeMap<usize, Vec<u8>>,
    outcome: Option<TreeResult>,
}

impl RankTree {
    /// Opens the listeners of the rank with that information; connects to no other rank yet. `token`: group token, at rank 0 only;
    /// `secret`: job secret, if there is one.
    pub(crate) fn new(
        rank_info: &RankInfo,
        token: Option<Arc<Token>>,
        secret: Option<&[u8]>,
    ) -> io::Result<Self> {
        let (rank, size, id) = (rank_info.rank as usize, rank_info.size as usize, random());
        let socket = [b"smddp-cards-", ProcessUid::as_slice(&id)].concat();
        let mut listeners = vec![CloseOnFork::new(listen(&socket)?.into())];
        // The same interface as the group's later connections.
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
                created: address::now(),
                id,
                boot,
                netns,
                uid: rank_info.uid,
                socket,
                tcp: address,
                shared_token: rank_info.token.clone(),
            },
            records: Records { size, key: secret.map(Token::from_secret) },
            token,
            reject_logged: false,
            listeners,
            incoming: Vec::new(),
            duplicates: Vec::new(),
            children: BTreeMap::new(),
            parent_link: if rank == 0 { ParentLink::Absent } else { ParentLink::Unknown },
            probes: BTreeMap::new(),
            sent_up: false,
            last_error: String::new(),
            rank_infos: BTreeMap::from([(rank, rank_info.without_token())]),
            outcome: None,
        })
    }

    /// Returns the address record of this rank, which its children need for [`RankTree::set_parent`].
    pub fn address(&self) -> Vec<u8> {
        self.records.seal(self.rank, &self.address)
    }

    /// Returns the group token in rank 0's address record. An error text continues "rank 0 has ...".
    pub(crate) fn shared_token(&self, first: &[u8]) -> Result<Token, String> {
        self.records.open(0, first)?.shared_token.ok_or_else(|| "an address without a token".to_owned())
    }

    /// Returns the description of this process for error texts.
    pub fn process(&self) -> String {
        self.address.process()
    }

    /// Returns both processes if another one stored its address record for this rank: "pid 5 on host a and pid 7 on host b".
    pub fn rank_conflict(&self, stored: &[u8]) -> Option<String> {
        let other = parse_unverified(stored).filter(|other| other.id != self.address.id)?;
        Some(format!("{} and {}", self.address.process(), other.process()))
    }

    /// Describes the conflict if the address record of `rank` belongs to a group of another size.
    pub fn size_conflict(&self, rank: usize, address: &[u8]) -> Option<String> {
        let (mine, other) = (&self.address, parse_unverified(address)?);
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

    /// Returns true if the address records of rank 0 and of the parent must be read, or read again.
    pub fn needs_addresses(&self, now: Instant) -> bool {
        match &self.parent_link {
            ParentLink::Unknown => true,
            ParentLink::Connecting { attempt, .. } => now.duration_since(attempt.read) >= SUSPECT_AFTER,
            _ => false,
        }
    }

    /// Sets the group token and the address record of the parent. Returns true if the record is a new one.
    pub(crate) fn set_parent(
        &mut self,
        token: Arc<Token>,
        parent: &[u8],
        now: Instant,
    ) -> Result<bool, String> {
        let address = self.records.open(self.parent().unwrap_or(0), parent)?;
        self.token = Some(token);
        // The same record again must not restart the timeouts.
        let (since, next, was_reachable, new) = match &self.parent_link {
            ParentLink::Connecting { attempt, next } if attempt.bytes == parent => {
                (attempt.since, *next, attempt.was_reachable, false)
            }
            _ => (now, now, false, true),
        };
        let attempt = ParentAttempt { address, bytes: parent.to_vec(), read: now, since, was_reachable };
        self.parent_link = ParentLink::Connecting { attempt, next };
        Ok(new)
    }

    /// Returns the children that have not sent their information.
    fn pending_children(&self) -> Vec<usize> {
        let reported = |child: &usize| self.children.get(child).is_some_and(|child| child.reported);
        tree_shape::children(self.rank, self.size).filter(|child| !reported(child)).collect()
    }

    fn is_connected(&self, child: usize) -> bool {
        self.children.get(&child).is_some_and(|child| child.link.is_some())
    }

    /// Returns the children without a connection that have not sent their information.
    pub fn unconnected(&self) -> Vec<usize> {
        let mut pending_children = self.pending_children();
        pending_children.retain(|child| !self.children.contains_key(child));
        pending_children
    }

    /// Returns ranks without a connection, whose liveness only a probe of their address can show: for [`RankTree::probe`].
    pub fn suspects(&self) -> Vec<usize> {
        if self.outcome.is_some() {
            return Vec::new();
        }
        let parent_link = match &self.parent_link {
            ParentLink::Absent | ParentLink::Connected { .. } => None,
            ParentLink::Unknown | ParentLink::Connecting { .. } | ParentLink::Unreached { .. } => {
                self.parent()
            }
        };
        let mut ranks = self.unconnected();
        ranks.extend(parent_link);
        ranks.retain(|rank| !self.probes.get(rank).is_some_and(LivenessProbe::is_connected));
        ranks
    }

    /// Probes a suspect rank at the address record that the store contains. If its listener existed and is now closed, the rank is
    /// lost. If it was never seen, the record may belong to an earlier attempt, and the rank is lost after `patience`.
    pub fn probe(
        &mut self,
        rank: usize,
        bytes: &[u8],
        patience: Duration,
        now: Instant,
    ) -> Result<(), String> {
        let was_reachable = match &self.parent_link {
            ParentLink::Connecting { attempt, .. } => {
                self.parent() == Some(rank) && attempt.was_reachable && attempt.bytes == bytes
            }
            _ => false,
        };
        if !self.probes.get(&rank).is_some_and(|probe| probe.has_record(bytes)) {
            self.probes.insert(rank, LivenessProbe::new(bytes, self.records.open(rank, bytes)?));
        }
        if let Some(probe) = self.probes.get_mut(&rank) {
            probe.was_reachable |= was_reachable || probe.is_not_older_than(&self.address);
            if probe.is_dead(&self.address, patience, now) {
                self.fail(StartupFailure::lost(
                    rank,
                    "ended, or gave up, before the group was created".to_owned(),
                ));
            }
        }
        Ok(())
    }

    /// Returns the ranks that this rank waits for: children that must send or receive a message; otherwise the parent.
    pub fn missing(&self) -> Vec<usize> {
        let unflushed = |child: &ChildLink| child.link.as_ref().is_some_and(|link| !link.is_flushed());
        let mut ranks = self.pending_children();
        ranks.extend(
            self.children
                .iter()
                .filter(|(_, child)| child.reported && unflushed(child))
                .map(|(rank, _)| *rank),
        );
        if ranks.is_empty() { self.parent().into_iter().collect() } else { ranks }
    }

    /// Returns, once, the message that must be relayed to an unreachable parent, and the reason why it is unreachable.
    pub fn take_relay(&mut self) -> Option<(Vec<u8>, String)> {
        let unreached = matches!(self.parent_link, ParentLink::Unreached { relay_tag: None });
        if !unreached || !self.pending_children().is_empty() {
            return None;
        }
        let mut bytes = self.encode_upward();
        let tag = self.token.as_ref()?.tag(&[UP, &rank_bytes(self.rank), &bytes]);
        bytes.extend(tag);
        (self.parent_link, self.sent_up) = (ParentLink::Unreached { relay_tag: Some(tag) }, true);
        Some((bytes, std::mem::take(&mut self.last_error)))
    }

    /// Returns true if the result must be relayed to this rank.
    pub fn is_unreached(&self) -> bool {
        matches!(self.parent_link, ParentLink::Unreached { relay_tag: Some(_) }) && self.outcome.is_none()
    }

    /// Accepts the relayed result of an unreachable parent.
    pub fn accept_result(&mut self, bytes: &[u8]) {
        let ParentLink::Unreached { relay_tag: Some(up) } = self.parent_link else { return };
        match self.verified(DOWN, &up, bytes) {
            Some((text, _)) => self.settle(text),
            None => self.fail(tampered(self.parent().unwrap_or(0))),
        }
    }

    /// Returns the reason why the group cannot be created, once it is known.
    pub fn failure(&self) -> Option<&StartupFailure> {
        self.outcome.as_ref()?.as_ref().err()
    }

    /// Accepts the relayed message of a child without a connection.
    pub fn accept_relayed(&mut self, child: usize, bytes: &[u8]) {
        let Some((text, tag)) = self.verified(UP, &rank_bytes(child), bytes) else {
            return self.fail(tampered(child));
        };
        self.children.insert(child, ChildLink { link: None, reported: true, relay_tag: Some(*tag) });
        self.accept_rank_infos(child, text);
    }

    /// Returns the messages that must be relayed to children without a connection, once the result is known.
    pub fn result_to_relay(&self) -> Vec<(usize, Vec<u8>)> {
        let (Some(outcome), Some(token)) = (&self.outcome, &self.token) else { return Vec::new() };
        let text = encode_downward(outcome);
        let relay_tag = self.children.iter().filter_map(|(rank, child)| Some((*rank, child.relay_tag?)));
        relay_tag.map(|(rank, up)| (rank, [&text[..], &token.tag(&[DOWN, &up, &text])].concat())).collect()
    }

    /// Splits a relayed message into text and authentication code. `None` if the code does not verify for `label` and `subject`.
    fn verified<'a>(
        &self,
        label: &[u8],
        subject: &[u8],
        bytes: &'a [u8],
    ) -> Option<(&'a [u8], &'a [u8; TAG])> {
        let (text, tag) = bytes.split_last_chunk::<TAG>()?;
        self.token.as_ref()?.verifies(&[label, subject, text], tag).then_some((text, tag))
    }

    /// Makes progress on all connections. Returns the result once it was sent to all connected children.
    pub fn poll(&mut self, now: Instant) -> Option<&TreeResult> {
        self.accept_children(now);
        self.read_children();
        self.connect_parent(now);
        self.probes.values_mut().for_each(|probe| probe.poll(now));
        if self.rank == 0 && self.outcome.is_none() && self.rank_infos.len() == self.size {
            let rank_infos = std::mem::take(&mut self.rank_infos);
            self.finish(Ok(rank_infos.into_values().collect()));
        }
        self.send();
        let sending = self.links().any(|link| !link.is_flushed());
        // A reachable parent waits for this rank and must receive its failure, too.
        let parent_unnotified = match (&self.outcome, &self.parent_link) {
            (Some(Err(failure)), _) if failure.lost.is_some() && failure.lost == self.parent() => false,
            (Some(Err(_)), ParentLink::Connecting { .. }) => true,
            (Some(Err(_)), ParentLink::Connected { link, .. }) => !link.is_flushed(),
            _ => false,
        };
        self.outcome.as_ref().filter(|_| !sending && !parent_unnotified)
    }

    /// Ends the exchange and sends the failure to all connected ranks. Only the first failure is recorded and sent.
    pub fn fail(&mut self, failure: StartupFailure) {
        if self.outcome.is_some() {
            return;
        }
        if let ParentLink::Connected { link, .. } = &mut self.parent_link {
            link.send_text(&encode_payload(&Err(failure.clone())));
            self.sent_up = true;
        }
        self.finish(Err(failure));
        self.send();
    }

    fn links(&self) -> impl Iterator<Item = &TreeLink> {
        self.children.values().filter_map(|child| child.link.as_ref())
    }

    /// Returns the maximum length of a frame in bytes.
    fn max_bytes(&self) -> usize {
        self.size * MAX_RANK_INFO
    }

    /// Waits until progress is possible, at most `at_most` from `now` on.
    pub fn wait(&self, at_most: Duration, now: Instant) {
        let (parent, at_most) = match &self.parent_link {
            ParentLink::Connected { link, .. } => (Some(link), at_most),
            ParentLink::Connecting { next, .. } => (None, at_most.min(next.saturating_duration_since(now))),
            _ => (None, at_most),
        };
        // Incoming connections that cannot be processed yet keep their data, and listeners keep their queues.
        let incoming = if self.accepts_children(now) { self.incoming.as_slice() } else { &[] };
        let links = self.links().chain(parent).chain(incoming);
        let links = links.map(|link| PollFd::from_borrowed_fd(link.as_fd(), link.events()));
        let open = if self.incoming.len() < MAX_INCOMING { self.listeners.as_slice() } else { &[] };
        let listeners = open.iter().map(|one| PollFd::from_borrowed_fd(one.as_fd(), PollFlags::IN));
        let probes = self.probes.values().filter_map(LivenessProbe::socket);
        let probes = probes.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = links.chain(listeners).chain(probes).collect();
        // After an interrupt or an error, the next call finds the same descriptors ready.
        let _ = poll(&mut fds, Timespec::try_from(at_most).ok().as_ref());
    }

    /// Accepts connections of children and authenticates them.
    fn accept_children(&mut self, now: Instant) {
        let mut unauthenticated = Vec::new();
        for listener in &self.listeners {
            // A shortage of descriptors may be temporary: pending connections remain in the queue.
            while self.incoming.len() < MAX_INCOMING
                && let Ok(link) = TreeLink::accept(listener.as_fd(), now)
            {
                match link.check_user() {
                    Ok(()) => self.incoming.push(link),
                    Err(error) => unauthenticated.push(error),
                }
            }
        }
        unauthenticated.iter().for_each(|error| self.reject(error));
        if !self.accepts_children(now) {
            return;
        }
        for mut link in std::mem::take(&mut self.incoming) {
            match link.handshake(&self.address.id, self.token.as_ref()).map(|known| (known, link.from)) {
                Ok((false, _)) => self.incoming.push(link),
                Ok((true, child))
                    if self.pending_children().contains(&child) && !self.is_connected(child) =>
                {
                    // The group has failed before this child connected.
                    if let Some(outcome) = &self.outcome {
                        link.send_text(&encode_downward(outcome));
                    }
                    self.children
                        .insert(child, ChildLink { link: Some(link), reported: false, relay_tag: None });
                }
                Err(error) if is_unauthenticated(&error) => self.reject(&error),
                // A second process of that rank: the store shows it, and the end of either connection would appear as a lost parent.
                Ok((true, _)) if self.duplicates.len() < MAX_INCOMING => self.duplicates.push(link),
                // A second connection of a child, or a closed connection.
                Ok(_) | Err(_) => {}
            }
        }
        if self.incoming.len() == MAX_INCOMING {
            self.incoming.retain(|link| now.duration_since(link.since) < GREETING_TIMEOUT);
        }
    }

    /// Logs the first rejected connection: repeated ones must not fill the log.
    fn reject(&mut self, reason: &io::Error) {
        if !std::mem::replace(&mut self.reject_logged, true) {
            warn(&format!(
                "rejected a connection to rank {} while the group is made: {reason}. The job continues; further rejected \
                 connections are not logged (docs/security.md)",
                self.rank,
            ));
        }
    }

    /// Returns true if incoming connections are processed: once this rank's link to its parent is authenticated, or is unlikely to be
    /// soon.
    fn accepts_children(&self, now: Instant) -> bool {
        match &self.parent_link {
            ParentLink::Absent | ParentLink::Unreached { .. } => true,
            ParentLink::Unknown => false,
            ParentLink::Connecting { attempt, .. } => now.duration_since(attempt.since) >= 2 * SUSPECT_AFTER,
            ParentLink::Connected { link, attempt } => {
                link.is_authenticated() || now.duration_since(attempt.since) >= 2 * SUSPECT_AFTER
            }
        }
    }

    /// Reads the messages of all connected children. A child sends one message, and another one only after a failure.
    fn read_children(&mut self) {
        let (max_bytes, mut received) = (self.max_bytes(), Vec::new());
        if self.outcome.is_some() {
            return;
        }
        for (rank, child) in &mut self.children {
            let Some(link) = &mut child.link else { continue };
            match link.read(max_bytes) {
                Ok(None) => {}
                Ok(Some(bytes)) => {
                    child.reported = true;
                    received.push((*rank, Ok(bytes)));
                }
                Err(error) => received.push((*rank, Err(connection_lost(*rank, &error)))),
            }
        }
        for (rank, message) in received {
            match message {
                Ok(bytes) => self.accept_rank_infos(rank, &bytes),
                Err(failure) => self.fail(failure),
            }
        }
    }

    /// Connects to the parent, and retries a failed attempt until `PARENT_TIMEOUT`.
    fn connect_parent(&mut self, now: Instant) {
        if let ParentLink::Connected { link, attempt } = &self.parent_link
            && !link.is_authenticated()
            && now.duration_since(attempt.since) >= PARENT_TIMEOUT
        {
            self.last_error = "it does not answer".to_owned();
            self.parent_link = ParentLink::Unreached { relay_tag: None };
        }
        if let (ParentLink::Connecting { attempt: ParentAttempt { address, .. }, next }, Some(token)) =
            (&self.parent_link, &self.token)
            && now >= *next
        {
            let link = TreeLink::connect(address, &self.address, self.rank, token, now);
            let parent_link =
                std::mem::replace(&mut self.parent_link, ParentLink::Unreached { relay_tag: None });
            let ParentLink::Connecting { attempt, .. } = parent_link else { return };
            match link {
                Ok(link) => self.parent_link = ParentLink::Connected { attempt, link },
                Err(error) => {
                    self.last_error = error.to_string();
                    if now.duration_since(attempt.since) < PARENT_TIMEOUT {
                        self.parent_link = ParentLink::Connecting { attempt, next: now + RETRY_INTERVAL };
                    }
                }
            }
        }
        self.exchange_with_parent(now);
    }

    fn exchange_with_parent(&mut self, now: Instant) {
        let failed = matches!(self.outcome, Some(Err(_)));
        let (max_bytes, ready) =
            (self.max_bytes(), !self.sent_up && (failed || self.pending_children().is_empty()));
        let upward = if ready { self.encode_upward() } else { Vec::new() };
        let ParentLink::Connected { link, .. } = &mut self.parent_link else { return };
        if ready {
            link.send_text(&upward);
            self.sent_up = true;
        }
        let greeted = link.handshake(&self.address.id, None);
        if self.outcome.is_some() {
            // The parent has closed the connection and cannot receive the failure.
            if greeted.is_err() {
                self.parent_link = ParentLink::Absent;
            }
            return;
        }
        let outcome = greeted.and_then(|_| link.write()).and_then(|()| link.read(max_bytes));
        let known = link.is_authenticated();
        match outcome {
            Ok(None) => {}
            Ok(Some(bytes)) => self.settle(&bytes),
            Err(error) if known => self.fail(connection_lost(self.parent().unwrap_or(0), &error)),
            Err(error) => {
                let parent_link = std::mem::replace(&mut self.parent_link, ParentLink::Absent);
                let ParentLink::Connected { mut attempt, link } = parent_link else { return };
                attempt.was_reachable |= link.was_reachable();
                (self.sent_up, self.last_error) = (false, error.to_string());
                self.parent_link = ParentLink::Connecting { attempt, next: now + RETRY_INTERVAL };
            }
        }
    }

    fn send(&mut self) {
        // A child whose connection fails has ended and needs no result.
        for child in self.children.values_mut() {
            if child.link.as_mut().is_some_and(|link| link.write().is_err()) {
                child.link = None;
            }
        }
        if let ParentLink::Connected { link, .. } = &mut self.parent_link {
            let _ = link.write();
        }
    }

    fn encode_upward(&self) -> Vec<u8> {
        if let Some(Err(failure)) = &self.outcome {
            return encode_payload(&Err(failure.clone()));
        }
        let rank_infos = self.rank_infos.iter().map(|(rank, rank_info)| (*rank as u32, rank_info.clone()));
        encode_payload(&Ok(rank_infos.collect()))
    }

    /// Records the rank information in a child's message, or its failure.
    fn accept_rank_infos(&mut self, child: usize, bytes: &[u8]) {
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

    /// Ends the exchange with the parent's message.
    fn settle(&mut self, bytes: &[u8]) {
        let parent = self.parent().unwrap_or(0);
        let outcome = parse(parent, bytes).and_then(|rank_infos| {
            let rank_infos: BTreeMap<u32, Vec<u8>> = rank_infos.into_iter().collect();
            match rank_infos.len() == self.size {
                true => Ok(rank_infos.into_values().collect()),
                false => Err(StartupFailure::of(format!(
                    "rank {parent} sent the information of {} ranks, expected {}",
                    rank_infos.len(),
                    self.size
                ))),
            }
        });
        self.finish(outcome);
    }

    fn finish(&mut self, outcome: TreeResult) {
        let bytes = encode_downward(&outcome);
        for link in self.children.values_mut().filter_map(|child| child.link.as_mut()) {
            link.send_text(&bytes);
        }
        self.outcome = Some(outcome);
    }
}

fn listen_at(ip: IpAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind((ip, 0))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn rank_bytes(rank: usize) -> [u8; 8] {
    (rank as u64).to_le_bytes()
}
