//! Page-aligned memory with a guard zone on each side.

use std::alloc::{Layout, alloc, dealloc};
use std::ops::Range;
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};
use rustix::param::page_size;

use smddp_core::{Config, SymmetricBuffer};

use crate::error::{Error, Result};

/// Bytes on each side of the region in use that nobody may write.
pub(crate) const GUARD: usize = 64;

const GUARD_BYTE: u8 = 0x5C;
const HUGE_PAGE: usize = 2 << 20;
/// Buffers from here on are aligned to, and asked to consist of, huge pages.
const HUGE_FROM: usize = 4 << 20;

/// One allocation, every page of it written before it is handed out. The data begins one alignment into it, so
/// that the guard before the data costs no alignment.
pub(crate) struct Buffer {
    base: NonNull<u8>,
    layout: Layout,
    /// Whose memory it is, where it was not allocated here.
    symmetric: Option<SymmetricBuffer>,
    align: usize,
    capacity: usize,
    /// Bytes of the data in use; the second guard lies right behind them.
    used: usize,
}

/// What makes a buffer of so many bytes.
pub(crate) type Exporter = fn(usize) -> Result<Buffer>;

// SAFETY: the allocation belongs to this value alone; no thread keeps a pointer into it except through borrows
// of it (or through calls that hold such a borrow until they are done, see `calls`).
unsafe impl Send for Buffer {}

impl Buffer {
    /// As `-R` says.
    pub(crate) fn maker(register: u8) -> Exporter {
        if register == 2 { Self::symmetric } else { Self::new }
    }

    /// Zeroed memory for up to `capacity` bytes, all of them in use.
    pub(crate) fn new(capacity: usize) -> Result<Buffer> {
        let align = if capacity >= HUGE_FROM { HUGE_PAGE } else { page_size() };
        let layout = Self::layout(capacity, align)?;
        // SAFETY: the layout's size is at least `align`, so not zero.
        let base = NonNull::new(unsafe { alloc(layout) }).ok_or(Error::Allocation(capacity))?;
        if align == HUGE_PAGE {
            let whole = capacity / HUGE_PAGE * HUGE_PAGE;
            // SAFETY: the range lies inside our own allocation and is a whole number of pages; advice does not
            // change its contents. Where the kernel has no huge pages the refusal does not matter.
            let _ = unsafe { madvise(base.as_ptr().add(align).cast(), whole, Advice::LinuxHugepage) };
        }
        Ok(Self::over(base, layout, capacity, None))
    }

    /// The same in memory that the ranks of this node read where it lies.
    fn symmetric(capacity: usize) -> Result<Buffer> {
        let layout = Self::layout(capacity, page_size())?;
        let staging = Config::get()?.staging;
        let none = |_| Error::Allocation(capacity);
        let memory = SymmetricBuffer::new(staging, layout.size()).map_err(none)?;
        let base = NonNull::new(memory.as_mut_ptr()).ok_or(Error::Allocation(capacity))?;
        Ok(Self::over(base, layout, capacity, Some(memory)))
    }

    fn layout(capacity: usize, align: usize) -> Result<Layout> {
        let size = capacity.checked_add(align + GUARD);
        size.and_then(|size| Layout::from_size_align(size, align).ok()).ok_or(Error::Allocation(capacity))
    }

    fn over(base: NonNull<u8>, layout: Layout, capacity: usize, symmetric: Option<SymmetricBuffer>) -> Self {
        // SAFETY: `base` is valid for writes of `layout.size()` bytes, and nobody else knows it yet.
        unsafe { base.as_ptr().write_bytes(0, layout.size()) };
        let mut buffer = Buffer { base, layout, symmetric, align: layout.align(), capacity, used: 0 };
        buffer.set_used(capacity);
        buffer
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Puts the second guard behind the first `bytes` bytes and renews both.
    pub(crate) fn set_used(&mut self, bytes: usize) {
        assert!(bytes <= self.capacity, "{bytes} bytes of a buffer of {}", self.capacity);
        self.used = bytes;
        self.before().fill(GUARD_BYTE);
        self.behind().fill(GUARD_BYTE);
    }

    /// Guard bytes that were written since [`Buffer::set_used`].
    pub(crate) fn overwritten(&mut self) -> usize {
        let changed = |guard: &[u8]| guard.iter().filter(|b| **b != GUARD_BYTE).count();
        changed(self.before()) + changed(self.behind())
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        self.slice(self.align..self.align + self.used)
    }

    fn before(&mut self) -> &mut [u8] {
        self.slice(self.align - GUARD..self.align)
    }

    fn behind(&mut self) -> &mut [u8] {
        let end = self.align + self.used;
        self.slice(end..end + GUARD)
    }

    fn slice(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.layout.size());
        // SAFETY: the range lies inside our allocation (just checked), which is initialised and, through
        // `&mut self`, borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.symmetric.is_some() {
            return;
        }
        // SAFETY: `base` came from `alloc` with this very layout and is freed once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_surround_the_bytes_in_use() {
        for capacity in [0, 1, 4096, 5 << 20] {
            let mut b = Buffer::new(capacity).unwrap();
            assert_eq!(b.bytes().len(), capacity);
            b.set_used(capacity / 2);
            b.bytes().fill(1);
            assert_eq!(b.overwritten(), 0);
            b.before()[GUARD - 1] = 0;
            b.behind()[0] = 0;
            assert_eq!(b.overwritten(), 2);
            b.set_used(capacity);
            assert_eq!(b.overwritten(), 0);
        }
    }

    #[test]
    fn data_is_aligned_for_pages_and_huge_pages() {
        assert_eq!(Buffer::new(100).unwrap().bytes().as_ptr() as usize % page_size(), 0);
        assert_eq!(Buffer::new(HUGE_FROM).unwrap().bytes().as_ptr() as usize % HUGE_PAGE, 0);
    }

    #[test]
    fn absurd_sizes_are_refused() {
        assert!(matches!(Buffer::new(usize::MAX), Err(Error::Allocation(usize::MAX))));
    }
}
