//! Staging memory of a group for data from and to other nodes.

use std::sync::Arc;

use super::endpoint::Endpoint;
use super::pool::{Region, ReleaseCondition};

/// Condition that is always met: no peer reads such a region, so it is free once it is returned.
struct Unshared;

impl ReleaseCondition for Unshared {
    fn released(&self) -> bool {
        true
    }
}

/// Staging memory of a group, with the region of its current operation.
pub struct StagingMemory {
    endpoint: Arc<Endpoint>,
    nonce: u64,
    region: Option<Region>,
}

impl StagingMemory {
    /// Returns an empty share of the group with that nonce.
    pub fn new(endpoint: Arc<Endpoint>, nonce: u64) -> Self {
        Self { endpoint, nonce, region: None }
    }

    /// Returns another, empty share of the same group.
    pub fn sibling(&self) -> Self {
        Self { endpoint: self.endpoint.clone(), nonce: self.nonce, region: None }
    }

    /// Reserves at least `bytes` bytes. Returns false if the pool has none at present.
    pub fn reserve(&mut self, bytes: usize) -> bool {
        if bytes == 0 || self.region.as_ref().is_some_and(|region| region.bytes() >= bytes) {
            return true;
        }
        self.give_back();
        let memory = &self.endpoint.memory;
        self.region = self.endpoint.pool.acquire(memory, self.nonce, bytes, bytes);
        self.region.is_some()
    }

    /// Returns the address of the reserved region; a dangling address if nothing is reserved.
    pub fn base(&self) -> *mut u8 {
        self.region.as_ref().map_or(std::ptr::dangling_mut(), |region| self.address(region))
    }

    /// Returns the reserved region to the pool.
    pub fn give_back(&mut self) {
        if let Some(region) = self.region.take() {
            self.endpoint.pool.retire(&self.endpoint.memory, self.nonce, region, Arc::new(Unshared));
        }
    }

    /// Gives up the region without returning it to the pool, because it may still be written.
    pub fn abandon(&mut self) {
        self.region = None;
    }

    /// Returns memory of one message between two ranks.
    pub fn take(&self, bytes: usize) -> Option<Region> {
        self.endpoint.pool.acquire_for_message(&self.endpoint.memory, self.nonce, bytes, bytes)
    }

    /// Returns true if the reserved region contains these bytes.
    #[cfg(any(test, feature = "testing"))]
    pub fn holds(&self, at: *const u8, bytes: usize) -> bool {
        self.region.as_ref().is_some_and(|region| self.region_contains(region, at, bytes))
    }

    /// Returns true if the region contains these bytes.
    #[cfg(any(test, feature = "testing"))]
    pub fn region_contains(&self, region: &Region, at: *const u8, bytes: usize) -> bool {
        let from = (at as usize).checked_sub(self.address(region) as usize);
        from.and_then(|from| from.checked_add(bytes)).is_some_and(|end| end <= region.bytes())
    }

    /// Returns the address of the first byte of a region.
    pub fn address(&self, region: &Region) -> *mut u8 {
        self.endpoint.memory.at(region.offset(), region.bytes())
    }

    /// Returns the memory of a message to the pool, which may reuse it at once. It is returned once, after the last access of this
    /// process and of its devices.
    pub fn give(&self, region: Region) {
        self.endpoint.pool.retire(&self.endpoint.memory, self.nonce, region, Arc::new(Unshared));
    }
}

impl Drop for StagingMemory {
    fn drop(&mut self) {
        self.give_back();
    }
}
