//! Memory for tensors inside what all processes of the node map: readers take from it directly, and nothing is staged.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::memory::SharedMemory;
use super::pool::{give, take};
use crate::lock;

/// Pages of buffers that are gone stay for the next ones, up to this and to half of what is in use.
const IDLE: usize = 256 << 20;

#[derive(Debug, Default)]
struct Ranges {
    /// By offset. What was never used lies at the end.
    free: BTreeMap<usize, usize>,
    /// Bytes that were given back with their pages.
    idle: usize,
}

/// The part of a process's memory that buffers are made of.
#[derive(Debug)]
pub(crate) struct Symmetric {
    state: Mutex<Ranges>,
    first: usize,
    /// Bytes that buffers may have together.
    pub(super) bytes: usize,
    /// Bytes of buffers.
    pub(super) used: AtomicUsize,
    /// Messages that were read where they lay.
    pub(crate) messages: AtomicU64,
}

impl Symmetric {
    /// `bytes` from `first` on.
    pub(crate) fn new(first: usize, bytes: usize) -> Self {
        let free = if bytes > 0 { BTreeMap::from([(first, bytes)]) } else { BTreeMap::new() };
        let state = Mutex::new(Ranges { free, ..Ranges::default() });
        Self { state, first, bytes, used: AtomicUsize::new(0), messages: AtomicU64::new(0) }
    }

    /// Whether anything can lie in here.
    #[inline]
    pub(crate) fn in_use(&self) -> bool {
        self.used.load(Ordering::Relaxed) > 0
    }

    /// Where these bytes lie, if all of them are in here and where words may lie.
    pub(crate) fn offset(&self, memory: &SharedMemory, at: usize, bytes: usize) -> Option<usize> {
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
        // A device that knows a page would go on with the old one.
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
    fn pages_of_buffers_that_are_gone_are_kept_up_to_a_bound() {
        let memory = SharedMemory::create(4 * IDLE).unwrap().0;
        let symmetric = Symmetric { state: Mutex::default(), ..Symmetric::new(0, 0) };
        let word = |offset: usize| memory.flag64(offset).load(Ordering::Relaxed);
        for (offset, stays) in [(0, true), (IDLE, false)] {
            memory.flag64(offset).store(7, Ordering::Relaxed);
            symmetric.used.fetch_add(IDLE, Ordering::Relaxed);
            symmetric.give(&memory, offset, IDLE);
            assert_eq!(word(offset), if stays { 7 } else { 0 });
        }
    }
}
