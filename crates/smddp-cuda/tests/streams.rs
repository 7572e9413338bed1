//! Enqueued operations: copies, events, words, reductions.

#![allow(clippy::unwrap_used, reason = "test helpers")]

mod common;

use std::ffi::CStr;

use common::*;
use smddp_cuda::{Copy, Device, Element, Error, Fold, Reduction, Stream, Wait};

const ABORT_VALUE: u64 = 1 << 62;

/// Registers a page of words in host memory with the device.
fn words(device: &Device) -> u64 {
    let page = page(&memfd());
    // SAFETY: never unmapped.
    unsafe { device.register(page, 4096) }.unwrap()
}

/// Eight pieces of one array to their positions in another, in reverse order, and one empty copy.
fn pieces(to: u64, from: u64, bytes: usize) -> Vec<Copy> {
    let piece = |i: u64| Copy { to: to + (7 - i) * bytes as u64, from: from + i * bytes as u64, bytes };
    let mut all: Vec<Copy> = (0..8).map(piece).collect();
    all.insert(3, Copy { to, from, bytes: 0 });
    all
}

/// Copies in pieces, on `stream`, twice. Returns the number of calls of each copy function.
fn shuffle(device: &Device, stream: Stream) -> [u64; 3] {
    const COUNTED: [&CStr; 3] = [c"cuMemcpyBatchAsync", c"cuMemcpyBatchAsync_v2", c"cuMemcpyAsync"];
    let pattern: Vec<u8> = (0..8u8).flat_map(|i| [i; 4096]).collect();
    let from = filled(device, stream, &pattern);
    let (middle, to) = (device.allocate(pattern.len()).unwrap(), device.allocate(pattern.len()).unwrap());
    let before = COUNTED.map(calls);
    // SAFETY: all memory remains allocated.
    unsafe {
        device.copy(stream, &pieces(middle, from, 4096)).unwrap();
        device.copy(stream, &pieces(to, middle, 4096)).unwrap();
    }
    let after = COUNTED.map(calls);
    assert_eq!(
        contents(device, stream, middle, pattern.len()),
        pattern.iter().rev().copied().collect::<Vec<_>>()
    );
    assert_eq!(contents(device, stream, to, pattern.len()), pattern);
    std::array::from_fn(|i| after[i] - before[i])
}

#[test]
fn every_driver_version_copies_with_its_best_call() {
    let name = "every_driver_version_copies_with_its_best_call";
    // Settings, and the number of calls of the batch of 12.8, of the batch of 13.0, and of single copies.
    let cases = [
        ("12000", "0", [0, 0, 16]),
        ("12080", "0", [2, 0, 0]),
        ("12090", "0", [2, 0, 0]),
        ("13000", "0", [0, 2, 0]),
        ("13010", "0", [0, 2, 0]),
        // A failed batch is not tried again.
        ("13000", "1", [0, 1, 16]),
        ("13000", "2", [0, 1, 16]),
    ];
    for (version, without, expected) in cases {
        let settings =
            [("FAKE_CUDA_VERSION", version), ("FAKE_CUDA_NO_BATCH", without), ("FAKE_CUDA_SEED", "7")];
        in_child(name, &settings, || {
            let device = device(0);
            let stream = device.create_stream().unwrap();
            assert_eq!(shuffle(&device, stream), expected, "CUDA {version}");
        });
    }
}

#[test]
fn default_streams_get_no_batch() {
    in_child("default_streams_get_no_batch", &[], || {
        for number in 0..3 {
            assert_eq!(shuffle(&device(0), Stream(number)), [0, 0, 16], "stream {number}");
        }
    });
}

#[test]
fn few_copies_use_one_launch() {
    in_child("few_copies_use_one_launch", &[("FAKE_CUDA_SEED", "7")], || {
        let device = device(0);
        let stream = device.create_stream().unwrap();
        let pattern: Vec<u8> = (0..64u32 << 10).map(|i| (i * 7 % 251) as u8).collect();
        let from = filled(&device, stream, &pattern);
        // (copies, bytes of each, launches)
        for (n, bytes, launches) in
            [(1, 100, 1), (3, 1024, 1), (9, 1001, 2), (16, 64, 2), (2, 32 << 10, 1), (2, 20_001, 0)]
        {
            let to = device.allocate(pattern.len()).unwrap();
            let copies: Vec<Copy> = (0..n)
                .map(|i| i * bytes as u64)
                .map(|at| Copy { to: to + at, from: from + at, bytes })
                .collect();
            let before = calls(c"cuLaunchKernel");
            // SAFETY: all memory remains allocated.
            unsafe { device.copy_few(stream, &copies) }.unwrap();
            assert_eq!(calls(c"cuLaunchKernel") - before, launches, "{n} of {bytes}");
            let all = n as usize * bytes;
            assert_eq!(contents(&device, stream, to, all), pattern[..all], "{n} of {bytes}");
        }
    });
}

