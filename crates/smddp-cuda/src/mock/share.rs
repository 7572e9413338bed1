//! Memory of one process that another has: exported and imported, or host memory that several register.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::device::MockDevice;
use super::memory::{self, Identity};
use super::report::Fault;
use super::shadow::Shadow;
use super::space::{Allocation, Had, View};
use super::state::{failed, invalid_value};
use crate::{Address, Error, Export, Import, Imported, Kind, Region, Result};

/// What a handle of a legacy allocation begins with; its generation follows.
const HANDLE: &[u8; 8] = b"mock ipc";

impl MockDevice {
    /// [`crate::Device::region`].
    pub(super) fn find_region(&self, address: Address) -> Result<Region> {
        let state = self.shared().lock();
        let found = state.space.find(self.process, address);
        let found = found.and_then(|(_, view)| Some((view, state.space.allocations.get(&view.allocation)?)));
        let Some((view, allocation)) = found else {
            return Err(Error::Invalid(format!("{address:#x} is no memory of a device, nor known to one")));
        };
        let device = allocation.owner.map(|(_, device)| device).filter(|_| allocation.kind != Kind::Host);
        if let Some(device) = device.filter(|device| *device != self.ordinal) {
            let why = format!("{address:#x} is memory of device {device}, not of device {}", self.ordinal);
            return Err(Error::Invalid(why));
        }
        // What came from another process cannot be passed on.
        let kind = if matches!(view.had, Had::Imported { .. }) { Kind::Private } else { allocation.kind };
        Ok(Region { base: view.base, bytes: view.bytes, generation: view.allocation, kind })
    }

    /// [`crate::Device::export`].
    pub(super) fn give_handle(&self, region: &Region) -> Result<Export> {
        let call = "cuIpcGetMemHandle";
        let state = self.calls()?;
        let found = state.space.find(self.process, region.base);
        let same = |view: &View| {
            view.had == Had::Own && view.base == region.base && view.allocation == region.generation
        };
        let Some((_, view)) = found.filter(|(_, view)| same(view)) else {
            return Err(invalid_value(call));
        };
        match state.space.allocations.get(&view.allocation).map(|allocation| allocation.kind) {
            Some(Kind::Legacy) => {
                let mut handle = [0; 64];
                handle[..8].copy_from_slice(HANDLE);
                handle[8..16].copy_from_slice(&view.allocation.to_le_bytes());
                Ok(Export::Legacy(handle))
            }
            Some(Kind::Mapped) => Ok(Export::Descriptor(descriptor(view.allocation)?)),
            _ => Err(invalid_value(call)),
        }
    }

