//! Fuzzing of the shared-memory transport: a peer writes arbitrary values at any time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smddp_base::{CallFingerprint, Channels, Envelope, MessageId, RecvChannel, SendChannel};
use smddp_net::fuzzing::Script;
use smddp_process::fuzzing::endpoint;
use smddp_process::layout::INLINE_BYTES;

use crate::LocalChannels;
use crate::fuzzing::{PeerMemory, pair};

/// Two ranks: rank 0 follows the protocol, the script writes the memory of rank 1.
struct Pair {
    link: LocalChannels,
    peer: PeerMemory,
    seq: u64,
    /// (messages, sent, slot bytes) and (channel, taken) by channel.
    outs: Vec<(u64, u64, usize)>,
    ins: Vec<(RecvChannel, u64)>,
    open: bool,
    failed: bool,
    sends: Vec<(MessageId, u64, u64)>,
    receives: Vec<(MessageId, u64, u64)>,
}

/// Writes arbitrary values to the shared memory of a peer while rank 0 communicates with it.
pub fn shm(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    endpoint();
    let odd = (script.below(16) == 0).then(|| script.number());
    let Some((link, peer)) = pair(odd) else { return };
    let mut pair = Pair {
        link,
        peer,
        seq: 0,
        outs: Vec::new(),
        ins: Vec::new(),
        open: false,
        failed: false,
        sends: Vec::new(),
        receives: Vec::new(),
    };
    while let Some(action) = script.step() {
        match action % 2 {
            0 => pair.write(&mut script),
            _ => pair.act(&mut script),
        }
    }
}

impl Pair {
    /// Writes a field of the peer's memory.
    fn write(&mut self, script: &mut Script<'_>) {
        match script.below(8) {
            0 => return self.peer.header(self.seq, script.number(), script.number() & 0xff),
            1 => return self.peer.message(script.number(), script.number()),
            _ => {}
        }
        let word = self.peer.pick(script.byte(), script.byte(), self.seq);
        let value = match script.below(4) {
            0 => self.seq + 1,
            1 => self.peer.staged(script.below(64)),
            _ => script.number(),
        };
        word.store(value, Ordering::Release);
    }

    fn act(&mut self, script: &mut Script<'_>) {
        match script.below(12) {
            0..3 => self.begin(script),
            3 => self.publish(script),
            4 | 5 => self.receive(),
            6 => self.end(),
            7 => self.inspect(script),
            8 | 9 => self.send(script),
            _ => self.p2p(),
        }
    }

    fn begin(&mut self, script: &mut Script<'_>) {
        if self.open || self.failed {
            return;
        }
        let inline = script.yes();
        let mut channel_layout =
            Channels { inline, depth: (1 + script.below(4), 1), window: 2, ..Channels::default() };
        let most = if inline { 1 } else { 5 };
        for _ in 0..script.below(3) {
            let (messages, slot_bytes) = (script.below(most + 1) as u64, 1 + 31 * script.below(200));
            channel_layout.send_channels.push(SendChannel {
                readers: vec![1],
                slot_bytes,
                messages,
                bytes: messages * slot_bytes as u64,
            });
            if inline {
                break;
            }
        }
        for channel in 0..script.below(3) {
            let (messages, slot_bytes) = (script.below(most + 1) as u64, 1 + 31 * script.below(200));
            let bytes = script.number() & 0xff;
            channel_layout.recv_channels.push(RecvChannel {
                rank: 1,
                channel,
                reader: 0,
                slot_bytes,
                messages,
                bytes,
            });
        }
        let channel_layout = Arc::new(channel_layout);
        if self.link.begin(self.seq, CallFingerprint { call: 1, count: 1 }, &channel_layout, &[]) {
            self.open = true;
            self.outs =
                channel_layout.send_channels.iter().map(|out| (out.messages, 0, out.slot_bytes)).collect();
            self.ins = channel_layout.recv_channels.iter().map(|recv_channel| (*recv_channel, 0)).collect();
        }
    }

    fn publish(&mut self, script: &mut Script<'_>) {
        let Some(out) = script.below(4).checked_rem(self.outs.len()) else { return };
        let (messages, sent, slot_bytes) = self.outs[out];
        if self.open
            && !self.failed
            && sent < messages
            && let Some(at) = self.link.send_slot(out)
        {
            self.check_shared(at, slot_bytes);
            self.link.publish(out);
            self.outs[out].1 += 1;
        }
    }

    fn receive(&mut self) {
        if !self.open || self.failed {
            return;
        }
        for recv_channel in 0..self.ins.len() {
            let (want, taken) = self.ins[recv_channel];
            if taken == want.messages {
                continue;
            }
            match self.link.recv_slot(recv_channel) {
                Ok(Some(at)) => {
                    self.check_shared(at, want.slot_bytes);
                    self.link.release(recv_channel);
                    self.ins[recv_channel].1 += 1;
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
        match self.link.settle() {
            Ok(settled) => {
                let all = self.outs.iter().all(|(messages, sent, _)| sent == messages)
                    && self.ins.iter().all(|(want, taken)| want.messages == *taken);
                if settled && all {
                    self.link.end();
                    self.open = false;
                    self.seq += 1;
                }
            }
            Err(_) => self.failed = true,
        }
    }

    fn inspect(&mut self, script: &mut Script<'_>) {
        let seq = self.seq + script.below(2) as u64;
        let _ = (self.link.arrived(1, seq), self.link.fingerprint_of(1, seq));
        self.link.flush();
        self.failed |= !self.link.faults().is_empty() && script.yes();
    }

    fn send(&mut self, script: &mut Script<'_>) {
        if self.sends.len() < 3 {
            let bytes = script.number() % (300 << 10);
            if let Some(stream) = self.link.messages().announce(1, Envelope { tag: 1, dtype: 2, bytes }) {
                self.sends.push((stream, bytes, 0));
            }
        }
        let Some(at) = script.below(3).checked_rem(self.sends.len()) else { return };
        let (stream, bytes, mut transferred) = self.sends[at];
        while transferred < bytes {
            let Some((send_slot, room)) = self.link.messages().send_slot(stream) else { break };
            let piece = room.min((bytes - transferred) as usize);
            self.check_shared(send_slot, piece);
            self.link.messages().publish(stream, piece);
            transferred += piece as u64;
        }
        self.sends[at].2 = transferred;
        if transferred == bytes {
            self.sends.swap_remove(at);
            self.link.messages().close(stream);
        }
    }

    fn p2p(&mut self) {
        if let Some((envelope, stream)) = self.link.messages().next_announced(1)
            && envelope.bytes <= 1 << 20
        {
            self.receives.push((stream, envelope.bytes, 0));
        }
        let mut at = 0;
        while at < self.receives.len() {
            let (stream, bytes, mut transferred) = self.receives[at];
            while transferred < bytes {
                let Some((recv_slot, room)) = self.link.messages().recv_slot(stream) else { break };
                let length = room.min((bytes - transferred) as usize);
                assert!(length > 0, "an empty fragment would cause an endless loop");
                // Inline payloads were copied with their announcement.
                if bytes > INLINE_BYTES as u64 {
                    self.check_shared(recv_slot, length);
                }
                self.link.messages().release(stream);
                transferred += length as u64;
            }
            self.receives[at].2 = transferred;
            if transferred == bytes {
                self.receives.swap_remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Checks that memory which the rank accesses is inside the shared memory.
    fn check_shared(&self, at: *const u8, bytes: usize) {
        assert!(self.peer.within(at, bytes), "{bytes} bytes are outside the shared memory");
    }
}
