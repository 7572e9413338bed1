//! Buffers in a process's symmetric memory.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smddp_base::fork;

use super::endpoint::Endpoint;
use super::layout::{GRAIN, SYMMETRIC_BYTES};
use super::symmetric::Symmetric;

/// Symmetric memory of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SymmetricUsage {
    /// Bytes of allocated buffers.
    pub used: usize,
    /// Size of the symmetric memory in bytes.
    pub most: usize,
    /// Messages that peers read directly from symmetric memory, without a copy into slots.
    pub messages: u64,
}

/// Bytes of this process that the other processes of its node read directly; released on drop. A forked child shares
/// them with its parent.
pub struct SymmetricBuffer {
    endpoint: Arc<Endpoint>,
    offset: usize,
    /// Allocated bytes, a multiple of `GRAIN`.
    room: usize,
    bytes: usize,
    forks: u32,
}

impl SymmetricBuffer {
    /// Allocates `bytes` bytes. `cap`: bytes of the staging pool, if this call creates the endpoint.
    ///
    /// # Errors
    /// The process has no symmetric memory, or no contiguous free range of this size.
    pub fn new(cap: usize, bytes: usize) -> io::Result<Self> {
        let endpoint = Endpoint::get(cap)?;
        let room = bytes.max(1).checked_next_multiple_of(GRAIN).unwrap_or(usize::MAX);
        let offset = endpoint.symmetric.take(room).ok_or_else(|| {
            let SymmetricUsage { used, most, .. } = Self::usage();
            let (used, most) = (used >> 20, most >> 20);
            let need = "bytes of symmetric memory are not free in one piece";
            let text = format!("{bytes} {need}: {used} of {most} MiB are in use");
            io::Error::new(io::ErrorKind::OutOfMemory, text)
        })?;
        Ok(Self { endpoint, offset, room, bytes, forks: fork::generation() })
    }

    /// Returns the use of symmetric memory by this process.
    pub fn usage() -> SymmetricUsage {
        let unused = SymmetricUsage { most: SYMMETRIC_BYTES, ..SymmetricUsage::default() };
        Endpoint::existing().map_or(unused, |endpoint| {
            let Symmetric { used, bytes, messages, .. } = &endpoint.symmetric;
            let (used, messages) = (used.load(Ordering::Relaxed), messages.load(Ordering::Relaxed));
            SymmetricUsage { used, most: *bytes, messages }
        })
    }

    /// Returns the page-aligned address. The initial contents are unspecified.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.endpoint.memory.at(self.offset, self.bytes)
    }

    /// Returns the requested size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns true for a buffer of 0 bytes.
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
        // The memory belongs to the parent, which may still use it.
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
    fn buffers_do_not_overlap_and_only_their_addresses_have_offsets() {
        let first = SymmetricBuffer::new(CAP, 5_000).unwrap();
        let second = SymmetricBuffer::new(CAP, 0).unwrap();
        let (a, b) = (first.as_mut_ptr() as usize, second.as_mut_ptr() as usize);
        assert!(a.is_multiple_of(4096) && b.is_multiple_of(4096) && a.abs_diff(b) >= 4096);
        let Endpoint { memory, symmetric, .. } = &*first.endpoint;
        assert!(symmetric.offset(memory, a + 8, 4_000).is_some());
        // Misaligned, outside of symmetric memory, beyond its end, outside of shared memory.
        assert_eq!(symmetric.offset(memory, a + 1, 8), None);
        assert_eq!(symmetric.offset(memory, memory.at(0, 8) as usize, 8), None);
        assert_eq!(symmetric.offset(memory, a, SYMMETRIC_BYTES + 1), None);
        assert_eq!(symmetric.offset(memory, std::ptr::from_ref(&CAP) as usize, 8), None);
    }

    #[test]
    fn exhausted_memory_error_contains_the_usage() {
        let error = SymmetricBuffer::new(CAP, usize::MAX).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        assert!(error.to_string().contains("MiB are in use"), "{error}");
    }
}
