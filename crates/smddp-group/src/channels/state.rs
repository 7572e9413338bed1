//! State of a rank's channels and messages, and validation of the frames that a wire receives for them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use smddp_base::{CallFingerprint, Fault, MAX_ABORT_REPORT, Mismatch};
use smddp_net::frame::{COLLECTIVES, Classes, Frame, Kind, MESSAGES};
use smddp_net::wire::{Sink, Target, Ticket};
use smddp_process::StagingMemory;
use smddp_process::layout::MAX_ERROR_BYTES;

use super::P2P;
use super::leave_notice::PeerLastError;
use crate::layout::{ChannelProgress, RecvProgress, RecvTarget, RemoteLayout, RemoteRecv};
use crate::messages::RemoteMessages;

/// State of one peer rank.
#[derive(Clone, Default)]
pub(super) struct PeerRecord {
    /// Number of operations that the peer is known to have begun, and the fingerprint of the newest if its data has
    /// arrived.
    pub(super) begun: u64,
    pub(super) newest: Option<CallFingerprint>,
    /// Set if the peer replied to a straggler query: `begun` is then exact.
    pub(super) replied: bool,
    /// Set if the peer's host received the straggler query, but its process did not reply.
    pub(super) unresponsive: bool,
    /// Set if the straggler query got no reply from the peer's host.
    pub(super) silent: bool,
    /// Current activity of the peer, from its reply to the straggler query.
    pub(super) activity: String,
    /// Set once a frame was sent to the peer or received from it.
    pub(super) contacted: bool,
    /// Bit set of the classes with traffic in either direction.
    pub(super) classes: u8,
    /// Bit set of the classes on which the peer sent `Leave`.
    pub(super) leave_classes: u8,
    /// Set once the peer has announced its last message.
    pub(super) last_announced: bool,
    pub(super) left: bool,
    /// Last error that the peer sent with its `Leave`.
    pub(super) last_error: Option<PeerLastError>,
    /// Abort reason that the peer sends, and the class that carries it. Allocated once and never replaced: the wire may write
    /// to it at any time.
    pub(super) abort_text: Option<(u32, Box<[u8]>)>,
    /// Operation in which the peer aborted the group, and the reason.
    pub(super) abort: Option<(u64, String)>,
    /// Time at which the wire first reported the connection as broken.
    pub(super) broken: Option<Instant>,
    /// Protocol violation by the peer. All further frames from it are discarded.
    pub(super) protocol_error: Option<&'static str>,
}

/// State of this rank's channels and messages in both directions. As the wire's sink it validates frames and selects their target
/// addresses.
pub(super) struct ChannelState {
    pub(super) me: usize,
    pub(super) staging: StagingMemory,
    /// Number of the operation in progress, or of the next one.
    pub(super) seq: u64,
    pub(super) open: bool,
    pub(super) fingerprint: CallFingerprint,
    /// Start of the operation's slots.
    pub(super) base: *mut u8,
    pub(super) layout: Arc<RemoteLayout>,
    pub(super) flow: ChannelProgress,
    /// By receive channel: the call's own memory, for channels that receive in place.
    pub(super) recv_targets: Vec<Option<RecvTarget>>,
    /// Number of sends from slots whose memory is still in use.
    pub(super) in_flight: u64,
    /// Payload bytes of the operation in progress passed to the wire.
    pub(super) bytes_sent: u64,
    /// Fingerprints of the last completed operations.
    pub(super) completed: VecDeque<(u64, CallFingerprint)>,
    pub(super) mismatch: Option<Fault>,
    /// First operation in which a rank aborted the group.
    pub(super) aborted_from: Option<u64>,
    /// By rank.
    pub(super) peers: Vec<PeerRecord>,
    pub(super) messages: RemoteMessages,
}

// SAFETY: slot addresses are inside the endpoint's staging memory, in a region that this operation owns until it ends. Receive
// targets are inside the call's output, which is valid until the call ends or `release_user_buffers` runs. One thread at a
// time owns this state.
unsafe impl Send for ChannelState {}

impl ChannelState {
    /// Readers with sends in flight, or whose full window stops the writer.
    pub(super) fn pending_readers(&self) -> impl Iterator<Item = usize> {
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
    pub(super) fn pending_ranks(&self) -> (Vec<usize>, Vec<usize>) {
        let awaited = self
            .recv_channels()
            .filter(|(i, progress)| progress.is_pending(&i.spec))
            .map(|(i, _)| i.spec.rank);
        (awaited.collect(), if self.open { self.pending_readers().collect() } else { Vec::new() })
    }

    /// Records a protocol error of the peer, and discards the frame.
    pub(super) fn reject(&mut self, peer: usize, what: &'static str) -> Target {
        self.peers[peer].protocol_error.get_or_insert(what);
        Target::Discard
    }

    /// Receive channels with their progress.
    pub(super) fn recv_channels(&self) -> impl Iterator<Item = (&RemoteRecv, &RecvProgress)> {
        self.layout.recvs.iter().zip(&self.flow.recvs)
    }

    /// Records a mismatch: the frame belongs to a completed operation, or to a channel that this rank does not read.
    pub(super) fn record_mismatch(&mut self, peer: usize, frame: &Frame) {
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
    pub(super) fn check_wait_notice(&mut self, peer: usize, frame: &Frame) {
        let mine = if frame.seq == self.seq && self.open {
            Some(self.fingerprint)
        } else {
            self.completed.iter().find(|(seq, _)| *seq == frame.seq).map(|&(_, fingerprint)| fingerprint)
        };
        if mine.is_some_and(|mine| mine != CallFingerprint { call: frame.what, count: frame.count }) {
            self.record_mismatch(peer, frame);
        }
    }

    pub(super) fn data_target(&mut self, peer: usize, frame: &Frame) -> Target {
        let (begun, known) = (frame.seq.saturating_add(1), &mut self.peers[peer]);
        // A query may have shown that the rank is further: then this is not its newest operation.
        if begun >= known.begun {
            known.begun = begun;
            known.newest = Some(CallFingerprint { call: frame.what, count: frame.count });
        }
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
        } else if frame.total != i.spec.bytes || frame.bytes > i.spec.slot_bytes as u64 {
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
    pub(super) fn recv_address(&self, recv_channel: usize, index: u64, bytes: u64) -> Option<*mut u8> {
        if let Some(recv_target) = self.recv_targets.get(recv_channel).copied().flatten() {
            return recv_target.slot_address(index, bytes);
        }
        let i = &self.layout.recvs[recv_channel];
        let slot = (index % i.slots) as usize * i.spec.slot_bytes.next_multiple_of(64);
        Some(self.base.wrapping_add(i.at + slot))
    }

    pub(super) fn data_received(&mut self, peer: usize, frame: &Frame) {
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

// SAFETY: the targets of collectives and messages are slots of staging regions, or memory of the caller. Their size is checked
// against `frame.bytes`. A region returns to the pool after its payloads are received. Memory of the caller is valid until
// `release_user_buffers`. The other targets are allocations of `frame.bytes` bytes, which are never replaced. They are read after
// they are received.
unsafe impl Sink for ChannelState {
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

    fn expected(&self) -> Classes {
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
