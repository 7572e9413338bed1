//! Fabric endpoints of one process, shared by all its groups.
//!
//! An endpoint costs queue pairs, of which a device has few, so all groups share it. Each message carries the receiver's group
//! number. *Credits* between two processes bound the flow. A peer may have one message in flight per credit, and each credit has a
//! posted receive buffer. Neither the receive queue nor the completion queue can therefore overrun.
//!
//! A peer starts with a few credits, in a large job with one. A process *opens the window* of a peer when it first sends to the
//! peer or receives from it: the message carries the remaining credits. The number of posted buffers thus follows the peers in
//! use.

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::group::{EndpointGroup, Peer};
use super::queues::{Queues, ReceiveQueue, choose_window, initial_credits, min_message};
use super::rail::{Completion, Context, Rail, RailLimits};
use super::registration::RegisteredStaging;
use super::send_buffers::Buffers;
use super::slab::Slab;
use super::transfers::{Grant, PayloadOffer, PendingTransfer};

/// Fabric address of one rank of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricAddress {
    /// Id of the process's endpoint.
    endpoint: u64,
    /// Group number at that endpoint.
    group: u32,
    /// Messages that a peer may send before its window is open, and the size of the largest message in bytes.
    initial_credits: u32,
    message: u32,
    /// Provider addresses, by rail.
    rails: Vec<Vec<u8>>,
    /// Provider name, for example "efa"; it must be equal on all ranks.
    provider: String,
}

#[cfg(any(test, feature = "testing"))]
impl FabricAddress {
    /// Returns the group number at this endpoint.
    pub fn group(&self) -> u32 {
        self.group
    }

    /// Returns this address with the values of another endpoint.
    pub fn elsewhere(&self, endpoint: u64, initial_credits: u32, message: u32) -> Self {
        Self { endpoint, initial_credits, message, ..self.clone() }
    }
}

/// Posted operation, identified by its completion context.
#[derive(Clone, Copy)]
pub(super) enum Operation {
    Receive { buffer: u32, rail: usize },
    Send { buffer: u32, peer: usize },
    Read { peer: usize, rail: usize, group: u32, rank: u32, seq: u64 },
    Write { peer: usize, rail: usize, offer: u64 },
}

/// State of another process.
#[derive(Default)]
pub(super) struct RemoteEndpoint {
    /// Address handles by local rail; empty until the peer's address is inserted.
    pub(super) to: Vec<u64>,
    pub(super) message: usize,
    /// Set once this process has opened the peer's window, with receive buffers for all of it.
    pub(super) window_opened: bool,
    /// Set once a message of the peer was received: the peer has then opened this process's window.
    pub(super) peer_window_open: bool,
    /// Messages that the peer can receive now.
    pub(super) credits: u32,
    /// Received messages of the peer whose credits were not returned yet.
    pub(super) pending_release: u32,
    pub(super) outgoing: VecDeque<Vec<u8>>,
    /// Completed offers of the peer that it has not been notified of.
    pub(super) fetched: Vec<u64>,
    /// Sends in flight.
    pub(super) sending: usize,
    pub(super) broken: Option<String>,
    /// Unanswered pings, and the time of the last ping.
    pub(super) unanswered_pings: u32,
    pub(super) last_ping: Option<Instant>,
    /// Set once a message to the peer was sent successfully.
    pub(super) contacted: bool,
    /// Time since which pings cannot be posted although nothing is in flight to the peer.
    pub(super) unreachable_since: Option<Instant>,
    /// Pings of the peer to be answered.
    pub(super) pending_pongs: u32,
    /// Set while the peer is in the list of active peers.
    pub(super) listed: bool,
}

/// Endpoint of a process: its rails, peers, groups and pending transfers.
pub struct FabricEndpoint {
    pub(super) rails: Vec<Box<dyn Rail>>,
    pub(super) limits: RailLimits,
    name: String,
    pub(super) id: u64,
    pub(crate) staging: RegisteredStaging,
    pub(super) window: u32,
    /// Initial credits of a peer whose window is not open.
    pub(super) initial_credits: u32,
    pub(super) message: usize,
    /// Receive queues, by rail.
    pub(super) receive_queues: Vec<ReceiveQueue>,
    pub(super) sends: Buffers,
    pub(super) ops: Slab<Operation>,
    /// Sends, reads and writes in flight, by rail.
    pub(super) busy: Vec<usize>,
    /// Number of `QueueFull` results since the last poll, by rail.
    pub(super) rejections: Vec<u32>,
    pub(super) peers: Vec<RemoteEndpoint>,
    by_id: HashMap<u64, usize>,
    pub(super) groups: HashMap<u32, EndpointGroup>,
    next_group: u32,
    /// Peers with pending work.
    pub(super) active: VecDeque<usize>,
    pub(super) pending_transfers: VecDeque<PendingTransfer>,
    pub(super) offers: Slab<PayloadOffer>,
    pub(super) grants: Slab<Grant>,
    /// Number of writes with immediate data that peers may still complete.
    pub(super) immediates: usize,
    /// Round-robin counter that spreads transfers over the rails.
    pub(super) next_rail: usize,
    pub(super) events: Vec<Completion>,
    pub(super) failure: Option<String>,
    /// Number of received messages without the magic number, which were dropped.
    pub(super) foreign: u64,
    forks: u32,
    #[cfg(test)]
    pub(crate) injected_error: Option<ProtocolError>,
}

