//! Collectives on CUDA tensors between real processes, through the real driver code, over a fake driver.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "each test binary uses a part of it")]
#[path = "../common/mod.rs"]
mod common;

use std::cell::Cell;
use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::group::world;
use common::procs::{RankProcess, start};
use common::value;
use smddp_core::{Blocks, Call, Collective, Communicator, DType, DeviceStream, Options, RedOp};
use smddp_cuda::driver::Cuda;
use smddp_cuda::{Copy, Device, Stream};

const TIMEOUT: Duration = Duration::from_secs(100);

/// Bytes of the allocation that contains the tensors.
const CACHE: usize = 64 << 20;
/// Bytes of one mapped physical allocation; tensors span several.
const CHUNK: usize = 2 << 20;

const COLLECTIVES: [Collective; 8] = [
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllReduce,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
];

/// Entry point of the processes that the tests start, not a test.
#[test]
fn rank_process() {
    let Some(me) = RankProcess::role() else { return };
    match me.role.as_str() {
        // Tensors in one allocation, as in torch's cache, or each in a separate allocation that is freed immediately.
        "cached" => collectives(&me, |device| Some(device.allocate(CACHE).unwrap())),
        "segment" => collectives(&me, |_| Some(segment())),
        "fresh" => collectives(&me, |_| None),
        "rejected" => rejected(&me),
        other => panic!("no role `{other}`"),
    }
}

/// Returns a function of the fake driver that smddp does not call.
///
/// # Safety
/// `F` is the type of the function.
unsafe fn function<F: std::marker::Copy>(name: &CStr) -> F {
    let path = CString::new(fake_libcuda::PATH).unwrap();
    // SAFETY: the library is already open; the name is one of its functions.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let found = libc::dlsym(handle, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        std::mem::transmute_copy::<*mut c_void, F>(&found)
    }
}

/// Maps memory of device 0 like torch's expandable segments: many chunks at adjacent addresses.
fn segment() -> u64 {
    type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> i32;
    type Create = unsafe extern "C" fn(*mut u64, usize, *const [u64; 4], u64) -> i32;
    type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> i32;
    type Access = unsafe extern "C" fn(u64, usize, *const [i32; 3], usize) -> i32;
    let (mut base, mut handle) = (0, 0);
    // CUmemAllocationProp: pinned, exportable as descriptors, on device 0; then the access description.
    let (property, access) = ([1 | 1 << 32, 1, 0, 0], [1, 0, 3]);
    // SAFETY: the types of these functions.
    unsafe {
        assert_eq!(function::<Reserve>(c"cuMemAddressReserve")(&raw mut base, CACHE, 0, 0, 0), 0);
        for at in (base..base + CACHE as u64).step_by(CHUNK) {
            assert_eq!(function::<Create>(c"cuMemCreate")(&raw mut handle, CHUNK, &raw const property, 0), 0);
            assert_eq!(function::<Map>(c"cuMemMap")(at, CHUNK, 0, handle, 0), 0);
        }
        assert_eq!(function::<Access>(c"cuMemSetAccess")(base, CACHE, &raw const access, 1), 0);
    }
    base
}

/// Allocator of tensors.
struct Source {
    on: DeviceStream,
    /// Address of the shared allocation, and offset of the next tensor.
    cache: Option<(u64, Cell<u64>)>,
}

impl Source {
    fn take(&self, bytes: usize) -> u64 {
        let Some((base, next)) = &self.cache else { return self.on.device.allocate(bytes).unwrap() };
        let bytes = (bytes as u64).next_multiple_of(512);
        if next.get() + bytes > CACHE as u64 {
            next.set(0);
        }
        base + next.replace(next.get() + bytes)
    }
}

/// Device memory with the caller's stream.
struct Tensor {
    device: Arc<Device>,
    stream: Stream,
    cached: bool,
    at: u64,
    pinned: *mut u8,
    count: usize,
}

