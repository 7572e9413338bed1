//! Symmetric memory: tensors inside shared memory, which peers read directly without staging.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use smddp_base::lock;

use super::memory::SharedMemory;
use super::pool::{give, take};

/// Maximum bytes of idle pages that are kept for later buffers, beside half of the bytes in use.
const IDLE: usize = 256 << 20;

#[derive(Debug, Default)]
struct Ranges {
    /// Free ranges by offset. Never used memory is at the end.
    free: BTreeMap<usize, usize>,
    /// Free bytes whose pages were kept.
    idle: usize,
}

/// Allocator of buffers in a process's shared memory.
#[derive(Debug)]
pub struct Symmetric {
    state: Mutex<Ranges>,
    first: usize,
    /// Total bytes for buffers.
    pub(super) bytes: usize,
    /// Bytes of allocated buffers.
    pub(super) used: AtomicUsize,
    /// Messages that peers read directly.
    pub messages: AtomicU64,
}

impl Symmetric {
    /// Creates an allocator of `bytes` bytes from offset `first`.
    pub(crate) fn new(first: usize, bytes: usize) -> Self {
        let free = if bytes > 0 { BTreeMap::from([(first, bytes)]) } else { BTreeMap::new() };
        let state = Mutex::new(Ranges { free, ..Ranges::default() });
        Self { state, first, bytes, used: AtomicUsize::new(0), messages: AtomicU64::new(0) }
    }

    /// Returns true if any buffer is allocated.
    #[inline]
    pub fn in_use(&self) -> bool {
        self.used.load(Ordering::Relaxed) > 0
    }

    /// Returns the offset of these bytes if all of them are in symmetric memory and 8-byte aligned.
    pub fn offset(&self, memory: &SharedMemory, at: usize, bytes: usize) -> Option<usize> {
        let offset = memory.offset(at)?;
        (offset >= self.first && memory.contains(offset, bytes)).then_some(offset)
    }

    pub(super) fn take(&self, bytes: usize) -> Option<usize> {
        let mut state = lock(&self.state);
        let offset = take(&mut state.free, bytes)?;
        self.used.fetch_add(bytes, Ordering::Relaxed);
        state.idle = state.idle.saturating_sub(bytes);
        Some(offset)
    }

    pub(super) fn give(&self, memory: &SharedMemory, offset: usize, bytes: usize) {
        let mut state = lock(&self.state);
        let used = self.used.fetch_sub(bytes, Ordering::Relaxed) - bytes;
        // A device that has mapped a page would keep using the old one.
        if state.idle + bytes > IDLE + used / 2 && !memory.pinned() {
            memory.discard(offset, bytes);
        } else {
            state.idle += bytes;
        }
        give(&mut state.free, offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_released_buffers_are_kept_up_to_a_limit() {
        let memory = SharedMemory::create(4 * IDLE).unwrap().0;
        let symmetric = Symmetric { state: Mutex::default(), ..Symmetric::new(0, 0) };
        let value = |offset: usize| memory.flag64(offset).load(Ordering::Relaxed);
        for (offset, kept) in [(0, true), (IDLE, false)] {
            memory.flag64(offset).store(7, Ordering::Relaxed);
            symmetric.used.fetch_add(IDLE, Ordering::Relaxed);
            symmetric.give(&memory, offset, IDLE);
            assert_eq!(value(offset), if kept { 7 } else { 0 });
        }
    }
}
