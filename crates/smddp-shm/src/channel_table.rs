//! Channel table in a writer's shared memory: location of its messages.

use std::sync::atomic::Ordering;

use smddp_base::RecvChannel;
use smddp_process::layout::{ENTRY, IN_PRIVATE_MEMORY, IN_SLOTS, LINE};
use smddp_process::memory::SharedMemory;

/// Location of a channel in its writer's memory, as the writer has published it.
#[derive(Clone, Copy, Default)]
pub(super) struct Channel {
    pub(super) lines: usize,
    pub(super) slots: usize,
    pub(super) slot_bytes: usize,
    pub(super) depth: u64,
    pub(super) bytes: u64,
    /// Set if each reader must publish the number of messages that it has read.
    pub(super) acks: bool,
    /// `slots` is an address in the writer's process, not an offset in its shared memory.
    pub(super) is_address: bool,
}

impl Channel {
    /// Reads the table entry of the channel `want`. `None` if its fields point outside of `memory`.
    pub(super) fn read(memory: &SharedMemory, region: usize, want: &RecvChannel) -> Option<Self> {
        let entry = region.checked_add(want.channel * ENTRY)?;
        if !memory.contains(entry, ENTRY) {
            return None;
        }
        let field = |i: usize| memory.flag64(entry + 8 * i).load(Ordering::Relaxed);
        let size = |i: usize| usize::try_from(field(i)).ok();
        let is_address = field(5) == IN_PRIVATE_MEMORY;
        let lines = region.checked_add(size(0)?)?;
        let slots = if is_address { size(1)? } else { region.checked_add(size(1)?)? };
        let (slot_bytes, depth) = (size(2)?, size(3)?.max(1));
        // The line with the number of published messages, and one line for each reader up to this rank.
        let all = slot_bytes.checked_mul(depth)?;
        let placed = if is_address { slots.checked_add(all).is_some() } else { memory.contains(slots, all) };
        let in_bounds = memory.contains(lines, LINE * (2 + want.reader)) && placed;
        in_bounds.then_some(Self {
            lines,
            slots,
            slot_bytes,
            depth: depth as u64,
            bytes: field(4),
            acks: field(5) != IN_SLOTS,
            is_address,
        })
    }
}
