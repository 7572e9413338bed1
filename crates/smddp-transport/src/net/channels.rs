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

use self::leave_notice::PeerLastError;
use super::frame::{CLASSES, COLLECTIVES, Frame, Kind, MESSAGES};
use super::layout::{ChannelProgress, RecvProgress, RecvTarget, RemoteLayout, RemoteRecv};
use super::messages::{QueuedMessage, RemoteMessages};
use super::tcp::{ProcessLiveness, Sideband};
use super::wire::{Broken, Sink, Target, Ticket, Wire};
use crate::fork;
use crate::process::layout::MAX_ERROR_BYTES;
use crate::process::{Endpoint, StagingMemory, last_error};
use crate::{CallFingerprint, Fault, MAX_ABORT_REPORT, MessageTransport, Mismatch};

mod leave_notice;
mod straggler_query;
#[cfg(test)]
mod tests;

/// Number of completed operations whose fingerprints are kept to check late frames.
const KEPT_FINGERPRINTS: usize = 64;
/// Slot base while no memory is allocated. Channels without data need no memory, but their slots still have an address.
const NO_ADDRESS: *mut u8 = std::ptr::dangling_mut();

/// State of one peer rank.
#[derive(Clone, Default)]
struct PeerRecord {
    /// Number of operations that the peer is known to have begun, and the fingerprint of the newest.
    begun: u64,
    newest: CallFingerprint,
    /// Set if the peer replied to a straggler query: `begun` is then exact.
    replied: bool,
    /// Set if the peer's host received the straggler query, but its process did not reply.
    unresponsive: bool,
    /// Set if the straggler query got no reply from the peer's host.
    silent: bool,
    /// Current activity of the peer, from its reply to the straggler query.
    activity: String,
    /// Set once a frame was sent to the peer or received from it.
    contacted: bool,
    /// Bit set of the classes with traffic in either direction.
    classes: u8,
    /// Bit set of the classes on which the peer sent `Leave`.
    leave_classes: u8,
    /// Set once the peer has announced its last message.
    last_announced: bool,
    left: bool,
    /// Last error that the peer sent with its `Leave`.
    last_error: Option<PeerLastError>,
    /// Abort reason that the peer sends, and the class that carries it. Allocated once and never replaced: the wire may write
    /// to it at any time.
    abort_text: Option<(u32, Box<[u8]>)>,
    /// Operation in which the peer aborted the group, and the reason.
    abort: Option<(u64, String)>,
    /// Time at which the wire first reported the connection as broken.
    broken: Option<Instant>,
    /// Protocol violation by the peer. All further frames from it are discarded.
    protocol_error: Option<&'static str>,
}

/// State of this rank's channels and messages in both directions. As the wire's sink it validates frames and selects their target
/// addresses.
pub(super) struct ChannelState {
    me: usize,
    staging: StagingMemory,
    /// Number of the operation in progress, or of the next one.
    seq: u64,
    open: bool,
    fingerprint: CallFingerprint,
    /// Start of the operation's slots.
    base: *mut u8,
    layout: Arc<RemoteLayout>,
    flow: ChannelProgress,
    /// By receive channel: the call's own memory, for channels that receive in place.
    recv_targets: Vec<Option<RecvTarget>>,
    /// Number of sends from slots whose memory is still in use.
    in_flight: u64,
    /// Payload bytes of collectives passed to the wire.
    bytes_sent: u64,
    /// Fingerprints of the last completed operations.
    completed: VecDeque<(u64, CallFingerprint)>,
    mismatch: Option<Fault>,
    /// First operation in which a rank aborted the group.
    aborted_from: Option<u64>,
    /// By rank.
    peers: Vec<PeerRecord>,
    pub(super) messages: RemoteMessages,
}

// SAFETY: slot addresses are inside the endpoint's staging memory, in a region that this operation owns until it ends. Receive
// targets are inside the call's output, which is valid until the call ends or `release_user_buffers` runs. One thread at a
// time owns this state.
unsafe impl Send for ChannelState {}

