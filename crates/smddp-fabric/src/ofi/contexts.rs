//! Context memory that an operation lends to the provider until its completion (modes `FI_CONTEXT`, `FI_CONTEXT2`).

use std::ffi::c_void;

use libfabric_sys::fi_context2;

use crate::rail::Context;

/// Provider's context memory with the id of its operation.
#[repr(C)]
struct Slot {
    /// First field: the provider gets this address.
    room: fi_context2,
    context: Context,
}

/// Slots per allocation.
const CHUNK: usize = 256;

/// Pool of context memory.
#[derive(Default)]
pub(super) struct Contexts {
    chunks: Vec<*mut [Slot; CHUNK]>,
    free: Vec<*mut Slot>,
}

// SAFETY: private memory that is not bound to a thread; the endpoint that owns it is behind a mutex.
unsafe impl Send for Contexts {}

impl Contexts {
    pub(super) fn take(&mut self, context: Context) -> *mut c_void {
        let slot = self.free.pop().unwrap_or_else(|| self.grow());
        // SAFETY: a slot of a live chunk that nothing else uses.
        unsafe { (&raw mut (*slot).context).write(context) };
        slot.cast()
    }

    fn grow(&mut self) -> *mut Slot {
        let empty = || Slot { room: fi_context2 { internal: [std::ptr::null_mut(); 8] }, context: 0 };
        let chunk = Box::into_raw(Box::new(std::array::from_fn::<_, CHUNK, _>(|_| empty())));
        self.chunks.push(chunk);
        let first = chunk.cast::<Slot>();
        self.free.extend((1..CHUNK).rev().map(|i| first.wrapping_add(i)));
        first
    }

    /// Frees the slot at an address that the provider returned, and returns its operation. `None`: not an address of a slot.
    pub(super) fn give(&mut self, at: *mut c_void) -> Option<Context> {
        let slot = at.cast::<Slot>();
        let known = self.chunks.iter().any(|&chunk| {
            let offset = (slot as usize).wrapping_sub(chunk as usize);
            offset < size_of::<[Slot; CHUNK]>() && offset.is_multiple_of(size_of::<Slot>())
        });
        if !known {
            return None;
        }
        self.free.push(slot);
        // SAFETY: a slot of a live chunk (checked above), which the provider has released.
        Some(unsafe { (&raw const (*slot).context).read() })
    }
}

impl Drop for Contexts {
    fn drop(&mut self) {
        for &chunk in &self.chunks {
            // SAFETY: from `Box::into_raw`, dropped once; the endpoint was closed before, so no operation is in flight.
            drop(unsafe { Box::from_raw(chunk) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_found_by_address_and_unknown_addresses_are_rejected() {
        let mut contexts = Contexts::default();
        let taken: Vec<_> = (0..600u64).map(|i| contexts.take(i)).collect();
        assert_eq!(contexts.give(std::ptr::null_mut()), None);
        assert_eq!(contexts.give(taken[0].wrapping_byte_add(8)), None);
        for (i, at) in taken.into_iter().enumerate().rev() {
            assert_eq!(contexts.give(at), Some(i as u64));
        }
        assert_eq!(contexts.chunks.len(), 3);
    }
}
