//! Where a writer says that its messages lie.

use std::sync::atomic::Ordering;

use crate::RecvChannel;
use crate::process::layout::{ENTRY, IN_CELLS, IN_PRIVATE_MEMORY, LINE};
use crate::process::memory::SharedMemory;

/// Where a channel lies in its writer's memory, as the writer says.
#[derive(Clone, Copy, Default)]
pub(super) struct Channel {
    pub(super) lines: usize,
    pub(super) cells: usize,
    pub(super) cell: usize,
    pub(super) depth: u64,
    pub(super) bytes: u64,
    /// Whether each reader is to say what it has read.
    pub(super) acks: bool,
    /// `cells` is an address of the writer's process.
    pub(super) foreign: bool,
}

impl Channel {
    /// `None`: not a place within that memory.
    pub(super) fn read(memory: &SharedMemory, region: usize, want: &RecvChannel) -> Option<Self> {
        let entry = region.checked_add(want.channel * ENTRY)?;
        if !memory.contains(entry, ENTRY) {
            return None;
        }
        let field = |i: usize| memory.flag64(entry + 8 * i).load(Ordering::Relaxed);
        let size = |i: usize| usize::try_from(field(i)).ok();
        let foreign = field(5) == IN_PRIVATE_MEMORY;
        let lines = region.checked_add(size(0)?)?;
        let cells = if foreign { size(1)? } else { region.checked_add(size(1)?)? };
        let (cell, depth) = (size(2)?, size(3)?.max(1));
        // The line that counts the messages, and one for each reader up to this rank's.
        let all = cell.checked_mul(depth)?;
        let placed = if foreign { cells.checked_add(all).is_some() } else { memory.contains(cells, all) };
        let there = memory.contains(lines, LINE * (2 + want.reader)) && placed;
        there.then_some(Self {
            lines,
            cells,
            cell,
            depth: depth as u64,
            bytes: field(4),
            acks: field(5) != IN_CELLS,
            foreign,
        })
    }
}