/// Inter-node transport parts of a group.
pub(crate) struct RemoteParts {
    pub(crate) wire: Box<dyn Wire>,
    /// Sideband of this process: it answers queries for ranks that do not drive their groups.
    pub(crate) sideband: Option<Arc<Sideband>>,
    pub(crate) liveness: Option<ProcessLiveness>,
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
    state: ChannelState,
    aborted: bool,
    left_group: bool,
    /// State for the operation in progress.
    wait_notice: WaitNotice,
    forks: u32,
}

/// Waiting time after which a rank sends a wait notice to the ranks that it waits for.
const WAIT_NOTICE_DELAY: Duration = Duration::from_millis(50);
/// Maximum time that `leave` waits until the last bytes are sent.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time that `abort` waits until its messages are sent.
const ABORT_FLUSH_TIMEOUT: Duration = Duration::from_millis(50);
/// Poll interval while only acknowledgements are missing.
const ACK_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Largest group in which an aborting rank sends the reason to all other ranks directly.
const MAX_DIRECT_ABORTS: usize = 256;
/// Credit frames that a reader sends per window.
const CREDITS_PER_WINDOW: u64 = 8;
/// Ticket bit of frames without a cell of a collective: control frames (without a number) and message fragments.
const P2P: Ticket = 1 << 63;

impl RemoteChannels {
    /// `nonce`: number of the group in this process's staging pool.
    pub(crate) fn new(
        me: usize,
        size: usize,
        RemoteParts { wire, sideband, liveness }: RemoteParts,
        endpoint: Arc<Endpoint>,
        nonce: u64,
    ) -> Self {
        let staging = StagingMemory::new(endpoint, nonce);
        let state = ChannelState {
            me,
            messages: RemoteMessages::new(size, staging.sibling(), wire.copies()),
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
            state,
            aborted: false,
            left_group: false,
            wait_notice: WaitNotice::default(),
            forks: fork::generation(),
        }
    }

    pub(crate) fn name(&self) -> String {
        self.wire.name()
    }

    pub(crate) fn poll(&mut self) -> bool {
        self.wire.poll(&mut self.state) | self.send_queued()
    }

    /// Sends queued frames without a poll for incoming ones.
    pub(crate) fn push(&mut self) {
        self.wire.push(&mut self.state);
    }

    pub(crate) fn busy(&self) -> bool {
        self.state.in_flight > 0 || self.state.messages.has_unsent() || !self.wire.drained()
    }

    /// Sends a frame whose payload, if any, is short or staged.
    fn send_frame(&mut self, to: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        self.record_contact(to, frame);
        // SAFETY: a short payload needs to be valid only now. A slot belongs to a region that is kept until the ticket returns. The
        // input of a call or message is kept until its ticket returns or `release_user_buffers` runs.
        unsafe { self.wire.send(to, frame, payload, ticket) };
    }

