//! Legacy IPC handles between processes.

use std::collections::HashMap;
use std::ffi::c_uint;
use std::os::fd::AsRawFd;

use crate::api;
use crate::memory::{Kind, Range, read, unmap, write};
use crate::os::{self, MAP_SHARED, PROT_RW};
use crate::views::{Origin, closed, opened};
use crate::state::*;
use crate::streams::{acquiring, drain};
use crate::types::*;

/// Contents of a handle: the location of the memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
struct Handle {
    magic: [u8; 8],
    /// Address in the exporting process.
    base: u64,
    bytes: u64,
    id: u64,
    pid: u32,
    fd: i32,
    /// Device number on this machine, independent of CUDA_VISIBLE_DEVICES.
    device: u32,
    /// Process number in a checked world.
    process: u32,
    zeros: [u32; 4],
}

const MAGIC: [u8; 8] = *b"fakecuda";
const _: () = assert!(size_of::<Handle>() == 64);

impl Handle {
    /// Returns true if both describe overlapping addresses of one process: one of the two allocations has been freed.
    fn displaces(&self, other: &Self) -> bool {
        (self.pid, self.process, self.device) == (other.pid, other.process, other.device)
            && self.base < other.base + other.bytes
            && other.base < self.base + self.bytes
    }
}

/// Open imports: the mapped address and the number of opens.
#[derive(Default)]
pub(crate) struct Imports(HashMap<Handle, (u64, u32)>);

/// Returns the ordinal of the device in a `memfd` name. A device hidden from this process counts as the first.
pub(crate) fn device_of(name: &str) -> Option<usize> {
    let number: usize = name.strip_prefix("fake-cuda-")?.split('-').next()?.parse().ok()?;
    Some(settings().visible.iter().position(|&device| device == number).unwrap_or(0))
}

api! {
    fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr) {
        current()?;
        if !settings().ipc {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let memory = read();
        let Some((base, Range { kind: Kind::Device(fd), bytes, id, device })) = memory.find(address) else {
            return Err(CUDA_ERROR_INVALID_VALUE);
        };
        // The documentation allows only the base of an allocation.
        if base != address || *bytes < settings().least_export {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        write_out(handle.cast(), Handle {
            magic: MAGIC,
            base,
            bytes: *bytes as u64,
            id: *id,
            pid: std::process::id(),
            fd: fd.as_raw_fd(),
            device: settings().visible[*device] as u32,
            process: process() as u32,
            zeros: [0; 4],
        })
    }

    fn cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) {
        let device = current()?;
        acquiring("cuIpcOpenMemHandle")?;
        let handle: Handle = std::mem::transmute(handle);
        if flags != IPC_MEM_LAZY_ENABLE_PEER_ACCESS || handle.magic != MAGIC {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if (handle.pid, handle.process) == (std::process::id(), process() as u32) {
            // A process cannot open its own handle.
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        if !settings().reaches(device, handle.device as usize) {
            return Err(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        }
        write(|memory| {
            if let Some((base, times)) = memory.imports.0.get_mut(&handle) {
                *times += 1;
                return write_out(address, *base);
            }
            if memory.imports.0.keys().any(|open| open.displaces(&handle)) {
                return Err(CUDA_ERROR_ALREADY_MAPPED);
            }
            // After the exporting process has exited or freed the memory, the descriptor is another file or closed.
            let path = format!("/proc/{}/fd/{}", handle.pid, handle.fd);
            let name = format!("fake-cuda-{}-{}", handle.device, handle.id);
            if os::memfd_name(&path).as_deref() != Some(&name) {
                return Err(CUDA_ERROR_MAP_FAILED);
            }
            let file = std::fs::File::options()
                .read(true)
                .write(true)
                .open(&path)
                .map_err(|_| CUDA_ERROR_MAP_FAILED)?;
            let bytes = handle.bytes as usize;
            let base = os::map(0, bytes, PROT_RW, MAP_SHARED, file.as_raw_fd()).ok_or(CUDA_ERROR_MAP_FAILED)?;
            let device = device_of(&name).unwrap_or(device);
            memory.ranges.insert(base, Range { bytes, device, id: fresh(), kind: Kind::Imported });
            memory.imports.0.insert(handle, (base, 1));
            opened(base, bytes, Origin::Imported, Some(file.as_raw_fd()));
            write_out(address, base)
        })
    }

    fn cuIpcCloseMemHandle(address: CUdeviceptr) {
        current()?;
        drain("cuIpcCloseMemHandle")?;
        write(|memory| {
            let imports = &mut memory.imports.0;
            let (&handle, times) = imports
                .iter_mut()
                .find_map(|(handle, (base, times))| (*base == address).then_some((handle, times)))
                .ok_or(CUDA_ERROR_INVALID_VALUE)?;
            *times -= 1;
            if *times == 0 {
                imports.remove(&handle);
                closed(address, "cuIpcCloseMemHandle");
                memory.ranges.remove(&address);
                unmap(address, handle.bytes as usize);
            }
            Ok(())
        })
    }
}
