//! Point-to-point messages between ranks of different nodes.
//!
//! The sender announces each message. The payload of a short (eager) message follows at once; the receiver stores it until it is
//! requested, within a limit per sender. A longer message waits until the receiver requests it and has slots for its fragments.
//! No message therefore blocks another message or a collective. If the wire can send from and receive into any memory, messages
//! are sent from the sender's buffer. Requested messages are then received in place, in the receiver's buffer.

#[allow(unsafe_code)]
mod transport;

use std::collections::{BTreeMap, VecDeque};

use smddp_base::{Envelope, MessageId};
use smddp_net::frame::{Frame, Kind};
use smddp_net::wire::{INLINE_PAYLOAD, Payload, Target, Ticket};
use smddp_process::{Region, StagingMemory};

/// Largest payload of one fragment, in bytes.
const FRAGMENT: usize = 128 << 10;
/// Largest eager message, in bytes: it follows its announcement at once.
const EAGER_LIMIT: usize = 64 << 10;
/// Maximum number of fragments of one message in flight.
const MAX_IN_FLIGHT: u64 = 4;
/// Limit of eager messages that a receiver stores for one sender, in bytes.
const EAGER_CREDIT: u64 = 8 << 20;
/// Released bytes of eager messages per credit frame: a credit frame for each message would cost as much as the message.
const CREDIT_BATCH: u64 = EAGER_CREDIT / 8;
/// Maximum number of announced messages of one sender that the receiver has not requested: a sender beyond it is out of control.
const MAX_ANNOUNCED: usize = 1 << 20;
/// Value of `Frame::channel` in a `Ready` frame: eager messages of `total` bytes were released.
const EAGER_RELEASED: u32 = 1;

/// Outgoing message.
struct SendingMessage {
    to: usize,
    bytes: usize,
    /// Set if the message was announced as eager.
    eager: bool,
    region: Option<Region>,
    /// Source of a zero-copy send, instead of `region`: the sender's buffer.
    source: Option<*const u8>,
    granted: u64,
    sent: u64,
    busy: [u32; MAX_IN_FLIGHT as usize],
    closed: bool,
}

/// Target of a message that is received in place, without slots.
enum RecvTarget {
    At(*mut u8),
    /// The receiver has released its buffer: the rest of the message is discarded.
    Discarded,
}

/// Incoming message.
struct ReceivingMessage {
    bytes: usize,
    eager: bool,
    region: Option<Region>,
    recv_target: Option<RecvTarget>,
    /// Set once delivery was deferred by one poll, so that a waiting receiver can provide a target.
    deferred: bool,
    /// Number of fragments with an assigned target, received, and released. A fragment is released only after it was received,
    /// so the region is not freed while the wire writes to it.
    placed: u64,
    received: u64,
    released: u64,
}

impl ReceivingMessage {
    fn fragments(&self) -> u64 {
        if self.eager { 1 } else { self.bytes.div_ceil(FRAGMENT) as u64 }
    }

    /// Size of the next fragment, in bytes.
    fn next_bytes(&self) -> usize {
        if self.eager { self.bytes } else { (self.bytes - self.placed as usize * FRAGMENT).min(FRAGMENT) }
    }
}

/// State of all messages between this rank and ranks of other nodes.
pub(super) struct RemoteMessages {
    staging: StagingMemory,
    /// Set if the wire can send from and receive into any memory.
    in_place: bool,
    next: u64,
    outgoing: BTreeMap<u64, SendingMessage>,
    /// Bytes of this rank's eager messages that each peer has not released yet.
    unreceived: Vec<u64>,
    /// Ranks to which an eager message was sent: its confirmation would need another message.
    short_sent: Vec<bool>,
    /// By peer: released bytes of eager messages not yet returned as credit.
    unannounced: Vec<u64>,
    announced: Vec<VecDeque<(Envelope, MessageId)>>,
    incoming: BTreeMap<MessageId, ReceivingMessage>,
    /// By peer: set if the last request found no announced message.
    waiting: Vec<bool>,
    /// Set if the last request for any peer found no announced message.
    waiting_any: bool,
    due: VecDeque<QueuedMessage>,
}

/// Queued frame for a rank.
pub(super) struct QueuedMessage {
    pub(super) to: usize,
    pub(super) frame: Frame,
    pub(super) payload: Payload,
}