/// Protocol rule that a test makes the endpoint break, to check that the break is detected.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProtocolError {
    /// Accepts messages in order of arrival.
    Order,
    /// Sends without credit.
    Window,
    /// Posts operations without the memory descriptor.
    Desc,
    /// Uses offsets instead of virtual addresses for remote memory.
    Address,
    /// Uses its requested key instead of the provider's.
    Key,
    /// Sends messages of any size.
    Size,
    /// Posts reads and writes of any size.
    Cap,
    /// Retries a full queue without a poll.
    Again,
    /// Posts writes to a device without native writes.
    Writes,
    /// Counts the first write of a payload as all of them.
    Counting,
    /// Inserts peer addresses on the first rail only.
    AddressVector,
    /// Fills the send queue regardless of the completion queue's size.
    Completions,
}

/// Number of `QueueFull` results after which a rail is not used until the next poll. More than one, because a single result may
/// concern one peer only, to which the provider is still connecting.
const MAX_REJECTIONS: u32 = 8;

impl FabricEndpoint {
    /// Creates an endpoint over `rails`, without peers or groups. `peers`: number of peers of the largest expected group. `budget`:
    /// target size of all receive buffers, in bytes.
    ///
    /// # Errors
    /// `rails` is empty.
    pub fn new<R: Rail + 'static>(
        name: String,
        rails: Vec<R>,
        staging: RegisteredStaging,
        peers: usize,
        budget: usize,
    ) -> Result<Self, String> {
        let boxed = rails.into_iter().map(|rail| Box::new(rail) as Box<dyn Rail>).collect::<Vec<_>>();
        let limits = boxed.iter().map(|rail| rail.limits()).reduce(RailLimits::common);
        let limits = limits.ok_or_else(|| format!("{name} has no device"))?;
        let rails = boxed.len();
        let (window, message) = choose_window(&limits, rails, peers.max(1), budget);
        Ok(Self {
            name,
            limits,
            id: u64::from_le_bytes(smddp_base::random::bytes()),
            staging,
            window,
            initial_credits: initial_credits(&limits, peers.max(1), window),
            message,
            receive_queues: (0..rails).map(|rail| ReceiveQueue::new(rail, message)).collect(),
            sends: Buffers::new(message),
            ops: Slab::default(),
            busy: vec![0; rails],
            rejections: vec![0; rails],
            peers: Vec::new(),
            by_id: HashMap::new(),
            groups: HashMap::new(),
            next_group: 0,
            active: VecDeque::new(),
            pending_transfers: VecDeque::new(),
            offers: Slab::default(),
            grants: Slab::default(),
            immediates: 0,
            next_rail: 0,
            events: Vec::new(),
            failure: None,
            foreign: 0,
            forks: smddp_base::fork::generation(),
            rails: boxed,
            #[cfg(test)]
            injected_error: None,
        })
    }

    pub(crate) fn name(&self) -> String {
        let rails = self.busy.len();
        format!("fabric {}, {rails} rail{}", self.name, if rails == 1 { "" } else { "s" })
    }

    #[cfg(test)]
    pub(super) fn breaks(&self, rule: ProtocolError) -> bool {
        self.injected_error == Some(rule)
    }

    /// Creates a group of `size` ranks, of which up to `expected` are in other processes and use this endpoint. They may send
    /// from now on.
    pub(crate) fn prepare(
        &mut self,
        me: usize,
        size: usize,
        expected: usize,
    ) -> Result<(FabricAddress, u32), String> {
        let number = self.next_group;
        self.next_group += 1;
        self.groups.insert(number, EndpointGroup::new(me as u32, size, expected));
        if let Err(reason) = self.resize_receive_queues() {
            self.groups.remove(&number);
            return Err(reason);
        }
        let address = FabricAddress {
            endpoint: self.id,
            group: number,
            initial_credits: self.initial_credits,
            message: self.message as u32,
            rails: self.rails.iter().map(|rail| rail.address()).collect(),
            provider: self.name.split(' ').next().unwrap_or_default().to_owned(),
        };
        Ok((address, number))
    }

    /// Connects a prepared group. `addresses`: by rank; `None` for ranks that do not use this endpoint.
    pub(crate) fn connect(&mut self, number: u32, addresses: &[Option<FabricAddress>]) -> Result<(), String> {
        let mut members = Vec::with_capacity(addresses.len());
        for address in addresses {
            members.push(match address {
                Some(address) => Some(Peer { peer: self.add_peer(address)?, group: address.group, next: 0 }),
                None => None,
            });
        }
        let Some(group) = self.groups.get_mut(&number) else { return Err("no such group".to_owned()) };
        group.members = members;
        group.expected = 0;
        self.resize_receive_queues()
    }

    /// Inserts a peer's address on all rails; returns the peer's index.
    fn add_peer(&mut self, address: &FabricAddress) -> Result<usize, String> {
        let mine = self.name.split(' ').next().unwrap_or_default();
        if address.provider != mine || address.rails.is_empty() {
            return Err(format!(
                "fabric providers differ: {mine} on this rank, {} on the other rank",
                address.provider
            ));
        }
        if (address.message as usize) < min_message(self.busy.len()) {
            return Err(format!(
                "invalid fabric address: a message size of {} bytes is below the minimum of {} bytes",
                address.message,
                min_message(self.busy.len())
            ));
        }
        let peer = self.peer(address.endpoint);
        if self.peers[peer].to.is_empty() {
            let mut to = Vec::with_capacity(self.busy.len());
            for rail in 0..self.busy.len() {
                #[cfg(test)]
                if rail > 0 && self.breaks(ProtocolError::AddressVector) {
                    to.push(0);
                    continue;
                }
                // Required even without sends from this process: a device serves one-sided operations of known initiators only.
                to.push(self.rails[rail].insert(&address.rails[rail % address.rails.len()])?);
            }
            let known = &mut self.peers[peer];
            known.to = to;
            known.credits = known.credits.saturating_add(address.initial_credits);
            known.message = (address.message as usize).min(self.message);
        }
        // The peer may have sent messages before its address was known.
        self.mark_active(peer);
        Ok(peer)
    }

    pub(super) fn peer(&mut self, endpoint: u64) -> usize {
        *self.by_id.entry(endpoint).or_insert_with(|| {
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

    /// Maximum number of operations in flight on a rail.
    pub(super) fn operations(&self) -> usize {
        #[cfg(test)]
        if self.breaks(ProtocolError::Completions) {
            return self.limits.operations;
        }
        Queues::new(&self.limits).operations
    }

    /// See `FabricWire::check_checksums`.
    pub(crate) fn check_checksums(&mut self, number: u32) {
        if let Some(group) = self.groups.get_mut(&number) {
            group.checks = true;
        }
    }

    /// Stops waiting for further writes to an aborted group.
    pub(crate) fn abandon(&mut self, number: u32) {
        self.drop_grants(|grant| grant.group == number);
    }

    pub(crate) fn close(&mut self, number: u32) {
        self.groups.remove(&number);
        self.offers.drain_where(|offer| offer.group == number);
        self.abandon(number);
        // Receive buffers that are not needed any more are not posted again.
        let _ = self.resize_receive_queues();
    }

    /// Returns true if all sends of a group are complete and no operation writes into its memory.
    pub(super) fn is_drained(&self, number: u32) -> bool {
        let Some(group) = self.groups.get(&number) else { return true };
        group.offers == 0 && group.transfers == 0 && self.messages_sent(number)
    }

    /// Returns true if all messages to the members of a group are sent.
    pub(super) fn messages_sent(&self, number: u32) -> bool {
        let Some(group) = self.groups.get(&number) else { return true };
        group.members.iter().flatten().all(|member| {
            let peer = &self.peers[member.peer];
            peer.broken.is_some() || peer.outgoing.is_empty() && peer.fetched.is_empty() && peer.sending == 0
        })
    }

    /// Returns true if operations may be posted on a rail; false after many `QueueFull` results until the next poll.
    pub(super) fn accepts_work(&self, rail: usize) -> bool {
        self.rejections[rail] < MAX_REJECTIONS
    }

    /// See `Wire::wait_sources`.
    pub(super) fn wait_sources(&mut self, number: u32, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.groups.get(&number).is_some_and(|group| group.wait_source(fds))
            && self.rails.iter_mut().all(|rail| {
                let fd = rail.wait_sources();
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
        if self.forks != smddp_base::fork::generation() {
            // These are the parent's endpoints: closing them here could access its devices.
            std::mem::forget(std::mem::take(&mut self.rails));
        }
    }
}
