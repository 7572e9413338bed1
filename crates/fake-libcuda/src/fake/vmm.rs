//! The virtual memory API: physical memory, address reservations, and mappings.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::api;
use crate::memory::{Kind, Memory, Range, unmap, write};
use crate::numbers::MEM_ALLOCATION_TYPE_PINNED;
use crate::os::{self, MAP_ANONYMOUS, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_RW};
use crate::views::{Origin, closed, opened};
use crate::state::*;
use crate::streams::{acquiring, drain};
use crate::types::*;

pub(crate) struct Physical {
    fd: OwnedFd,
    pub(crate) bytes: usize,
    pub(crate) device: usize,
    pub(crate) exportable: bool,
    imported: bool,
    pub(crate) id: u64,
}

#[derive(Default)]
pub(crate) struct Virtual {
    /// By start: bytes and number.
    reserved: BTreeMap<u64, (usize, u64)>,
    /// By number, with the reference count.
    handles: HashMap<u64, (Arc<Physical>, u32)>,
}

impl Virtual {
    pub(crate) fn open(&self) -> usize {
        self.reserved.len() + self.handles.len()
    }

    pub(crate) fn reservation(&self, address: u64) -> Option<(u64, usize, u64)> {
        let (&start, &(bytes, id)) = self.reserved.range(..=address).next_back()?;
        (address - start < bytes as u64).then_some((start, bytes, id))
    }

    fn retain(&mut self, physical: Arc<Physical>) -> u64 {
        let id = physical.id;
        self.handles.entry(id).or_insert((physical, 0)).1 += 1;
        id
    }

