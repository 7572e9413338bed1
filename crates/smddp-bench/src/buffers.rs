//! Page-aligned buffers with a guard zone on each side.

use std::alloc::{Layout, alloc, dealloc};
use std::ops::Range;
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};
use rustix::param::page_size;

use smddp_core::{Config, SymmetricBuffer};

use crate::error::{Error, Result};

/// Bytes of each guard zone, which no call may write.
pub(crate) const GUARD: usize = 64;

const GUARD_BYTE: u8 = 0x5C;
const HUGE_PAGE: usize = 2 << 20;
/// Buffers of at least this size are aligned to huge pages and request them.
const HUGE_FROM: usize = 4 << 20;

/// One allocation, whose pages are all written before use. The data begins one alignment after the start, so that the
/// guard before the data preserves the alignment.
pub(crate) struct Buffer {
    base: NonNull<u8>,
    layout: Layout,
    /// The owner of symmetric memory; `None` for memory of the allocator.
    symmetric: Option<SymmetricBuffer>,
    align: usize,
    capacity: usize,
    /// Bytes of the data in use. The second guard follows them.
    used: usize,
}

/// Function that allocates a buffer of a number of bytes.
pub(crate) type Allocate = fn(usize) -> Result<Buffer>;

// SAFETY: the value is the only owner of the allocation. Pointers into it exist only during borrows, or in calls that hold
// such a borrow until they are done (see `calls`).
unsafe impl Send for Buffer {}

impl Buffer {
    /// Returns the function for the value of `-R`.
    pub(crate) fn allocate(register: u8) -> Allocate {
        if register == 2 { Self::symmetric } else { Self::new }
    }

    /// Returns zeroed memory of `capacity` bytes, all in use.
    pub(crate) fn new(capacity: usize) -> Result<Buffer> {
        let align = if capacity >= HUGE_FROM { HUGE_PAGE } else { page_size() };
        let layout = Self::layout(capacity, align)?;
        // SAFETY: the layout's size is at least `align` and not zero.
        let base = NonNull::new(unsafe { alloc(layout) }).ok_or(Error::Allocation(capacity))?;
        if align == HUGE_PAGE {
            let whole = capacity / HUGE_PAGE * HUGE_PAGE;
            // SAFETY: the range is inside the allocation and a whole number of pages; advice does not change its contents.
            // An error of a kernel without huge pages is ignored.
            let _ = unsafe { madvise(base.as_ptr().add(align).cast(), whole, Advice::LinuxHugepage) };
        }
        Ok(Self::from_raw(base, layout, capacity, None))
    }

    /// Returns zeroed symmetric memory, which the ranks of this node read in place.
    fn symmetric(capacity: usize) -> Result<Buffer> {
        let layout = Self::layout(capacity, page_size())?;
        let staging = Config::get()?.staging;
        let none = |_| Error::Allocation(capacity);
        let memory = SymmetricBuffer::new(staging, layout.size()).map_err(none)?;
        let base = NonNull::new(memory.as_mut_ptr()).ok_or(Error::Allocation(capacity))?;
        Ok(Self::from_raw(base, layout, capacity, Some(memory)))
    }

    fn layout(capacity: usize, align: usize) -> Result<Layout> {
        let size = capacity.checked_add(align + GUARD);
        size.and_then(|size| Layout::from_size_align(size, align).ok()).ok_or(Error::Allocation(capacity))
    }

    fn from_raw(
        base: NonNull<u8>,
        layout: Layout,
        capacity: usize,
        symmetric: Option<SymmetricBuffer>,
    ) -> Self {
        // SAFETY: `base` is valid for writes of `layout.size()` bytes, and no other reference exists.
        unsafe { base.as_ptr().write_bytes(0, layout.size()) };
        let mut buffer = Buffer { base, layout, symmetric, align: layout.align(), capacity, used: 0 };
        buffer.set_used(capacity);
        buffer
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the number of bytes in use, and writes both guards.
    pub(crate) fn set_used(&mut self, bytes: usize) {
        assert!(bytes <= self.capacity, "{bytes} bytes of a buffer of {}", self.capacity);
        self.used = bytes;
        self.before().fill(GUARD_BYTE);
        self.behind().fill(GUARD_BYTE);
    }

    /// Returns the number of guard bytes that changed since [`Buffer::set_used`].
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
        // SAFETY: the range is inside the allocation (just checked), which is initialized and exclusively borrowed through
        // `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.symmetric.is_some() {
            return;
        }
        // SAFETY: `base` was allocated with this layout and is freed once.
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
    fn impossible_sizes_are_rejected() {
        assert!(matches!(Buffer::new(usize::MAX), Err(Error::Allocation(usize::MAX))));
    }
}
