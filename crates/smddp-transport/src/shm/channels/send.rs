//! The channels that a rank writes: where an operation's messages lie, and how they are told.

use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use super::super::local_ranks::GroupHome;
use super::LocalChannels;
use crate::process::layout::*;
use crate::process::memory::SharedMemory;
use crate::process::single_copy;
use crate::process::{Region, SingleCopy};
use crate::{Channels, SendChannel};

/// An outlet whose messages stay where they lie, one behind the other, `stride` bytes from one to the next: its readers take them from
/// there, and the operation is over when they have.
#[derive(Clone, Copy, Debug)]
pub struct ZeroCopySource {
    pub channel: usize,
    pub at: *const u8,
    pub stride: usize,
    /// Whether they do where that is not this process's symmetric memory.
    pub single_copy: SingleCopy,
}

/// Where an outlet's messages stay.
enum Place {
    /// Offset in this process's memory.
    Symmetric(usize),
    /// Address.
    Foreign(usize),
}

/// A channel I write, in the operation under way.
pub(super) struct LocalSend {
    pub(super) lines: usize,
    pub(super) cells: usize,
    pub(super) cell: usize,
    pub(super) depth: u64,
    pub(super) sent: u64,
    /// Fewest messages that all readers are known to have read.
    pub(super) read: u64,
    pub(super) readers: usize,
    pub(super) messages: u64,
    /// The caller's own memory.
    pub(super) stays: bool,
    /// `cells` is an address.
    pub(super) foreign: bool,
}

impl LocalSend {
    /// Messages that all its readers have read, as far as they say.
    pub(super) fn read_by_all(&self, memory: &SharedMemory) -> u64 {
        let read = (1..=self.readers).map(|reader| memory.counter(self.lines + LINE * reader).read());
        read.min().unwrap_or(u64::MAX)
    }
}

/// Cells from which the distance is measured, at one message of so many.
const MEASURED: usize = 8 << 10;
const MEASURED_EVERY: u32 = 4;

