//! Queries of an address. The driver has a record of every allocation of the process, from any allocator.

use std::ffi::c_void;

use super::cuda::Cuda;
use super::errors::code_of;
use super::types::*;
use crate::device::{Address, Error, Kind, Region, Result};

/// Attributes of one query. A result has one, four or eight bytes, so each gets a zeroed 64-bit word.
const QUERIED: [i32; 9] = [
    MEMORY_TYPE,
    DEVICE_ORDINAL,
    BUFFER_ID,
    IS_MANAGED,
    IS_LEGACY_CUDA_IPC_CAPABLE,
    RANGE_START_ADDR,
    RANGE_SIZE,
    MAPPED,
    MEMPOOL_HANDLE,
];

/// Bit that separates generations of mapped memory from those of other memory. The driver numbers the two separately.
const MAPPED_GENERATION: u64 = 1 << 63;

impl Cuda {
    /// Returns the allocation that contains `address`, for the device `ordinal`, whose context is current.
    ///
    /// Virtual memory: one address reservation maps many physical allocations, and a tensor may span several. The
    /// range attributes describe the reservation. cuMemGetAddressRange describes the physical allocation at
    /// `address`, which is the unit of export and therefore the region. Its generation is the number of the physical
    /// allocation, which changes when that allocation is unmapped and another is mapped at its address.
    pub(super) fn region(&self, ordinal: i32, address: Address) -> Result<Region> {
        let [memory_type, owner, buffer, managed, legacy, start, size, mapped, pool] = self.query(address)?;
        let whole = |kind| Ok(Region { base: start, bytes: size as usize, generation: buffer, kind });
        if managed as u32 != 0 {
            return whole(Kind::Private);
        }
        match memory_type as u32 {
            MEMORYTYPE_HOST => return whole(Kind::Host),
            MEMORYTYPE_DEVICE => {}
            _ => {
                return Err(Error::Invalid(format!(
                    "the address {address:#x} is not CUDA memory (never allocated or registered, or already freed)"
                )));
            }
        }
        let owner = owner as u32 as i32;
        if owner != ordinal {
            return Err(Error::Invalid(format!(
                "the memory at {address:#x} belongs to CUDA device {owner}, expected device {ordinal}"
            )));
        }
        if pool != 0 {
            return whole(Kind::Private);
        }
        let (base, bytes) = self.physical_range(address).map_err(|error| match mapped as u32 {
            0 => Error::Invalid(format!("no memory is mapped at {address:#x} (freed?)")),
            _ => error,
        })?;
        if legacy as u32 != 0 {
            return Ok(Region { base, bytes, generation: buffer, kind: Kind::Legacy });
        }
        let kind = if self.exportable(address) { Kind::Mapped } else { Kind::Private };
        // Drivers without numbers for physical memory have a number for the mapping.
        let generation = self.one(MEMORY_BLOCK_ID, address).filter(|&id| id != 0).unwrap_or(buffer);
        Ok(Region { base, bytes, generation: generation | MAPPED_GENERATION, kind })
    }

    /// Returns the attributes in [`QUERIED`]; all zeros for an address that the driver has no record of.
    fn query(&self, address: Address) -> Result<[u64; QUERIED.len()]> {
        let (mut attributes, mut answers) = (QUERIED, [0u64; QUERIED.len()]);
        let mut pointers = answers.each_mut().map(|answer| (answer as *mut u64).cast::<c_void>());
        // SAFETY: one pointer per attribute, each to a word that fits the largest result.
        let result = unsafe {
            self.table.required.pointer_get_attributes(
                attributes.len() as u32,
                attributes.as_mut_ptr(),
                pointers.as_mut_ptr(),
                address,
            )
        };
        match result {
            // The documentation promises success for unknown addresses, but the driver rejects some of them.
            Err(error) if code_of(&error) != CUDA_ERROR_INVALID_VALUE => Err(error),
            _ => Ok(answers),
        }
    }

    /// Returns true if the allocation at `address` still has this [`Region::generation`]; always false for mapped
    /// memory.
    pub(super) fn is_buffer(&self, address: Address, generation: u64) -> bool {
        self.one(BUFFER_ID, address) == Some(generation)
    }

    /// Returns the ordinal of the device that owns the memory at `address`; `None` for other memory.
    pub(super) fn owner(&self, address: Address) -> Option<i32> {
        let of_device = self.one(MEMORY_TYPE, address) == Some(u64::from(MEMORYTYPE_DEVICE));
        self.one(DEVICE_ORDINAL, address).filter(|_| of_device).map(|ordinal| ordinal as i32)
    }

    fn one(&self, attribute: i32, address: Address) -> Option<u64> {
        let mut answer = 0u64;
        // SAFETY: the word fits the largest result.
        let result = unsafe {
            self.table.required.pointer_get_attribute((&raw mut answer).cast(), attribute, address)
        };
        result.ok().map(|()| answer)
    }

    /// Returns the physical allocation that is mapped at `address`.
    fn physical_range(&self, address: Address) -> Result<(Address, usize)> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the call writes both values.
        match unsafe { self.table.required.mem_get_address_range(&raw mut base, &raw mut bytes, address) } {
            Ok(()) => Ok((base, bytes)),
            // Some drivers return "not found" for mapped memory and provide the range as attributes.
            Err(error) if code_of(&error) == CUDA_ERROR_NOT_FOUND => self
                .one(MAPPING_BASE_ADDR, address)
                .zip(self.one(MAPPING_SIZE, address))
                .map_or(Err(error), |(base, bytes)| Ok((base, bytes as usize))),
            Err(error) => Err(error),
        }
    }

    /// Returns true if the physical memory mapped at `address` was created with support for export as a descriptor.
    fn exportable(&self, address: Address) -> bool {
        let Ok(handle) = self.retain(address) else { return false };
        let mut properties = std::mem::MaybeUninit::<CUmemAllocationProp>::zeroed();
        // SAFETY: the call fills the structure, for which all zeros is valid; the handle is retained.
        let (result, properties) = unsafe {
            let result = self.table.required.mem_properties(properties.as_mut_ptr(), handle);
            (result, properties.assume_init())
        };
        self.release(handle);
        result.is_ok() && properties.requested_handle_types & MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0
    }

    /// Retains the physical memory mapped at `address`.
    pub(super) fn retain(&self, address: Address) -> Result<CUmemGenericAllocationHandle> {
        let mut handle = 0;
        // SAFETY: the call writes the handle; it rejects an address without one.
        unsafe { self.table.required.mem_retain(&raw mut handle, address as *mut c_void) }?;
        Ok(handle)
    }

    pub(super) fn release(&self, handle: CUmemGenericAllocationHandle) {
        // SAFETY: a handle that the caller retained and does not use again. Mappings keep the memory alive.
        unsafe { (self.table.required.mem_release)(handle) };
    }
}
