//! Allocations, what addresses are, and regions that go to other processes.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use common::*;
use smddp_cuda::{Copy, Device, Error, Export, Import, Kind, Stream};

/// As the driver's chunks are.
const CHUNK: usize = 2 << 20;

/// Memory mapped by virtual-memory calls, as torch's expandable segments are.
struct Segment {
    base: u64,
}

type Create = unsafe extern "C" fn(*mut u64, usize, *const [u64; 4], u64) -> i32;
type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> i32;
type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> i32;
type Access = unsafe extern "C" fn(u64, usize, *const [i32; 3], usize) -> i32;
type Unmap = unsafe extern "C" fn(u64, usize) -> i32;
type Release = unsafe extern "C" fn(u64) -> i32;

impl Segment {
    fn reserve(chunks: usize) -> Self {
        let mut base = 0;
        // SAFETY: the type of this function.
        let code =
            unsafe { function::<Reserve>(c"cuMemAddressReserve")(&raw mut base, chunks * CHUNK, 0, 0, 0) };
        assert_eq!(code, 0);
        Self { base }
    }

    fn at(&self, chunk: usize) -> u64 {
        self.base + (chunk * CHUNK) as u64
    }

    /// New memory at the place of a chunk, which can be exported or not.
    fn map(&self, chunk: usize, exportable: bool) {
        let mut handle = 0;
        // CUmemAllocationProp: pinned, handle types, on device 0, nothing else.
        let property = [1 | u64::from(exportable) << 32, 1, 0, 0];
        // SAFETY: the types of these functions.
        unsafe {
            assert_eq!(function::<Create>(c"cuMemCreate")(&raw mut handle, CHUNK, &raw const property, 0), 0);
            assert_eq!(function::<Map>(c"cuMemMap")(self.at(chunk), CHUNK, 0, handle, 0), 0);
            let access = function::<Access>(c"cuMemSetAccess");
            let description = [1, 0, 3];
            assert_eq!(access(self.at(chunk), CHUNK, &raw const description, 1), 0);
            assert_eq!(function::<Release>(c"cuMemRelease")(handle), 0);
        }
    }

    fn unmap(&self, chunk: usize) {
        // SAFETY: the type of this function.
        assert_eq!(unsafe { function::<Unmap>(c"cuMemUnmap")(self.at(chunk), CHUNK) }, 0);
    }
}

fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Invalid(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_allocation_is_found_by_any_address_in_it_and_another_one_later_is_another() {
    with("an_allocation_is_found_by_any_address_in_it_and_another_one_later_is_another", &[], || {
        let device = device(0);
        let base = device.allocate(100_000).unwrap();
        let region = device.region(base + 99_999).unwrap();
        assert_eq!((region.base, region.bytes, region.kind), (base, 100_000, Kind::Legacy));
        assert_eq!(device.region(base).unwrap(), region);
        // SAFETY: no stream has used it.
        unsafe { device.free(base) };
        let error = refusal(device.region(base));
        assert!(error.contains("is not CUDA memory"), "{error}");
        let again = device.allocate(100_000).unwrap();
        assert_ne!(device.region(again).unwrap().generation, region.generation);
    });
}

#[test]
fn host_memory_is_known_when_allocated_or_registered_and_not_otherwise() {
    with("host_memory_is_known_when_allocated_or_registered_and_not_otherwise", &[], || {
        let device = device(0);
        let allocated = device.allocate_host(8192).unwrap();
        let region = device.region(allocated as u64 + 5000).unwrap();
        assert_eq!((region.base, region.bytes, region.kind), (allocated as u64, 8192, Kind::Host));
        let error = refusal(device.export(&region));
        assert!(error.contains("cannot be given to other processes"), "{error}");
        let mine = page(&memfd());
        let error = refusal(device.region(mine as u64));
        assert!(error.contains("is not CUDA memory"), "{error}");
        // SAFETY: the page is never taken away; the other memory is the device's own.
        unsafe {
            let address = device.register(mine, 4096).unwrap();
            assert_eq!(device.region(address).unwrap().kind, Kind::Host);
            let error = device.register(mine, 4096).unwrap_err().to_string();
            assert!(
                error.contains("cuMemHostRegister failed: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
                "{error}"
            );
            assert!(error.contains("known to the device already"), "{error}");
            device.unregister(mine);
            device.free_host(allocated);
        }
        refusal(device.region(mine as u64));
    });
}

#[test]
fn memory_of_another_device_is_refused_and_both_are_named() {
    with("memory_of_another_device_is_refused_and_both_are_named", &[("FAKE_CUDA_DEVICES", "2")], || {
        let cuda = open();
        let (first, second) = (cuda.device(0).unwrap(), cuda.device(1).unwrap());
        let error = refusal(first.region(second.allocate(64).unwrap()));
        assert!(error.contains("is of CUDA device 1, but this is device 0"), "{error}");
    });
}

#[test]
fn a_device_that_is_full_says_so_and_what_may_help() {
    with("a_device_that_is_full_says_so_and_what_may_help", &[("FAKE_CUDA_MEMORY", "1000000")], || {
        let device = device(0);
        let first = device.allocate(600_000).unwrap();
        let error = device.allocate(600_000).unwrap_err().to_string();
        assert!(error.starts_with("cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2); "), "{error}");
        assert!(error.contains("torch.cuda.empty_cache()"), "{error}");
        // SAFETY: no stream has used it.
        unsafe { device.free(first) };
        device.allocate(600_000).unwrap();
    });
}

#[test]
fn a_chunk_of_a_segment_is_a_region_and_new_memory_at_its_place_is_another() {
    let name = "a_chunk_of_a_segment_is_a_region_and_new_memory_at_its_place_is_another";
    with(name, &[], || {
        let device = device(0);
        let segment = Segment::reserve(4);
        segment.map(0, true);
        segment.map(1, true);
        segment.map(2, false);
        let region = |chunk: usize| device.region(segment.at(chunk) + 4097).unwrap();
        let (first, second, third) = (region(0), region(1), region(2));
        assert_eq!((first.base, first.bytes, first.kind), (segment.at(0), CHUNK, Kind::Mapped));
        assert_eq!((second.base, second.bytes, second.kind), (segment.at(1), CHUNK, Kind::Mapped));
        assert_eq!(third.kind, Kind::Private, "made without a type of handle");
        assert_ne!(first.generation, second.generation);
        refusal(device.region(segment.at(3)));
        segment.unmap(0);
        refusal(device.region(segment.at(0)));
        segment.map(0, true);
        assert_ne!(region(0).generation, first.generation);
        assert_eq!(region(1), second);
    });
}

#[test]
fn memory_that_cannot_be_shared_is_private() {
    with("memory_that_cannot_be_shared_is_private", &[("FAKE_CUDA_NO_IPC", "1")], || {
        let device = device(0);
        let region = device.region(device.allocate(4096).unwrap()).unwrap();
        assert_eq!(region.kind, Kind::Private);
        let error = refusal(device.export(&region));
        assert!(error.contains("(Private) cannot be given to other processes"), "{error}");
    });
}

/// The process that owns the memory: tells of it, lets the other one write, and finds what it wrote.
fn owner(peer: &UnixStream, device: &Device, stream: Stream, base: u64, bytes: usize) {
    put(device, stream, base, &vec![7; bytes]);
    let region = device.region(base + 1).unwrap();
    assert_eq!((region.base, region.bytes), (base, bytes));
    match device.export(&region).unwrap() {
        Export::Legacy(handle) => say(peer, &handle),
        Export::Descriptor(fd) => send(peer, &fd),
    }
    assert_eq!(hear::<1>(peer), [1]);
    assert_eq!(contents(device, stream, base, bytes), vec![9; bytes]);
    say(peer, &[2]);
}

/// The process that imports it: reads, writes, and leaves nothing behind.
fn guest(peer: &UnixStream, device: &Device, import: Import<'_>, bytes: usize) {
    let stream = device.create_stream().unwrap();
    let before = things();
    let imported = device.import(import, bytes).unwrap();
    assert_eq!(imported.bytes, bytes);
    assert_eq!(contents(device, stream, imported.base, bytes), vec![7; bytes]);
    put(device, stream, imported.base, &vec![9; bytes]);
    // Nobody says what the driver calls it here; that it goes no further, exporting tells.
    if let Ok(region) = device.region(imported.base)
        && region.kind == Kind::Legacy
    {
        assert!(device.export(&region).is_err());
    }
    say(peer, &[1]);
    assert_eq!(hear::<1>(peer), [2]);
    device.close(imported);
    assert_eq!(things(), before);
    // SAFETY: the address is refused, because nothing is there any more.
    let gone = unsafe { device.wait_words(stream, &[smddp_cuda::Wait { word: imported.base, value: 1 }]) };
    assert!(gone.is_err(), "closed memory is still mapped");
}

#[test]
fn an_allocation_is_shared_with_another_process_by_its_handle() {
    const BYTES: usize = 300_000;
    with_peer(
        "an_allocation_is_shared_with_another_process_by_its_handle",
        &[("FAKE_CUDA_SEED", "21")],
        |peer| {
            let device = device(0);
            let stream = device.create_stream().unwrap();
            let base = device.allocate(BYTES).unwrap();
            owner(peer, &device, stream, base, BYTES);
            // A process cannot open its own handle, and the driver's refusal is passed on.
            let Export::Legacy(handle) = device.export(&device.region(base).unwrap()).unwrap() else {
                panic!()
            };
            let error = device.import(Import::Legacy(&handle), BYTES).unwrap_err().to_string();
            assert!(error.contains("cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID_CONTEXT"), "{error}");
        },
        |peer| {
            let handle = hear::<64>(peer);
            guest(peer, &device(0), Import::Legacy(&handle), BYTES);
        },
    );
}

#[test]
fn a_chunk_is_shared_with_another_process_by_a_descriptor() {
    with_peer(
        "a_chunk_is_shared_with_another_process_by_a_descriptor",
        &[("FAKE_CUDA_SEED", "22")],
        |peer| {
            let device = device(0);
            let stream = device.create_stream().unwrap();
            let segment = Segment::reserve(3);
            segment.map(1, true);
            let before = things();
            owner(peer, &device, stream, segment.at(1), CHUNK);
            assert_eq!(things(), before, "handles are given back");
        },
        |peer| {
            let fd = receive(peer);
            guest(peer, &device(0), Import::Descriptor(&fd), CHUNK);
        },
    );
}

#[test]
fn what_cannot_be_imported_is_an_error_and_leaves_nothing_behind() {
    with("what_cannot_be_imported_is_an_error_and_leaves_nothing_behind", &[], || {
        let device = device(0);
        let before = things();
        let error = device.import(Import::Legacy(&[3; 64]), 4096).unwrap_err().to_string();
        assert!(error.contains("cuIpcOpenMemHandle"), "{error}");
        let error = device.import(Import::Descriptor(&memfd()), CHUNK).unwrap_err().to_string();
        assert!(error.contains("cuMemImportFromShareableHandle"), "{error}");
        let segment = Segment::reserve(1);
        segment.map(0, true);
        let with_segment = things();
        let Export::Descriptor(fd) = device.export(&device.region(segment.at(0)).unwrap()).unwrap() else {
            panic!()
        };
        // More than there is.
        let error = device.import(Import::Descriptor(&fd), 2 * CHUNK).unwrap_err().to_string();
        assert!(error.contains("cuMemMap"), "{error}");
        assert_eq!(things(), with_segment);
        assert!(with_segment > before);
    });
}

#[test]
fn devices_that_cannot_reach_each_other_refuse_what_is_imported() {
    with_peer(
        "devices_that_cannot_reach_each_other_refuse_what_is_imported",
        &[("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_NO_PEER", "1")],
        |peer| {
            let device = device(0);
            let region = device.region(device.allocate(4096).unwrap()).unwrap();
            let Export::Legacy(handle) = device.export(&region).unwrap() else { panic!() };
            say(peer, &handle);
            assert_eq!(hear::<1>(peer), [1]);
        },
        |peer| {
            let handle = hear::<64>(peer);
            let error = device(1).import(Import::Legacy(&handle), 4096).unwrap_err().to_string();
            assert!(error.contains("cannot reach each other's memory"), "{error}");
            say(peer, &[1]);
        },
    );
}

#[test]
fn memory_that_its_process_has_freed_cannot_be_imported_nor_what_came_to_its_place_before_it_is_closed() {
    const TRIES: usize = 1000;
    with_peer(
        "memory_that_its_process_has_freed_cannot_be_imported_nor_what_came_to_its_place_before_it_is_closed",
        &[],
        |peer| {
            let device = device(0);
            let first = hear::<64>(peer);
            let old = device.import(Import::Legacy(&first), 4096).unwrap();
            // The same handle again is the same memory; each import has its close.
            assert_eq!(device.import(Import::Legacy(&first), 4096).unwrap(), old);
            device.close(old);
            say(peer, &[1]);
            let second = hear::<64>(peer);
            let error = device.import(Import::Legacy(&second), 4096).unwrap_err().to_string();
            assert!(error.contains("CUDA_ERROR_ALREADY_MAPPED (208); its owner freed memory"), "{error}");
            device.close(old);
            let error = device.import(Import::Legacy(&first), 4096).unwrap_err().to_string();
            assert!(error.contains("CUDA_ERROR_MAP_FAILED"), "{error}");
            device.close(device.import(Import::Legacy(&second), 4096).unwrap());
            say(peer, &[1]);
        },
        |peer| {
            let device = device(0);
            let tell = |base| {
                let Export::Legacy(handle) = device.export(&device.region(base).unwrap()).unwrap() else {
                    panic!()
                };
                say(peer, &handle);
                assert_eq!(hear::<1>(peer), [1]);
            };
            let first = device.allocate(4096).unwrap();
            tell(first);
            // SAFETY: no stream has used it.
            unsafe { device.free(first) };
            let second = (0..TRIES).map(|_| device.allocate(4096).unwrap()).find(|&base| base == first);
            tell(second.expect("addresses come again"));
        },
    );
}

#[test]
fn copies_to_memory_that_is_gone_are_errors() {
    with("copies_to_memory_that_is_gone_are_errors", &[], || {
        let device = device(0);
        let stream = device.create_stream().unwrap();
        let base = device.allocate(4096).unwrap();
        // SAFETY: the driver refuses what is not there.
        unsafe {
            // The stream's thread has begun, and maps nothing more where memory was.
            device.copy(stream, &[Copy { to: base + 2000, from: base, bytes: 200 }]).unwrap();
            device.synchronize(stream).unwrap();
            let past = [Copy { to: base + 4000, from: base, bytes: 200 }];
            assert!(device.copy(stream, &past).is_err());
            device.free(base);
            let gone = [Copy { to: base, from: base, bytes: 200 }; 2];
            let error = device.copy(stream, &gone).unwrap_err().to_string();
            assert!(error.contains("may have been freed"), "{error}");
        }
    });
}

type Left = (Arc<Device>, Stream, u64);

/// What the end of the process finds in use.
static LEFT: Mutex<Option<Left>> = Mutex::new(None);

#[test]
fn what_is_left_at_the_end_of_the_process_ends_without_a_crash() {
    extern "C" fn late() {
        // After the driver's own end: it was initialised later, and the last registered is the first to run.
        let (device, stream, address) = LEFT.lock().unwrap().take().unwrap();
        let error = device.allocate(64).unwrap_err().to_string();
        if !error.contains("CUDA_ERROR_DEINITIALIZED") {
            std::process::abort();
        }
        // SAFETY: nothing uses it, and the driver has gone.
        unsafe { device.free(address) };
        device.destroy_stream(stream);
        drop(device);
    }
    with("what_is_left_at_the_end_of_the_process_ends_without_a_crash", &[], || {
        // SAFETY: a function that returns.
        assert_eq!(unsafe { libc::atexit(late) }, 0);
        let device = device(0);
        device.prepare().unwrap();
        let stream = device.create_stream().unwrap();
        let address = device.allocate(64).unwrap();
        *LEFT.lock().unwrap() = Some((device, stream, address));
    });
}

#[test]
fn a_fork_of_a_process_that_used_the_driver_is_told_to_spawn() {
    with("a_fork_of_a_process_that_used_the_driver_is_told_to_spawn", &[], || {
        let device = device(0);
        // SAFETY: the child makes one call that is refused at once, and leaves without the parent's handlers.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                let told = device.allocate(64).is_err_and(|error| error.to_string().contains("spawn"));
                libc::_exit(if told { 0 } else { 1 });
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert_eq!(status, 0);
        }
    });
}

#[test]
fn everything_is_given_back() {
    with("everything_is_given_back", &[("FAKE_CUDA_DEVICES", "2")], || {
        let cuda = open();
        let before = things();
        let device = cuda.device(1).unwrap();
        device.prepare().unwrap();
        let (stream, event) = (device.create_stream().unwrap(), device.create_event().unwrap());
        let (address, memory) = (device.allocate(64).unwrap(), device.allocate_host(64).unwrap());
        assert!(things() >= before + 5);
        // SAFETY: no stream has used them.
        unsafe {
            device.free(address);
            device.free_host(memory);
        }
        device.destroy_event(event);
        device.destroy_stream(stream);
        drop(device);
        assert_eq!(things(), before);
    });
}
