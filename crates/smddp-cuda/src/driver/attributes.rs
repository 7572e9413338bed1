//! What an address is: asked of the driver, which knows every allocation of the process, whoever made it.

use std::ffi::c_void;

use super::cuda::Cuda;
use super::errors::code_of;
use super::types::*;
use crate::device::{Address, Error, Kind, Region, Result};

/// Answers are of at most eight bytes, some of four or one: each has a zeroed word.
const ASKED: [i32; 9] = [
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

/// Tells generations of mapped memory from those of other memory, which the driver numbers separately.
const MAPPED_GENERATION: u64 = 1 << 63;

impl Cuda {
    /// The allocation in which `address` lies, for the device `ordinal`, whose context is current.
    ///
    /// Memory mapped by virtual-memory calls: a reservation of addresses holds many chunks of physical memory, and a
    /// tensor may span several. The driver's range attributes tell of the reservation, cuMemGetAddressRange of the one
    /// chunk that `address` is in; the chunk is what can be exported, so it is the region. Its generation is the number
    /// of the physical memory, which is another one where a chunk was unmapped and a new one mapped at its place.
    pub(super) fn region(&self, ordinal: i32, address: Address) -> Result<Region> {
        let [memory_type, owner, buffer, managed, legacy, start, size, mapped, pool] = self.ask(address)?;
        let whole = |kind| Ok(Region { base: start, bytes: size as usize, generation: buffer, kind });
        if managed as u32 != 0 {
            return whole(Kind::Private);
        }
        match memory_type as u32 {
            MEMORYTYPE_HOST => return whole(Kind::Host),
            MEMORYTYPE_DEVICE => {}
            _ => {
                return Err(Error::Invalid(format!(
                    "the address {address:#x} is not CUDA memory (never allocated or registered, or freed)"
                )));
            }
        }
        let owner = owner as u32 as i32;
        if owner != ordinal {
            return Err(Error::Invalid(format!(
                "the memory at {address:#x} is of CUDA device {owner}, but this is device {ordinal}"
            )));
        }
        if pool != 0 {
            return whole(Kind::Private);
        }
        let (base, bytes) = self.chunk(address).map_err(|error| match mapped as u32 {
            0 => Error::Invalid(format!("no memory is mapped at {address:#x} (freed?)")),
            _ => error,
        })?;
        if legacy as u32 != 0 {
            return Ok(Region { base, bytes, generation: buffer, kind: Kind::Legacy });
        }
        let kind = if self.exportable(address) { Kind::Mapped } else { Kind::Private };
        // Drivers that do not number physical memory yet number the mapping.
        let generation = self.one(MEMORY_BLOCK_ID, address).filter(|&id| id != 0).unwrap_or(buffer);
        Ok(Region { base, bytes, generation: generation | MAPPED_GENERATION, kind })
    }

    /// The attributes of [`ASKED`]; zeros for an address that the driver does not know.
    fn ask(&self, address: Address) -> Result<[u64; ASKED.len()]> {
        let (mut asked, mut answers) = (ASKED, [0u64; ASKED.len()]);
        let mut places = answers.each_mut().map(|answer| (answer as *mut u64).cast::<c_void>());
        // SAFETY: as many places as attributes, each with room for the largest answer.
        let told = unsafe {
            self.table.required.pointer_get_attributes(
                asked.len() as u32,
                asked.as_mut_ptr(),
                places.as_mut_ptr(),
                address,
            )
        };
        match told {
            // Documented to succeed for unknown addresses too, but for some it refuses.
            Err(error) if code_of(&error) != CUDA_ERROR_INVALID_VALUE => Err(error),
            _ => Ok(answers),
        }
    }

    /// Whether the allocation at `address` is still the one of that [`Region::generation`]; never for mapped memory.
    pub(super) fn is_buffer(&self, address: Address, generation: u64) -> bool {
        self.one(BUFFER_ID, address) == Some(generation)
    }

    /// The device whose memory is at `address`.
    pub(super) fn owner(&self, address: Address) -> Option<i32> {
        let of_device = self.one(MEMORY_TYPE, address) == Some(u64::from(MEMORYTYPE_DEVICE));
        self.one(DEVICE_ORDINAL, address).filter(|_| of_device).map(|ordinal| ordinal as i32)
    }

    fn one(&self, attribute: i32, address: Address) -> Option<u64> {
        let mut answer = 0u64;
        // SAFETY: room for the largest answer.
        let told = unsafe {
            self.table.required.pointer_get_attribute((&raw mut answer).cast(), attribute, address)
        };
        told.ok().map(|()| answer)
    }

    /// The physical allocation that is mapped at `address`.
    fn chunk(&self, address: Address) -> Result<(Address, usize)> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: fills both.
        match unsafe { self.table.required.mem_get_address_range(&raw mut base, &raw mut bytes, address) } {
            Ok(()) => Ok((base, bytes)),
            // Some drivers say so of mapped memory, and answer by attribute.
            Err(error) if code_of(&error) == CUDA_ERROR_NOT_FOUND => self
                .one(MAPPING_BASE_ADDR, address)
                .zip(self.one(MAPPING_SIZE, address))
                .map_or(Err(error), |(base, bytes)| Ok((base, bytes as usize))),
            Err(error) => Err(error),
        }
    }

    /// Whether the physical memory mapped at `address` was made to be exported as a descriptor.
    fn exportable(&self, address: Address) -> bool {
        let Ok(handle) = self.retain(address) else { return false };
        let mut properties = std::mem::MaybeUninit::<CUmemAllocationProp>::zeroed();
        // SAFETY: fills the structure, of which zeros are a valid value; the handle is held.
        let (told, properties) = unsafe {
            let told = self.table.required.mem_properties(properties.as_mut_ptr(), handle);
            (told, properties.assume_init())
        };
        self.release(handle);
        told.is_ok() && properties.requested_handle_types & MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0
    }

    /// A share in the physical memory mapped at `address`.
    pub(super) fn retain(&self, address: Address) -> Result<CUmemGenericAllocationHandle> {
        let mut handle = 0;
        // SAFETY: fills the handle; an address that has none is refused.
        unsafe { self.table.required.mem_retain(&raw mut handle, address as *mut c_void) }?;
        Ok(handle)
    }

    pub(super) fn release(&self, handle: CUmemGenericAllocationHandle) {
        // SAFETY: a share that the caller holds and does not use again. Mappings keep the memory.
        unsafe { (self.table.required.mem_release)(handle) };
    }
}
