//! Rank that follows the protocol, over a wire that delivers arbitrary frames.

use std::sync::Arc;
use std::time::Instant;

use smddp_base::{CallFingerprint, Envelope, MessageId, RecvChannel, SendChannel};
use smddp_net::fuzzing::Script;
use smddp_net::wire::Wire;
use smddp_process::fuzzing::endpoint;

use crate::channels::{RemoteChannels, RemoteParts};
use crate::layout::RemoteLayout;

pub(super) const ME: usize = 0;
pub(super) const SIZE: usize = 4;
/// Selects the rank of a peer.
pub(super) fn peer(script: &mut Script<'_>) -> usize {
    1 + script.below(SIZE - 1)
}

/// Point-to-point message in transfer.
struct Transfer {
    stream: MessageId,
    bytes: u64,
    transferred: u64,
    /// Memory of the message if it is transferred without slots.
    memory: Option<Box<[u8]>>,
}

pub(super) struct Rank {
    pub(super) net: RemoteChannels,
    seq: u64,
    open: bool,
    failed: bool,
    sends_open: Vec<(u64, u64, usize)>,
    receives_open: Vec<(RecvChannel, u64)>,
    sends: Vec<Transfer>,
    receives: Vec<Transfer>,
    /// Released memory, which must not be accessed any more.
    released: Vec<Box<[u8]>>,
}

impl Rank {
    pub(super) fn new(wire: Box<dyn Wire>) -> Self {
        // All inputs use the same pool owner, so that they reuse each other's regions.
        let net = RemoteChannels::new(
            ME,
            SIZE,
            RemoteParts { wire, sideband: None, liveness: None, checksums: false },
            endpoint(),
            7,
        );
        let (sends_open, receives_open, sends, receives, released) = Default::default();
        Self { net, seq: 0, open: false, failed: false, sends_open, receives_open, sends, receives, released }
    }

    pub(super) fn seq(&self) -> u64 {
        self.seq
    }

    /// Executes one action of the rank.
    pub(super) fn act(&mut self, script: &mut Script<'_>) {
        match script.below(16) {
            0..3 => self.begin(script),
            3..5 => self.publish(script),
            5..8 => self.receive(),
            8 => self.end(),
            9 => self.inspect(script),
            10 => self.send(script),
            11 => self.fragments(script),
            12..15 => self.p2p(script),
            _ => {
                // Rare, because the rank stops afterwards.
                if script.byte() == 0 {
                    self.failed = true;
                    self.net.abort("aborted by the script", &[1, 3]);
                    self.net.release_user_buffers();
                    let posts = self.sends.drain(..).chain(self.receives.drain(..));
                    self.released.extend(posts.filter_map(|post| post.memory));
                }
            }
        }
    }

    fn begin(&mut self, script: &mut Script<'_>) {
        if self.open || self.failed || self.net.is_aborted(self.seq) || self.net.has_mismatch() {
            return;
        }
        let mut send_channels = Vec::new();
        self.sends_open.clear();
        for channel in 0..script.below(3) {
            let (messages, slot_bytes) = (script.below(6) as u64, 1 + 97 * script.below(200));
            let readers = (1..=1 + script.below(SIZE - 1)).collect();
            let bytes = messages * slot_bytes as u64;
            send_channels.push((channel, SendChannel { readers, slot_bytes, messages, bytes }));
            self.sends_open.push((messages, 0, slot_bytes));
        }
        let mut recv_channels = Vec::new();
        for channel in 0..script.below(4) {
            let (messages, slot_bytes) = (script.below(6) as u64, 1 + 97 * script.below(200));
            // A channel has one writer, and a rank has one receive channel of it.
            recv_channels.push(RecvChannel {
                rank: 1 + channel % (SIZE - 1),
                channel,
                reader: 0,
                slot_bytes,
                messages,
                bytes: script.number() & 0xff,
            });
        }
        self.receives_open = recv_channels.iter().map(|recv_channel| (*recv_channel, 0)).collect();
        let (window, written) = (1 + script.below(4), 1 + script.below(4));
        self.net.set_layout(&Arc::new(RemoteLayout::new(ME, send_channels, &recv_channels, window, written)));
        if self.net.reserve() {
            self.net.begin(self.seq, CallFingerprint { call: 1, count: 1 });
            self.open = true;
        }
    }

    fn publish(&mut self, script: &mut Script<'_>) {
        let Some(out) = script.below(4).checked_rem(self.sends_open.len()) else { return };
        let (messages, sent, bytes) = self.sends_open[out];
        if !self.open || self.failed || sent == messages {
            return;
        }
        if let Some(free_slot) = self.net.free_slot(out) {
            self.check_owned(free_slot, bytes, "a slot to be filled");
            // SAFETY: `check_owned` checked the slot; single-threaded.
            unsafe { free_slot.write_bytes(sent as u8, bytes) };
            self.net.publish(out, bytes);
            self.sends_open[out].1 += 1;
        }
    }