/// Queues a frame without a payload.
fn queue_control(due: &mut VecDeque<QueuedMessage>, to: usize, frame: Frame) {
    due.push_back(QueuedMessage { to, frame, payload: Payload::None });
}

impl RemoteMessages {
    pub(super) fn new(size: usize, staging: StagingMemory, in_place: bool) -> Self {
        Self {
            staging,
            in_place,
            next: 1,
            outgoing: BTreeMap::new(),
            unreceived: vec![0; size],
            unannounced: vec![0; size],
            short_sent: vec![false; size],
            announced: vec![VecDeque::new(); size],
            incoming: BTreeMap::new(),
            waiting: vec![false; size],
            waiting_any: false,
            due: VecDeque::new(),
        }
    }

    /// Removes and returns the next frame to send.
    pub(super) fn pop_queued(&mut self) -> Option<QueuedMessage> {
        self.due.pop_front()
    }

    /// Returns true if frames are queued or fragments of closed messages are in flight.
    pub(super) fn has_unsent(&self) -> bool {
        self.outgoing.values().any(|out| out.closed) || !self.due.is_empty()
    }

    /// Returns true if any frame is expected.
    pub(super) fn expects_frames(&self) -> bool {
        self.waiting_any || !self.outgoing.is_empty() || !self.incoming.is_empty()
    }

    /// Records the release of an eager message of `from`, and returns credit in batches.
    fn return_credit(&mut self, from: usize, bytes: u64) {
        self.unannounced[from] += bytes;
        if self.unannounced[from] >= CREDIT_BATCH {
            let total = std::mem::take(&mut self.unannounced[from]);
            queue_control(
                &mut self.due,
                from,
                Frame { channel: EAGER_RELEASED, total, ..Frame::new(Kind::Grant, 0) },
            );
        }
    }

    /// Ranks from which a frame is expected.
    pub(super) fn expected_ranks(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = self.outgoing.values().map(|out| out.to).collect();
        let requested =
            |incoming: &ReceivingMessage| incoming.region.is_some() || incoming.recv_target.is_some();
        ranks.extend(self.incoming.iter().filter(|(_, i)| requested(i)).map(|(message, _)| message.peer));
        ranks.extend(self.waiting.iter().enumerate().filter(|(_, waiting)| **waiting).map(|(rank, _)| rank));
        ranks
    }

    fn remove_finished(&mut self, stream: u64) {
        let done = |out: &mut SendingMessage| out.closed && out.busy.iter().all(|&busy| busy == 0);
        if self.outgoing.get_mut(&stream).is_some_and(done)
            && let Some(region) = self.outgoing.remove(&stream).and_then(|out| out.region)
        {
            self.staging.give(region);
        }
    }

    pub(super) fn sent(&mut self, ticket: Ticket) {
        let (stream, slot) = (ticket >> 8, (ticket & 0xff) as usize);
        if let Some(out) = self.outgoing.get_mut(&stream) {
            out.busy[slot] = out.busy[slot].saturating_sub(1);
        }
        self.remove_finished(stream);
    }

    pub(super) fn granted(&mut self, peer: usize, frame: &Frame) {
        if frame.channel == EAGER_RELEASED {
            self.unreceived[peer] = self.unreceived[peer].saturating_sub(frame.total);
        } else if let Some(out) = self.outgoing.get_mut(&frame.seq).filter(|out| out.to == peer) {
            out.granted = out.granted.max(frame.index);
        }
    }