    fn get(&self, handle: u64) -> Answer<Arc<Physical>> {
        self.handles.get(&handle).map(|(physical, _)| physical.clone()).ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}

/// Returns the mapped ranges in these addresses, which must contain whole ranges only.
fn inside(memory: &Memory, address: u64, bytes: usize) -> Answer<Vec<u64>> {
    let end = address + bytes as u64;
    let found: Vec<u64> = memory.ranges.range(address..end).map(|(&base, _)| base).collect();
    let whole: usize = found.iter().map(|base| memory.ranges[base].bytes).sum();
    let mapped = found.iter().all(|base| matches!(memory.ranges[base].kind, Kind::Mapped { .. }));
    if whole == bytes && mapped { Ok(found) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

api! {
    fn cuMemGetAllocationGranularity(granularity: *mut usize, _property: *const CUmemAllocationProp, _option: c_int) {
        write_out(granularity, settings().granularity)
    }

    fn cuMemCreate(handle: *mut u64, bytes: usize, property: *const CUmemAllocationProp, flags: u64) {
        let property = *property;
        let device = check_device(property.location.id)?;
        if bytes == 0
            || !bytes.is_multiple_of(settings().granularity)
            || flags != 0
            || property.kind != MEM_ALLOCATION_TYPE_PINNED
            || property.location.kind != MEM_LOCATION_TYPE_DEVICE
        {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let id = fresh();
        let fd = os::memfd(&format!("fake-cuda-{}-{id}", settings().visible[device]), bytes)
            .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let exportable =
            settings().ipc && property.requested_handle_types & MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0;
        let physical = Arc::new(Physical { fd, bytes, device, exportable, imported: false, id });
        write_out(handle, write(|memory| memory.virtuals.retain(physical)))
    }

    fn cuMemRelease(handle: u64) {
        write(|memory| {
            let entry = memory.virtuals.handles.get_mut(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            entry.1 -= 1;
            if entry.1 == 0 {
                memory.virtuals.handles.remove(&handle);
            }
            Ok(())
        })
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) {
        write(|memory| {
            let physical = match memory.find(address as u64) {
                Some((_, Range { kind: Kind::Mapped { physical, .. }, .. })) => physical.clone(),
                _ => return Err(CUDA_ERROR_INVALID_VALUE),
            };
            write_out(handle, memory.virtuals.retain(physical))
        })
    }

    fn cuMemGetAllocationPropertiesFromHandle(property: *mut CUmemAllocationProp, handle: u64) {
        let physical = write(|memory| memory.virtuals.get(handle))?;
        write_out(property, CUmemAllocationProp {
            kind: MEM_ALLOCATION_TYPE_PINNED,
            requested_handle_types: physical.exportable.into(),
            location: CUmemLocation { kind: MEM_LOCATION_TYPE_DEVICE, id: physical.device as c_int },
            win32_handle_meta_data: std::ptr::null_mut(),
            compression_type: 0,
            gpu_direct_rdma_capable: 0,
            usage: 0,
            reserved: [0; 4],
        })
    }

    fn cuMemAddressReserve(address: *mut u64, bytes: usize, alignment: usize, _hint: u64, flags: u64) {
        if bytes == 0 || !bytes.is_multiple_of(settings().granularity) || flags != 0 || alignment & alignment.wrapping_sub(1) != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        let at = os::map(0, bytes, PROT_NONE, flags, -1).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        write(|memory| memory.virtuals.reserved.insert(at, (bytes, fresh())));
        write_out(address, at)
    }

    fn cuMemAddressFree(address: u64, bytes: usize) {
        write(|memory| match memory.virtuals.reserved.get(&address) {
            Some(&(reserved, _)) if reserved == bytes && !memory.overlaps(address, bytes) => {
                memory.virtuals.reserved.remove(&address);
                unmap(address, bytes);
                Ok(())
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        })
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        write(|memory| {
            let physical = memory.virtuals.get(handle)?;
            let (start, reserved, _) =
                memory.virtuals.reservation(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            if offset != 0
                || flags != 0
                || bytes == 0
                || !bytes.is_multiple_of(settings().granularity)
                || bytes > physical.bytes
                || address + bytes as u64 > start + reserved as u64
                || memory.overlaps(address, bytes)
            {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            os::map(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical.fd.as_raw_fd())
                .ok_or(CUDA_ERROR_MAP_FAILED)?;
            let (device, id) = (physical.device, fresh());
            let origin = if physical.imported { Origin::Imported } else { Origin::Device };
            opened(address, bytes, origin, Some(physical.fd.as_raw_fd()));
            let kind = Kind::Mapped { physical, accessible: false };
            memory.ranges.insert(address, Range { bytes, device, id, kind });
            Ok(())
        })
    }

    fn cuMemUnmap(address: u64, bytes: usize) {
        drain("cuMemUnmap")?;
        write(|memory| {
            for base in inside(memory, address, bytes)? {
                closed(base, "cuMemUnmap");
                memory.ranges.remove(&base);
            }
            let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
            os::map(address, bytes, PROT_NONE, flags, -1).map(drop).ok_or(CUDA_ERROR_MAP_FAILED)
        })
    }

    fn cuMemSetAccess(address: u64, bytes: usize, descriptions: *const CUmemAccessDesc, count: usize) {
        let [description] = std::slice::from_raw_parts(descriptions, count) else {
            return Err(CUDA_ERROR_INVALID_VALUE);
        };
        let accessor = check_device(description.location.id)?;
        if description.flags != MEM_ACCESS_FLAGS_PROT_READWRITE {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        acquiring("cuMemSetAccess")?;
        write(|memory| {
            for base in inside(memory, address, bytes)? {
                let Some(range) = memory.ranges.get_mut(&base) else { continue };
                if !settings().reaches(accessor, settings().visible[range.device]) {
                    return Err(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
                }
                if let Kind::Mapped { accessible, .. } = &mut range.kind {
                    *accessible = true;
                }
            }
            if os::mprotect(address as *mut c_void, bytes, PROT_RW) == 0 {
                Ok(())
            } else {
                Err(CUDA_ERROR_MAP_FAILED)
            }
        })
    }

    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: c_int, flags: u64) {
        let physical = write(|memory| memory.virtuals.get(handle))?;
        if kind != MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags != 0 || !physical.exportable {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let fd = os::fcntl(physical.fd.as_raw_fd(), os::F_DUPFD_CLOEXEC, 0);
        if fd < 0 { Err(CUDA_ERROR_OUT_OF_MEMORY) } else { write_out(shareable.cast::<c_int>(), fd) }
    }

    fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_int) {
        current()?;
        let fd = shareable as c_int;
        // The name contains the device, and shows that the fake driver created the memory.
        let device = os::memfd_name(&format!("/proc/self/fd/{fd}"))
            .and_then(|name| crate::sharing::device_of(&name))
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if kind != MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let fd = os::fcntl(fd, os::F_DUPFD_CLOEXEC, 0);
        if fd < 0 {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let fd = OwnedFd::from_raw_fd(fd);
        let file = std::fs::File::from(fd);
        let bytes = file.metadata().map_err(|_| CUDA_ERROR_INVALID_VALUE)?.len() as usize;
        let physical = Physical { fd: file.into(), bytes, device, exportable: true, imported: true, id: fresh() };
        write_out(handle, write(|memory| memory.virtuals.retain(Arc::new(physical))))
    }
}
