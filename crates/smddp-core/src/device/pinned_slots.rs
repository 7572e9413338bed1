//! Pinned host memory for messages that are not passed by reference.

use std::sync::Arc;

use smddp_cuda::{Device, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    /// Being filled, or holds a message that waits to be sent.
    Held,
    /// Free once the stream has passed this number.
    Until(u64),
}

struct Slot {
    at: *mut u8,
    bytes: usize,
    in_use: Use,
}

/// Pinned slots of a site. They are allocated on demand and kept.
pub(crate) struct PinnedSlots {
    device: Arc<Device>,
    slots: Vec<Slot>,
}

// SAFETY: the addresses point to memory that this value owns, and one thread at a time owns the value.
unsafe impl Send for PinnedSlots {}

/// Slots of one size before a message has to wait for one. A channel without any message in flight always gets one.
const MAX_SLOTS: usize = 16;

impl PinnedSlots {
    pub(crate) fn new(device: Arc<Device>) -> Self {
        Self { device, slots: Vec::new() }
    }

    /// Returns a slot of `bytes`, or `None` if all of them are in use and no more may be allocated. `needed`: always
    /// allocate. `passed`: returns true if the stream has passed a number.
    pub(crate) fn take(
        &mut self,
        bytes: usize,
        passed: impl Fn(u64) -> bool,
        needed: bool,
    ) -> Result<Option<usize>> {
        for slot in &mut self.slots {
            if let Use::Until(number) = slot.in_use
                && passed(number)
            {
                slot.in_use = Use::Free;
            }
        }
        let found = self.slots.iter().position(|s| s.in_use == Use::Free && s.bytes >= bytes);
        if let Some(index) = found {
            self.slots[index].in_use = Use::Held;
            return Ok(Some(index));
        }
        let same_size = self.slots.iter().filter(|s| s.bytes >= bytes).count();
        if same_size >= MAX_SLOTS && !needed {
            return Ok(None);
        }
        let bytes = bytes.next_power_of_two().max(4096);
        let at = self.device.allocate_host(bytes)?;
        self.slots.push(Slot { at, bytes, in_use: Use::Held });
        Ok(Some(self.slots.len() - 1))
    }

    /// Returns true if this rank's stream alone will free a slot.
    pub(crate) fn has_pending_release(&self) -> bool {
        self.slots.iter().any(|slot| matches!(slot.in_use, Use::Until(_)))
    }

    pub(crate) fn address(&self, slot: usize) -> *mut u8 {
        self.slots[slot].at
    }

    pub(crate) fn free(&mut self, slot: usize) {
        self.slots[slot].in_use = Use::Free;
    }

    pub(crate) fn free_at(&mut self, slot: usize, number: u64) {
        self.slots[slot].in_use = Use::Until(number);
    }
}

impl Drop for PinnedSlots {
    fn drop(&mut self) {
        for slot in &self.slots {
            // SAFETY: allocated by `take`. The site is dropped when its stream is empty.
            unsafe { self.device.free_host(slot.at) };
        }
    }
}
