//! Inter-node channels and messages of one rank in a group.
//!
//! All ranks agree on a window. The reader of a channel has one slot per window entry, and the writer is at most one window
//! ahead of the reader. On a long window, the reader returns credits for several slots at a time. The writer needs its own slots
//! only where the wire does not copy payloads. Data for the operation in progress therefore always has a receive slot. Data for
//! later operations waits in the wire.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_base::fork;
use smddp_base::{CallFingerprint, Mismatch};
use smddp_net::frame::{ALL_CLASSES, Frame, Kind, payload_checksum};
use smddp_net::wire::{Payload, Ticket, Wire};
use smddp_process::{Endpoint, StagingMemory};
use smddp_tcp::straggler_query::StragglerQuery;
use smddp_tcp::{ProcessLiveness, Sideband};

pub use self::carrier::Carrier;
use self::state::{ChannelState, PeerRecord};
use super::layout::{ChannelProgress, RecvTarget, RemoteLayout};
use super::messages::{QueuedMessage, RemoteMessages};

mod carrier;
mod close;
mod health;
mod leave_notice;
#[allow(unsafe_code)]
mod state;
mod straggler_query;
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

/// Number of completed operations whose fingerprints are kept to check late frames.
const KEPT_FINGERPRINTS: usize = 64;
/// Slot base while no memory is allocated. Channels without data need no memory, but their slots still have an address.
const NO_ADDRESS: *mut u8 = std::ptr::dangling_mut();

/// Inter-node transport parts of a group.
pub(crate) struct RemoteParts {
    pub(crate) wire: Box<dyn Wire>,
    /// Sideband of this process: it answers queries for ranks that do not drive their groups.
    pub(crate) sideband: Option<Arc<Sideband>>,
    pub(crate) liveness: Option<ProcessLiveness>,
    /// Frames have checksums.
    pub(crate) checksums: bool,
}

/// Progress of the wait notice in the operation in progress.
#[derive(Default)]
enum WaitNotice {
    /// No wait was observed in this operation.
    #[default]
    Idle,
    /// Start of the wait.
    Waiting(Instant),
    Sent,
}

/// Inter-node channels of a group: the wire, and the state of this rank's channels and messages.
pub(crate) struct RemoteChannels {
    wire: Box<dyn Wire>,
    sideband: Option<Arc<Sideband>>,
    /// Liveness connections to the peers' TCP listeners, for wires that do not detect dead peers. libfabric providers report
    /// a dead peer late, or never while nothing is sent to it.
    liveness: Option<ProcessLiveness>,
    /// Query of ranks in progress.
    query: Option<StragglerQuery>,
    state: ChannelState,
    aborted: bool,
    /// Times of the first [`Self::leave`], and of the last one at which a connection attempt was in progress.
    leave_times: Option<(Instant, Instant)>,
    /// Ranks for which this rank waits outside of this group, until the next check for faults.
    watched: Vec<usize>,
    /// State for the operation in progress.
    wait_notice: WaitNotice,
    /// Set if calls for messages have sent frames since the last flush. The wire may have queued them.
    unflushed: bool,
    /// Frames have checksums.
    checksums: bool,
    forks: u32,
}

/// Credit frames that a reader sends per window.
const CREDITS_PER_WINDOW: u64 = 8;
/// Ticket bit of message fragments; other tickets name a slot of a collective.
const P2P: Ticket = 1 << 63;

impl RemoteChannels {
    /// `nonce`: number of the group in this process's staging pool.
    pub(crate) fn new(
        me: usize,
        size: usize,
        RemoteParts { wire, sideband, liveness, checksums }: RemoteParts,
        endpoint: Arc<Endpoint>,
        nonce: u64,
    ) -> Self {
        let staging = StagingMemory::new(endpoint, nonce);
        let state = ChannelState {
            me,
            messages: RemoteMessages::new(size, staging.sibling(), wire.capabilities().copies_payloads),
            staging,
            seq: 0,
            open: false,
            fingerprint: CallFingerprint::default(),
            base: NO_ADDRESS,
            layout: Arc::default(),
            flow: ChannelProgress::default(),
            recv_targets: Vec::new(),
            in_flight: 0,
            bytes_sent: 0,
            completed: VecDeque::new(),
            mismatch: None,
            aborted_from: None,
            peers: vec![PeerRecord::default(); size],
        };
        Self {
            wire,
            sideband,
            liveness,
            query: None,
            state,
            aborted: false,
            leave_times: None,
            watched: Vec::new(),
            wait_notice: WaitNotice::default(),
            unflushed: false,
            checksums,
            forks: fork::generation(),
        }
    }

