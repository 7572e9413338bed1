//! Memory for tensors inside what all processes of the node map: readers take from it directly, and nothing is staged.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::endpoint::Endpoint;
use super::layout::{GRAIN, SYMMETRIC_BYTES};
use super::memory::Memory;
use super::pool::{give, take};
use crate::{fork, lock};

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
    /// Bytes of buffers.
    used: AtomicUsize,
    /// Messages that were read where they lay.
    pub(crate) messages: AtomicU64,
}

/// Of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SymmetricUsage {
    /// Bytes of buffers, and how many there may be.
    pub used: usize,
    pub most: usize,
    /// Messages of its that were read where they lay, and not copied into cells.
    pub messages: u64,
}

impl Symmetric {
    /// From `first` on, [`SYMMETRIC_BYTES`].
    pub(crate) fn new(first: usize) -> Self {
        let free = BTreeMap::from([(first, SYMMETRIC_BYTES)]);
        let state = Mutex::new(Ranges { free, ..Ranges::default() });
        Self { state, first, used: AtomicUsize::new(0), messages: AtomicU64::new(0) }
    }

    /// Whether anything can lie in here.
    #[inline]
    pub(crate) fn in_use(&self) -> bool {
        self.used.load(Ordering::Relaxed) > 0
    }

    /// Where these bytes lie, if all of them are in here and where words may lie.
    pub(crate) fn offset(&self, memory: &Memory, at: usize, bytes: usize) -> Option<usize> {
        let offset = memory.offset(at)?;
        (offset >= self.first && memory.holds(offset, bytes)).then_some(offset)
    }

    fn take(&self, bytes: usize) -> Option<usize> {
        let mut state = lock(&self.state);
        let offset = take(&mut state.free, bytes)?;
        self.used.fetch_add(bytes, Ordering::Relaxed);
        state.idle = state.idle.saturating_sub(bytes);
        Some(offset)
    }

    fn give(&self, memory: &Memory, offset: usize, bytes: usize) {
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

/// Bytes of this process that the others of its node read where they lie; given back when it is dropped. A forked child has them
/// in common with its parent.
pub struct SymmetricBuffer {
    endpoint: Arc<Endpoint>,
    offset: usize,
    /// Whole grains.
    room: usize,
    bytes: usize,
    forks: u32,
}

impl SymmetricBuffer {
    /// `cap`: bytes of the staging pool, where this is the first that the process has of all this.
    ///
    /// # Errors
    /// The process has no such memory, or not so much of it is free.
    pub fn new(cap: usize, bytes: usize) -> io::Result<Self> {
        let endpoint = Endpoint::get(cap)?;
        let room = bytes.max(1).checked_next_multiple_of(GRAIN).unwrap_or(usize::MAX);
        let offset = endpoint.symmetric.take(room).ok_or_else(|| {
            let SymmetricUsage { used, most, .. } = Self::usage();
            let (used, most) = (used >> 20, most >> 20);
            let what = "bytes of symmetric memory are not free in one piece";
            let text = format!("{bytes} {what}: {used} of {most} MiB are in use");
            io::Error::new(io::ErrorKind::OutOfMemory, text)
        })?;
        Ok(Self { endpoint, offset, room, bytes, forks: fork::generation() })
    }

    pub fn usage() -> SymmetricUsage {
        let most = SYMMETRIC_BYTES;
        Endpoint::existing().map_or(SymmetricUsage { most, ..SymmetricUsage::default() }, |endpoint| {
            let Symmetric { used, messages, .. } = &endpoint.symmetric;
            let (used, messages) = (used.load(Ordering::Relaxed), messages.load(Ordering::Relaxed));
            SymmetricUsage { used, most, messages }
        })
    }

    /// Aligned to pages. What it holds at first is anything.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.endpoint.memory.at(self.offset, self.bytes)
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl std::fmt::Debug for SymmetricBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SymmetricBuffer({} bytes)", self.bytes)
    }
}

impl Drop for SymmetricBuffer {
    fn drop(&mut self) {
        // A forked child's copy: the memory is the parent's, who may go on with it.
        if self.forks != fork::generation() {
            return;
        }
        self.endpoint.symmetric.give(&self.endpoint.memory, self.offset, self.room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAP: usize = 1 << 20;

    #[test]
    fn buffers_are_apart_and_their_room_is_used_again() {
        let first = SymmetricBuffer::new(CAP, 5_000).unwrap();
        let second = SymmetricBuffer::new(CAP, 0).unwrap();
        let (a, b) = (first.as_mut_ptr() as usize, second.as_mut_ptr() as usize);
        assert!(a.is_multiple_of(4096) && b.is_multiple_of(4096) && a.abs_diff(b) >= 4096);
        let Endpoint { memory, symmetric, .. } = &*first.endpoint;
        assert!(symmetric.offset(memory, a + 8, 4_000).is_some());
        // Not where words may lie, not in there, and beyond its end.
        assert_eq!(symmetric.offset(memory, a + 1, 8), None);
        assert_eq!(symmetric.offset(memory, memory.at(0, 8) as usize, 8), None);
        assert_eq!(symmetric.offset(memory, a, SYMMETRIC_BYTES + 1), None);
        assert_eq!(symmetric.offset(memory, std::ptr::from_ref(&CAP) as usize, 8), None);
    }

    #[test]
    fn more_than_there_is_is_told_with_what_is_in_use() {
        let error = SymmetricBuffer::new(CAP, usize::MAX).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        assert!(error.to_string().contains("MiB are in use"), "{error}");
    }

    #[test]
    fn pages_of_buffers_that_are_gone_are_kept_up_to_a_bound() {
        let memory = Memory::create(4 * IDLE).unwrap().0;
        let symmetric = Symmetric { state: Mutex::default(), ..Symmetric::new(0) };
        let word = |offset: usize| memory.word64(offset).load(Ordering::Relaxed);
        for (offset, stays) in [(0, true), (IDLE, false)] {
            memory.word64(offset).store(7, Ordering::Relaxed);
            symmetric.used.fetch_add(IDLE, Ordering::Relaxed);
            symmetric.give(&memory, offset, IDLE);
            assert_eq!(word(offset), if stays { 7 } else { 0 });
        }
    }
}
