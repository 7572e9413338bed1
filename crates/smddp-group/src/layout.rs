//! Layout of an operation's inter-node channels: computed once for a bound call, used by each of its operations.

use std::collections::HashMap;

use smddp_base::{Mismatch, RecvChannel, SendChannel};

/// Send channel between nodes.
pub(super) struct RemoteSend {
    /// Channel number in the program.
    pub(super) channel: usize,
    /// Readers in rotated order, so that not all ranks write to the same reader first.
    pub(super) readers: Vec<usize>,
    /// Offset of the first slot in the operation's memory, in bytes.
    pub(super) at: usize,
    pub(super) slot_bytes: usize,
    /// Maximum number of messages ahead of the slowest reader.
    pub(super) window: u64,
    /// Number of send slots.
    pub(super) slots: u64,
    pub(super) messages: u64,
    pub(super) bytes: u64,
    /// First index of its readers and of its slots among those of all send channels.
    pub(super) first_reader: usize,
    pub(super) first_slot: usize,
}

/// Receive channel between nodes.
pub(super) struct RemoteRecv {
    pub(super) spec: RecvChannel,
    /// Offset of the first slot in the operation's memory, in bytes.
    pub(super) at: usize,
    /// Number of receive slots.
    pub(super) slots: u64,
}

/// Inter-node channels of an operation, with the offsets of their slots in its memory.
#[derive(Default)]
pub(crate) struct RemoteLayout {
    pub(super) sends: Vec<RemoteSend>,
    pub(super) recvs: Vec<RemoteRecv>,
    /// Index of a receive channel by (rank, channel).
    pub(super) recv_index: HashMap<(usize, u32), usize>,
    /// Total size of all slots.
    pub(super) bytes: usize,
    readers: usize,
    slots: usize,
}

impl RemoteLayout {
    /// `send_channels`: with their numbers in the program. `window`: receive slots of a channel, equal on all ranks. `send_slots`: send
    /// slots of a channel.
    pub(crate) fn new(
        me: usize,
        send_channels: Vec<(usize, SendChannel)>,
        recv_channels: &[RecvChannel],
        window: usize,
        send_slots: usize,
    ) -> Self {
        let mut layout = Self::default();
        let mut end = 0;
        let mut allocate = |slot_bytes: usize, messages: u64, limit: usize| {
            let (at, slot_bytes, slots) =
                (end, slot_bytes.next_multiple_of(64), messages.min(limit as u64).max(1));
            end += slot_bytes * slots as usize;
            (at, slot_bytes, slots)
        };
        for (channel, send_channel) in send_channels {
            let (at, slot_bytes, slots) =
                allocate(send_channel.slot_bytes, send_channel.messages, send_slots);
            let mut readers = send_channel.readers;
            let first = readers.iter().position(|&rank| rank > me).unwrap_or(0);
            readers.rotate_left(first);
            let (first_reader, first_slot) = (layout.readers, layout.slots);
            layout.readers += readers.len();
            layout.slots += slots as usize;
            layout.sends.push(RemoteSend {
                channel,
                readers,
                at,
                slot_bytes,
                window: send_channel.messages.min(window as u64).max(1),
                slots,
                messages: send_channel.messages,
                bytes: send_channel.bytes,
                first_reader,
                first_slot,
            });
        }
        for (index, recv_channel) in recv_channels.iter().enumerate() {
            let (at, _, slots) = allocate(recv_channel.slot_bytes, recv_channel.messages, window);
            layout.recv_index.insert((recv_channel.rank, recv_channel.channel as u32), index);
            layout.recvs.push(RemoteRecv { spec: *recv_channel, at, slots });
        }
        layout.bytes = end;
        layout
    }
}

/// Memory of the call itself that receives a channel's messages in place, consecutively and without slots.
#[derive(Clone, Copy)]
pub(super) struct RecvTarget {
    pub(super) at: *mut u8,
    pub(super) bytes: usize,
    /// Distance between the starts of two messages, in bytes.
    pub(super) stride: usize,
}

impl RecvTarget {
    /// Returns the address of message `index`; `None`: `bytes` do not fit there.
    pub(super) fn slot_address(&self, index: u64, bytes: u64) -> Option<*mut u8> {
        let offset = usize::try_from(index).ok()?.checked_mul(self.stride)?;
        let end = offset.checked_add(usize::try_from(bytes).ok()?)?;
        (end <= self.bytes).then(|| self.at.wrapping_add(offset))
    }
}

/// Progress of one channel that this rank reads.
#[derive(Clone, Copy, Default)]
pub(super) struct RecvProgress {
    /// Number of messages with an assigned target, of received messages, and of released messages. The operation does not end
    /// while a target is assigned and its message not received, so nothing writes to its slots afterwards.
    pub(super) placed: u64,
    pub(super) received: u64,
    pub(super) released: u64,
    /// Number of released messages for which the writer has received credit.
    pub(super) credited: u64,
    /// Set once the writer's fingerprint has been checked.
    pub(super) confirmed: bool,
    pub(super) mismatch: Option<Mismatch>,
}

impl RecvProgress {
    /// Returns true if the channel still expects data.
    pub(super) fn is_pending(&self, spec: &RecvChannel) -> bool {
        !self.confirmed || self.received < spec.messages
    }
}

/// Progress of the channels of the operation in progress.
#[derive(Default)]
pub(super) struct ChannelProgress {
    /// Messages sent, by send channel.
    pub(super) sent: Vec<u64>,
    /// Messages that each reader of each send channel has acknowledged with credits.
    pub(super) read: Vec<u64>,
    /// Sends in flight from each slot of each send channel.
    pub(super) busy: Vec<u32>,
    pub(super) recvs: Vec<RecvProgress>,
}

impl ChannelProgress {
    /// Resets all progress to zero; keeps the allocations.
    pub(super) fn reset(&mut self, layout: &RemoteLayout) {
        fn zero<T: Clone + Default>(list: &mut Vec<T>, length: usize) {
            list.clear();
            list.resize(length, T::default());
        }
        zero(&mut self.sent, layout.sends.len());
        zero(&mut self.read, layout.readers);
        zero(&mut self.busy, layout.slots);
        zero(&mut self.recvs, layout.recvs.len());
    }
}
