//! Memory that the driver knows: a map of ranges, read by streams while they touch it and changed by calls.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::api;
use crate::os::{self, MAP_ANONYMOUS, MAP_SHARED, PROT_RW};
use crate::views::{Had, closed, opened};
use crate::sharing::Imports;
use crate::state::*;
use crate::streams::{acquiring, drain};
use crate::numbers::{ALLOWED_HANDLE_TYPES, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED};
use crate::types::*;
use crate::vmm::{Physical, Virtual};

pub(crate) enum Kind {
    Device(OwnedFd),
    /// Allocated here, or made known.
    Host {
        ours: bool,
    },
    Imported,
    Mapped {
        physical: Arc<Physical>,
        accessible: bool,
    },
}

pub(crate) struct Range {
    pub(crate) bytes: usize,
    pub(crate) device: usize,
    /// CUDA's number of the buffer.
    pub(crate) id: u64,
    pub(crate) kind: Kind,
}

impl Range {
    pub(crate) fn usable(&self) -> bool {
        !matches!(self.kind, Kind::Mapped { accessible: false, .. })
    }
}

#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) ranges: BTreeMap<u64, Range>,
    pub(crate) virtuals: Virtual,
    pub(crate) imports: Imports,
    used: [usize; 32],
}

/// By process.
static MEMORY: RwLock<BTreeMap<usize, Memory>> = RwLock::new(BTreeMap::new());

