//! The fake driver in a rank process: a device, a caller's stream, and two kinds of memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_core::{DeviceStream, Options};
use smddp_cuda::{Address, Copy, Device, Stream};

use crate::world::{function, open_device};

/// Time limit for releases by the library's threads, sufficient for a slow machine.
const LIMIT: Duration = Duration::from_secs(20);
/// Size in bytes of one mapped physical allocation.
const CHUNK: usize = 2 << 20;

#[derive(Clone)]
pub(crate) struct Gpu {
    pub(crate) device: Arc<Device>,
    /// The caller's stream.
    pub(crate) stream: Stream,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Legacy,
    /// Like torch's expandable segments: an allocation spans two chunks.
    Mapped,
}

impl Gpu {
    pub(crate) fn open() -> Self {
        let device = open_device(0);
        let stream = device.create_stream().unwrap();
        Self { device, stream }
    }

    pub(crate) fn on(&self) -> Options {
        let on = DeviceStream { device: self.device.clone(), stream: self.stream };
        Options { on: Some(on), ..Options::default() }
    }

    pub(crate) fn synchronize(&self) {
        self.device.synchronize(self.stream).unwrap();
    }

    /// Enqueues a write of `data`, which is read before the call returns.
    pub(crate) fn write(&self, to: Address, data: &[u8]) {
        if !data.is_empty() {
            let copy = Copy { to, from: data.as_ptr() as u64, bytes: data.len() };
            // SAFETY: pageable memory is read before the call returns; the destination belongs to the caller.
            unsafe { self.device.copy(self.stream, &[copy]).unwrap() };
        }
    }

    /// Reads memory after all earlier work of the stream.
    pub(crate) fn read(&self, from: Address, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        if bytes > 0 {
            let copy = Copy { to: data.as_mut_ptr() as u64, from, bytes };
            // SAFETY: both remain allocated until the stream is empty.
            unsafe { self.device.copy(self.stream, &[copy]).unwrap() };
            self.synchronize();
        }
        data
    }

    pub(crate) fn allocate(&self, kind: Kind, bytes: usize) -> Memory {
        match kind {
            Kind::Legacy => Memory {
                gpu: self.clone(),
                at: self.device.allocate(bytes.max(16)).unwrap(),
                bytes,
                reserved: None,
            },
            Kind::Mapped => {
                let chunks = 1 + bytes.div_ceil(CHUNK).max(1);
                let base = map_at(None, chunks * CHUNK, CHUNK, true);
                let at = base + (CHUNK - ((bytes / 2) & !15).min(CHUNK)) as u64;
                Memory { gpu: self.clone(), at, bytes, reserved: Some((base, chunks * CHUNK)) }
            }
        }
    }

    /// Releases the device and asserts that nothing remains allocated, created or mapped in this process.
    pub(crate) fn close_and_check(self) {
        self.synchronize();
        self.device.destroy_stream(self.stream);
        drop(self);
        // Other threads of the library may still be releasing objects.
        let begun = Instant::now();
        while open_objects() > 0 {
            assert!(begun.elapsed() < LIMIT, "{} driver objects are still open", open_objects());
            std::thread::yield_now();
        }
    }
}

/// Number of objects that are allocated, mapped, reserved, retained or created in the fake driver.
fn open_objects() -> u64 {
    // SAFETY: the type of that function, which has no side effects.
    unsafe { function::<unsafe extern "C" fn() -> u64>(c"fake_open")() }
}

/// Device memory, released by its drop.
pub(crate) struct Memory {
    gpu: Gpu,
    pub(crate) at: Address,
    pub(crate) bytes: usize,
    /// Address and bytes of the reservation.
    reserved: Option<(Address, usize)>,
}

impl Memory {
    /// Overwrites the memory on the stream, as unrelated work of the caller would.
    pub(crate) fn overwrite(&self) {
        self.gpu.write(self.at, &vec![0xa5; self.bytes]);
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        self.gpu.read(self.at, self.bytes)
    }

    /// Replaces the physical memory at the same addresses.
    pub(crate) fn remap(&self) {
        let Some((base, bytes)) = self.reserved else { return };
        self.gpu.synchronize();
        // SAFETY: mapped completely by `allocate`, and no stream uses it.
        assert_eq!(unsafe { function::<Unmap>(c"cuMemUnmap")(base, bytes) }, 0);
        map_at(Some(base), bytes, CHUNK, true);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.gpu.device.synchronize(self.gpu.stream);
        match self.reserved {
            // SAFETY: the caller's stream is empty, and it waits for the group's use of the memory.
            None => unsafe { self.gpu.device.free(self.at) },
            // SAFETY: as above.
            Some((base, bytes)) => unsafe { unmap(base, bytes) },
        }
    }
}

type Create = unsafe extern "C" fn(*mut u64, usize, *const [u64; 4], u64) -> i32;
type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> i32;
type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> i32;
type Access = unsafe extern "C" fn(u64, usize, *const [i32; 3], usize) -> i32;
type Unmap = unsafe extern "C" fn(u64, usize) -> i32;
type Release = unsafe extern "C" fn(u64) -> i32;

/// Maps adjacent chunks of memory, exportable or not, at `base` or at new addresses.
pub(crate) fn map_at(base: Option<Address>, bytes: usize, chunk: usize, exported: bool) -> Address {
    let mut at = base.unwrap_or(0);
    if base.is_none() {
        // SAFETY: the type of this function.
        let code = unsafe { function::<Reserve>(c"cuMemAddressReserve")(&raw mut at, bytes, 0, 0, 0) };
        assert_eq!(code, 0);
    }
    for place in (at..at + bytes as u64).step_by(chunk) {
        let mut handle = 0;
        // CUmemAllocationProp: pinned, exportable as a descriptor, on device 0, other fields zero.
        let property = [1 | u64::from(exported) << 32, 1, 0, 0];
        let access = [1, 0, 3];
        // SAFETY: the types of these functions.
        unsafe {
            assert_eq!(function::<Create>(c"cuMemCreate")(&raw mut handle, chunk, &raw const property, 0), 0);
            assert_eq!(function::<Map>(c"cuMemMap")(place, chunk, 0, handle, 0), 0);
            assert_eq!(function::<Access>(c"cuMemSetAccess")(place, chunk, &raw const access, 1), 0);
            assert_eq!(function::<Release>(c"cuMemRelease")(handle), 0);
        }
    }
    at
}

/// # Safety
/// No stream uses the memory that [`map_at`] mapped.
pub(crate) unsafe fn unmap(base: Address, bytes: usize) {
    // SAFETY: the types of these functions, and the caller's contract.
    unsafe {
        function::<Unmap>(c"cuMemUnmap")(base, bytes);
        function::<Unmap>(c"cuMemAddressFree")(base, bytes);
    }
}