impl LocalChannels {
    pub(super) fn open_region(
        &mut self,
        channel_layout: &Channels,
        stays: &[ZeroCopySource],
    ) -> Option<Region> {
        let GroupHome { endpoint, nonce, .. } = self.home.as_ref()?;
        // Where an outlet's messages lie of themselves, and their stride.
        let place = |channel: usize| {
            let found = stays.binary_search_by_key(&channel, |stay| stay.channel).ok()?;
            let ZeroCopySource { at, stride, single_copy, .. } = stays[found];
            let send_channel = &channel_layout.send_channels[channel];
            let bytes = stride.checked_mul(usize::try_from(send_channel.messages).ok()?)?;
            if let Some(offset) = endpoint.symmetric.offset(&endpoint.memory, at as usize, bytes) {
                return Some((Place::Symmetric(offset), stride));
            }
            let lent = single_copy != SingleCopy::Never
                && self.ranks.all_read()
                && single_copy.is_enabled()
                && single_copy::is_readable(at, usize::try_from(send_channel.bytes).ok()?);
            lent.then_some((Place::Foreign(at as usize), stride))
        };
        // Looked for once: what may be read can change. Most calls have none.
        let places: Vec<_> = if stays.is_empty() {
            Vec::new()
        } else {
            (0..channel_layout.send_channels.len()).map(place).collect()
        };
        let place = |channel: usize| places.get(channel).and_then(Option::as_ref);
        let lines: usize = channel_layout.send_channels.iter().map(|o| LINE * (1 + o.readers.len())).sum();
        let fixed = channel_layout.send_channels.len() * ENTRY + lines;
        let cells: usize = (0..channel_layout.send_channels.len())
            .filter(|&channel| place(channel).is_none())
            .map(|channel| channel_layout.send_channels[channel].cell.next_multiple_of(LINE))
            .sum();
        let bytes = |depth: usize| fixed.next_multiple_of(GRAIN) + cells * depth;
        let (want, least) = channel_layout.depth;
        let region = endpoint.pool.acquire(&endpoint.memory, *nonce, bytes(want), bytes(least))?;
        let depth = if region.bytes >= bytes(want) {
            want
        } else {
            (region.bytes - fixed.next_multiple_of(GRAIN)).checked_div(cells).unwrap_or(want).max(least)
        };
        let memory = &endpoint.memory;
        let mut line = channel_layout.send_channels.len() * ENTRY;
        let mut cell = fixed.next_multiple_of(GRAIN);
        self.outs.clear();
        for (channel, send_channel) in channel_layout.send_channels.iter().enumerate() {
            let messages = send_channel.messages as usize;
            let in_cells = send_channel.cell.next_multiple_of(LINE);
            // As told: offset in the region, or address.
            let (cells, cell_bytes, cells_deep, lie) = match place(channel) {
                Some((Place::Symmetric(offset), stride)) => {
                    endpoint.symmetric.messages.fetch_add(send_channel.messages, Ordering::Relaxed);
                    (offset - region.offset, *stride, messages, IN_SYMMETRIC)
                }
                Some((Place::Foreign(at), stride)) => {
                    endpoint.single_copies.fetch_add(send_channel.messages, Ordering::Relaxed);
                    (*at, *stride, messages, IN_PRIVATE_MEMORY)
                }
                None => (cell, in_cells, depth, IN_CELLS),
            };
            let entry = region.offset + channel * ENTRY;
            let told = [line, cells, cell_bytes, cells_deep, send_channel.bytes as usize, lie as usize];
            for (i, value) in told.into_iter().enumerate() {
                memory.flag64(entry + 8 * i).store(value as u64, Ordering::Relaxed);
            }
            memory.flag64(region.offset + line).store(0, Ordering::Relaxed);
            for (i, &reader) in send_channel.readers.iter().enumerate() {
                // A reader elsewhere never holds anything up here.
                let read = if reader == SendChannel::REMOTE { u64::MAX } else { 0 };
                memory.flag64(region.offset + line + LINE * (1 + i)).store(read, Ordering::Relaxed);
            }
            self.outs.push(LocalSend {
                lines: region.offset + line,
                cells: if lie == IN_PRIVATE_MEMORY { cells } else { region.offset + cells },
                cell: cell_bytes,
                depth: cells_deep as u64,
                sent: 0,
                read: 0,
                readers: send_channel.readers.len(),
                messages: send_channel.messages,
                stays: lie != IN_CELLS,
                foreign: lie == IN_PRIVATE_MEMORY,
            });
            line += LINE * (1 + send_channel.readers.len());
            cell += if lie == IN_CELLS { cell_bytes * depth } else { 0 };
        }
        Some(region)
    }

    pub fn cell(&mut self, channel: usize) -> Option<*mut u8> {
        let memory = &self.home.as_ref()?.endpoint.memory;
        let out = &mut self.outs[channel];
        if out.sent.saturating_sub(out.read) >= out.depth {
            out.read = out.read_by_all(memory);
            // A reader that says it has read more than there was spoils its own messages only.
            if out.sent.saturating_sub(out.read) >= out.depth {
                self.flush();
                return None;
            }
        }
        let at = out.cells + (out.sent % out.depth) as usize * out.cell;
        // The caller's own, as it said.
        Some(if out.foreign { std::ptr::with_exposed_provenance_mut(at) } else { memory.at(at, out.cell) })
    }

    pub fn publish(&mut self, channel: usize) {
        let Some(GroupHome { endpoint, .. }) = &self.home else { return };
        let out = &mut self.outs[channel];
        debug_assert!(out.sent < out.messages);
        out.sent += 1;
        let (word, value) = if self.channel_layout.inline {
            (self.block + slot_at(self.layout, self.seq) + TAG, self.seq + 1)
        } else {
            (out.lines, out.sent)
        };
        // The readers look at this line while they wait, so it is in their caches: how long it takes to take it back
        // tells how far they are. The barriers cost little beside a large cell.
        let large = !self.channel_layout.inline && !out.stays && out.cell >= MEASURED;
        self.large = self.large.wrapping_add(large.into());
        let begun = (large && self.large.is_multiple_of(MEASURED_EVERY)).then(|| {
            fence(Ordering::SeqCst);
            Instant::now()
        });
        endpoint.memory.counter(word).publish(value);
        if let Some(begun) = begun {
            fence(Ordering::SeqCst);
            self.distance.learn(begun.elapsed());
        }
        self.owe();
    }
}