/// A process's memory.
pub(crate) struct Reading(RwLockReadGuard<'static, BTreeMap<usize, Memory>>, usize);

pub(crate) fn read() -> Reading {
    Reading(MEMORY.read().unwrap_or_else(PoisonError::into_inner), process())
}

/// Nothing is known any more.
pub(crate) fn forget() {
    MEMORY.write().unwrap_or_else(PoisonError::into_inner).clear();
}

impl Reading {
    /// The range in which an address lies, and its start.
    pub(crate) fn find(&self, address: u64) -> Option<(u64, &Range)> {
        self.0.get(&self.1)?.find(address)
    }

    /// Whether all of these bytes are known and may be touched. They may lie in several ranges, one after the other.
    pub(crate) fn covers(&self, address: u64, bytes: usize) -> bool {
        let (mut at, end) = (address, address.saturating_add(bytes as u64));
        while at < end {
            match self.find(at) {
                Some((base, range)) if range.usable() => at = base + range.bytes as u64,
                _ => return false,
            }
        }
        true
    }

    pub(crate) fn reservation(&self, address: u64) -> Option<(u64, usize, u64)> {
        self.0.get(&self.1)?.virtuals.reservation(address)
    }
}

pub(crate) fn write<T>(change: impl FnOnce(&mut Memory) -> T) -> T {
    let mut guard: RwLockWriteGuard<'_, _> = MEMORY.write().unwrap_or_else(PoisonError::into_inner);
    change(guard.entry(process()).or_default())
}

impl Memory {
    pub(crate) fn find(&self, address: u64) -> Option<(u64, &Range)> {
        let (&base, range) = self.ranges.range(..=address).next_back()?;
        (address - base < range.bytes as u64).then_some((base, range))
    }

    pub(crate) fn overlaps(&self, address: u64, bytes: usize) -> bool {
        self.ranges
            .range(..address + bytes as u64)
            .next_back()
            .is_some_and(|(&base, range)| base + range.bytes as u64 > address)
    }

    /// Counts memory of a device, and refuses more than it has.
    pub(crate) fn take(&mut self, device: usize, bytes: usize) -> Answer {
        if self.used[device].saturating_add(bytes) > settings().memory {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.used[device] += bytes;
        Ok(())
    }

    pub(crate) fn give_back(&mut self, device: usize, bytes: usize) {
        self.used[device] -= bytes;
    }
}

/// Allocations, mappings, reservations and handles.
pub(crate) fn open() -> u64 {
    let all = read();
    all.0.values().map(|memory| (memory.ranges.len() + memory.virtuals.open()) as u64).sum()
}

/// New memory holds anything: nobody shall count on zeros. (Large memory keeps them, for speed.)
unsafe fn soil(address: u64, bytes: usize) {
    std::ptr::write_bytes(address as *mut u8, 0xA5, bytes.min(64 << 20));
}

pub(crate) fn unmap(address: u64, bytes: usize) {
    unsafe { os::munmap(address as *mut c_void, bytes) };
}

api! {
    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) {
        let device = current()?;
        acquiring("cuMemAlloc")?;
        if bytes == 0 || address.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let id = fresh();
        let fd = os::memfd(&format!("fake-cuda-{}-{id}", settings().visible[device]), bytes)
            .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        write(|memory| {
            memory.take(device, bytes)?;
            let at = os::map(0, bytes, PROT_RW, MAP_SHARED, fd.as_raw_fd());
            let at = at.ok_or(CUDA_ERROR_OUT_OF_MEMORY).inspect_err(|_| memory.give_back(device, bytes))?;
            soil(at, bytes);
            opened(at, bytes, Had::Device, Some(fd.as_raw_fd()));
            memory.ranges.insert(at, Range { bytes, device, id, kind: Kind::Device(fd) });
            give(address, at)
        })
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        gone(address, "cuMemFree", |kind| matches!(kind, Kind::Device(_)), CUDA_ERROR_INVALID_VALUE)
    }

    fn cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint) {
        let device = current()?;
        acquiring("cuMemHostAlloc")?;
        if bytes == 0 || flags > 7 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let at = os::map(0, bytes, PROT_RW, MAP_SHARED | MAP_ANONYMOUS, -1).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        soil(at, bytes);
        write(|memory| {
            memory.ranges.insert(at, Range { bytes, device, id: fresh(), kind: Kind::Host { ours: true } });
            opened(at, bytes, Had::Host, None);
        });
        give(host, at as *mut c_void)
    }

    fn cuMemFreeHost(host: *mut c_void) {
        let ours = |kind: &Kind| matches!(kind, Kind::Host { ours: true });
        gone(host as u64, "cuMemFreeHost", ours, CUDA_ERROR_INVALID_VALUE)
    }

    fn cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: c_uint) {
        let device = current()?;
        acquiring("cuMemHostRegister")?;
        let pages = bytes.div_ceil(4096);
        if bytes == 0 || flags > 15 || !(host as u64).is_multiple_of(4096) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if os::mincore(host, bytes, vec![0; pages].as_mut_ptr()) != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        write(|memory| {
            if memory.overlaps(host as u64, bytes) {
                return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
            }
            let range = Range { bytes, device, id: fresh(), kind: Kind::Host { ours: false } };
            memory.ranges.insert(host as u64, range);
            opened(host as u64, bytes, Had::Registered, None);
            Ok(())
        })
    }

    fn cuMemHostUnregister(host: *mut c_void) {
        let theirs = |kind: &Kind| matches!(kind, Kind::Host { ours: false });
        gone(host as u64, "cuMemHostUnregister", theirs, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    }

    fn cuMemHostGetDevicePointer_v2(address: *mut CUdeviceptr, host: *mut c_void, flags: c_uint) {
        current()?;
        match read().find(host as u64) {
            Some((_, Range { kind: Kind::Host { .. }, .. })) if flags == 0 => give(address, host as u64),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr) {
        current()?;
        let memory = read();
        let (start, range) = memory.find(address).ok_or(CUDA_ERROR_NOT_FOUND)?;
        give(base, start)?;
        give(bytes, range.bytes)
    }

    fn cuPointerGetAttribute(data: *mut c_void, which: c_int, address: CUdeviceptr) {
        current()?;
        attribute(data, which, address)?.then_some(()).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    fn cuPointerGetAttributes(count: c_uint, which: *mut c_int, data: *mut *mut c_void, address: CUdeviceptr) {
        current()?;
        for i in 0..count as usize {
            attribute(*data.add(i), *which.add(i), address)?;
        }
        Ok(())
    }
}

/// By `call`, memory at `address` is known no more, and none if it was allocated here; `otherwise` where it is not of that
/// kind.
fn gone(address: u64, call: &str, kind: impl Fn(&Kind) -> bool, otherwise: CUresult) -> Answer {
    current()?;
    drain(call)?;
    write(|memory| {
        let known = memory.ranges.get(&address).is_some_and(|range| kind(&range.kind));
        let range = known.then(|| {
            closed(address, call);
            memory.ranges.remove(&address)
        });
        let Range { bytes, device, kind, .. } = range.flatten().ok_or(otherwise)?;
        if matches!(kind, Kind::Device(_)) {
            memory.give_back(device, bytes);
        }
        if !matches!(kind, Kind::Host { ours: false }) {
            unmap(address, bytes);
        }
        Ok(())
    })
}

/// Writes the answer, in its own width; zero, and false, for an address that is unknown.
unsafe fn attribute(data: *mut c_void, which: c_int, address: u64) -> Answer<bool> {
    let memory = read();
    let found = memory.find(address);
    let newest = if settings().version < 11080 { MEMPOOL_HANDLE } else { MEMORY_BLOCK_ID };
    if !(1..=newest).contains(&which) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let value = found.map_or(0, |(base, range)| {
        let reserved = memory.reservation(base);
        match which {
            MEMORY_TYPE => match range.kind {
                Kind::Host { .. } => MEMORYTYPE_HOST.into(),
                _ => MEMORYTYPE_DEVICE.into(),
            },
            // Mapped memory: what it lies in, so that nobody relies on more.
            BUFFER_ID => reserved.map_or(range.id, |(_, _, id)| id),
            DEVICE_ORDINAL => range.device as u64,
            // Imported memory too, which nobody says; a handle of it is refused.
            IS_LEGACY_CUDA_IPC_CAPABLE => {
                (matches!(range.kind, Kind::Device(_) | Kind::Imported) && settings().ipc).into()
            }
            RANGE_START_ADDR => reserved.map_or(base, |(start, ..)| start),
            RANGE_SIZE => reserved.map_or(range.bytes, |(_, bytes, _)| bytes) as u64,
            MAPPED => 1,
            ALLOWED_HANDLE_TYPES => match &range.kind {
                Kind::Mapped { physical, .. } => physical.exportable.into(),
                _ => 0,
            },
            MAPPING_SIZE => range.bytes as u64,
            MAPPING_BASE_ADDR => base,
            MEMORY_BLOCK_ID => match &range.kind {
                Kind::Mapped { physical, .. } => physical.id,
                _ => range.id,
            },
            _ => 0,
        }
    });
    match which {
        IS_MANAGED
        | MAPPED
        | IS_LEGACY_CUDA_IPC_CAPABLE
        | MEMORY_TYPE
        | DEVICE_ORDINAL
        | ALLOWED_HANDLE_TYPES => data.cast::<u32>().write(value as u32),
        _ => data.cast::<u64>().write(value),
    }
    Ok(found.is_some())
}