    /// Records an announced message; the error describes a protocol violation.
    pub(super) fn announced(&mut self, peer: usize, frame: &Frame) -> Result<(), &'static str> {
        let envelope = Envelope { tag: frame.count, dtype: frame.what, bytes: frame.total };
        let eager = frame.index == Frame::FOLLOWS;
        if eager && envelope.bytes > EAGER_LIMIT as u64 || usize::try_from(envelope.bytes).is_err() {
            return Err("a message of an impossible size");
        }
        if self.announced[peer].len() >= MAX_ANNOUNCED {
            return Err("more than a million messages without a matching recv");
        }
        let message = MessageId::remote(peer, frame.seq);
        if self.incoming.contains_key(&message) {
            return Err("two messages with the same number");
        }
        self.announced[peer].push_back((envelope, message));
        if envelope.bytes > 0 {
            let incoming = ReceivingMessage {
                bytes: envelope.bytes as usize,
                eager,
                region: None,
                recv_target: None,
                deferred: false,
                placed: 0,
                received: 0,
                released: 0,
            };
            self.incoming.insert(message, incoming);
        }
        Ok(())
    }

    /// Returns the target of a fragment; `None`: no such fragment is expected.
    pub(super) fn target(&mut self, peer: usize, frame: &Frame) -> Option<Target> {
        let incoming = self.incoming.get_mut(&MessageId::remote(peer, frame.seq))?;
        let whole = incoming.eager || incoming.recv_target.is_some();
        let room = if whole { incoming.fragments() } else { incoming.released + MAX_IN_FLIGHT };
        let next = frame.index == incoming.placed && incoming.placed < incoming.fragments().min(room);
        if !next || frame.bytes != incoming.next_bytes() as u64 {
            return None;
        }
        match incoming.recv_target {
            Some(RecvTarget::At(at)) => {
                incoming.placed += 1;
                return Some(Target::At(at.wrapping_add(frame.index as usize * FRAGMENT)));
            }
            Some(RecvTarget::Discarded) => {
                incoming.placed += 1;
                return Some(Target::Discard);
            }
            // Copying up to INLINE_PAYLOAD bytes is faster than another poll.
            None if self.in_place
                && incoming.eager
                && incoming.bytes > INLINE_PAYLOAD
                && self.waiting[peer]
                && !incoming.deferred =>
            {
                incoming.deferred = true;
                return Some(Target::Later);
            }
            None => {}
        }
        if incoming.eager && incoming.region.is_none() {
            incoming.region = self.staging.take(incoming.bytes);
            // Memory becomes free when another message is released.
            if incoming.region.is_none() {
                return Some(Target::Later);
            }
        }
        // A longer message has its region before it is requested from the sender.
        let base = self.staging.address(incoming.region.as_ref()?);
        let slot = if incoming.eager { 0 } else { (frame.index % MAX_IN_FLIGHT) as usize * FRAGMENT };
        incoming.placed += 1;
        Some(Target::At(base.wrapping_add(slot)))
    }

    pub(super) fn arrived(&mut self, peer: usize, frame: &Frame) {
        if let Some(incoming) = self.incoming.get_mut(&MessageId::remote(peer, frame.seq))
            && incoming.received < incoming.placed
        {
            incoming.received += 1;
        }
    }

    /// Stops all use of the senders' and receivers' buffers: nothing more is sent from them, and further data for them is
    /// discarded.
    pub(super) fn release_user_buffers(&mut self) {
        self.due.retain(|due| due.frame.kind != Kind::Fragment);
        self.outgoing.values_mut().for_each(|out| out.source = None);
        for recv_target in self.incoming.values_mut().filter_map(|incoming| incoming.recv_target.as_mut()) {
            *recv_target = RecvTarget::Discarded;
        }
    }

    /// Leaks all regions: a device may still access them.
    pub(super) fn abandon(&mut self) {
        self.outgoing.clear();
        self.incoming.clear();
    }
}

impl Drop for RemoteMessages {
    fn drop(&mut self) {
        let sent = std::mem::take(&mut self.outgoing).into_values().filter_map(|out| out.region);
        let received =
            std::mem::take(&mut self.incoming).into_values().filter_map(|incoming| incoming.region);
        sent.chain(received).for_each(|region| self.staging.give(region));
    }
}

#[cfg(any(test, feature = "testing"))]
impl RemoteMessages {
    /// Returns true if these bytes are inside memory of a message.
    pub(super) fn owns(&self, at: *const u8, bytes: usize) -> bool {
        let regions = self.outgoing.values().filter_map(|out| out.region.as_ref());
        let mut regions =
            regions.chain(self.incoming.values().filter_map(|incoming| incoming.region.as_ref()));
        let targets = self.incoming.values().filter_map(|incoming| match incoming.recv_target {
            Some(RecvTarget::At(base)) => Some((base.cast_const(), incoming.bytes)),
            _ => None,
        });
        let mut own = targets.chain(self.outgoing.values().filter_map(|out| Some((out.source?, out.bytes))));
        let contains =
            |(base, size): (*const u8, usize)| at >= base && at.addr() + bytes <= base.addr() + size;
        own.any(contains) || regions.any(|region| self.staging.region_contains(region, at, bytes))
    }
}
