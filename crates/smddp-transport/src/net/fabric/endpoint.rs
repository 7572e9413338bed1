//! One process's endpoints, for all its groups.
//!
//! An endpoint costs queue pairs, of which a device has few, so groups share it. Their messages carry the receiver's
//! number for the group. Flow is bounded by *credits* between two processes: a peer may have as many messages under way to
//! this one as it has credits, for each of which a receive buffer is posted; so neither the receive queue nor the
//! completion queue can overrun. A peer has a few credits from the beginning, in a large job one. Whoever sends to a peer for
//! the first time, or hears from it, *opens* its window: the message carries the credits for the rest. So what is posted
//! follows from the peers in use.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::pair::Pair;
use super::queues::{PINGS, Queues, ReceiveQueue, first, least, shape};
use super::rail::{Context, Event, Rail, RailLimits};
use super::registration::RegisteredStaging;
use super::send_buffers::Buffers;
use super::slab::Slab;
use super::transfers::{Grant, PayloadOffer, PendingTransfer};
use crate::net::wire::Ticket;

/// Where a rank of a group can be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricAddress {
    /// The process's engine.
    engine: u64,
    /// Its number for the group.
    group: u32,
    /// Messages that a peer may send it before it is heard of, and bytes of the largest.
    first: u32,
    message: u32,
    /// The provider's addresses, by rail.
    rails: Vec<Vec<u8>>,
    /// "efa": two ends must have the same.
    provider: String,
}

#[cfg(any(test, fuzzing))]
impl FabricAddress {
    pub(crate) fn group(&self) -> u32 {
        self.group
    }

    /// As another engine's card would have it.
    pub(crate) fn elsewhere(&self, engine: u64, first: u32, message: u32) -> Self {
        Self { engine, first, message, ..self.clone() }
    }
}

#[derive(Clone, Copy)]
pub(super) enum Operation {
    Receive { buffer: u32, rail: usize },
    Send { buffer: u32, peer: usize },
    Read { peer: usize, rail: usize, group: u32, rank: u32, seq: u64 },
    Write { peer: usize, rail: usize, offer: u64 },
}

/// Another process.
#[derive(Default)]
pub(super) struct RemoteEndpoint {
    /// By my rails; empty until its address is known.
    pub(super) to: Vec<u64>,
    pub(super) message: usize,
    /// It is in use: its window is open, with receive buffers for all of it.
    pub(super) opened: bool,
    /// Something came from it, so it has opened its window for this process.
    pub(super) heard: bool,
    /// Messages it can take now.
    pub(super) credits: u32,
    /// Messages of its that were taken and that it does not know of.
    pub(super) pending_release: u32,
    pub(super) outgoing: VecDeque<Vec<u8>>,
    /// Offers of its that are fetched, to be told.
    pub(super) fetched: Vec<u64>,
    /// Sends under way.
    pub(super) sending: usize,
    pub(super) broken: Option<String>,
    /// Pings that are not answered yet; when the last one went.
    pub(super) pinged: u32,
    pub(super) ping: Option<Instant>,
    /// Something went to it, or came from it; since when it could not be pinged, though nothing is under way to it.
    pub(super) met: bool,
    pub(super) mute: Option<Instant>,
    /// Pings of its to be answered.
    pub(super) pongs: u32,
    /// Whether it is on the list of those with something to do.
    pub(super) listed: bool,
}

/// A rank of a group, in another process.
pub(super) struct Peer {
    pub(super) peer: usize,
    /// Its number for the group.
    pub(super) group: u32,
    /// Number of the next ordered message to it.
    pub(super) next: u64,
}

pub(super) struct EndpointGroup {
    pub(super) me: u32,
    pub(super) size: usize,
    /// Ranks that will write to this one, as far as was known at first.
    pub(super) expected: usize,
    /// By rank; empty before `connect`.
    pub(super) members: Vec<Option<Peer>>,
    pub(super) pairs: HashMap<u32, Pair>,
    /// Ranks from whom frames wait.
    pub(super) waiting: VecDeque<u32>,
    pub(super) sent: Vec<Ticket>,
    /// Offers that nobody has fetched yet, and operations that write into my memory.
    pub(super) offers: usize,
    pub(super) moving: usize,
    doorbell: Option<OwnedFd>,
    rung: bool,
}

impl EndpointGroup {
    /// Wakes whoever sleeps for this group: another group's owner has moved it on.
    pub(super) fn ring(&mut self) {
        if !self.rung
            && let Some(doorbell) = &self.doorbell
        {
            self.rung = rustix::io::write(doorbell, &1u64.to_ne_bytes()).is_ok();
        }
    }