    pub(crate) fn name(&self) -> String {
        let checked = if self.checksums { ", with checksums" } else { "" };
        format!("{}{checked}", self.wire.capabilities().name)
    }

    pub(crate) fn poll(&mut self) -> bool {
        self.wire.poll(&mut self.state) | self.send_queued()
    }

    /// Sends the frames of messages that the wire has queued, without a poll for incoming ones.
    pub(crate) fn flush(&mut self) {
        if std::mem::take(&mut self.unflushed) {
            self.wire.flush(&mut self.state);
        }
    }

    pub(crate) fn busy(&self) -> bool {
        self.state.in_flight > 0 || self.state.messages.has_unsent() || !self.wire.is_flushed(ALL_CLASSES)
    }

    /// Sends a frame. A borrowed payload is a slot, or the input of a call or message.
    fn send_frame(&mut self, to: usize, frame: &Frame, payload: Payload) {
        self.state.peers[to].contacted = true;
        self.state.peers[to].classes |= 1 << frame.class();
        let with_checksum;
        let mut frame = frame;
        if self.checksums && frame.checksum.is_none() {
            with_checksum = Frame { checksum: Some(checksum(frame, payload)), ..*frame };
            frame = &with_checksum;
        }
        // SAFETY: a slot belongs to a region that is kept until the ticket returns. The input of a call or message is kept until its
        // ticket returns or `release_user_buffers` runs. A copied payload is valid during this call.
        unsafe { self.wire.send(to, frame, payload) };
    }

    /// Sets the channels of the following operations.
    pub(crate) fn set_layout(&mut self, layout: &Arc<RemoteLayout>) {
        let state = &mut self.state;
        if Arc::ptr_eq(&state.layout, layout) {
            return;
        }
        state.layout = layout.clone();
        state.flow.reset(layout);
        for recv_channel in &layout.recvs {
            state.peers[recv_channel.spec.rank].contacted = true;
        }
    }

    /// Allocates the memory of the operation; returns false while the pool has none.
    pub(crate) fn reserve(&mut self) -> bool {
        self.state.staging.reserve(self.state.layout.bytes)
    }

    /// Begins operation `seq`. Its layout must be set and its memory reserved.
    pub(crate) fn begin(&mut self, seq: u64, fingerprint: CallFingerprint) {
        let state = &mut self.state;
        (state.seq, state.fingerprint, state.open) = (seq, fingerprint, true);
        self.wait_notice = WaitNotice::Idle;
        state.base = state.staging.base();
        state.flow.reset(&state.layout);
        state.recv_targets.clear();
        // An empty channel still sends its readers the fingerprint of this operation.
        for out in 0..self.state.layout.sends.len() {
            if self.state.layout.sends[out].messages == 0 {
                self.send_to_readers(out, 0, std::ptr::null(), 0);
            }
        }
    }

    /// Includes the operation in progress in the replies to straggler queries.
    pub(crate) fn publish_begun(&self) {
        if let Some(sideband) = &self.sideband {
            sideband.set_started(self.state.seq + 1);
        }
    }

