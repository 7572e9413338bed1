//! What an operation's channels between nodes need: made once for a call that is bound, used by each of its operations.

use std::collections::HashMap;

use crate::{Mismatch, RecvChannel, SendChannel};

pub(super) struct RemoteSend {
    /// Its number in the program.
    pub(super) channel: usize,
    /// In rotated order, so that not all ranks write to one first.
    pub(super) readers: Vec<usize>,
    /// Of its first cell, in the operation's memory.
    pub(super) at: usize,
    pub(super) cell: usize,
    /// Messages that it may be ahead of its readers, and cells that it has for them.
    pub(super) window: u64,
    pub(super) cells: u64,
    pub(super) messages: u64,
    pub(super) bytes: u64,
    /// Where its readers and its cells begin among those of all channels.
    pub(super) first_reader: usize,
    pub(super) first_cell: usize,
}

pub(super) struct RemoteRecv {
    pub(super) want: RecvChannel,
    pub(super) at: usize,
    pub(super) depth: u64,
}

/// Channels, and where their cells lie in an operation's memory.
#[derive(Default)]
pub(crate) struct RemoteLayout {
    pub(super) outs: Vec<RemoteSend>,
    pub(super) ins: Vec<RemoteRecv>,
    /// Inlets by (rank, channel).
    pub(super) places: HashMap<(usize, u32), usize>,
    /// Of all cells.
    pub(super) bytes: usize,
    readers: usize,
    cells: usize,
}

impl RemoteLayout {
    /// `send_channels`: each with its number in the program. `window`: cells of a channel at its readers, on which all ranks agree; `written`: those of its writer.
    pub(crate) fn new(
        me: usize,
        send_channels: Vec<(usize, SendChannel)>,
        recv_channels: &[RecvChannel],
        window: usize,
        written: usize,
    ) -> Self {
        let mut channel_layout = Self::default();
        let mut end = 0;
        let mut place = |cell: usize, messages: u64, most: usize| {
            let (at, cell, cells) = (end, cell.next_multiple_of(64), messages.min(most as u64).max(1));
            end += cell * cells as usize;
            (at, cell, cells)
        };
        for (channel, send_channel) in send_channels {
            let (at, cell, cells) = place(send_channel.cell, send_channel.messages, written);
            let mut readers = send_channel.readers;
            let first = readers.iter().position(|&rank| rank > me).unwrap_or(0);
            readers.rotate_left(first);
            let (first_reader, first_cell) = (channel_layout.readers, channel_layout.cells);
            channel_layout.readers += readers.len();
            channel_layout.cells += cells as usize;
            channel_layout.outs.push(RemoteSend {
                channel,
                readers,
                at,
                cell,
                window: send_channel.messages.min(window as u64).max(1),
                cells,
                messages: send_channel.messages,
                bytes: send_channel.bytes,
                first_reader,
                first_cell,
            });
        }
        for (index, recv_channel) in recv_channels.iter().enumerate() {
            let (at, _, depth) = place(recv_channel.cell, recv_channel.messages, window);
            channel_layout.places.insert((recv_channel.rank, recv_channel.channel as u32), index);
            channel_layout.ins.push(RemoteRecv { want: *recv_channel, at, depth });
        }
        channel_layout.bytes = end;
        channel_layout
    }
}

/// Memory of the call's own in which a channel's messages arrive, one behind the other, without a cell.
#[derive(Clone, Copy)]
pub(super) struct RecvTarget {
    pub(super) at: *mut u8,
    pub(super) bytes: usize,
    /// From one message to the next.
    pub(super) stride: usize,
}

impl RecvTarget {
    /// Where message `index` lies; `None`: `bytes` do not fit there.
    pub(super) fn place(&self, index: u64, bytes: u64) -> Option<*mut u8> {
        let offset = usize::try_from(index).ok()?.checked_mul(self.stride)?;
        let end = offset.checked_add(usize::try_from(bytes).ok()?)?;
        (end <= self.bytes).then(|| self.at.wrapping_add(offset))
    }
}

/// How far one channel that this rank reads has come.
#[derive(Clone, Copy, Default)]
pub(super) struct RecvProgress {
    /// Messages that were given a cell, that are here, and that are read. As long as one of the first is not among the
    /// second, the operation does not end: so nobody writes to its cells afterwards.
    pub(super) placed: u64,
    pub(super) there: u64,
    pub(super) taken: u64,
    /// Of those that are read, the writer was told of so many.
    pub(super) told: u64,
    /// The writer's header was seen.
    pub(super) resolved: bool,
    pub(super) bad: Option<Mismatch>,
}

impl RecvProgress {
    /// Something is still to come.
    pub(super) fn awaited(&self, want: &RecvChannel) -> bool {
        !self.resolved || self.there < want.messages
    }
}

/// How far the channels of the operation under way have come.
#[derive(Default)]
pub(super) struct Progress {
    /// Messages, by outlet.
    pub(super) sent: Vec<u64>,
    /// Messages that each reader of each outlet is known to have read.
    pub(super) read: Vec<u64>,
    /// Sends under way from each cell of each outlet.
    pub(super) busy: Vec<u32>,
    pub(super) came: Vec<RecvProgress>,
}

impl Progress {
    /// Nothing has moved yet. Keeps its memory.
    pub(super) fn reset(&mut self, channel_layout: &RemoteLayout) {
        fn zero<T: Clone + Default>(list: &mut Vec<T>, length: usize) {
            list.clear();
            list.resize(length, T::default());
        }
        zero(&mut self.sent, channel_layout.outs.len());
        zero(&mut self.read, channel_layout.readers);
        zero(&mut self.busy, channel_layout.cells);
        zero(&mut self.came, channel_layout.ins.len());
    }
}