    pub(super) fn hush(&mut self) {
        if std::mem::take(&mut self.rung)
            && let Some(doorbell) = &self.doorbell
        {
            let _ = rustix::io::read(doorbell, &mut [0u8; 8]);
        }
    }
}

pub(crate) struct FabricEndpoint {
    pub(super) rails: Vec<Box<dyn Rail>>,
    pub(super) limits: RailLimits,
    name: String,
    pub(super) id: u64,
    pub(crate) staging: RegisteredStaging,
    pub(super) window: u32,
    /// Messages of a peer that is not in use yet.
    pub(super) first: u32,
    pub(super) message: usize,
    /// By rail.
    pub(super) inboxes: Vec<ReceiveQueue>,
    pub(super) sends: Buffers,
    pub(super) ops: Slab<Operation>,
    /// Sends, reads and writes under way, by rail.
    pub(super) busy: Vec<usize>,
    /// How often each rail had no room since the last poll.
    pub(super) refused: Vec<u32>,
    pub(super) peers: Vec<RemoteEndpoint>,
    by_id: HashMap<u64, usize>,
    pub(super) groups: HashMap<u32, EndpointGroup>,
    next_group: u32,
    /// Peers with something to do.
    pub(super) active: VecDeque<usize>,
    pub(super) todo: VecDeque<PendingTransfer>,
    pub(super) offers: Slab<PayloadOffer>,
    pub(super) grants: Slab<Grant>,
    /// Numbers of writes that are still to come to this process.
    pub(super) numbers: usize,
    /// Turns the rails for payloads that take only one.
    pub(super) turn: usize,
    pub(super) events: Vec<Event>,
    pub(super) dead: Option<String>,
    /// Messages without the magic number, which were dropped.
    pub(super) foreign: u64,
    forks: u32,
    #[cfg(test)]
    pub(crate) careless: Option<ProtocolError>,
}

/// A rule of the fabric that the engine breaks, to see that somebody notices.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProtocolError {
    /// Takes messages in the order in which they come.
    Order,
    /// Sends without credit.
    Window,
    /// Gives no descriptor with its memory.
    Desc,
    /// Takes remote addresses for offsets.
    Address,
    /// Takes the key it would have chosen itself.
    Key,
    /// Sends messages of any size.
    Size,
    /// Reads and writes any size at once.
    Cap,
    /// Tries again at once where a queue is full.
    Again,
    /// Writes where the device does not.
    Writes,
    /// Takes the first write's number for all of them.
    Counting,
    /// Notes its peers on the first rail alone.
    Book,
    /// Starts as many operations as the queue takes, however many completions it takes.
    Completions,
}

/// A peer that was reached before, and to which nothing can be sent for so long though nothing is under way to it.
const MUTE: Duration = Duration::from_secs(3);
/// Rails are not asked again before the next poll after so many refusals. Not after the first: it may be for one peer
/// alone, to which a connection is being made.
const REFUSALS: u32 = 8;
/// Between two pings.
pub(super) const PING: Duration = Duration::from_millis(200);