    /// Sends message `index`, of `bytes` bytes, to all readers of a send channel.
    fn send_to_readers(&mut self, out: usize, index: u64, payload: *const u8, bytes: usize) {
        let (state, o) = (&self.state, &self.state.layout.sends[out]);
        let slot = index % o.slots;
        let mut frame = Frame {
            channel: o.channel as u32,
            index,
            bytes: bytes as u64,
            what: state.fingerprint.call,
            count: state.fingerprint.count,
            total: o.bytes,
            ..Frame::new(Kind::Data, state.seq)
        };
        let ticket = (out as u64) << 32 | slot;
        // Once for all readers.
        if self.checksums {
            frame.checksum = Some(checksum(&frame, Payload::Borrowed { at: payload, ticket }));
        }
        let (readers, busy_index) = (o.readers.len(), o.first_slot + slot as usize);
        self.state.in_flight += readers as u64;
        self.state.bytes_sent += (bytes * readers) as u64;
        self.state.flow.busy[busy_index] += readers as u32;
        for reader in 0..readers {
            let to = self.state.layout.sends[out].readers[reader];
            self.send_frame(to, &frame, Payload::Borrowed { at: payload, ticket });
        }
    }

    /// Returns the next send slot of a channel; `None` while the window or the slot is in use.
    pub(crate) fn free_slot(&mut self, out: usize) -> Option<*mut u8> {
        let (o, flow) = (&self.state.layout.sends[out], &self.state.flow);
        let sent = flow.sent[out];
        let readers = o.first_reader..o.first_reader + o.readers.len();
        let slowest = flow.read[readers].iter().copied().min().unwrap_or(sent);
        let slot = (sent % o.slots) as usize;
        let free = sent.saturating_sub(slowest) < o.window && flow.busy[o.first_slot + slot] == 0;
        free.then(|| self.state.base.wrapping_add(o.at + slot * o.slot_bytes))
    }

    pub(crate) fn publish(&mut self, out: usize, bytes: usize) {
        let (state, o) = (&self.state, &self.state.layout.sends[out]);
        let slot = state.flow.sent[out] % o.slots;
        let payload = state.base.wrapping_add(o.at + slot as usize * o.slot_bytes);
        self.publish_from(out, payload, bytes);
    }

    /// Sends a message from `payload` instead of the free slot.
    pub(crate) fn publish_from(&mut self, out: usize, payload: *const u8, bytes: usize) {
        let index = self.state.flow.sent[out];
        self.state.flow.sent[out] += 1;
        self.send_to_readers(out, index, payload, bytes);
    }

    /// Receives the messages of this channel in place, in the operation in progress: consecutively in `bytes` from `at`.
    pub(crate) fn recv_in_place(&mut self, recv_channel: usize, at: *mut u8, bytes: usize, stride: usize) {
        let state = &mut self.state;
        state.recv_targets.resize(state.layout.recvs.len(), None);
        state.recv_targets[recv_channel] = Some(RecvTarget { at, bytes, stride });
    }

    /// Stops all use of callers' memory: the calls under way end.
    pub(crate) fn release_user_buffers(&mut self) {
        self.state.recv_targets.clear();
        self.state.messages.release_user_buffers();
        self.wire.release_user_buffers();
    }