    /// Records that a frame is sent to a rank.
    fn record_contact(&mut self, to: usize, frame: &Frame) {
        self.state.peers[to].contacted = true;
        self.state.peers[to].classes |= 1 << frame.class();
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
        let frame = Frame {
            channel: o.channel as u32,
            index,
            bytes: bytes as u64,
            what: state.fingerprint.call,
            count: state.fingerprint.count,
            total: o.bytes,
            ..Frame::new(Kind::Data, state.seq)
        };
        let ticket = (out as u64) << 32 | slot;
        let (readers, busy_index) = (o.readers.len(), o.first_slot + slot as usize);
        self.state.in_flight += readers as u64;
        self.state.bytes_sent += (bytes * readers) as u64;
        self.state.flow.busy[busy_index] += readers as u32;
        for reader in 0..readers {
            let to = self.state.layout.sends[out].readers[reader];
            self.send_frame(to, &frame, payload, ticket);
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
            self.send_frame(to, &frame, std::ptr::null(), P2P);
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
        Ok(intact && self.state.in_flight == 0 && self.wire.drained())
    }

    pub(crate) fn end(&mut self) {
        let state = &mut self.state;
        state.completed.push_back((state.seq, state.fingerprint));
        if state.completed.len() > KEPT_FINGERPRINTS {
            state.completed.pop_front();
        }
        (state.open, state.seq) = (false, state.seq + 1);
        state.staging.give_back();
    }

    /// Returns true if `rank` has begun operation `seq`; `None`: unknown.
    pub(crate) fn arrived(&self, rank: usize, seq: u64) -> Option<bool> {
        let begun = self.state.peers[rank].begun > seq;
        (begun || self.state.peers[rank].replied).then_some(begun)
    }

    /// Returns true if operation `seq` waits for data of `rank`, which is not known to have begun it.
    pub(crate) fn waits_for(&self, rank: usize, seq: u64) -> bool {
        self.state.waits_for(rank, seq)
    }

    /// Returns true if data of operation `seq` is being sent to `rank`, or the window of `rank` is full.
    pub(crate) fn has_pending_sends_to(&self, rank: usize, seq: u64) -> bool {
        self.state.open && self.state.seq == seq && self.state.pending_readers().any(|reader| reader == rank)
    }

    /// Sets the number that status queries about this rank pass to the process's responder.
    pub(crate) fn set_query_subject(&self, subject: u64) {
        if let Some(sideband) = &self.sideband {
            sideband.set_query_subject(subject);
        }
    }

    /// Returns the activity that a rank reported in its reply to the straggler query.
    pub(crate) fn activity(&self, rank: usize) -> &str {
        &self.state.peers[rank].activity
    }

    /// Ranks whose process did not reply to the straggler query although its host received it.
    pub(crate) fn unresponsive(&self) -> impl Iterator<Item = usize> {
        self.state.peers.iter().enumerate().filter(|(_, peer)| peer.unresponsive).map(|(rank, _)| rank)
    }

    /// Ranks whose hosts did not reply to the straggler query.
    pub(crate) fn silent_hosts(&self) -> Vec<usize> {
        (0..self.state.peers.len()).filter(|&rank| self.state.peers[rank].silent).collect()
    }

    pub(crate) fn fingerprint_of(&self, rank: usize, seq: u64) -> Option<CallFingerprint> {
        (self.state.peers[rank].begun == seq + 1).then(|| self.state.peers[rank].newest)
    }

    /// Payload bytes of collectives passed to the wire.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.state.bytes_sent
    }

    /// Returns true if a rank aborted the group in operation `seq` or before.
    pub(crate) fn is_aborted(&self, seq: u64) -> bool {
        self.state.aborted_from.is_some_and(|from| from <= seq)
    }

    /// Returns true if `rank` aborted the group in an operation after `seq`.
    pub(crate) fn aborted_after(&self, rank: usize, seq: u64) -> bool {
        self.state.peers[rank].abort.as_ref().is_some_and(|(from, _)| *from > seq)
    }

    /// Returns true if a rank made a different call in an operation that this rank has completed.
    pub(crate) fn has_mismatch(&self) -> bool {
        self.state.mismatch.is_some()
    }

    /// Checks the ranks that this rank waits for, and returns all faults known at `now`.
    pub(crate) fn faults(&mut self, now: Instant) -> Vec<Fault> {
        let (awaited, readers) = self.state.pending_ranks();
        self.wait_notice(&awaited, now);
        let awaited = awaited.into_iter().chain(readers).chain(self.state.messages.expected_ranks());
        for rank in awaited {
            self.watch(rank, now);
        }
        self.wire.check(now);
        self.liveness.iter_mut().for_each(|liveness| liveness.check(now));
        self.state
            .peers
            .iter_mut()
            .filter_map(|p| p.last_error.as_mut())
            .for_each(|error| error.observe(now));
        let broken = self.broken(now);
        let mut faults: Vec<Fault> = self.state.mismatch.clone().into_iter().collect();
        let peers = || self.state.peers.iter().enumerate();
        faults.extend(
            peers().filter_map(|(rank, p)| Some(Fault::Aborted { rank, reason: p.abort.clone()?.1 })),
        );
        faults.extend(peers().filter(|(_, p)| p.left).map(|(rank, _)| Fault::Left { rank }));
        let protocol_error = |what: &str| format!("is lost (it sent {what})");
        faults.extend(
            peers()
                .filter_map(|(rank, p)| Some(Fault::Lost { rank, how: protocol_error(p.protocol_error?) })),
        );
        let local_error = self.wire.local_error();
        faults.extend(local_error.map(|(rank, reason)| Fault::Unreachable { rank, reason }));
        // A rank that sent the abort reason may close its connection.
        let known = |peer: usize| self.state.peers[peer].left || self.state.peers[peer].abort.is_some();
        let broken = broken.into_iter().filter(|b| !known(b.peer));
        faults.extend(broken.map(|b| Fault::Lost { rank: b.peer, how: format!("is lost ({})", b.reason) }));
        faults
    }

