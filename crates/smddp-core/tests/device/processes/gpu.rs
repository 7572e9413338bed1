//! The fake driver as a rank process has it: a device, a caller's stream, and memory of both kinds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_core::{On, Options};
use smddp_cuda::{Address, Copy, Device, Stream};

use crate::world::{function, open_device};

/// The library's threads let go of things within this time, however slow the machine.
const LIMIT: Duration = Duration::from_secs(20);
/// Of the memory that virtual-memory calls map.
const CHUNK: usize = 2 << 20;

#[derive(Clone)]
pub(crate) struct Gpu {
    pub(crate) device: Arc<Device>,
    /// The caller's.
    pub(crate) stream: Stream,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Legacy,
    /// As torch's expandable segments; what is asked for lies across two chunks.
    Mapped,
}

impl Gpu {
    pub(crate) fn open() -> Self {
        let device = open_device(0);
        let stream = device.create_stream().unwrap();
        Self { device, stream }
    }

    pub(crate) fn on(&self) -> Options {
        let on = On { device: self.device.clone(), stream: self.stream };
        Options { on: Some(on), ..Options::default() }
    }

    pub(crate) fn synchronize(&self) {
        self.device.synchronize(self.stream).unwrap();
    }

    /// The stream writes `data` there; it is read now.
    pub(crate) fn write(&self, to: Address, data: &[u8]) {
        if !data.is_empty() {
            let copy = Copy { to, from: data.as_ptr() as u64, bytes: data.len() };
            // SAFETY: ordinary memory is read before the call returns; the other is the caller's.
            unsafe { self.device.copy(self.stream, &[copy]).unwrap() };
        }
    }

    /// What is there after all that the stream was asked to do.
    pub(crate) fn read(&self, from: Address, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        if bytes > 0 {
            let copy = Copy { to: data.as_mut_ptr() as u64, from, bytes };
            // SAFETY: both live until the stream is empty.
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

    /// Ends with all that was allocated, made or mapped in this process.
    pub(crate) fn leave_nothing(self) {
        self.synchronize();
        self.device.destroy_stream(self.stream);
        drop(self);
        // What another thread of the library lets go of, it lets go of soon.
        let begun = Instant::now();
        while things() > 0 {
            assert!(begun.elapsed() < LIMIT, "{} things of the driver's are left", things());
            std::thread::yield_now();
        }
    }
}

/// What is allocated, mapped, reserved, held or created in the fake.
fn things() -> u64 {
    // SAFETY: the type of that function, which changes nothing.
    unsafe { function::<unsafe extern "C" fn() -> u64>(c"fake_open")() }
}

/// Device memory; given back when dropped.
pub(crate) struct Memory {
    gpu: Gpu,
    pub(crate) at: Address,
    pub(crate) bytes: usize,
    /// Address and bytes of what it lies in.
    reserved: Option<(Address, usize)>,
}

impl Memory {
    /// The stream has other uses for it.
    pub(crate) fn spoil(&self) {
        self.gpu.write(self.at, &vec![0xa5; self.bytes]);
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        self.gpu.read(self.at, self.bytes)
    }

    /// Other physical memory comes to the place of it.
    pub(crate) fn exchange(&self) {
        let Some((base, bytes)) = self.reserved else { return };
        self.gpu.synchronize();
        // SAFETY: mapped by `allocate`, in whole, and no stream uses it.
        assert_eq!(unsafe { function::<Unmap>(c"cuMemUnmap")(base, bytes) }, 0);
        map_at(Some(base), bytes, CHUNK, true);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.gpu.device.synchronize(self.gpu.stream);
        match self.reserved {
            // SAFETY: the caller's stream is empty, which comes after what the group did with it.
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

/// Memory of chunks that lie in a row, at these addresses or new ones, which can be exported or not.
pub(crate) fn map_at(base: Option<Address>, bytes: usize, chunk: usize, exported: bool) -> Address {
    let mut at = base.unwrap_or(0);
    if base.is_none() {
        // SAFETY: the type of this function.
        let code = unsafe { function::<Reserve>(c"cuMemAddressReserve")(&raw mut at, bytes, 0, 0, 0) };
        assert_eq!(code, 0);
    }
    for place in (at..at + bytes as u64).step_by(chunk) {
        let mut handle = 0;
        // CUmemAllocationProp: pinned, exported as a descriptor, on device 0, nothing else.
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
/// No stream uses what [`map_at`] gave.
pub(crate) unsafe fn unmap(base: Address, bytes: usize) {
    // SAFETY: the types of these functions, and the caller's promise.
    unsafe {
        function::<Unmap>(c"cuMemUnmap")(base, bytes);
        function::<Unmap>(c"cuMemAddressFree")(base, bytes);
    }
}
