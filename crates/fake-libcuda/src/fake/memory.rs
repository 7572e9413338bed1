//! Memory known to the driver: a map of ranges. Streams hold the read lock during accesses; calls change the map.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::api;
use crate::os::{self, MAP_ANONYMOUS, MAP_SHARED, PROT_RW};
use crate::views::{Origin, closed, opened};
use crate::sharing::Imports;
use crate::state::*;
use crate::streams::{acquiring, drain};
use crate::numbers::{ALLOWED_HANDLE_TYPES, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED};
use crate::types::*;
use crate::vmm::{Physical, Virtual};

pub(crate) enum Kind {
    Device(OwnedFd),
    /// Allocated by the driver, or registered.
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
    /// Buffer number, as in CUDA.
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

/// Read access to one process's memory.
pub(crate) struct Reading(RwLockReadGuard<'static, BTreeMap<usize, Memory>>, usize);

pub(crate) fn read() -> Reading {
    Reading(MEMORY.read().unwrap_or_else(PoisonError::into_inner), process())
}

/// Drops all ranges.
pub(crate) fn reset() {
    MEMORY.write().unwrap_or_else(PoisonError::into_inner).clear();
}

impl Reading {
    /// Returns the range that contains an address, and its start.
    pub(crate) fn find(&self, address: u64) -> Option<(u64, &Range)> {
        self.0.get(&self.1)?.find(address)
    }

    /// Returns true if all these bytes are known and accessible. They may span several adjacent ranges.
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

    /// Charges memory to a device. Fails if the device has not enough.
    pub(crate) fn charge(&mut self, device: usize, bytes: usize) -> Answer {
        if self.used[device].saturating_add(bytes) > settings().memory {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        self.used[device] += bytes;
        Ok(())
    }

    pub(crate) fn refund(&mut self, device: usize, bytes: usize) {
        self.used[device] -= bytes;
    }
}

/// Number of allocations, mappings, reservations and handles.
pub(crate) fn open() -> u64 {
    let all = read();
    all.0.values().map(|memory| (memory.ranges.len() + memory.virtuals.open()) as u64).sum()
}

/// Fills new memory with a pattern, so that no test depends on zeros. The rest of large memory keeps zeros, for
/// speed.
unsafe fn fill_pattern(address: u64, bytes: usize) {
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
            memory.charge(device, bytes)?;
            let at = os::map(0, bytes, PROT_RW, MAP_SHARED, fd.as_raw_fd());
            let at = at.ok_or(CUDA_ERROR_OUT_OF_MEMORY).inspect_err(|_| memory.refund(device, bytes))?;
            fill_pattern(at, bytes);
            opened(at, bytes, Origin::Device, Some(fd.as_raw_fd()));
            memory.ranges.insert(at, Range { bytes, device, id, kind: Kind::Device(fd) });
            write_out(address, at)
        })
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        remove(address, "cuMemFree", |kind| matches!(kind, Kind::Device(_)), CUDA_ERROR_INVALID_VALUE)
    }

    fn cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint) {
        let device = current()?;
        acquiring("cuMemHostAlloc")?;
        if bytes == 0 || flags > 7 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let at = os::map(0, bytes, PROT_RW, MAP_SHARED | MAP_ANONYMOUS, -1).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        fill_pattern(at, bytes);
        write(|memory| {
            memory.ranges.insert(at, Range { bytes, device, id: fresh(), kind: Kind::Host { ours: true } });
            opened(at, bytes, Origin::Host, None);
        });
        write_out(host, at as *mut c_void)
    }

    fn cuMemFreeHost(host: *mut c_void) {
        let ours = |kind: &Kind| matches!(kind, Kind::Host { ours: true });
        remove(host as u64, "cuMemFreeHost", ours, CUDA_ERROR_INVALID_VALUE)
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
            opened(host as u64, bytes, Origin::Registered, None);
            Ok(())
        })
    }

    fn cuMemHostUnregister(host: *mut c_void) {
        let theirs = |kind: &Kind| matches!(kind, Kind::Host { ours: false });
        remove(host as u64, "cuMemHostUnregister", theirs, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    }

    fn cuMemHostGetDevicePointer_v2(address: *mut CUdeviceptr, host: *mut c_void, flags: c_uint) {
        current()?;
        match read().find(host as u64) {
            Some((_, Range { kind: Kind::Host { .. }, .. })) if flags == 0 => write_out(address, host as u64),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr) {
        current()?;
        let memory = read();
        let (start, range) = memory.find(address).ok_or(CUDA_ERROR_NOT_FOUND)?;
        write_out(base, start)?;
        write_out(bytes, range.bytes)
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

/// Removes the range at `address` on behalf of `call`, and unmaps it if it was allocated here. Fails with `otherwise`
/// if the range is not of that kind.
fn remove(address: u64, call: &str, kind: impl Fn(&Kind) -> bool, otherwise: CUresult) -> Answer {
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
            memory.refund(device, bytes);
        }
        if !matches!(kind, Kind::Host { ours: false }) {
            unmap(address, bytes);
        }
        Ok(())
    })
}

/// Writes the attribute in its width. For an unknown address writes zero and returns false.
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
            // For mapped memory the reservation's number, so that no test depends on more.
            BUFFER_ID => reserved.map_or(range.id, |(_, _, id)| id),
            DEVICE_ORDINAL => range.device as u64,
            // Set for imported memory too, because the real value is unspecified. The export fails.
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