    /// Ranks for which the active operation waits: for their data, their acknowledgements or their credits.
    pub(crate) fn pending_ranks(&self) -> Vec<usize> {
        let (mut ranks, readers) = self.state.pending_ranks();
        ranks.extend(readers);
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Starts liveness checks of `rank`, for which this rank waits.
    pub(crate) fn watch(&mut self, rank: usize, now: Instant) {
        self.wire.watch(rank, self.liveness.is_some(), now);
        self.liveness.iter_mut().for_each(|liveness| liveness.watch(rank, now));
    }

    /// Lost peers in order of detection. A liveness report takes precedence over a report of the wire.
    fn broken(&mut self, now: Instant) -> Vec<Broken> {
        let mut broken = self.liveness.as_ref().map_or_else(Vec::new, |liveness| liveness.broken(now));
        let drain_grace = self.wire.drain_grace();
        let mut also = Vec::new();
        for found in self.wire.broken() {
            let since = *self.state.peers[found.peer].broken.get_or_insert(now);
            if now.duration_since(since) >= drain_grace && !broken.iter().any(|b| b.peer == found.peer) {
                also.push((since, found));
            }
        }
        also.sort_by_key(|(since, _)| *since);
        broken.extend(also.into_iter().map(|(_, found)| found));
        broken
    }

    /// Sends the fingerprint of the operation in progress to the ranks that it waits for, once per operation and after
    /// `WAIT_NOTICE_DELAY`. A rank in another call, which sends nothing to this rank, then detects the mismatch.
    fn wait_notice(&mut self, awaited: &[usize], now: Instant) {
        match self.wait_notice {
            _ if !self.state.open => return,
            WaitNotice::Idle => {
                self.wait_notice = WaitNotice::Waiting(now);
                return;
            }
            WaitNotice::Waiting(since) if now.duration_since(since) >= WAIT_NOTICE_DELAY => {
                self.wait_notice = WaitNotice::Sent
            }
            WaitNotice::Waiting(_) | WaitNotice::Sent => return,
        }
        let fingerprint = self.state.fingerprint;
        let frame = Frame {
            what: fingerprint.call,
            count: fingerprint.count,
            ..Frame::new(Kind::WaitNotice, self.state.seq)
        };
        for &rank in awaited {
            self.send_frame(rank, &frame, std::ptr::null(), P2P);
        }
    }

    /// Sends the abort reason. `remote`: all ranks of other nodes. A rank without traffic yet may still wait for this rank in another
    /// call.
    pub(crate) fn abort(&mut self, reason: &str, remote: &[usize]) {
        if std::mem::replace(&mut self.aborted, true) {
            return;
        }
        let abort_text = &reason.as_bytes()[..reason.len().min(MAX_ABORT_REPORT)];
        for rank in self.abort_recipients(remote) {
            // The class of messages always carries the reason, as for `Leave`. If it has no connection yet, this process may
            // exit before one is established. The reason therefore also goes to each class that has a connection.
            let classes = self.state.peers[rank].classes | self.wire.connected_classes(rank) | 1 << MESSAGES;
            for class in (0..CLASSES).filter(|class| classes >> class & 1 == 1) {
                let (bytes, channel) = (abort_text.len() as u64, class as u32);
                let frame = Frame { bytes, channel, ..Frame::new(Kind::Abort, self.state.seq) };
                self.send_frame(rank, &frame, abort_text.as_ptr(), P2P);
            }
        }
        self.wire.poll(&mut self.state);
        self.wire.abandon();
        self.flush_briefly();
    }

    /// Polls briefly until the messages are sent. This process may exit with the error that it is about to raise. Peers
    /// without the reason would then report this rank as the first failure.
    fn flush_briefly(&mut self) {
        let until = Instant::now() + ABORT_FLUSH_TIMEOUT;
        while !self.wire.messages_drained() && Instant::now() < until {
            if !self.wire.poll(&mut self.state) {
                std::thread::sleep(ACK_POLL_INTERVAL);
            }
        }
    }

    /// Returns the ranks that get the abort reason from this rank: all others in a small group. In a large group: all contacted
    /// ranks, and those at distance 1, 2, 4, ... Each recipient forwards the reason, so all ranks receive it.
    fn abort_recipients(&self, remote: &[usize]) -> Vec<usize> {
        let state = &self.state;
        let size = state.peers.len();
        let distance = |rank: usize| rank.abs_diff(state.me).min(size - rank.abs_diff(state.me));
        let chosen = |rank: usize| {
            state.peers[rank].contacted || size <= MAX_DIRECT_ABORTS || distance(rank).is_power_of_two()
        };
        remote.iter().copied().filter(|&rank| !state.peers[rank].left && chosen(rank)).collect()
    }

    /// Ranks with traffic in either direction that have not left.
    fn contacted_ranks(&self) -> Vec<usize> {
        let state = &self.state;
        (0..state.peers.len())
            .filter(|&rank| state.peers[rank].contacted && !state.peers[rank].left)
            .collect()
    }

    /// Sends `Leave` to all contacted ranks, and waits until everything is sent or the time limit expires.
    pub(crate) fn leave(&mut self) {
        if std::mem::replace(&mut self.left_group, true) {
            return;
        }
        let error = last_error::own();
        for rank in self.contacted_ranks() {
            // Always on the class of messages: on the other class, `Leave` may queue behind a call that the peer never makes.
            let classes = self.state.peers[rank].classes | 1 << MESSAGES;
            for class in (0..CLASSES).filter(|class| classes >> class & 1 == 1) {
                let (channel, index) = (class as u32, u64::from(classes));
                let mut frame = Frame { channel, index, ..Frame::new(Kind::Leave, self.state.seq) };
                let mut payload = std::ptr::null();
                if let Some((ago, text)) = error.as_ref().filter(|_| class == MESSAGES) {
                    (frame.bytes, frame.total, payload) = leave_notice::payload(*ago, text);
                }
                self.send_frame(rank, &frame, payload, P2P);
            }
        }
        // A peer may never receive the data of an aborted group. Its listener accepts a connection at any time, so a waiting abort
        // report is still delivered. Without it, the peer would report a lost rank.
        let dead = self.aborted || self.state.peers.iter().any(|peer| peer.abort.is_some());
        let mut now = Instant::now();
        let (soon, until) = (now + LEAVE_TIMEOUT / 20, now + LEAVE_TIMEOUT);
        let waits =
            |now: Instant, wire: &dyn Wire| now < until && (!dead || now < soon || wire.is_connecting());
        while !self.wire.finish() && waits(now, &*self.wire) {
            if self.wire.drained() {
                // Only acknowledgements are missing.
                std::thread::sleep(ACK_POLL_INTERVAL);
            } else if !self.wire.poll(&mut self.state) {
                self.wire.check(now);
                let mut fds = Vec::new();
                self.interest(&mut fds);
                self.state.staging.wait_briefly(&fds);
            }
            now = Instant::now();
        }
        self.wire.close();
    }

    /// Returns true if `rank` has announced all its messages.
    pub(crate) fn all_announced(&self, rank: usize) -> bool {
        let peer = &self.state.peers[rank];
        peer.last_announced || peer.leave_classes >> MESSAGES & 1 == 1
    }

    /// Notifies a rank that all messages to it are announced.
    pub(crate) fn announce_last(&mut self, rank: usize) {
        self.send_queued();
        self.send_frame(rank, &Frame::new(Kind::LastMessage, self.state.seq), std::ptr::null(), P2P);
    }

    /// Returns the last error that a rank sent with its `Leave`, and its age.
    pub(crate) fn last_error(&self, rank: usize) -> Option<(Duration, String)> {
        self.state.peers[rank].last_error.as_ref()?.text()
    }

    pub(crate) fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.liveness.iter().for_each(|liveness| liveness.interest(fds));
        self.wire.interest(fds)
    }

