//! State of the channels: messages sent and read, and free slots.

use super::ports::Time;
use crate::ir::Program;

pub(super) const NONE: u32 = u32::MAX;

/// A channel, and the progress of its writer.
#[derive(Clone, Copy, Debug)]
struct Channel {
    rank: u32,
    /// First index of its readers in `Flows::readers`.
    first: u32,
    count: u32,
    sent: u32,
    /// Pipeline that waits for a free slot.
    waiting: u32,
}

/// One reader of a channel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader {
    pub(super) rank: u32,
    taken: u32,
    arrived: u32,
    /// Pipeline that waits for the next message.
    waiting: u32,
}

/// A message that has arrived, or will have arrived at `finish`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Message {
    pub(super) finish: Time,
    pub(super) posted: Time,
    /// Last record of the writer when it sent the message.
    pub(super) record: u32,
    /// Nanoseconds that it waited for the out-port and for the in-port.
    pub(super) out_wait: u32,
    pub(super) in_wait: u32,
}

/// A slot: the number of outstanding readers, then the time at which the writer has its credit.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    left: u32,
    free: Time,
    record: u32,
}

/// All channels of all ranks.
pub(super) struct Flows {
    /// Simulated slots per channel, at most its number of messages.
    depth: usize,
    /// Messages per segment on the busiest channel.
    most: usize,
    /// Number of the first channel of each rank.
    base: Vec<u32>,
    channels: Vec<Channel>,
    readers: Vec<Reader>,
    /// `depth` entries per reader.
    messages: Vec<Message>,
    /// `depth` entries per channel.
    slots: Vec<Slot>,
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
            slots: Vec::new(),
        }
    }

    /// Adds the channels of the next rank.
    pub(super) fn push(&mut self, rank: usize, program: &Program) {
        self.base.push(self.channels.len() as u32);
        for channel in &program.channels {
            let (first, count) = (self.readers.len() as u32, channel.readers.len() as u32);
            self.readers.extend(channel.readers.iter().map(|&rank| Reader {
                rank: rank as u32,
                taken: 0,
                arrived: 0,
                waiting: NONE,
            }));
            self.channels.push(Channel { rank: rank as u32, first, count, sent: 0, waiting: NONE });
        }
        let mut messages = vec![0; program.channels.len()];
        for (channel, _) in program.pipelines.iter().flatten().filter_map(|timed| timed.step.published()) {
            messages[channel] += 1;
        }
        self.most = messages.into_iter().fold(self.most, usize::max);
    }

    /// Allocates messages and slots after all programs were added, for blocks with this number of segments.
    pub(super) fn complete(&mut self, segments: u64) {
        self.depth = (self.most.max(1) as u64).saturating_mul(segments).min(self.depth as u64) as usize;
        self.messages = vec![Message::default(); self.readers.len() * self.depth];
        self.slots = vec![Slot::default(); self.channels.len() * self.depth];
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

    /// Returns the time at which the next slot is free, and the record that freed it. `Err` registers
    /// `pipeline` as waiting for it.
    pub(super) fn room(&mut self, channel: u32, pipeline: u32) -> Result<(Time, u32), ()> {
        let flow = &mut self.channels[channel as usize];
        let slot = self.slots[channel as usize * self.depth + flow.sent as usize % self.depth];
        if slot.left > 0 {
            flow.waiting = pipeline;
            return Err(());
        }
        Ok((slot.free, slot.record))
    }

    /// Marks the next message as sent.
    pub(super) fn post(&mut self, channel: u32) {
        let flow = &mut self.channels[channel as usize];
        let slot = &mut self.slots[channel as usize * self.depth + flow.sent as usize % self.depth];
        *slot = Slot { left: flow.count, free: 0, record: NONE };
        flow.sent += 1;
    }

    /// Delivers the next message to a reader. Returns the pipeline that waits for it, if any.
    pub(super) fn arrive(&mut self, reader: usize, message: Message) -> Option<u32> {
        let state = &mut self.readers[reader];
        self.messages[reader * self.depth + state.arrived as usize % self.depth] = message;
        state.arrived += 1;
        let waiting = std::mem::replace(&mut state.waiting, NONE);
        (waiting != NONE).then_some(waiting)
    }

    /// Returns the next unread message of a reader. `None` registers `pipeline` as waiting for it.
    pub(super) fn next(&mut self, reader: usize, pipeline: u32) -> Option<Message> {
        let state = &mut self.readers[reader];
        if state.taken == state.arrived {
            state.waiting = pipeline;
            return None;
        }
        Some(self.messages[reader * self.depth + state.taken as usize % self.depth])
    }

    /// Releases the next message of a reader; the writer has the credit at `free`. Returns the writer's
    /// pipeline and its start time if it waits for this slot.
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
        let slot = &mut self.slots[channel as usize * self.depth + at];
        slot.left -= 1;
        if free >= slot.free {
            (slot.free, slot.record) = (free, record);
        }
        let freed = slot.left == 0;
        let free = slot.free;
        let flow = &mut self.channels[channel as usize];
        if !freed || flow.waiting == NONE || flow.sent as usize % self.depth != at {
            return None;
        }
        Some((std::mem::replace(&mut flow.waiting, NONE), free))
    }
}
