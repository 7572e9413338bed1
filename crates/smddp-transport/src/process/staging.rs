//! What a group takes from its process's staging pool for bytes that come from, or go to, other nodes.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use super::endpoint::Endpoint;
use super::pool::{Region, ReleaseCondition};

/// Nobody else reads such a region: it is free as soon as it is handed back.
struct Unshared;

impl ReleaseCondition for Unshared {
    fn released(&self) -> bool {
        true
    }
}

/// A group at the staging pool, with the region of its operation under way.
pub(crate) struct StagingMemory {
    endpoint: Arc<Endpoint>,
    nonce: u64,
    region: Option<Region>,
}

impl StagingMemory {
    pub(crate) fn new(endpoint: Arc<Endpoint>, nonce: u64) -> Self {
        Self { endpoint, nonce, region: None }
    }

    /// Another share of the same group's.
    pub(crate) fn sibling(&self) -> Self {
        Self { endpoint: self.endpoint.clone(), nonce: self.nonce, region: None }
    }

    /// Has at least `bytes` ready; false while the pool has none.
    pub(crate) fn reserve(&mut self, bytes: usize) -> bool {
        if bytes == 0 || self.region.is_some_and(|region| region.bytes >= bytes) {
            return true;
        }
        self.give_back();
        let memory = &self.endpoint.memory;
        self.region = self.endpoint.pool.acquire(memory, self.nonce, bytes, bytes);
        self.region.is_some()
    }

    /// First address of what is reserved; of nothing, an address that must not be used.
    pub(crate) fn base(&self) -> *mut u8 {
        self.region.map_or(std::ptr::dangling_mut(), |region| self.address(region))
    }

    pub(crate) fn give_back(&mut self) {
        if let Some(region) = self.region.take() {
            self.endpoint.pool.retire(&self.endpoint.memory, self.nonce, region, Arc::new(Unshared));
        }
    }

    /// Leaves the memory to whoever may still write into it.
    pub(crate) fn abandon(&mut self) {
        self.region = None;
    }

    /// Memory of one message between two ranks.
    pub(crate) fn take(&self, bytes: usize) -> Option<Region> {
        self.endpoint.pool.acquire_for_message(&self.endpoint.memory, self.nonce, bytes, bytes)
    }

    /// Whether this share has these bytes.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn holds(&self, at: *const u8, bytes: usize) -> bool {
        self.region.is_some_and(|region| self.region_contains(region, at, bytes))
    }

    #[cfg(any(test, fuzzing))]
    pub(crate) fn region_contains(&self, region: Region, at: *const u8, bytes: usize) -> bool {
        let from = (at as usize).checked_sub(self.address(region) as usize);
        from.and_then(|from| from.checked_add(bytes)).is_some_and(|end| end <= region.bytes)
    }

    pub(crate) fn address(&self, region: Region) -> *mut u8 {
        self.endpoint.memory.at(region.offset, region.bytes)
    }

    pub(crate) fn give(&self, region: Region) {
        self.endpoint.pool.retire(&self.endpoint.memory, self.nonce, region, Arc::new(Unshared));
    }

    /// Waits a moment for one of the descriptors.
    pub(crate) fn wait_briefly(&self, fds: &[(RawFd, i16)]) {
        let doorbell = self.endpoint.doorbell();
        doorbell.sleep(doorbell.prepare_wait(), fds, Duration::from_millis(10));
        doorbell.cancel_wait();
    }
}

impl Drop for StagingMemory {
    fn drop(&mut self) {
        self.give_back();
    }
}