    pub(crate) fn unacknowledged(&self) -> Vec<(usize, u32)> {
        self.wire.unacknowledged()
    }

    pub(crate) fn round_trip(&self, rank: usize) -> Option<Duration> {
        self.wire.round_trip(rank)
    }

    pub(crate) fn expect(&mut self, bytes: usize) {
        self.wire.expect(bytes);
    }

    /// Calls `call` with the messages to ranks of other nodes, and sends the frames that it queued.
    pub(crate) fn p2p<T>(&mut self, call: impl FnOnce(&mut dyn MessageTransport) -> T) -> T {
        let outcome = call(&mut self.state.messages);
        self.send_queued();
        outcome
    }

    /// Sends the queued frames of messages; returns true if there were any.
    fn send_queued(&mut self) -> bool {
        let mut any = false;
        while let Some(QueuedMessage { to, frame, payload, ticket }) = self.state.messages.pop_queued() {
            match ticket {
                Some(ticket) => self.send_frame(to, &frame, payload, P2P | ticket),
                None => {
                    self.record_contact(to, &frame);
                    // SAFETY: memory of the message's sender. The send completes for the sender only after this call.
                    unsafe { self.wire.post(to, &frame, payload) };
                }
            }
            any = true;
        }
        any
    }
}

impl Drop for RemoteChannels {
    /// Abandons the staging memory while sends are not complete: a device may still access it.
    fn drop(&mut self) {
        // In a forked child, all memory belongs to the parent.
        if self.forks != fork::generation() || !self.wire.drained() {
            self.state.staging.abandon();
            self.state.messages.abandon();
        }
    }
}

