//! Allocations, queries of addresses, and regions shared with other processes.

#![allow(clippy::unwrap_used, reason = "test helpers")]

mod common;

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use common::*;
use smddp_cuda::{Copy, Device, Error, Export, Import, Kind, Stream};

/// Size of one physical allocation, as in the driver.
const CHUNK: usize = 2 << 20;

/// Memory mapped by the virtual memory API, like torch's expandable segments.
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

    /// Maps new memory, exportable or not, at the position of a chunk.
    fn map(&self, chunk: usize, exportable: bool) {
        let mut handle = 0;
        // CUmemAllocationProp: pinned, handle types, on device 0, other fields zero.
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

fn invalid_reason<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Invalid(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn region_covers_all_addresses_and_generation_changes_on_reuse() {
    in_child("region_covers_all_addresses_and_generation_changes_on_reuse", &[], || {
        let device = device(0);
        let base = device.allocate(100_000).unwrap();
        let region = device.region(base + 99_999).unwrap();
        assert_eq!((region.base, region.bytes, region.kind), (base, 100_000, Kind::Legacy));
        assert_eq!(device.region(base).unwrap(), region);
        // SAFETY: no stream has used it.
        unsafe { device.free(base) };
        let error = invalid_reason(device.region(base));
        assert!(error.contains("is not CUDA memory"), "{error}");
        let again = device.allocate(100_000).unwrap();
        assert_ne!(device.region(again).unwrap().generation, region.generation);
    });
}

#[test]
fn host_memory_has_a_region_only_when_allocated_or_registered() {
    in_child("host_memory_has_a_region_only_when_allocated_or_registered", &[], || {
        let device = device(0);
        let allocated = device.allocate_host(8192).unwrap();
        let region = device.region(allocated as u64 + 5000).unwrap();
        assert_eq!((region.base, region.bytes, region.kind), (allocated as u64, 8192, Kind::Host));
        let error = invalid_reason(device.export(&region));
        assert!(error.contains("cannot be exported to other processes"), "{error}");
        let page = page(&memfd());
        let error = invalid_reason(device.region(page as u64));
        assert!(error.contains("is not CUDA memory"), "{error}");
        // SAFETY: the page is never unmapped; the other memory belongs to the device.
        unsafe {
            let address = device.register(page, 4096).unwrap();
            assert_eq!(device.region(address).unwrap().kind, Kind::Host);
            let error = device.register(page, 4096).unwrap_err().to_string();
            assert!(
                error.contains("cuMemHostRegister failed: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
                "{error}"
            );
            assert!(error.contains("already registered with CUDA"), "{error}");
            device.unregister(page);
            device.free_host(allocated);
        }
        invalid_reason(device.region(page as u64));
    });
}

#[test]
fn memory_of_another_device_is_rejected_with_both_ordinals() {
    in_child(
        "memory_of_another_device_is_rejected_with_both_ordinals",
        &[("FAKE_CUDA_DEVICES", "2")],
        || {
            let cuda = open();
            let (first, second) = (cuda.device(0).unwrap(), cuda.device(1).unwrap());
            let error = invalid_reason(first.region(second.allocate(64).unwrap()));
            assert!(error.contains("belongs to CUDA device 1, expected device 0"), "{error}");
        },
    );
}

#[test]
fn out_of_memory_error_has_advice() {
    in_child("out_of_memory_error_has_advice", &[("FAKE_CUDA_MEMORY", "1000000")], || {
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
fn mapped_chunk_is_a_region_and_a_new_mapping_is_another() {
    let name = "mapped_chunk_is_a_region_and_a_new_mapping_is_another";
    in_child(name, &[], || {
        let device = device(0);
        let segment = Segment::reserve(4);
        segment.map(0, true);
        segment.map(1, true);
        segment.map(2, false);
        let region = |chunk: usize| device.region(segment.at(chunk) + 4097).unwrap();
        let (first, second, third) = (region(0), region(1), region(2));
        assert_eq!((first.base, first.bytes, first.kind), (segment.at(0), CHUNK, Kind::Mapped));
        assert_eq!((second.base, second.bytes, second.kind), (segment.at(1), CHUNK, Kind::Mapped));
        assert_eq!(third.kind, Kind::Private, "created without a handle type");
        assert_ne!(first.generation, second.generation);
        invalid_reason(device.region(segment.at(3)));
        segment.unmap(0);
        invalid_reason(device.region(segment.at(0)));
        segment.map(0, true);
        assert_ne!(region(0).generation, first.generation);
        assert_eq!(region(1), second);
    });
}

#[test]
fn memory_without_ipc_support_is_private() {
    in_child("memory_without_ipc_support_is_private", &[("FAKE_CUDA_NO_IPC", "1")], || {
        let device = device(0);
        let region = device.region(device.allocate(4096).unwrap()).unwrap();
        assert_eq!(region.kind, Kind::Private);
        let error = invalid_reason(device.export(&region));
        assert!(error.contains("(Private) cannot be exported to other processes"), "{error}");
    });
}

/// The exporting process: sends the handle, lets the peer write, and checks the written data.
fn export_and_check(peer: &UnixStream, device: &Device, stream: Stream, base: u64, bytes: usize) {
    put(device, stream, base, &vec![7; bytes]);
    let region = device.region(base + 1).unwrap();
    assert_eq!((region.base, region.bytes), (base, bytes));
    match device.export(&region).unwrap() {
        Export::Legacy(handle) => write_bytes(peer, &handle),
        Export::Descriptor(fd) => send(peer, &fd),
    }
    assert_eq!(read_bytes::<1>(peer), [1]);
    assert_eq!(contents(device, stream, base, bytes), vec![9; bytes]);
    write_bytes(peer, &[2]);
}

/// The importing process: reads, writes, and releases everything.
fn import_and_write(peer: &UnixStream, device: &Device, import: Import<'_>, bytes: usize) {
    let stream = device.create_stream().unwrap();
    let before = open_objects();
    let imported = device.import(import, bytes).unwrap();
    assert_eq!(imported.bytes, bytes);
    assert_eq!(contents(device, stream, imported.base, bytes), vec![7; bytes]);
    put(device, stream, imported.base, &vec![9; bytes]);
    // The kind of imported memory is unspecified here. If it is a legacy allocation, its export must fail.
    if let Ok(region) = device.region(imported.base)
        && region.kind == Kind::Legacy
    {
        assert!(device.export(&region).is_err());
    }
    write_bytes(peer, &[1]);
    assert_eq!(read_bytes::<1>(peer), [2]);
    device.close(imported);
    assert_eq!(open_objects(), before);
    // SAFETY: the driver rejects the address, because it is not mapped any more.
    let wait = unsafe { device.wait_words(stream, &[smddp_cuda::Wait { word: imported.base, value: 1 }]) };
    assert!(wait.is_err(), "closed memory is still mapped");
}

#[test]
fn allocation_is_shared_by_ipc_handle() {
    const BYTES: usize = 300_000;
    in_two_children(
        "allocation_is_shared_by_ipc_handle",
        &[("FAKE_CUDA_SEED", "21")],
        |peer| {
            let device = device(0);
            let stream = device.create_stream().unwrap();
            let base = device.allocate(BYTES).unwrap();
            export_and_check(peer, &device, stream, base, BYTES);
            // A process cannot open its own handle; the driver's error is returned.
            let Export::Legacy(handle) = device.export(&device.region(base).unwrap()).unwrap() else {
                panic!()
            };
            let error = device.import(Import::Legacy(&handle), BYTES).unwrap_err().to_string();
            assert!(error.contains("cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID_CONTEXT"), "{error}");
        },
        |peer| {
            let handle = read_bytes::<64>(peer);
            import_and_write(peer, &device(0), Import::Legacy(&handle), BYTES);
        },
    );
}

#[test]
fn mapped_chunk_is_shared_by_file_descriptor() {
    in_two_children(
        "mapped_chunk_is_shared_by_file_descriptor",
        &[("FAKE_CUDA_SEED", "22")],
        |peer| {
            let device = device(0);
            let stream = device.create_stream().unwrap();
            let segment = Segment::reserve(3);
            segment.map(1, true);
            let before = open_objects();
            export_and_check(peer, &device, stream, segment.at(1), CHUNK);
            assert_eq!(open_objects(), before, "all handles are released");
        },
        |peer| {
            let fd = receive(peer);
            import_and_write(peer, &device(0), Import::Descriptor(&fd), CHUNK);
        },
    );
}

#[test]
fn failed_import_leaks_nothing() {
    in_child("failed_import_leaks_nothing", &[], || {
        let device = device(0);
        let before = open_objects();
        let error = device.import(Import::Legacy(&[3; 64]), 4096).unwrap_err().to_string();
        assert!(error.contains("cuIpcOpenMemHandle"), "{error}");
        let error = device.import(Import::Descriptor(&memfd()), CHUNK).unwrap_err().to_string();
        assert!(error.contains("cuMemImportFromShareableHandle"), "{error}");
        let segment = Segment::reserve(1);
        segment.map(0, true);
        let with_segment = open_objects();
        let Export::Descriptor(fd) = device.export(&device.region(segment.at(0)).unwrap()).unwrap() else {
            panic!()
        };
        // More than the allocation's size.
        let error = device.import(Import::Descriptor(&fd), 2 * CHUNK).unwrap_err().to_string();
        assert!(error.contains("cuMemMap"), "{error}");
        assert_eq!(open_objects(), with_segment);
        assert!(with_segment > before);
    });
}

#[test]
fn import_fails_between_devices_without_peer_access() {
    in_two_children(
        "import_fails_between_devices_without_peer_access",
        &[("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_NO_PEER", "1")],
        |peer| {
            let device = device(0);
            let region = device.region(device.allocate(4096).unwrap()).unwrap();
            let Export::Legacy(handle) = device.export(&region).unwrap() else { panic!() };
            write_bytes(peer, &handle);
            assert_eq!(read_bytes::<1>(peer), [1]);
        },
        |peer| {
            let handle = read_bytes::<64>(peer);
            let error = device(1).import(Import::Legacy(&handle), 4096).unwrap_err().to_string();
            assert!(error.contains("cannot access each other's memory"), "{error}");
            write_bytes(peer, &[1]);
        },
    );
}

#[test]
fn freed_memory_and_its_successor_cannot_be_imported_before_the_close() {
    const TRIES: usize = 1000;
    in_two_children(
        "freed_memory_and_its_successor_cannot_be_imported_before_the_close",
        &[],
        |peer| {
            let device = device(0);
            let first = read_bytes::<64>(peer);
            let old = device.import(Import::Legacy(&first), 4096).unwrap();
            // The same handle again maps the same memory; each import needs a close.
            assert_eq!(device.import(Import::Legacy(&first), 4096).unwrap(), old);
            device.close(old);
            write_bytes(peer, &[1]);
            let second = read_bytes::<64>(peer);
            let error = device.import(Import::Legacy(&second), 4096).unwrap_err().to_string();
            assert!(
                error.contains("CUDA_ERROR_ALREADY_MAPPED (208); the exporting process freed"),
                "{error}"
            );
            device.close(old);
            let error = device.import(Import::Legacy(&first), 4096).unwrap_err().to_string();
            assert!(error.contains("CUDA_ERROR_MAP_FAILED"), "{error}");
            device.close(device.import(Import::Legacy(&second), 4096).unwrap());
            write_bytes(peer, &[1]);
        },
        |peer| {
            let device = device(0);
            let export = |base| {
                let Export::Legacy(handle) = device.export(&device.region(base).unwrap()).unwrap() else {
                    panic!()
                };
                write_bytes(peer, &handle);
                assert_eq!(read_bytes::<1>(peer), [1]);
            };
            let first = device.allocate(4096).unwrap();
            export(first);
            // SAFETY: no stream has used it.
            unsafe { device.free(first) };
            let second = (0..TRIES).map(|_| device.allocate(4096).unwrap()).find(|&base| base == first);
            export(second.expect("an address is reused"));
        },
    );
}

#[test]
fn copies_to_freed_memory_fail() {
    in_child("copies_to_freed_memory_fail", &[], || {
        let device = device(0);
        let stream = device.create_stream().unwrap();
        let base = device.allocate(4096).unwrap();
        // SAFETY: the driver rejects unmapped addresses.
        unsafe {
            // The stream's thread has started, and does not map memory at the freed address any more.
            device.copy(stream, &[Copy { to: base + 2000, from: base, bytes: 200 }]).unwrap();
            device.synchronize(stream).unwrap();
            let past = [Copy { to: base + 4000, from: base, bytes: 200 }];
            assert!(device.copy(stream, &past).is_err());
            device.free(base);
            let freed = [Copy { to: base, from: base, bytes: 200 }; 2];
            let error = device.copy(stream, &freed).unwrap_err().to_string();
            assert!(error.contains("may have been freed"), "{error}");
        }
    });
}

type Leftovers = (Arc<Device>, Stream, u64);

/// Resources that are in use at process exit.
static LEFTOVERS: Mutex<Option<Leftovers>> = Mutex::new(None);

#[test]
fn release_after_driver_shutdown_does_not_crash() {
    extern "C" fn late() {
        // Runs after the driver's own exit handler: the driver was initialised later, and handlers run in reverse
        // order.
        let (device, stream, address) = LEFTOVERS.lock().unwrap().take().unwrap();
        let error = device.allocate(64).unwrap_err().to_string();
        if !error.contains("CUDA_ERROR_DEINITIALIZED") {
            std::process::abort();
        }
        // SAFETY: unused, and the driver has shut down.
        unsafe { device.free(address) };
        device.destroy_stream(stream);
        drop(device);
    }
    in_child("release_after_driver_shutdown_does_not_crash", &[], || {
        // SAFETY: a function that returns.
        assert_eq!(unsafe { libc::atexit(late) }, 0);
        let device = device(0);
        device.prepare().unwrap();
        let stream = device.create_stream().unwrap();
        let address = device.allocate(64).unwrap();
        *LEFTOVERS.lock().unwrap() = Some((device, stream, address));
    });
}

#[test]
fn forked_child_gets_advice_to_spawn() {
    in_child("forked_child_gets_advice_to_spawn", &[], || {
        let device = device(0);
        // SAFETY: the child makes one call that fails immediately, and exits without the parent's handlers.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                let advised = device.allocate(64).is_err_and(|error| error.to_string().contains("spawn"));
                libc::_exit(if advised { 0 } else { 1 });
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert_eq!(status, 0);
        }
    });
}

#[test]
fn device_releases_all_objects() {
    in_child("device_releases_all_objects", &[("FAKE_CUDA_DEVICES", "2")], || {
        let cuda = open();
        let before = open_objects();
        let device = cuda.device(1).unwrap();
        device.prepare().unwrap();
        let (stream, event) = (device.create_stream().unwrap(), device.create_event().unwrap());
        let (address, memory) = (device.allocate(64).unwrap(), device.allocate_host(64).unwrap());
        assert!(open_objects() >= before + 5);
        // SAFETY: no stream has used them.
        unsafe {
            device.free(address);
            device.free_host(memory);
        }
        device.destroy_event(event);
        device.destroy_stream(stream);
        drop(device);
        assert_eq!(open_objects(), before);
    });
}