    /// [`crate::Device::import`].
    pub(super) fn take_handle(&self, import: Import<'_>, bytes: usize) -> Result<Imported> {
        let mapped = matches!(import, Import::Descriptor(_));
        let call = if mapped { "cuMemImportFromShareableHandle" } else { "cuIpcOpenMemHandle" };
        let generation = match import {
            Import::Legacy(handle) => number_in(handle),
            Import::Descriptor(descriptor) => number_behind(descriptor),
        };
        let generation = generation.ok_or(invalid_value(call))?;
        let mut state = self.calls()?;
        state.may_stall(self.process, self.ordinal, call);
        let found = state.space.allocations.get(&generation).filter(|allocation| allocation.live);
        let found = found.and_then(|allocation| Some((allocation.owner?, allocation.bytes)));
        let Some(((owner, device), whole)) = found.filter(|(_, whole)| bytes <= *whole) else {
            return Err(invalid_value(call));
        };
        if owner == self.process && !mapped {
            return Err(failed(call, 201, "CUDA_ERROR_INVALID_CONTEXT"));
        }
        if state.script.unreachable.contains(&(self.ordinal, device)) {
            return Err(failed(call, 217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"));
        }
        // A legacy handle that is open already gives the same address again.
        let process = self.process;
        let again =
            state.space.views.values_mut().find(|view| {
                view.open && view.process == process && view.allocation == generation && !mapped
            });
        if let Some(View { had: Had::Imported { times, .. }, base, .. }) = again {
            *times += 1;
            return Ok(Imported { base: *base, bytes: whole, mapped });
        }
        // A processor that follows the address faults.
        let base = state.space.reserve(whole, false).ok_or(failed(call, 2, "CUDA_ERROR_OUT_OF_MEMORY"))?;
        state.space.add_view(process, base, whole, (generation, 0), Had::Imported { times: 1, mapped });
        Ok(Imported { base, bytes: whole, mapped })
    }

    /// [`crate::Device::close`].
    pub(super) fn close_handle(&self, imported: Imported) {
        let mut state = self.shared().lock();
        state.may_stall(self.process, self.ordinal, "close");
        let operation = state.host_operation(self.process, format!("close {:#x}", imported.base));
        let found = state.space.find(self.process, imported.base);
        let found = found.filter(|(_, view)| view.base == imported.base);
        let Some((number, Had::Imported { times, .. })) = found.map(|(number, view)| (number, view.had))
        else {
            let text = "this is not imported by this process, or was closed before".into();
            state.report(Fault::Misuse, text, vec![operation]);
            return;
        };
        if times > 1 {
            if let Some(view) = state.space.views.get_mut(&number) {
                view.had = Had::Imported { times: times - 1, mapped: imported.mapped };
            }
            return;
        }
        let clock = state.processes[self.process].clock.clone();
        for used in state.space.close_view(number, &clock) {
            let text = "nothing orders this use before the closing".into();
            state.report(Fault::Closed, text, vec![used, operation.clone()]);
        }
        state.wake_ready();
    }
    /// [`crate::Device::register`].
    pub(super) fn make_known(&self, base: Address, bytes: usize) -> Result<Address> {
        let call = "cuMemHostRegister";
        let identity = Identity::of(base);
        let mut state = self.calls()?;
        state.may_stall(self.process, self.ordinal, call);
        if bytes == 0 || !base.is_multiple_of(memory::PAGE as u64) {
            return Err(invalid_value(call));
        }
        if (0..bytes)
            .step_by(memory::PAGE)
            .any(|at| state.space.find(self.process, base + at as u64).is_some())
        {
            return Err(failed(call, 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"));
        }
        // Another process may have registered the same memory, here or where it has it mapped.
        let known = state.space.allocations.iter().find_map(|(generation, allocation)| {
            let offset = identity.behind(allocation.identity.as_ref()?)? as usize;
            let inside = allocation.live && offset + bytes <= allocation.bytes;
            inside.then_some((*generation, offset))
        });
        let of = known.unwrap_or_else(|| {
            let generation = state.space.number();
            let allocation = Allocation {
                owner: None,
                kind: Kind::Host,
                bytes,
                backing: base as usize,
                identity: Some(identity),
                live: true,
                shadow: Shadow::new(bytes, true),
                words: HashMap::new(),
            };
            state.space.allocations.insert(generation, allocation);
            (generation, 0)
        });
        state.space.add_view(self.process, base, bytes, of, Had::Registered);
        Ok(base)
    }

    /// [`crate::Device::unregister`].
    pub(super) fn make_unknown(&self, base: Address) {
        let mut state = self.shared().lock();
        state.may_stall(self.process, self.ordinal, "unregister");
        let operation = state.host_operation(self.process, format!("unregister {base:#x}"));
        let found = state.space.find(self.process, base);
        let found = found.filter(|(_, view)| view.base == base && view.had == Had::Registered);
        let Some((number, allocation)) = found.map(|(number, view)| (number, view.allocation)) else {
            let text = "this memory is not registered by this process".into();
            state.report(Fault::Misuse, text, vec![operation]);
            return;
        };
        let clock = state.processes[self.process].clock.clone();
        for used in state.space.close_view(number, &clock) {
            let text = "nothing orders this use before the memory is unknown to the device".into();
            state.report(Fault::Freed, text, vec![used, operation.clone()]);
        }
        // Whether it stays mapped where it was registered first is not ours to know: use a mapping that is known.
        let left = state.space.views.values().find(|view| view.open && view.allocation == allocation);
        let backing = left.map(|view| view.base as usize - view.offset);
        if let Some(allocation) = state.space.allocations.get_mut(&allocation) {
            match backing {
                Some(backing) => allocation.backing = backing,
                None => allocation.live = false,
            }
        }
        state.wake_ready();
    }
}

/// A file that says which allocation it stands for.
fn descriptor(generation: u64) -> Result<OwnedFd> {
    let refused = || failed("cuMemExportToShareableHandle", 1, "CUDA_ERROR_INVALID_VALUE");
    let mut text = HANDLE.to_vec();
    text.extend_from_slice(&generation.to_le_bytes());
    // SAFETY: a new descriptor, owned by nobody else, or -1.
    let file = unsafe {
        match libc::memfd_create(c"smddp mock".as_ptr(), libc::MFD_CLOEXEC) {
            ..0 => return Err(refused()),
            file => OwnedFd::from_raw_fd(file),
        }
    };
    // SAFETY: `text` is readable for its length.
    let written = unsafe { libc::pwrite(file.as_raw_fd(), text.as_ptr().cast(), text.len(), 0) };
    if written == text.len() as isize { Ok(file) } else { Err(refused()) }
}

fn number_behind(descriptor: &OwnedFd) -> Option<u64> {
    let mut text = [0u8; 64];
    // SAFETY: `text` is writable for its length.
    let read = unsafe { libc::pread(descriptor.as_raw_fd(), text.as_mut_ptr().cast(), text.len(), 0) };
    if read == 16 { number_in(&text) } else { None }
}

fn number_in(handle: &[u8; 64]) -> Option<u64> {
    let (magic, rest) = handle.split_first_chunk::<8>()?;
    let generation = rest.first_chunk::<8>()?;
    (magic == HANDLE).then(|| u64::from_le_bytes(*generation))
}
