//! Memory of a device: allocation, registration, regions, and memory of other processes.

use std::ffi::c_void;
use std::sync::{MutexGuard, PoisonError};

use super::Device;
use crate::device::{Address, Export, Import, Imported, Region, Result};
use crate::driver::region_cache::RegionCache;
use crate::driver::types::*;

#[expect(clippy::missing_safety_doc, reason = "the type documents the one contract of all methods")]
impl Device {
    /// Allocates device memory of kind `Kind::Legacy`.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
    pub fn allocate(&self, bytes: usize) -> Result<Address> {
        let _current = self.context.enter_relaxed()?;
        let mut address = 0;
        // SAFETY: the call writes the address.
        unsafe { self.driver().mem_alloc(&raw mut address, bytes) }?;
        Ok(address)
    }

    /// Frees device memory. The caller guarantees that no stream uses it any more.
    ///
    /// The driver first waits for all work on the device. Therefore no stream may wait for a word that this thread
    /// has still to write, or whose writer waits for this thread.
    pub unsafe fn free(&self, address: Address) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: allocated by `allocate`, by the caller's contract.
            unsafe { (self.driver().mem_free)(address) };
        }
    }

    /// Allocates page-aligned host memory that the device accesses at the same address.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
    pub fn allocate_host(&self, bytes: usize) -> Result<*mut u8> {
        let _current = self.context.enter_relaxed()?;
        let mut memory = std::ptr::null_mut();
        let flags = MEMHOSTALLOC_PORTABLE | MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the call writes the pointer.
        unsafe { self.driver().mem_host_alloc(&raw mut memory, bytes, flags) }?;
        Ok(memory.cast())
    }

    /// Frees host memory. The contract is that of `free`.
    pub unsafe fn free_host(&self, memory: *mut u8) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: allocated by `allocate_host`, by the caller's contract.
            unsafe { (self.driver().mem_free_host)(memory.cast()) };
        }
    }

    /// Registers page-aligned memory of this process with the device. Returns its device address.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
    pub unsafe fn register(&self, memory: *mut u8, bytes: usize) -> Result<Address> {
        let _current = self.context.enter_relaxed()?;
        let memory: *mut c_void = memory.cast();
        let flags = MEMHOSTREGISTER_PORTABLE | MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller keeps the memory mapped while it is registered.
        unsafe { self.driver().mem_host_register(memory, bytes, flags) }?;
        let mut address = 0;
        // SAFETY: registered above; flags must be 0.
        if let Err(error) = unsafe { self.driver().mem_host_get_device_pointer(&raw mut address, memory, 0) }
        {
            // SAFETY: registered above and not yet used.
            unsafe { (self.driver().mem_host_unregister)(memory) };
            return Err(error);
        }
        Ok(address)
    }

    /// Unregisters host memory. The contract is that of `free`.
    pub unsafe fn unregister(&self, memory: *mut u8) {
        if let Ok(_current) = self.context.enter_relaxed() {
            // SAFETY: registered by `register`, by the caller's contract.
            unsafe { (self.driver().mem_host_unregister)(memory.cast()) };
        }
    }

    /// Returns the allocation that contains `address`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for memory that is not registered with CUDA, and for memory
    /// of another device. [`Error::Driver`](crate::Error::Driver) if a driver call fails.
    pub fn region(&self, address: Address) -> Result<Region> {
        let _current = self.context.enter()?;
        if let Some(region) =
            self.regions().find(address, |generation| self.cuda.is_buffer(address, generation))
        {
            return Ok(region);
        }
        let region = self.cuda.region(self.ordinal, address)?;
        self.regions().insert(region);
        Ok(region)
    }

    /// Returns true if the memory at `address` belongs to this device, so that its kernels can access it.
    pub fn owns(&self, address: Address) -> bool {
        let current = self.context.enter();
        current.is_ok() && self.cuda.owner(address) == Some(self.ordinal)
    }

    /// Returns the handle with which another process imports the region.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for memory that other processes cannot map.
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
    pub fn export(&self, region: &Region) -> Result<Export> {
        let _current = self.context.enter_relaxed()?;
        self.cuda.export(region)
    }

    /// Maps a region of `bytes` bytes that another process exported.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a driver call fails.
    pub fn import(&self, import: Import<'_>, bytes: usize) -> Result<Imported> {
        let _current = self.context.enter_relaxed()?;
        self.cuda.import(self.device, &import, bytes)
    }

    /// Unmaps an imported region. The contract is that of `free`.
    pub fn close(&self, imported: Imported) {
        if let Ok(_current) = self.context.enter_relaxed() {
            self.cuda.close(imported);
        }
    }

    fn regions(&self) -> MutexGuard<'_, RegionCache> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
