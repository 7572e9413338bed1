//! Export and import of regions. The device's context is current.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::cuda::Cuda;
use super::types::*;
use crate::device::{Error, Export, Import, Imported, Kind, Region, Result};

impl Cuda {
    pub(super) fn export(&self, region: &Region) -> Result<Export> {
        match region.kind {
            Kind::Legacy => {
                let mut handle = CUipcMemHandle { reserved: [0; 64] };
                // SAFETY: the call writes the handle.
                unsafe { self.table.required.ipc_get_mem_handle(&raw mut handle, region.base) }?;
                Ok(Export::Legacy(handle.reserved))
            }
            Kind::Mapped => {
                let handle = self.retain(region.base)?;
                let mut fd = -1;
                // SAFETY: for this handle type the call writes a file descriptor, an int.
                let result = unsafe {
                    self.table.required.mem_export(
                        (&raw mut fd).cast(),
                        handle,
                        MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                        0,
                    )
                };
                self.release(handle);
                result?;
                // SAFETY: a new descriptor that this process owns. Executed children do not inherit it.
                Ok(Export::Descriptor(unsafe {
                    libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
                    OwnedFd::from_raw_fd(fd)
                }))
            }
            Kind::Private | Kind::Host => Err(Error::Invalid(format!(
                "the memory at {:#x} ({:?}) cannot be exported to other processes",
                region.base, region.kind
            ))),
        }
    }

    /// Maps an exported region with access for `device`.
    pub(super) fn import(&self, device: CUdevice, import: &Import<'_>, bytes: usize) -> Result<Imported> {
        match import {
            Import::Legacy(handle) => {
                let mut base = 0;
                let handle = CUipcMemHandle { reserved: **handle };
                let flags = IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
                // SAFETY: the call writes the address; the driver rejects an invalid handle.
                unsafe { self.table.required.ipc_open_mem_handle(&raw mut base, handle, flags) }?;
                Ok(Imported { base, bytes, mapped: false })
            }
            Import::Descriptor(fd) => {
                let mut handle = 0;
                let (fd, kind) = (fd.as_raw_fd() as usize, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
                // SAFETY: for this type the pointer argument holds the descriptor, which the caller keeps.
                unsafe { self.table.required.mem_import(&raw mut handle, fd as *mut c_void, kind) }?;
                let base = self.map(device, handle, bytes);
                // A mapping keeps the memory alive.
                self.release(handle);
                Ok(Imported { base: base?, bytes, mapped: true })
            }
        }
    }

    fn map(
        &self,
        device: CUdevice,
        handle: CUmemGenericAllocationHandle,
        bytes: usize,
    ) -> Result<CUdeviceptr> {
        let required = &self.table.required;
        let mut base = 0;
        // SAFETY: the call writes the address; minimum alignment, any address, flags must be 0.
        unsafe { required.mem_address_reserve(&raw mut base, bytes, 0, 0, 0) }?;
        // SAFETY: addresses reserved above, mapped completely; the offset must be 0.
        if let Err(error) = unsafe { required.mem_map(base, bytes, 0, handle, 0) } {
            // SAFETY: reserved above and not mapped.
            unsafe { (required.mem_address_free)(base, bytes) };
            return Err(error);
        }
        let access = CUmemAccessDesc {
            location: CUmemLocation { kind: MEM_LOCATION_TYPE_DEVICE, id: device },
            flags: MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: mapped above; one descriptor.
        if let Err(error) = unsafe { required.mem_set_access(base, bytes, &raw const access, 1) } {
            self.unmap(base, bytes);
            return Err(error);
        }
        Ok(base)
    }

    fn unmap(&self, base: CUdeviceptr, bytes: usize) {
        // SAFETY: mapped and reserved by `map`, unmapped completely. The codes are ignored: a failure means that the
        // mapping no longer exists.
        unsafe {
            (self.table.required.mem_unmap)(base, bytes);
            (self.table.required.mem_address_free)(base, bytes);
        }
    }

    pub(super) fn close(&self, imported: Imported) {
        if imported.mapped {
            self.unmap(imported.base, imported.bytes);
        } else {
            // SAFETY: opened by `import`. The code is ignored as in `unmap`.
            unsafe { (self.table.required.ipc_close_mem_handle)(imported.base) };
        }
    }
}