impl FabricEndpoint {
    /// `peers`: of the largest group to be expected; `budget`: bytes for receive buffers, kept as far as can be.
    pub(crate) fn new<R: Rail + 'static>(
        name: String,
        rails: Vec<R>,
        staging: RegisteredStaging,
        peers: usize,
        budget: usize,
    ) -> Result<Self, String> {
        let boxed = rails.into_iter().map(|rail| Box::new(rail) as Box<dyn Rail>).collect::<Vec<_>>();
        let limits = boxed.iter().map(|rail| rail.limits()).reduce(RailLimits::both);
        let limits = limits.ok_or_else(|| format!("{name} has no device"))?;
        let rails = boxed.len();
        let (window, message) = shape(&limits, rails, peers.max(1), budget);
        Ok(Self {
            name,
            limits,
            id: u64::from_le_bytes(crate::process::random()),
            staging,
            window,
            first: first(&limits, peers.max(1), window),
            message,
            inboxes: (0..rails).map(|rail| ReceiveQueue::new(rail, message)).collect(),
            sends: Buffers::new(message),
            ops: Slab::default(),
            busy: vec![0; rails],
            refused: vec![0; rails],
            peers: Vec::new(),
            by_id: HashMap::new(),
            groups: HashMap::new(),
            next_group: 0,
            active: VecDeque::new(),
            todo: VecDeque::new(),
            offers: Slab::default(),
            grants: Slab::default(),
            numbers: 0,
            turn: 0,
            events: Vec::new(),
            dead: None,
            foreign: 0,
            forks: crate::fork::generation(),
            rails: boxed,
            #[cfg(test)]
            careless: None,
        })
    }

    pub(crate) fn name(&self) -> String {
        let rails = self.busy.len();
        format!("fabric {}, {rails} rail{}", self.name, if rails == 1 { "" } else { "s" })
    }

    #[cfg(test)]
    pub(super) fn breaks(&self, rule: ProtocolError) -> bool {
        self.careless == Some(rule)
    }

    /// A new group of `size` ranks, of which up to `expected` are in other processes and reached through here.
    /// From now on they may send.
    pub(crate) fn prepare(
        &mut self,
        me: usize,
        size: usize,
        expected: usize,
    ) -> Result<(FabricAddress, u32), String> {
        let number = self.next_group;
        self.next_group += 1;
        let doorbell = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
        );
        let group = EndpointGroup {
            me: me as u32,
            size,
            expected,
            members: Vec::new(),
            pairs: HashMap::new(),
            waiting: VecDeque::new(),
            sent: Vec::new(),
            offers: 0,
            moving: 0,
            doorbell: doorbell.ok(),
            rung: false,
        };
        self.groups.insert(number, group);
        if let Err(reason) = self.want() {
            self.groups.remove(&number);
            return Err(reason);
        }
        let address = FabricAddress {
            engine: self.id,
            group: number,
            first: self.first,
            message: self.message as u32,
            rails: self.rails.iter().map(|rail| rail.address()).collect(),
            provider: self.name.split(' ').next().unwrap_or_default().to_owned(),
        };
        Ok((address, number))
    }

    /// The ranks of a prepared group, by rank; `None`: not reached through here.
    pub(crate) fn connect(&mut self, number: u32, addresses: &[Option<FabricAddress>]) -> Result<(), String> {
        let mut members = Vec::with_capacity(addresses.len());
        for address in addresses {
            members.push(match address {
                Some(address) => Some(Peer { peer: self.meet(address)?, group: address.group, next: 0 }),
                None => None,
            });
        }
        let Some(group) = self.groups.get_mut(&number) else { return Err("no such group".to_owned()) };
        group.members = members;
        group.expected = 0;
        self.want()
    }

    /// The process behind an address, noted on all rails.
    fn meet(&mut self, address: &FabricAddress) -> Result<usize, String> {
        let mine = self.name.split(' ').next().unwrap_or_default();
        if address.provider != mine || address.rails.is_empty() {
            return Err(format!("this rank's fabric is {mine}, the other's is {}", address.provider));
        }
        if (address.message as usize) < least(self.busy.len()) {
            return Err(format!(
                "its card says that messages have {} bytes, too few for any",
                address.message
            ));
        }
        let peer = self.peer(address.engine);
        if self.peers[peer].to.is_empty() {
            let mut to = Vec::with_capacity(self.busy.len());
            for rail in 0..self.busy.len() {
                #[cfg(test)]
                if rail > 0 && self.breaks(ProtocolError::Book) {
                    to.push(0);
                    continue;
                }
                // Also where nothing is sent from here: a device serves only initiators that it knows.
                to.push(self.rails[rail].insert(&address.rails[rail % address.rails.len()])?);
            }
            let known = &mut self.peers[peer];
            known.to = to;
            known.credits = known.credits.saturating_add(address.first);
            known.message = (address.message as usize).min(self.message);
        }
        // It may have been heard before it was known.
        self.list(peer);
        Ok(peer)
    }

    pub(super) fn peer(&mut self, engine: u64) -> usize {
        *self.by_id.entry(engine).or_insert_with(|| {
            self.peers.push(RemoteEndpoint::default());
            self.peers.len() - 1
        })
    }

    pub(super) fn local(&self, buffers: &Buffers, buffer: u32, bytes: usize) -> super::rail::LocalMemory {
        #[allow(unused_mut, reason = "changed in tests alone")]
        let mut local = buffers.local(buffer, bytes);
        #[cfg(test)]
        if self.breaks(ProtocolError::Desc) {
            local.desc = 0;
        }
        local
    }

    /// Operations that may be under way on a rail.
    pub(super) fn operations(&self) -> usize {
        #[cfg(test)]
        if self.breaks(ProtocolError::Completions) {
            return self.limits.operations;
        }
        Queues::new(&self.limits).operations
    }

    /// Nothing works any more.
    pub(super) fn die(&mut self, reason: &str) {
        if self.dead.is_none() {
            self.dead = Some(reason.to_owned());
        }
        for peer in 0..self.peers.len() {
            self.lose(peer, reason);
        }
    }

    /// A peer cannot be reached any more. What was sent to it has no reader.
    pub(super) fn lose(&mut self, peer: usize, reason: &str) {
        let p = &mut self.peers[peer];
        if p.broken.is_some() {
            return;
        }
        p.broken = Some(reason.to_owned());
        p.outgoing.clear();
        p.fetched.clear();
        for offer in self.offers.drain_where(|offer| offer.peer == peer) {
            self.offer_over(&offer);
        }
        self.give_up(|grant| grant.peer == peer);
        for group in self.groups.values_mut() {
            group.ring();
        }
    }

    /// A group is dead: nobody waits for what is still to be written to it.
    pub(crate) fn abandon(&mut self, number: u32) {
        self.give_up(|grant| grant.group == number);
    }

    pub(crate) fn close(&mut self, number: u32) {
        self.groups.remove(&number);
        self.offers.drain_where(|offer| offer.group == number);
        self.abandon(number);
        // Buffers that nobody needs any more are not posted again.
        let _ = self.want();
    }

    /// Whether all that a group sent is out of this process's hands, and nothing writes into its memory.
    pub(crate) fn drained(&self, number: u32) -> bool {
        let Some(group) = self.groups.get(&number) else { return true };
        group.offers == 0 && group.moving == 0 && self.messages_drained(number)
    }

    /// Whether all messages to a group's members are out of this process's hands.
    pub(crate) fn messages_drained(&self, number: u32) -> bool {
        let Some(group) = self.groups.get(&number) else { return true };
        group.members.iter().flatten().all(|member| {
            let peer = &self.peers[member.peer];
            peer.broken.is_some() || peer.outgoing.is_empty() && peer.fetched.is_empty() && peer.sending == 0
        })
    }

    /// A rank waits for another. A message to it shows whether it can still be reached. `elsewhere`: another way tells of its
    /// end, and of its host's; then a peer to which nothing can be sent is only busy, or stopped.
    pub(crate) fn watch(&mut self, number: u32, rank: usize, elsewhere: bool, now: Instant) {
        let member = self.groups.get(&number).and_then(|g| g.members.get(rank)?.as_ref());
        let Some(peer) = member.map(|m| m.peer) else { return };
        let p = &self.peers[peer];
        // A peer that is busy with other things answers late. Two, because the first one to a process that is gone
        // may get as far as a socket's buffer.
        if p.pinged >= PINGS || p.sending > 0 || p.ping.is_some_and(|at| now.duration_since(at) < PING) {
            return;
        }
        // Its first message has arrived there; the answer takes as long as its process is busy with other things.
        if !p.heard && p.credits == 0 && p.met {
            return;
        }
        if self.ping(peer, now) {
            self.peers[peer].mute = None;
            return;
        }
        // Some providers lose a connection without a word, and then ask for patience for ever.
        let p = &mut self.peers[peer];
        if !elsewhere && p.met && p.broken.is_none() && now.duration_since(*p.mute.get_or_insert(now)) > MUTE
        {
            self.lose(peer, "the connection to it is gone");
        }
    }

    /// Whether a rail may be asked for room: where it was refused often, a poll comes first.
    pub(super) fn open(&self, rail: usize) -> bool {
        self.refused[rail] < REFUSALS
    }

    /// (rank, why) of a group's ranks that cannot be reached.
    pub(crate) fn broken(&self, number: u32) -> Vec<(usize, String)> {
        let Some(group) = self.groups.get(&number) else { return Vec::new() };
        let members = group.members.iter().enumerate();
        members.filter_map(|(rank, m)| Some((rank, self.peers[m.as_ref()?.peer].broken.clone()?))).collect()
    }

    /// See `Wire::interest`.
    pub(crate) fn interest(&mut self, number: u32, fds: &mut Vec<(RawFd, i16)>) -> bool {
        let Some(group) = self.groups.get(&number) else { return false };
        let Some(doorbell) = &group.doorbell else { return false };
        if !group.sent.is_empty() || group.rung {
            return false;
        }
        fds.push((doorbell.as_raw_fd(), libc::POLLIN));
        self.rails.iter_mut().all(|rail| {
            let fd = rail.interest();
            fds.extend(fd.map(|fd| (fd, libc::POLLIN)));
            fd.is_some()
        })
    }

    pub(super) fn context(&mut self, op: Operation) -> Context {
        self.ops.insert(op)
    }
}

impl Drop for FabricEndpoint {
    fn drop(&mut self) {
        if self.forks != crate::fork::generation() {
            // The parent's endpoints: closing them here could talk to its devices.
            std::mem::forget(std::mem::take(&mut self.rails));
        }
    }
}
