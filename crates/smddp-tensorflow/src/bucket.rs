//! Pooled bucket memory with TensorFlow's alignment, reused from step to step.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::sync::{Arc, Mutex};

use smddp_core::{PerProcess, lock};

/// Alignment of TensorFlow's tensors (Eigen's maximum). TensorFlow copies memory with smaller alignment.
pub(crate) const ALIGN: usize = 64;

/// Uninitialized memory. It returns to the pool when the last reference is dropped.
pub(crate) struct Bucket {
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: the value owns the memory at the address; its users order their accesses, as the methods require.
unsafe impl Send for Bucket {}
// SAFETY: as above.
unsafe impl Sync for Bucket {}

#[derive(Default)]
struct Pool {
    free: Vec<Bucket>,
    free_bytes: usize,
    used: usize,
    /// Largest number of bytes in use at one time. The pool keeps as much memory.
    peak: usize,
}

static POOL: PerProcess<Mutex<Pool>> = PerProcess::new();

impl Bucket {
    /// Returns a bucket of at least `bytes` bytes.
    pub(crate) fn of(bytes: usize) -> Arc<Self> {
        // Rounding up lets steps with slightly different sizes reuse buckets.
        let bytes = bytes.max(1).next_multiple_of(if bytes > 1 << 16 { 1 << 12 } else { ALIGN });
        let mut pool = lock(POOL.get());
        let fits = |bucket: &Self| bucket.bytes >= bytes && bucket.bytes <= bytes + bytes / 4;
        let found = pool.free.iter().rposition(fits).map(|at| pool.free.swap_remove(at));
        let found = match found {
            Some(bucket) => {
                pool.free_bytes -= bucket.bytes;
                bucket
            }
            None => Self::allocate(bytes),
        };
        pool.used += found.bytes;
        pool.peak = pool.peak.max(pool.used);
        Arc::new(found)
    }

    fn allocate(bytes: usize) -> Self {
        let layout = layout(bytes);
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { alloc(layout) };
        if ptr.is_null() {
            handle_alloc_error(layout);
        }
        Self { ptr, bytes }
    }

    /// Returns the address of byte `offset`.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        self.ptr.wrapping_add(offset)
    }
}

fn layout(bytes: usize) -> Layout {
    match Layout::from_size_align(bytes, ALIGN) {
        Ok(layout) => layout,
        Err(_) => unreachable!("a bucket of {bytes} bytes exceeds the address space"),
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        let mut pool = lock(POOL.get());
        pool.used = pool.used.saturating_sub(self.bytes);
        if pool.used + pool.free_bytes + self.bytes <= pool.peak {
            pool.free_bytes += self.bytes;
            pool.free.push(Self { ptr: self.ptr, bytes: self.bytes });
            return;
        }
        drop(pool);
        // SAFETY: allocated with this layout. This value is the last reference, and the pool does not contain it.
        unsafe { dealloc(self.ptr, layout(self.bytes)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_reused_and_the_pool_keeps_at_most_the_peak() {
        let first = Bucket::of(1 << 20);
        let address = first.at(0) as usize;
        assert_eq!(address % ALIGN, 0);
        drop(first);
        let again = Bucket::of((1 << 20) - 5000);
        assert_eq!(again.at(0) as usize, address);
        let other = Bucket::of(1 << 20);
        assert_ne!(other.at(0) as usize, address);
        drop((again, other));
        let pool = POOL.get().lock().unwrap();
        assert!(pool.free_bytes <= pool.peak && pool.used == 0);
    }
}
