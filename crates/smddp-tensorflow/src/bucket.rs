//! Memory of buckets: aligned as TensorFlow wants it, and kept from one step to the next.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::sync::{Arc, Mutex, PoisonError};

use smddp_core::PerProcess;

/// Of TensorFlow's own tensors (Eigen's greatest): what is aligned less would be copied.
pub(crate) const ALIGN: usize = 64;

/// Uninitialised memory. It goes back to the pool when the last of those who hold it lets go.
pub(crate) struct Bucket {
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: an address of memory that this value owns; who writes when is the user's to see to, as the methods say.
unsafe impl Send for Bucket {}
// SAFETY: as above.
unsafe impl Sync for Bucket {}

#[derive(Default)]
struct Pool {
    free: Vec<Bucket>,
    free_bytes: usize,
    used: usize,
    /// The most that was in use at one time: as much is kept.
    most: usize,
}

static POOL: PerProcess<Mutex<Pool>> = PerProcess::new();

impl Bucket {
    /// Of at least `bytes`.
    pub(crate) fn of(bytes: usize) -> Arc<Self> {
        // A multiple of a page's part, so that steps that differ a little find each other's.
        let bytes = bytes.max(1).next_multiple_of(if bytes > 1 << 16 { 1 << 12 } else { ALIGN });
        let mut pool = POOL.get().lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |bucket: &Self| bucket.bytes >= bytes && bucket.bytes <= bytes + bytes / 4;
        let found = pool.free.iter().rposition(fits).map(|at| pool.free.swap_remove(at));
        let found = match found {
            Some(bucket) => {
                pool.free_bytes -= bucket.bytes;
                bucket
            }
            None => Self::fresh(bytes),
        };
        pool.used += found.bytes;
        pool.most = pool.most.max(pool.used);
        Arc::new(found)
    }

    fn fresh(bytes: usize) -> Self {
        let layout = layout(bytes);
        // SAFETY: the layout's size is not zero.
        let ptr = unsafe { alloc(layout) };
        if ptr.is_null() {
            handle_alloc_error(layout);
        }
        Self { ptr, bytes }
    }

    /// The address of its byte `offset`.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        self.ptr.wrapping_add(offset)
    }
}

fn layout(bytes: usize) -> Layout {
    match Layout::from_size_align(bytes, ALIGN) {
        Ok(layout) => layout,
        Err(_) => unreachable!("no tensors have {bytes} bytes together"),
    }
}

impl Drop for Bucket {
    fn drop(&mut self) {
        let mut pool = POOL.get().lock().unwrap_or_else(PoisonError::into_inner);
        pool.used = pool.used.saturating_sub(self.bytes);
        if pool.used + pool.free_bytes + self.bytes <= pool.most {
            pool.free_bytes += self.bytes;
            pool.free.push(Self { ptr: self.ptr, bytes: self.bytes });
            return;
        }
        drop(pool);
        // SAFETY: allocated with this layout, and nobody else has it: the pool got none.
        unsafe { dealloc(self.ptr, layout(self.bytes)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_used_again_and_no_more_is_kept_than_was_in_use_at_one_time() {
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
        assert!(pool.free_bytes <= pool.most && pool.used == 0);
    }
}