    /// Updates addresses after the memory of the collective under way has moved to `moved(address)`.
    pub(crate) fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.state
            .recv_targets
            .iter_mut()
            .flatten()
            .for_each(|recv_target| recv_target.at = moved(recv_target.at));
        self.wire.relocate(moved);
    }

    pub(crate) fn next_message(&mut self, recv_channel: usize) -> Result<Option<*const u8>, Mismatch> {
        let progress = &self.state.flow.recvs[recv_channel];
        match progress.mismatch {
            Some(mismatch) => Err(mismatch),
            None if progress.received > progress.released => {
                Ok(self.state.recv_address(recv_channel, progress.released, 0).map(<*mut u8>::cast_const))
            }
            None => Ok(None),
        }
    }

    pub(crate) fn release(&mut self, recv_channel: usize) {
        let (i, progress) =
            (&self.state.layout.recvs[recv_channel], &mut self.state.flow.recvs[recv_channel]);
        progress.released += 1;
        // The writer needs no credit for its last window of messages: the credit before it is the last.
        let last = progress.released + i.slots == i.spec.messages;
        let due = progress.released - progress.credited >= (i.slots / CREDITS_PER_WINDOW).max(1);
        if last || progress.released + i.slots < i.spec.messages && due {
            progress.credited = progress.released;
            let frame = Frame {
                channel: i.spec.channel as u32,
                index: progress.released,
                ..Frame::new(Kind::Credit, self.state.seq)
            };
            let to = i.spec.rank;
            self.send_frame(to, &frame, Payload::None);
        }
    }

    /// Returns true once all fingerprints are checked and all sends are complete: nothing drives the operation afterwards.
    pub(crate) fn settle(&mut self) -> Result<bool, Mismatch> {
        if let Some(mismatch) = self.state.flow.recvs.iter().find_map(|progress| progress.mismatch) {
            return Err(mismatch);
        }
        if self.state.flow.recvs.iter().any(|progress| !progress.confirmed) {
            return Ok(false);
        }
        // This operation must not succeed after a detected mismatch or an abort.
        let intact = !self.has_mismatch() && !self.is_aborted(self.state.seq);
        Ok(intact && self.state.in_flight == 0 && self.wire.is_flushed(ALL_CLASSES))
    }

    /// Ends the operation in progress; returns the bytes that it has sent.
    pub(crate) fn end(&mut self) -> u64 {
        let state = &mut self.state;
        state.completed.push_back((state.seq, state.fingerprint));
        if state.completed.len() > KEPT_FINGERPRINTS {
            state.completed.pop_front();
        }
        (state.open, state.seq) = (false, state.seq + 1);
        state.staging.give_back();
        std::mem::take(&mut state.bytes_sent)
    }

    pub(crate) fn wait_sources(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.liveness.iter().for_each(|liveness| liveness.wait_sources(fds));
        self.wire.wait_sources(fds)
    }

    pub(crate) fn unacknowledged(&self) -> Vec<(usize, u32)> {
        let packet = |rank| Some((rank, self.wire.connection_stats(rank).unacknowledged_packet?));
        (0..self.state.peers.len())
            .filter(|&rank| self.state.peers[rank].contacted)
            .filter_map(packet)
            .collect()
    }

    pub(crate) fn round_trip(&self, rank: usize) -> Option<Duration> {
        self.wire.connection_stats(rank).round_trip
    }

    pub(crate) fn expect(&mut self, bytes: usize) {
        self.wire.set_in_flight(bytes);
    }

    /// Returns the messages to and from ranks of other nodes.
    pub(crate) fn messages(&mut self) -> Carrier<'_> {
        Carrier::remote(self)
    }

    /// Sends the queued frames of messages; returns true if there were any.
    fn send_queued(&mut self) -> bool {
        let mut any = false;
        while let Some(QueuedMessage { to, frame, payload }) = self.state.messages.pop_queued() {
            let payload = match payload {
                Payload::Borrowed { at, ticket } => Payload::Borrowed { at, ticket: P2P | ticket },
                payload => payload,
            };
            self.send_frame(to, &frame, payload);
            any = true;
        }
        any
    }
}

/// Returns the checksum of a payload to send.
fn checksum(frame: &Frame, payload: Payload) -> u32 {
    match payload {
        Payload::Borrowed { at, .. } | Payload::Copied { at } if frame.bytes > 0 => {
            // SAFETY: a payload to send has `frame.bytes` readable bytes that do not change.
            payload_checksum(unsafe { std::slice::from_raw_parts(at, frame.bytes as usize) })
        }
        _ => payload_checksum(&[]),
    }
}

impl Drop for RemoteChannels {
    /// Abandons the staging memory while sends are not complete: a device may still access it.
    fn drop(&mut self) {
        // In a forked child, all memory belongs to the parent.
        if self.forks != fork::generation() || !self.wire.is_flushed(ALL_CLASSES) {
            self.state.staging.abandon();
            self.state.messages.abandon();
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl RemoteChannels {
    /// Returns true if these bytes are inside memory that this group owns.
    pub(crate) fn owns(&self, at: *const u8, bytes: usize) -> bool {
        let state = &self.state;
        let abort_text = |abort_text: &[u8]| abort_text.as_ptr() == at && bytes <= abort_text.len();
        state.staging.holds(at, bytes)
            || state.messages.owns(at, bytes)
            || state.peers.iter().filter_map(|peer| Some(&*peer.abort_text.as_ref()?.1)).any(abort_text)
            || state.peers.iter().filter_map(|peer| Some(peer.last_error.as_ref()?.bytes())).any(abort_text)
    }
}
