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
//! secret (`address::Records`). Frames have one under a key of their connection (`link`). Messages relayed through the store
//! have one under the token.

mod address;
mod children;
mod claim;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod fuzzing;
mod link;
mod liveness_probe;
mod parent;
mod payload;
mod relay;
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
use smddp_base::CloseOnFork;
use smddp_base::random::bytes as random;
use smddp_net::handshake::{PROTOCOL, ProcessUid};
use smddp_net::token::Token;
use smddp_process::listen;

use crate::RankInfo;
pub use address::rank_label;
use address::{Records, TreeAddress, parse_unverified};
use children::{ChildLink, MAX_INCOMING};
pub use claim::{Claim, Holder};
use link::TreeLink;
use liveness_probe::LivenessProbe;
use parent::ParentLink;
pub use payload::{StartupFailure, TreeResult};
use payload::{encode_downward, encode_payload};

/// Maximum size of one rank's information in bytes. That of an EFA rank with 32 rails takes a tenth.
const MAX_RANK_INFO: usize = 32 << 10;
/// Maximum size of the rank information that a rank provides, in bytes, without the overhead of a frame.
pub const MAX_RECORD: usize = MAX_RANK_INFO - 64;
/// Time after which a parent without an authenticated connection counts as unreachable.
pub const PARENT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time without a connection after which an address record may belong to an earlier attempt and is read again.
const SUSPECT_AFTER: Duration = Duration::from_millis(500);

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
        let at = &rank_info.address;
        let (rank, size, id) = (at.rank as usize, at.size as usize, random());
        let socket = [b"smddp-cards-", ProcessUid::as_slice(&id)].concat();
        let mut listeners = vec![CloseOnFork::new(listen(&socket)?.into())];
        // The same interface as the group's later connections.
        let ip = rank_info.offer.tcp.as_ref().ok().map(|(address, _)| address.socket.ip());
        let tcp = ip.and_then(|ip| listen_at(ip).ok());
        let address = tcp.as_ref().and_then(|listener| listener.local_addr().ok());
        listeners.extend(tcp.map(|listener| CloseOnFork::new(listener.into())));
        let (boot, netns, version) = (at.boot.clone(), at.netns, rank_info.version.clone());
        Ok(Self {
            rank,
            size,
            address: TreeAddress {
                protocol: PROTOCOL,
                version,
                host: at.host.clone(),
                pid: at.pid,
                process_id: address::process_id(),
                size: at.size,
                created: address::now(),
                id,
                boot,
                netns,
                uid: at.uid,
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

    /// Returns the address record of this rank, which its children need for `set_parent`.
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
    ///
    /// # Errors
    /// The address record is invalid; the text has the reason.
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

    /// Returns the reason why the group cannot be created, once it is known.
    pub fn failure(&self) -> Option<&StartupFailure> {
        self.outcome.as_ref()?.as_ref().err()
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