impl Tensor {
    fn new(source: &Source, count: usize) -> Self {
        let bytes = count.max(1) * 4;
        let DeviceStream { device, stream } = source.on.clone();
        let (at, pinned) = (source.take(bytes), device.allocate_host(bytes).unwrap());
        Self { device, stream, cached: source.cache.is_some(), at, pinned, count }
    }

    fn blocks(&self) -> Blocks<'static> {
        Blocks::Flat { ptr: self.at as *mut u8, count: self.count }
    }

    /// Enqueues a write in the caller's stream.
    fn fill(&self, data: &[f32]) {
        assert_eq!(data.len(), self.count);
        let bytes = data.len() * 4;
        // SAFETY: the pinned buffer has the same size, and both live until the stream is empty.
        unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr().cast(), self.pinned, bytes);
            self.device.copy(self.stream, &[Copy { to: self.at, from: self.pinned as u64, bytes }]).unwrap();
        }
    }

    /// Reads the contents after all earlier work of the caller's stream.
    fn read(&self) -> Vec<f32> {
        let bytes = self.count * 4;
        // SAFETY: as in `fill`.
        unsafe {
            self.device.copy(self.stream, &[Copy { to: self.pinned as u64, from: self.at, bytes }]).unwrap();
            self.device.synchronize(self.stream).unwrap();
            std::slice::from_raw_parts(self.pinned.cast::<f32>(), self.count).to_vec()
        }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        let _ = self.device.synchronize(self.stream);
        // SAFETY: the stream is empty, and all calls are complete.
        unsafe {
            if !self.cached {
                self.device.free(self.at);
            }
            self.device.free_host(self.pinned);
        }
    }
}

/// Runs and checks one collective on new tensors.
fn one(comm: &Communicator, source: &Source, collective: Collective, count: usize, salt: usize) {
    let (n, me, root) = (comm.size(), comm.rank(), salt % comm.size());
    let at_root = me == root;
    let data = |r: usize, len: usize| (0..len).map(|i| value(r + salt, i)).collect::<Vec<f32>>();
    let all = |len: usize| (0..n).flat_map(|r| data(r, len)).collect::<Vec<f32>>();
    let sum = |from: usize| {
        (from..from + count).map(|i| (0..n).map(|r| value(r + salt, i)).sum::<f32>()).collect::<Vec<f32>>()
    };
    let part = |r: usize| (0..count).map(|i| value(r + salt, me * count + i)).collect::<Vec<f32>>();
    let (given, want) = match collective {
        Collective::AllGather => (Some(data(me, count)), Some(all(count))),
        Collective::ReduceScatter => (Some(data(me, n * count)), Some(sum(me * count))),
        Collective::AllReduce => (Some(data(me, count)), Some(sum(0))),
        Collective::Broadcast => (at_root.then(|| data(root, count)), Some(data(root, count))),
        Collective::Reduce => (Some(data(me, count)), at_root.then(|| sum(0))),
        Collective::Gather => (Some(data(me, count)), at_root.then(|| all(count))),
        Collective::Scatter => (at_root.then(|| data(root, n * count)), Some(part(root))),
        Collective::AllToAll => (Some(data(me, n * count)), Some((0..n).flat_map(part).collect())),
        Collective::Barrier => (None, None),
    };
    let on = &source.on;
    let tensor = |len: usize| Tensor::new(source, len);
    let input = given.map(|data| {
        let input = tensor(data.len());
        input.fill(&data);
        input
    });
    let output = want.as_ref().map(|want| tensor(want.len()));
    let blocks = |tensor: &Option<Tensor>| tensor.as_ref().map_or(Blocks::None, Tensor::blocks);
    let (input_blocks, output_blocks) = (blocks(&input), blocks(&output));
    let call = Call {
        collective,
        dtype: DType::F32,
        redop: RedOp::Sum,
        root,
        input: input_blocks,
        output: output_blocks,
    };
    // SAFETY: the tensors live until the caller's stream, which waits for the call, is empty.
    let work = unsafe { comm.start(&call, Options { on: Some(on.clone()), ..Options::default() }) }.unwrap();
    work.wait_stream(on.stream).unwrap();
    if let (Some(output), Some(want)) = (&output, &want) {
        let found = output.read();
        let wrong = found.iter().zip(want).position(|(found, want)| found != want);
        assert_eq!(
            wrong,
            None,
            "{collective:?} of {count}, rank {me}: {:?}",
            wrong.map(|i| (found[i], want[i]))
        );
    }
    work.wait(Some(TIMEOUT)).unwrap();
}

