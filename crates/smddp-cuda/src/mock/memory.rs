//! The bytes behind the mock's addresses, and what reads and writes them.
//!
//! Memory is mapped for each allocation by itself, with a page that faults on either side, and stays reserved until the
//! world ends, so that an address that was freed is never another allocation's by accident.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Address;

pub(super) const PAGE: usize = 4096;

/// Whole pages of this process, with a faulting page on either side. Unmapped when it is dropped.
#[derive(Debug)]
pub(super) struct Pages {
    start: usize,
    bytes: usize,
}

impl Pages {
    /// Zeroed pages for `bytes`, or pages that fault. `None` where the system has no more.
    pub(super) fn new(bytes: usize, usable: bool) -> Option<Self> {
        let inside = bytes.max(1).checked_next_multiple_of(PAGE)?;
        let total = inside.checked_add(2 * PAGE)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, placed by the kernel.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), total, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let pages = Self { start: start as usize, bytes: total };
        if usable {
            // SAFETY: inside the mapping just made, which nobody else knows.
            let done =
                unsafe { libc::mprotect(pages.base() as *mut _, inside, libc::PROT_READ | libc::PROT_WRITE) };
            if done != 0 {
                return None;
            }
        }
        Some(pages)
    }

    pub(super) fn base(&self) -> Address {
        (self.start + PAGE) as Address
    }

    /// Bytes from [`Self::base`] on.
    pub(super) fn usable(&self) -> usize {
        self.bytes - 2 * PAGE
    }

    /// Gives the memory back and lets every later access by the processor fault. The addresses stay taken.
    pub(super) fn retire(&self) {
        // SAFETY: the mapping is ours. Whoever still uses it as memory breaks the promise of `Device::free`.
        unsafe {
            libc::madvise(self.start as *mut _, self.bytes, libc::MADV_DONTNEED);
            libc::mprotect(self.start as *mut _, self.bytes, libc::PROT_NONE);
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and the world that lent it is over.
        unsafe { libc::munmap(self.start as *mut _, self.bytes) };
    }
}

/// Reads what lies at `from`.
///
/// # Safety
/// `from` is memory of a live allocation of the world, or registered memory, for all of `to`.
pub(super) unsafe fn read(from: usize, to: &mut [u8]) {
    // SAFETY: the caller's contract; `to` is borrowed, so they do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) }
}

/// Writes to `to`.
///
/// # Safety
/// As [`read`].
pub(super) unsafe fn write(to: usize, from: &[u8]) {
    // SAFETY: the caller's contract; `from` is borrowed, so they do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) }
}

/// The word at `at`.
///
/// # Safety
/// As [`read`], aligned to 8 bytes.
pub(super) unsafe fn load(at: usize) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { AtomicU64::from_ptr(at as *mut u64) }.load(Ordering::Acquire)
}

/// Sets the word at `at`.
///
/// # Safety
/// As [`load`].
pub(super) unsafe fn store(at: usize, value: u64) {
    // SAFETY: the caller's contract.
    unsafe { AtomicU64::from_ptr(at as *mut u64) }.store(value, Ordering::Release);
}

/// What memory of this process really is: shared mappings of one file are the same memory wherever they are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// Device and inode of the file; zeros for private memory.
    file: (u64, u64),
    /// Offset in the file, or the address.
    pub(super) offset: u64,
}

impl Identity {
    pub(super) fn of(address: Address) -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        maps.lines()
            .find_map(|line| Self::in_line(line, address))
            .unwrap_or(Self { file: (0, 0), offset: address })
    }

    /// A line is "start-end rwxs offset major:minor inode path", in hexadecimal but for the inode.
    fn in_line(line: &str, address: Address) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = (hex(start)?, hex(end)?);
        if !(start..end).contains(&address) || !fields.next()?.ends_with('s') {
            return None;
        }
        let offset = hex(fields.next()?)?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        let file = (hex(major)? << 32 | hex(minor)?, inode);
        Some(Self { file, offset: offset + (address - start) })
    }

    /// How far this lies behind `start`, where both are of the same memory.
    pub(super) fn behind(&self, start: &Identity) -> Option<u64> {
        if self.file == start.file { self.offset.checked_sub(start.offset) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_of_a_file_are_the_same_memory_and_private_ones_are_not() {
        // SAFETY: a file of its own and two new mappings of it, unmapped with the process.
        let (a, b) = unsafe {
            let file = libc::memfd_create(c"identity".as_ptr(), libc::MFD_CLOEXEC);
            assert!(file >= 0);
            assert_eq!(libc::ftruncate(file, 3 * PAGE as i64), 0);
            let map = |offset: usize| {
                let protection = libc::PROT_READ | libc::PROT_WRITE;
                let length = 3 * PAGE - offset;
                libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, file, offset as i64)
                    as Address
            };
            (map(0), map(PAGE))
        };
        assert_ne!(a, b);
        assert_eq!(Identity::of(b).behind(&Identity::of(a)), Some(PAGE as u64));
        assert_eq!(Identity::of(a + 8), Identity { offset: 8, ..Identity::of(a) });
        let own = Pages::new(8, true).unwrap().base();
        assert_eq!(Identity::of(own), Identity { file: (0, 0), offset: own });
        assert_eq!(Identity::of(own).behind(&Identity::of(a)), None);
    }
}
