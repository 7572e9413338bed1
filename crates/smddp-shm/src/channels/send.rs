//! Send channels of a rank: location of an operation's messages and their publication.

use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use smddp_base::{Channels, SendChannel};
use smddp_process::layout::*;
use smddp_process::memory::SharedMemory;
use smddp_process::single_copy;
use smddp_process::{Region, SingleCopy};

use super::super::local_ranks::GroupHome;
use super::LocalChannels;

/// Zero-copy source of a send channel: the readers read its messages from the caller's memory, with `stride` bytes from one message
/// to the next. The operation ends once they have read all of them.
#[derive(Clone, Copy, Debug)]
pub struct ZeroCopySource {
    /// Index of the send channel.
    pub channel: usize,
    /// Address of the first message.
    pub at: *const u8,
    /// Distance between the starts of consecutive messages in bytes.
    pub stride: usize,
    /// Use of single copy for memory outside this process's symmetric memory.
    pub single_copy: SingleCopy,
}

/// Location of zero-copy messages.
enum Location {
    /// Offset in this process's shared memory.
    Symmetric(usize),
    /// Address in this process, which readers read through the kernel.
    Address(usize),
}

/// Send channel of the operation in progress.
pub(super) struct LocalSend {
    pub(super) lines: usize,
    pub(super) slots: usize,
    pub(super) slot_bytes: usize,
    pub(super) depth: u64,
    pub(super) sent: u64,
    /// Number of messages that all readers are known to have read.
    pub(super) read: u64,
    pub(super) readers: usize,
    pub(super) messages: u64,
    /// The messages are in the caller's memory.
    pub(super) zero_copy: bool,
    /// `slots` is an address, not an offset in the shared memory.
    pub(super) is_address: bool,
}

impl LocalSend {
    /// Returns the number of messages that all readers report as read.
    pub(super) fn read_by_all(&self, memory: &SharedMemory) -> u64 {
        let read = (1..=self.readers).map(|reader| memory.counter(self.lines + LINE * reader).read());
        read.min().unwrap_or(u64::MAX)
    }
}

/// Smallest slot, in bytes, whose publication measures the cache distance; one message in `MEASURED_EVERY` does.
const MEASURED: usize = 8 << 10;
const MEASURED_EVERY: u32 = 4;