fn collectives(me: &RankProcess, cache: impl Fn(&Device) -> Option<u64>) {
    let cuda = Cuda::open(Some(Path::new(fake_libcuda::PATH))).unwrap();
    let device = cuda.device(me.rank as i32 % cuda.count()).unwrap();
    device.prepare().unwrap();
    let comm = world(me, TIMEOUT);
    let stream = device.create_stream().unwrap();
    let on = DeviceStream { device: device.clone(), stream };
    comm.prepare_device(&on).unwrap();
    me.report(&format!("path {}", comm.on_device(device.ordinal()).unwrap().1));
    let source = Source { on, cache: cache(&device).map(|base| (base, Cell::new(0))) };
    let mut salt = 0;
    for iteration in 0..3 {
        for collective in COLLECTIVES {
            for count in [1, 1000, 70_001] {
                salt += 1;
                one(&comm, &source, collective, count, salt + iteration);
            }
        }
    }
    me.report("done");
    comm.close();
    device.synchronize(stream).unwrap();
    device.destroy_stream(stream);
}

fn rejected(me: &RankProcess) {
    let device = Cuda::open(Some(Path::new(fake_libcuda::PATH))).unwrap().device(0).unwrap();
    let comm = world(me, TIMEOUT);
    let on = DeviceStream { stream: device.create_stream().unwrap(), device };
    me.report(&format!("rejected {}", comm.prepare_device(&on).unwrap_err()));
    comm.close();
}

/// Runs the ranks and returns the selected device path.
fn run(role: &str, size: usize, settings: &[(&str, &str)]) -> String {
    let mut ranks = start(role, size, settings, TIMEOUT);
    let path = ranks.wait_for(0, "path ").text;
    ranks.finish(0..size);
    path
}

#[test]
fn processes_on_one_device_read_each_others_memory() {
    let path = run("cached", 3, &[("FAKE_CUDA_SEED", "1")]);
    assert!(path.contains("by reference"), "{path}");
}

#[test]
fn processes_on_two_devices_with_an_old_driver_get_the_same_results() {
    let settings = [("FAKE_CUDA_SEED", "2"), ("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_VERSION", "12020")];
    let path = run("cached", 4, &settings);
    assert!(path.contains("by reference"), "{path}");
}

#[test]
fn tensors_in_expandable_segments_are_shared_by_descriptors() {
    let path = run("segment", 3, &[("FAKE_CUDA_SEED", "5")]);
    assert!(path.contains("by reference"), "{path}");
}

#[test]
fn devices_without_peer_access_use_host_memory() {
    let settings = [("FAKE_CUDA_SEED", "3"), ("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_NO_PEER", "1")];
    let path = run("fresh", 2, &settings);
    assert!(path.contains("host") && path.contains("does not reach"), "{path}");
}

#[test]
fn freed_and_reallocated_memory_is_read_at_its_new_mapping() {
    let path = run("fresh", 3, &[("FAKE_CUDA_SEED", "4")]);
    assert!(path.contains("by reference"), "{path}");
}

#[test]
fn missing_stream_memory_operations_are_reported() {
    let mut ranks = start("rejected", 2, &[("FAKE_CUDA_NO_MEMOPS", "1")], TIMEOUT);
    for rank in 0..2 {
        let reason = ranks.wait_for(rank, "rejected ").text;
        assert!(reason.contains("no 64-bit stream memory operations"), "{reason}");
    }
    ranks.finish(0..2);
}