impl ChannelState {
    fn waits_for(&self, rank: usize, seq: u64) -> bool {
        let silent = |(i, progress): (&RemoteRecv, &RecvProgress)| {
            i.spec.rank == rank && progress.is_pending(&i.spec) && progress.received <= progress.released
        };
        self.open && self.seq == seq && self.peers[rank].begun <= seq && self.recv_channels().any(silent)
    }

    /// Readers with sends in flight, or whose full window stops the writer.
    fn pending_readers(&self) -> impl Iterator<Item = usize> {
        let flow = &self.flow;
        self.layout.sends.iter().enumerate().flat_map(move |(out, o)| {
            let in_flight =
                flow.busy[o.first_slot..o.first_slot + o.slots as usize].iter().any(|&busy| busy > 0);
            let sent = flow.sent[out];
            let full = move |reader: usize| {
                sent < o.messages && sent.saturating_sub(flow.read[o.first_reader + reader]) >= o.window
            };
            let readers = o.readers.iter().enumerate();
            readers.filter(move |&(reader, _)| in_flight || full(reader)).map(|(_, &rank)| rank)
        })
    }

    /// Returns the ranks whose data is missing, and the readers with sends in flight or a full window.
    fn pending_ranks(&self) -> (Vec<usize>, Vec<usize>) {
        let awaited = self
            .recv_channels()
            .filter(|(i, progress)| progress.is_pending(&i.spec))
            .map(|(i, _)| i.spec.rank);
        (awaited.collect(), if self.open { self.pending_readers().collect() } else { Vec::new() })
    }

    /// Records a protocol error of the peer, and discards the frame.
    fn reject(&mut self, peer: usize, what: &'static str) -> Target {
        self.peers[peer].protocol_error.get_or_insert(what);
        Target::Discard
    }

    /// Receive channels with their progress.
    fn recv_channels(&self) -> impl Iterator<Item = (&RemoteRecv, &RecvProgress)> {
        self.layout.recvs.iter().zip(&self.flow.recvs)
    }

    /// Records a mismatch: the frame belongs to a completed operation, or to a channel that this rank does not read.
    fn record_mismatch(&mut self, peer: usize, frame: &Frame) {
        let theirs = CallFingerprint { call: frame.what, count: frame.count };
        let mine = match self.completed.iter().find(|(seq, _)| *seq == frame.seq) {
            Some(&(_, fingerprint)) => fingerprint,
            None if frame.seq == self.seq => self.fingerprint,
            None => return,
        };
        let found = Mismatch { rank: peer, theirs, bytes: None };
        self.mismatch.get_or_insert(Fault::Mismatch { seq: frame.seq, mine, found });
    }

