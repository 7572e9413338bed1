//! Channels while they flow: who sent, who read, which cells are free.

use super::ports::Time;
use crate::ir::Program;

pub(super) const NOBODY: u32 = u32::MAX;

/// A channel: how far its writer is.
#[derive(Clone, Copy, Debug)]
struct Channel {
    rank: u32,
    /// Its readers in `Flows::readers`.
    first: u32,
    count: u32,
    sent: u32,
    /// Lane that waits for a free cell.
    waiting: u32,
}

/// One reader of a channel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader {
    pub(super) rank: u32,
    taken: u32,
    arrived: u32,
    /// Lane that waits for the next message.
    waiting: u32,
}

/// A message that is there, or known to be there at `finish`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Message {
    pub(super) finish: Time,
    pub(super) posted: Time,
    /// The writer's last record when it sent.
    pub(super) record: u32,
    /// How long it waited for the out-port and for the in-port, in nanoseconds.
    pub(super) out_wait: u32,
    pub(super) in_wait: u32,
}

/// A cell: readers that still have to read it; then when the writer knows that it is free.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    left: u32,
    free: Time,
    record: u32,
}

/// Every channel of every rank.
pub(super) struct Flows {
    /// Cells of a channel that are told apart: no more than it has messages.
    depth: usize,
    /// Messages of one segment on the busiest channel.
    most: usize,
    /// Number of the first channel of each rank.
    base: Vec<u32>,
    channels: Vec<Channel>,
    readers: Vec<Reader>,
    /// `depth` for each reader.
    messages: Vec<Message>,
    /// `depth` for each channel.
    cells: Vec<Cell>,
}

impl Flows {
    pub(super) fn new(depth: usize) -> Self {
        Self {
            depth: depth.max(1),
            most: 0,
            base: Vec::new(),
            channels: Vec::new(),
            readers: Vec::new(),
            messages: Vec::new(),
            cells: Vec::new(),
        }
    }

    /// The channels of the next rank.
    pub(super) fn push(&mut self, rank: usize, program: &Program) {
        self.base.push(self.channels.len() as u32);
        for channel in &program.channels {
            let (first, count) = (self.readers.len() as u32, channel.readers.len() as u32);
            self.readers.extend(channel.readers.iter().map(|&rank| Reader {
                rank: rank as u32,
                taken: 0,
                arrived: 0,
                waiting: NOBODY,
            }));
            self.channels.push(Channel { rank: rank as u32, first, count, sent: 0, waiting: NOBODY });
        }
        let mut messages = vec![0; program.channels.len()];
        for (channel, _) in program.lanes.iter().flatten().filter_map(|timed| timed.step.published()) {
            messages[channel] += 1;
        }
        self.most = messages.into_iter().fold(self.most, usize::max);
    }

    /// All programs are in, of blocks of so many segments.
    pub(super) fn complete(&mut self, segments: u64) {
        self.depth = (self.most.max(1) as u64).saturating_mul(segments).min(self.depth as u64) as usize;
        self.messages = vec![Message::default(); self.readers.len() * self.depth];
        self.cells = vec![Cell::default(); self.channels.len() * self.depth];
    }

    pub(super) fn id(&self, rank: u32, channel: u32) -> u32 {
        self.base[rank as usize] + channel
    }

    pub(super) fn writer(&self, channel: u32) -> u32 {
        self.channels[channel as usize].rank
    }

    pub(super) fn readers(&self, channel: u32) -> std::ops::Range<usize> {
        let Channel { first, count, .. } = self.channels[channel as usize];
        first as usize..(first + count) as usize
    }

    pub(super) fn reader(&self, reader: usize) -> Reader {
        self.readers[reader]
    }

    /// When the cell for the next message is free and who freed it; `Err` registers `lane` as waiting for it.
    pub(super) fn room(&mut self, channel: u32, lane: u32) -> Result<(Time, u32), ()> {
        let flow = &mut self.channels[channel as usize];
        let cell = self.cells[channel as usize * self.depth + flow.sent as usize % self.depth];
        if cell.left > 0 {
            flow.waiting = lane;
            return Err(());
        }
        Ok((cell.free, cell.record))
    }

    /// The next message is sent.
    pub(super) fn post(&mut self, channel: u32) {
        let flow = &mut self.channels[channel as usize];
        let cell = &mut self.cells[channel as usize * self.depth + flow.sent as usize % self.depth];
        *cell = Cell { left: flow.count, free: 0, record: NOBODY };
        flow.sent += 1;
    }

    /// The next message reached a reader; the lane that waits for it, if one does.
    pub(super) fn arrive(&mut self, reader: usize, message: Message) -> Option<u32> {
        let state = &mut self.readers[reader];
        self.messages[reader * self.depth + state.arrived as usize % self.depth] = message;
        state.arrived += 1;
        let waiting = std::mem::replace(&mut state.waiting, NOBODY);
        (waiting != NOBODY).then_some(waiting)
    }

    /// The next message for a reader, which has not read it; `None` registers `lane` as waiting for it.
    pub(super) fn next(&mut self, reader: usize, lane: u32) -> Option<Message> {
        let state = &mut self.readers[reader];
        if state.taken == state.arrived {
            state.waiting = lane;
            return None;
        }
        Some(self.messages[reader * self.depth + state.taken as usize % self.depth])
    }

    /// A reader is through with its next message, which the writer knows at `free`. Returns the writer's lane,
    /// where that waits for this very cell, and when it may go on.
    pub(super) fn release(
        &mut self,
        channel: u32,
        reader: usize,
        free: Time,
        record: u32,
    ) -> Option<(u32, Time)> {
        let state = &mut self.readers[reader];
        let at = state.taken as usize % self.depth;
        state.taken += 1;
        let cell = &mut self.cells[channel as usize * self.depth + at];
        cell.left -= 1;
        if free >= cell.free {
            (cell.free, cell.record) = (free, record);
        }
        let freed = cell.left == 0;
        let free = cell.free;
        let flow = &mut self.channels[channel as usize];
        if !freed || flow.waiting == NOBODY || flow.sent as usize % self.depth != at {
            return None;
        }
        Some((std::mem::replace(&mut flow.waiting, NOBODY), free))
    }
}