impl LocalChannels {
    pub(super) fn open_region(
        &mut self,
        channel_layout: &Channels,
        sources: &[ZeroCopySource],
    ) -> Option<Region> {
        let GroupHome { endpoint, nonce, .. } = self.home.as_ref()?;
        // Location and stride of a channel's zero-copy messages, if its readers can reach them.
        let location = |channel: usize| {
            let found = sources.binary_search_by_key(&channel, |source| source.channel).ok()?;
            let ZeroCopySource { at, stride, single_copy, .. } = sources[found];
            let send_channel = &channel_layout.send_channels[channel];
            let bytes = stride.checked_mul(usize::try_from(send_channel.messages).ok()?)?;
            if let Some(offset) = endpoint.symmetric.offset(&endpoint.memory, at as usize, bytes) {
                return Some((Location::Symmetric(offset), stride));
            }
            let readable = single_copy != SingleCopy::Never
                && self.ranks.all_read()
                && single_copy.is_enabled()
                && single_copy::is_readable(at, usize::try_from(send_channel.bytes).ok()?);
            readable.then_some((Location::Address(at as usize), stride))
        };
        // Evaluated once, because the result can change between two evaluations. Most calls have no sources.
        let locations: Vec<_> = if sources.is_empty() {
            Vec::new()
        } else {
            (0..channel_layout.send_channels.len()).map(location).collect()
        };
        let location = |channel: usize| locations.get(channel).and_then(Option::as_ref);
        let lines: usize = channel_layout.send_channels.iter().map(|o| LINE * (1 + o.readers.len())).sum();
        let fixed = channel_layout.send_channels.len() * ENTRY + lines;
        let slots: usize = (0..channel_layout.send_channels.len())
            .filter(|&channel| location(channel).is_none())
            .map(|channel| channel_layout.send_channels[channel].slot_bytes.next_multiple_of(LINE))
            .sum();
        let bytes = |depth: usize| fixed.next_multiple_of(GRAIN) + slots * depth;
        let (want, least) = channel_layout.depth;
        let region = endpoint.pool.acquire(&endpoint.memory, *nonce, bytes(want), bytes(least))?;
        let depth = if region.bytes() >= bytes(want) {
            want
        } else {
            (region.bytes() - fixed.next_multiple_of(GRAIN)).checked_div(slots).unwrap_or(want).max(least)
        };
        let memory = &endpoint.memory;
        let mut line = channel_layout.send_channels.len() * ENTRY;
        let mut slot = fixed.next_multiple_of(GRAIN);
        self.sends.clear();
        for (channel, send_channel) in channel_layout.send_channels.iter().enumerate() {
            let messages = send_channel.messages as usize;
            let slot_stride = send_channel.slot_bytes.next_multiple_of(LINE);
            // `slots` as published: an offset in the region, or an address.
            let (slots, slot_bytes, slot_count, kind) = match location(channel) {
                Some((Location::Symmetric(offset), stride)) => {
                    endpoint.symmetric.messages.fetch_add(send_channel.messages, Ordering::Relaxed);
                    (offset - region.offset(), *stride, messages, IN_SYMMETRIC)
                }
                Some((Location::Address(at), stride)) => {
                    endpoint.count_single_copies(send_channel.messages);
                    (*at, *stride, messages, IN_PRIVATE_MEMORY)
                }
                None => (slot, slot_stride, depth, IN_SLOTS),
            };
            let entry = region.offset() + channel * ENTRY;
            let fields = [line, slots, slot_bytes, slot_count, send_channel.bytes as usize, kind as usize];
            for (i, value) in fields.into_iter().enumerate() {
                memory.flag64(entry + 8 * i).store(value as u64, Ordering::Relaxed);
            }
            memory.flag64(region.offset() + line).store(0, Ordering::Relaxed);
            for (i, &reader) in send_channel.readers.iter().enumerate() {
                // A reader on another node never blocks this channel.
                let read = if reader == SendChannel::REMOTE { u64::MAX } else { 0 };
                memory.flag64(region.offset() + line + LINE * (1 + i)).store(read, Ordering::Relaxed);
            }
            self.sends.push(LocalSend {
                lines: region.offset() + line,
                slots: if kind == IN_PRIVATE_MEMORY { slots } else { region.offset() + slots },
                slot_bytes,
                depth: slot_count as u64,
                sent: 0,
                read: 0,
                readers: send_channel.readers.len(),
                messages: send_channel.messages,
                zero_copy: kind != IN_SLOTS,
                is_address: kind == IN_PRIVATE_MEMORY,
            });
            line += LINE * (1 + send_channel.readers.len());
            slot += if kind == IN_SLOTS { slot_bytes * depth } else { 0 };
        }
        Some(region)
    }

    /// Returns the next free slot of a send channel. `None`: its readers have not read enough messages yet. For a zero-copy source
    /// the slot is the memory of the message.
    pub fn send_slot(&mut self, channel: usize) -> Option<*mut u8> {
        let memory = &self.home.as_ref()?.endpoint.memory;
        let out = &mut self.sends[channel];
        if out.sent.saturating_sub(out.read) >= out.depth {
            out.read = out.read_by_all(memory);
            // A reader that reports more messages than were sent corrupts its own messages only.
            if out.sent.saturating_sub(out.read) >= out.depth {
                self.flush();
                return None;
            }
        }
        let at = out.slots + (out.sent % out.depth) as usize * out.slot_bytes;
        // A zero-copy message at an address of the caller.
        Some(if out.is_address {
            std::ptr::with_exposed_provenance_mut(at)
        } else {
            memory.at(at, out.slot_bytes)
        })
    }

    /// Publishes the slot that [`Self::send_slot`] returned last.
    pub fn publish(&mut self, channel: usize) {
        let Some(GroupHome { endpoint, .. }) = &self.home else { return };
        let out = &mut self.sends[channel];
        debug_assert!(out.sent < out.messages);
        out.sent += 1;
        let (counter, value) = if self.channel_layout.inline {
            (self.block + header_at(self.layout, self.seq) + TAG, self.seq + 1)
        } else {
            (out.lines, out.sent)
        };
        // Waiting readers poll this line, so their caches hold it. The time to take it back is a measure of their distance. The
        // barriers are cheap compared with a large slot.
        let large = !self.channel_layout.inline && !out.zero_copy && out.slot_bytes >= MEASURED;
        self.large_messages = self.large_messages.wrapping_add(large.into());
        let begun = (large && self.large_messages.is_multiple_of(MEASURED_EVERY)).then(|| {
            fence(Ordering::SeqCst);
            Instant::now()
        });
        endpoint.memory.counter(counter).publish(value);
        if let Some(begun) = begun {
            fence(Ordering::SeqCst);
            self.distance.record(begun.elapsed());
        }
        self.defer_notify();
    }
}