    /// Compares a wait notice with this rank's call of the same operation, and records a mismatch.
    fn check_wait_notice(&mut self, peer: usize, frame: &Frame) {
        let mine = if frame.seq == self.seq && self.open {
            Some(self.fingerprint)
        } else {
            self.completed.iter().find(|(seq, _)| *seq == frame.seq).map(|&(_, fingerprint)| fingerprint)
        };
        if mine.is_some_and(|mine| mine != CallFingerprint { call: frame.what, count: frame.count }) {
            self.record_mismatch(peer, frame);
        }
    }

    fn data_target(&mut self, peer: usize, frame: &Frame) -> Target {
        self.peers[peer].begun = self.peers[peer].begun.max(frame.seq.saturating_add(1));
        self.peers[peer].newest = CallFingerprint { call: frame.what, count: frame.count };
        if frame.seq > self.seq || frame.seq == self.seq && !self.open {
            return Target::Later;
        }
        let recv_channel =
            self.layout.recv_index.get(&(peer, frame.channel)).filter(|_| frame.seq == self.seq).copied();
        let Some(recv_channel) = recv_channel else {
            self.record_mismatch(peer, frame);
            return Target::Discard;
        };
        let (i, progress) = (&self.layout.recvs[recv_channel], &mut self.flow.recvs[recv_channel]);
        let theirs = CallFingerprint { call: frame.what, count: frame.count };
        if theirs != self.fingerprint {
            progress.mismatch = Some(Mismatch { rank: peer, theirs, bytes: None });
        } else if frame.total != i.spec.bytes || frame.bytes > i.spec.cell as u64 {
            progress.mismatch =
                Some(Mismatch { rank: peer, theirs, bytes: Some((i.spec.bytes, frame.total)) });
        }
        if progress.mismatch.is_some() {
            return Target::Discard;
        }
        // Each message arrives exactly once and in order.
        let is_next = if i.spec.messages == 0 { frame.bytes == 0 } else { frame.index == progress.placed };
        if !is_next || frame.index >= i.spec.messages.max(1) {
            return self.reject(peer, "a message out of order");
        }
        if frame.index >= progress.released + i.slots {
            return Target::Later;
        }
        let Some(place) = self.recv_address(recv_channel, frame.index, frame.bytes) else {
            return self.reject(peer, "a message that is longer than what is left of its block");
        };
        self.flow.recvs[recv_channel].placed += 1;
        Target::At(place)
    }

    /// Returns the address of message `index`: in the receive target if the channel has one, else in a slot. `None`: `bytes` do
    /// not fit in the receive target.
    fn recv_address(&self, recv_channel: usize, index: u64, bytes: u64) -> Option<*mut u8> {
        if let Some(recv_target) = self.recv_targets.get(recv_channel).copied().flatten() {
            return recv_target.slot_address(index, bytes);
        }
        let i = &self.layout.recvs[recv_channel];
        let slot = (index % i.slots) as usize * i.spec.cell.next_multiple_of(64);
        Some(self.base.wrapping_add(i.at + slot))
    }

    fn data_received(&mut self, peer: usize, frame: &Frame) {
        if frame.seq != self.seq || !self.open {
            return;
        }
        if let Some(&recv_channel) = self.layout.recv_index.get(&(peer, frame.channel)) {
            let (i, progress) = (&self.layout.recvs[recv_channel], &mut self.flow.recvs[recv_channel]);
            progress.confirmed = true;
            if progress.mismatch.is_none() && i.spec.messages > 0 && progress.received < progress.placed {
                progress.received += 1;
            }
        }
    }
}