#[test]
fn device_owns_only_its_memory() {
    in_child("device_owns_only_its_memory", &[("FAKE_CUDA_DEVICES", "2")], || {
        let (device, other) = (device(0), device(1));
        let mine = device.allocate(4096).unwrap();
        assert!(device.owns(mine + 5));
        assert!(!other.owns(mine));
        assert!(!device.owns(words(&device)));
        assert!(!device.owns(std::ptr::from_ref(&device) as u64));
    });
}

#[test]
fn empty_copies_and_waits_enqueue_nothing() {
    in_child("empty_copies_and_waits_enqueue_nothing", &[], || {
        let device = device(0);
        let stream = device.create_stream().unwrap();
        let nothing = Copy { to: 0, from: 0, bytes: 0 };
        // SAFETY: no memory is accessed.
        unsafe {
            device.copy(stream, &[]).unwrap();
            device.copy(stream, &[nothing]).unwrap();
            device.copy(stream, &[nothing, nothing]).unwrap();
            device.wait_words(stream, &[]).unwrap();
        }
        device.synchronize(stream).unwrap();
    });
}

#[test]
fn event_completes_in_stream_order_and_blocks_a_waiting_stream() {
    let name = "event_completes_in_stream_order_and_blocks_a_waiting_stream";
    in_child(name, &[("FAKE_CUDA_SEED", "3")], || {
        let device = device(0);
        let (one, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let (first, second) = (device.create_event().unwrap(), device.create_event().unwrap());
        let word = words(&device);
        assert!(device.passed(first).unwrap(), "never recorded");
        // SAFETY: the word remains mapped.
        unsafe {
            device.wait_words(one, &[Wait { word, value: 1 }]).unwrap();
            device.record(first, one).unwrap();
            device.wait_event(other, first).unwrap();
            device.write_word(other, word + 8, 5).unwrap();
            device.record(second, other).unwrap();
            assert!(!device.passed(first).unwrap() && !device.passed(second).unwrap());
            assert_eq!(device.load(word + 8), 0);
            device.store(word, 1);
            wait_until("the second event", || device.passed(second).unwrap());
            assert!(device.passed(first).unwrap());
            assert_eq!(device.load(word + 8), 5);
        }
        device.synchronize(one).unwrap();
        device.destroy_event(first);
        device.destroy_event(second);
        device.destroy_stream(one);
        device.destroy_stream(other);
    });
}

#[test]
fn waits_compare_the_signed_difference_and_abort_value_releases_all() {
    in_child("waits_compare_the_signed_difference_and_abort_value_releases_all", &[], || {
        let device = device(0);
        let word = words(&device);
        let stream = device.create_stream().unwrap();
        // SAFETY: the words remain mapped.
        unsafe {
            // Satisfied, although the value is the smaller number.
            device.store(word, 2);
            device.wait_words(stream, &[Wait { word, value: u64::MAX - 1 }]).unwrap();
            device.synchronize(stream).unwrap();
            // All ones is one less than zero.
            device.store(word, u64::MAX);
            device.wait_words(stream, &[Wait { word, value: 1 }]).unwrap();
            device.write_word(stream, word + 8, 1).unwrap();
            let event = device.create_event().unwrap();
            device.record(event, stream).unwrap();
            assert!(!device.passed(event).unwrap());
            device.store(word, ABORT_VALUE);
            device.synchronize(stream).unwrap();
            assert_eq!(device.load(word + 8), 1);
        }
    });
}

#[test]
fn many_waits_use_few_calls_and_all_apply() {
    in_child("many_waits_use_few_calls_and_all_apply", &[], || {
        let device = device(0);
        let word = words(&device);
        let stream = device.create_stream().unwrap();
        let event = device.create_event().unwrap();
        let waits: Vec<Wait> = (0..256).map(|i| Wait { word: word + 8 * i, value: i + 1 }).collect();
        // SAFETY: the words remain mapped.
        unsafe {
            device.wait_words(stream, &waits).unwrap();
            device.record(event, stream).unwrap();
            assert_eq!((calls(c"cuStreamBatchMemOp_v2"), calls(c"cuStreamWaitValue64_v2")), (2, 0));
            for wait in &waits[..255] {
                device.store(wait.word, wait.value);
            }
            assert!(!device.passed(event).unwrap());
            device.store(waits[255].word, ABORT_VALUE);
        }
        device.synchronize(stream).unwrap();
        assert!(device.passed(event).unwrap());
    });
}

#[test]
fn write_and_abort_value_of_another_process_release_a_stream() {
    let name = "write_and_abort_value_of_another_process_release_a_stream";
    in_two_children(
        name,
        &[("FAKE_CUDA_SEED", "11")],
        |peer| {
            let device = device(0);
            let fd = memfd();
            let memory = page(&fd);
            send(peer, &fd);
            let stream = device.create_stream().unwrap();
            // SAFETY: the page is never unmapped.
            unsafe {
                let word = device.register(memory, 4096).unwrap();
                for value in 1..=200 {
                    device.wait_words(stream, &[Wait { word, value }]).unwrap();
                    device.write_word(stream, word + 8, value).unwrap();
                }
                device.wait_words(stream, &[Wait { word, value: 1000 }, Wait { word, value: 2000 }]).unwrap();
                device.synchronize(stream).unwrap();
                assert_eq!(device.load(word), ABORT_VALUE);
                device.unregister(memory);
            }
        },
        |peer| {
            let device = device(0);
            let memory = page(&receive(peer));
            let stream = device.create_stream().unwrap();
            // SAFETY: as in the first process.
            unsafe {
                let word = device.register(memory, 4096).unwrap();
                for value in 1..=200 {
                    // Alternates between host and stream.
                    if value % 2 == 0 {
                        device.store(word, value);
                    } else {
                        device.write_word(stream, word, value).unwrap();
                    }
                    device.wait_words(stream, &[Wait { word: word + 8, value }]).unwrap();
                    device.synchronize(stream).unwrap();
                }
                device.store(word, ABORT_VALUE);
            }
        },
    );
}

#[test]
fn missing_stream_memory_operations_are_reported() {
    let name = "missing_stream_memory_operations_are_reported";
    for settings in [("FAKE_CUDA_NO_MEMOPS", "1"), ("FAKE_CUDA_VERSION", "11060")] {
        in_child(name, &[settings], || {
            let device = device(0);
            let why = device.mem_ops_error().unwrap();
            assert!(why.contains("no 64-bit stream memory operations"), "{why}");
            // SAFETY: nothing is enqueued.
            let error = unsafe { device.write_word(device.create_stream().unwrap(), 8, 1) }.unwrap_err();
            assert_eq!(error, Error::Invalid(why));
        });
    }
}

#[test]
fn capture_is_reported_and_survives_other_work() {
    in_child("capture_is_reported_and_survives_other_work", &[], || {
        type Create = unsafe extern "C" fn(*mut u64, u32, i32) -> i32;
        type Begin = unsafe extern "C" fn(u64, i32) -> i32;
        type End = unsafe extern "C" fn(u64, *mut usize) -> i32;
        let device = device(0);
        let stream = device.create_stream().unwrap();
        // SAFETY: the types of these functions.
        let (create, begin, end) = unsafe {
            (
                function::<Create>(c"cuStreamCreateWithPriority"),
                function::<Begin>(c"cuStreamBeginCapture_v2"),
                function::<End>(c"cuStreamEndCapture"),
            )
        };
        enter();
        let (mut blocking, mut graph) = (0, 0);
        // SAFETY: as above.
        unsafe {
            assert_eq!(create(&raw mut blocking, 0, 0), 0);
            assert!(!device.capturing(stream).unwrap() && !device.capturing(Stream(0)).unwrap());
            assert_eq!(begin(stream.0, 0), 0);
            assert!(device.capturing(stream).unwrap());
            assert!(!device.capturing(Stream(0)).unwrap(), "the stream does not synchronize with it");
            let error = device.copy(stream, &[Copy { to: 8, from: 8, bytes: 1 }]).unwrap_err().to_string();
            assert!(error.contains("a stream is being captured into a graph"), "{error}");
            // All operations that a progress thread may do during the capture.
            let other = device.create_stream().unwrap();
            let word = words(&device);
            device.write_word(other, word, 1).unwrap();
            let event = device.create_event().unwrap();
            device.record(event, other).unwrap();
            wait_until("the event", || device.passed(event).unwrap());
            device.free(device.allocate(64).unwrap());
            device.free_host(device.allocate_host(64).unwrap());
            device.prepare().unwrap();
            device.synchronize(other).unwrap();
            device.destroy_stream(other);
            assert_eq!(status(stream.0), 1, "the capture is still active");
            assert_eq!(end(stream.0, &raw mut graph), 0);
            assert!(!device.capturing(stream).unwrap());
            // Work on the legacy default stream would invalidate this capture.
            assert_eq!(begin(blocking, 0), 0);
            assert!(device.capturing(Stream(0)).unwrap());
            assert_eq!(end(blocking, &raw mut graph), 0);
            assert!(!device.capturing(Stream(0)).unwrap());
        }
    });
}

/// CUDA's capture status of a stream: 1 active, 2 invalidated.
fn status(stream: u64) -> i32 {
    let mut status = 0;
    // SAFETY: the type of this function.
    let code = unsafe {
        function::<unsafe extern "C" fn(u64, *mut i32) -> i32>(c"cuStreamIsCapturing")(
            stream,
            &raw mut status,
        )
    };
    assert_eq!(code, 0);
    status
}

/// Makes the first device's primary context current on this thread, as torch does.
fn enter() {
    type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;
    type Push = unsafe extern "C" fn(usize) -> i32;
    let mut context = 0;
    // SAFETY: the types of these functions.
    unsafe {
        assert_eq!(function::<Retain>(c"cuDevicePrimaryCtxRetain")(&raw mut context, 0), 0);
        assert_eq!(function::<Push>(c"cuCtxPushCurrent_v2")(context), 0);
    }
}

/// Returns the context that is current on this thread, or 0.
fn current() -> usize {
    type Get = unsafe extern "C" fn(*mut usize) -> i32;
    let mut context = 0;
    // SAFETY: the type of this function.
    assert_eq!(unsafe { function::<Get>(c"cuCtxGetCurrent")(&raw mut context) }, 0);
    context
}

#[test]
fn calls_restore_the_current_context() {
    in_child("calls_restore_the_current_context", &[("FAKE_CUDA_DEVICES", "2")], || {
        let cuda = open();
        let (first, second) = (cuda.device(0).unwrap(), cuda.device(1).unwrap());
        let use_all = || {
            for device in [&first, &second] {
                let address = device.allocate(64).unwrap();
                assert_eq!(device.region(address).unwrap().base, address);
                // SAFETY: just allocated.
                unsafe { device.free(address) };
            }
        };
        use_all();
        assert_eq!(current(), 0, "no context was current");
        enter();
        let ours = current();
        let pushed = calls(c"cuCtxPushCurrent_v2");
        use_all();
        assert_eq!(current(), ours);
        assert_eq!(
            calls(c"cuCtxPushCurrent_v2") - pushed,
            3,
            "the first device's context was current already"
        );
        std::thread::scope(|scope| drop(scope.spawn(use_all)));
    });
}

fn sum(sources: Vec<u64>, to: u64, count: usize, divide: Option<u32>) -> Reduction {
    Reduction { element: Element::F32, fold: Fold::Sum, sources, to, count, divide, times: None }
}

#[test]
fn sources_are_reduced_in_stream_order() {
    in_child("sources_are_reduced_in_stream_order", &[("FAKE_CUDA_SEED", "5")], || {
        let device = device(0);
        device.prepare().unwrap();
        let (loaded, found) = (calls(c"cuModuleLoadDataEx"), calls(c"cuModuleGetFunction"));
        assert!(found > 0);
        assert_eq!(calls(c"cuFuncLoad"), found, "without it a driver loads a function at its first launch");
        let stream = device.create_stream().unwrap();
        let floats =
            |by: f32| (0..1000u16).flat_map(|i| (f32::from(i) * by).to_le_bytes()).collect::<Vec<u8>>();
        let sources: Vec<u64> = [1.0, 2.0, 6.0].map(|by| filled(&device, stream, &floats(by))).to_vec();
        let to = device.allocate(4000).unwrap();
        // SAFETY: all memory remains allocated.
        unsafe {
            device.reduce(stream, &sum(sources.clone(), to, 1000, Some(3))).unwrap();
            device.reduce(stream, &sum(vec![to, sources[0]], to, 1000, None)).unwrap();
            device.reduce(stream, &sum(sources, to, 0, None)).unwrap();
        }
        assert_eq!(contents(&device, stream, to, 4000), floats(4.0));
        assert_eq!((loaded, calls(c"cuModuleLoadDataEx")), (1, 1), "loaded once, by prepare");
        assert_eq!(calls(c"cuLaunchKernel"), 2, "no launch for no elements");
        assert_eq!(calls(c"cuModuleGetFunction"), found, "each function once, by prepare");
    });
}

#[test]
fn compile_error_has_the_compiler_log_and_is_cached() {
    let name = "compile_error_has_the_compiler_log_and_is_cached";
    in_child(name, &[("FAKE_CUDA_BAD_JIT", "1")], || {
        let device = device(0);
        let stream = device.create_stream().unwrap();
        let memory = device.allocate(64).unwrap();
        // SAFETY: the memory remains allocated.
        let fail =
            || unsafe { device.reduce(stream, &sum(vec![memory], memory, 1, None)) }.unwrap_err().to_string();
        let error = fail();
        assert!(error.contains("CUDA_ERROR_INVALID_PTX (218)"), "{error}");
        assert!(error.contains("the compiler reports: ptxas fatal"), "{error}");
        assert_eq!(fail(), error);
        assert_eq!(calls(c"cuModuleLoadDataEx"), 1);
    });
}