    fn receive(&mut self) {
        if !self.open || self.failed {
            return;
        }
        for recv_channel in 0..self.receives_open.len() {
            let (want, taken) = self.receives_open[recv_channel];
            if taken == want.messages {
                continue;
            }
            match self.net.next_message(recv_channel) {
                Ok(Some(at)) => {
                    self.check_owned(at, want.slot_bytes, "a message");
                    self.net.release(recv_channel);
                    self.receives_open[recv_channel].1 += 1;
                }
                Ok(None) => {}
                Err(_) => self.failed = true,
            }
        }
    }

    fn end(&mut self) {
        if !self.open || self.failed {
            return;
        }
        match self.net.settle() {
            Ok(settled) => {
                let all = self.sends_open.iter().all(|(messages, sent, _)| sent == messages)
                    && self.receives_open.iter().all(|(want, taken)| want.messages == *taken);
                if settled && all {
                    self.net.end();
                    self.open = false;
                    self.seq += 1;
                }
            }
            Err(_) => self.failed = true,
        }
    }

    /// Calls all query functions.
    fn inspect(&mut self, script: &mut Script<'_>) {
        let (rank, seq) = (peer(script), self.seq + script.below(2) as u64);
        let _ = (self.net.arrived(rank, seq), self.net.fingerprint_of(rank, seq));
        let _ = (self.net.busy(), self.net.name(), self.net.wait_sources(&mut Vec::new()));
        if script.yes() {
            // A fault ends the group; some inputs continue for a while.
            self.failed |= !self.net.faults(Instant::now()).is_empty() && script.yes();
        }
    }

    fn send(&mut self, script: &mut Script<'_>) {
        if self.sends.len() < 4 && !self.failed {
            let (to, bytes) = (peer(script), script.number() % (600 << 10));
            let envelope = Envelope { tag: 1, dtype: 2, bytes };
            let announced = self.net.messages().announce(to, envelope);
            if let Some(stream) = announced {
                let memory = vec![1; bytes as usize].into_boxed_slice();
                // SAFETY: the memory is kept with the message.
                let zero_copy = unsafe { self.net.messages().send_in_place(stream, memory.as_ptr()) };
                self.sends.push(Transfer {
                    stream,
                    bytes,
                    transferred: 0,
                    memory: zero_copy.then_some(memory),
                });
            }
        }
    }

    fn fragments(&mut self, script: &mut Script<'_>) {
        let Some(at) = script.below(4).checked_rem(self.sends.len()) else { return };
        if self.sends[at].memory.is_some() {
            let stream = self.sends[at].stream;
            if !self.net.messages().is_sent(stream) {
                return;
            }
            self.sends[at].transferred = self.sends[at].bytes;
        }
        while self.sends[at].transferred < self.sends[at].bytes {
            let send = &self.sends[at];
            let Some((send_slot, room)) = self.net.messages().send_slot(send.stream) else {
                return;
            };
            let piece = room.min((send.bytes - send.transferred) as usize);
            self.check_owned(send_slot, piece, "a fragment to be filled");
            // SAFETY: `check_owned` checked the memory of this message; single-threaded.
            unsafe { send_slot.write_bytes(1, piece) };
            self.net.messages().publish(send.stream, piece);
            self.sends[at].transferred += piece as u64;
        }
        let done = self.sends.swap_remove(at);
        self.net.messages().close(done.stream);
    }

    fn p2p(&mut self, script: &mut Script<'_>) {
        let from = peer(script);
        let announced = self.net.messages().next_announced(from);
        if let Some((envelope, stream)) = announced {
            // A matching receive has a buffer of this size; larger messages match none.
            if envelope.bytes <= 1 << 20 {
                let mut memory = vec![0; envelope.bytes as usize].into_boxed_slice();
                let in_place = script.yes()
                    // SAFETY: the memory is kept with the message.
                    && unsafe { self.net.messages().receive_into(stream, memory.as_mut_ptr()) };
                let memory = in_place.then_some(memory);
                self.receives.push(Transfer { stream, bytes: envelope.bytes, transferred: 0, memory });
            }
        }
        let Some(at) = script.below(4).checked_rem(self.receives.len()) else { return };
        if self.receives[at].memory.is_some() {
            let stream = self.receives[at].stream;
            if !self.net.messages().is_received(stream) {
                return;
            }
            self.receives[at].transferred = self.receives[at].bytes;
        }
        while self.receives[at].transferred < self.receives[at].bytes {
            let receive = &self.receives[at];
            let Some((recv_slot, room)) = self.net.messages().recv_slot(receive.stream) else {
                return;
            };
            let length = room.min((receive.bytes - receive.transferred) as usize);
            assert!(length > 0, "an empty fragment would cause an endless loop");
            self.check_owned(recv_slot, length, "a fragment");
            self.net.messages().release(receive.stream);
            self.receives[at].transferred += length as u64;
        }
        self.receives.swap_remove(at);
    }

    /// Checks that memory which the rank or a peer accesses belongs to the group.
    pub(super) fn check_owned(&self, at: *const u8, bytes: usize, object: &str) {
        assert!(
            bytes == 0 || self.net.owns(at, bytes),
            "{object} of {bytes} bytes is not owned by this group"
        );
    }
}