impl Sink for ChannelState {
    fn target(&mut self, peer: usize, frame: &Frame) -> Target {
        self.peers[peer].contacted = true;
        if self.peers[peer].protocol_error.is_some() {
            return Target::Discard;
        }
        if matches!(frame.kind, Kind::Data | Kind::Credit | Kind::WaitNotice) {
            self.peers[peer].classes |= 1 << frame.class();
        }
        match frame.kind {
            Kind::Data => self.data_target(peer, frame),
            Kind::Fragment => match self.messages.target(peer, frame) {
                Some(place) => place,
                None => self.reject(peer, "an unexpected fragment of a message"),
            },
            Kind::Abort
                if frame.bytes <= MAX_ABORT_REPORT as u64 && self.peers[peer].abort_text.is_none() =>
            {
                let abort_text = vec![0; frame.bytes as usize].into();
                Target::At(self.peers[peer].abort_text.insert((frame.channel, abort_text)).1.as_mut_ptr())
            }
            // The reason arrives on each class in use: the first arrival counts.
            Kind::Abort if frame.bytes <= MAX_ABORT_REPORT as u64 => Target::Discard,
            Kind::Abort => self.reject(peer, "an abort reason that is too long"),
            Kind::Leave if frame.bytes > MAX_ERROR_BYTES as u64 => {
                self.reject(peer, "a last error that is too long")
            }
            // Accepted once, on the class of messages.
            Kind::Leave if frame.bytes > 0 => {
                let known = &mut self.peers[peer].last_error;
                match frame.channel as usize == MESSAGES && known.is_none() {
                    true => Target::At(known.insert(PeerLastError::new(frame)).target()),
                    false => Target::Discard,
                }
            }
            _ if frame.bytes > 0 => self.reject(peer, "a payload with a frame that has none"),
            _ => Target::Discard,
        }
    }

    fn received(&mut self, peer: usize, frame: &Frame) {
        if self.peers[peer].protocol_error.is_some() {
            return;
        }
        match frame.kind {
            Kind::Data => self.data_received(peer, frame),
            Kind::Credit => {
                let mut sends = self.layout.sends.iter().enumerate();
                let out = sends.find(|(_, out)| out.channel as u32 == frame.channel);
                if let Some((number, out)) = out.filter(|_| self.open && frame.seq == self.seq)
                    && let Some(reader) = out.readers.iter().position(|&rank| rank == peer)
                {
                    // A reader cannot have read messages that were not sent.
                    let sent = self.flow.sent[number];
                    let read = &mut self.flow.read[out.first_reader + reader];
                    *read = (*read).max(frame.index.min(sent));
                }
            }
            Kind::Abort => {
                let Some((class, abort_text)) = &self.peers[peer].abort_text else { return };
                if *class != frame.channel {
                    return;
                }
                let reason = String::from_utf8_lossy(abort_text).into_owned();
                self.peers[peer].abort.get_or_insert((frame.seq, reason));
                self.aborted_from = Some(self.aborted_from.map_or(frame.seq, |from| from.min(frame.seq)));
            }
            Kind::Leave => {
                // Frames on the other class may still be in flight.
                self.peers[peer].leave_classes |= 1 << (frame.channel & 7);
                self.peers[peer].left =
                    u64::from(self.peers[peer].leave_classes) & frame.index == frame.index;
                if frame.channel as usize == MESSAGES {
                    self.peers[peer].last_error.iter_mut().for_each(PeerLastError::mark_received);
                }
            }
            Kind::WaitNotice => self.check_wait_notice(peer, frame),
            // Handled inside the wire.
            Kind::Move | Kind::Moved => {}
            Kind::Announce => {
                if let Err(what) = self.messages.announced(peer, frame) {
                    self.reject(peer, what);
                }
            }
            Kind::LastMessage => self.peers[peer].last_announced = true,
            Kind::Grant => self.messages.granted(peer, frame),
            Kind::Fragment => self.messages.arrived(peer, frame),
        }
    }

    fn expected(&self) -> u8 {
        u8::from(self.open) << COLLECTIVES | u8::from(self.messages.expects_frames()) << MESSAGES
    }

    fn sent(&mut self, ticket: Ticket) {
        if ticket & P2P != 0 {
            return self.messages.sent(ticket & !P2P);
        }
        let (out, slot) = ((ticket >> 32) as usize, (ticket & 0xffff_ffff) as usize);
        self.in_flight = self.in_flight.saturating_sub(1);
        if let Some(o) = self.layout.sends.get(out).filter(|o| (slot as u64) < o.slots) {
            let busy = &mut self.flow.busy[o.first_slot + slot];
            *busy = busy.saturating_sub(1);
        }
    }
}

#[cfg(any(test, fuzzing))]
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
