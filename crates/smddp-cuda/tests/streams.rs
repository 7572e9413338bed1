//! What is enqueued: copies, events, words, reductions.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::ffi::CStr;

use common::*;
use smddp_cuda::{Copy, Device, Element, Error, Fold, Reduction, Stream, Wait};

const POISON: u64 = 1 << 62;

/// Words in host memory that the device knows.
fn words(device: &Device) -> u64 {
    let page = page(&memfd());
    // SAFETY: never taken away.
    unsafe { device.register(page, 4096) }.unwrap()
}

/// Eight pieces of one array to their places in another, in reverse, and some of nothing.
fn pieces(to: u64, from: u64, bytes: usize) -> Vec<Copy> {
    let piece = |i: u64| Copy { to: to + (7 - i) * bytes as u64, from: from + i * bytes as u64, bytes };
    let mut all: Vec<Copy> = (0..8).map(piece).collect();
    all.insert(3, Copy { to, from, bytes: 0 });
    all
}

/// Copies in pieces, on `stream`, twice; gives how often each function was called for it.
fn shuffle(device: &Device, stream: Stream) -> [u64; 3] {
    const COUNTED: [&CStr; 3] = [c"cuMemcpyBatchAsync", c"cuMemcpyBatchAsync_v2", c"cuMemcpyAsync"];
    let pattern: Vec<u8> = (0..8u8).flat_map(|i| [i; 4096]).collect();
    let from = filled(device, stream, &pattern);
    let (middle, to) = (device.allocate(pattern.len()).unwrap(), device.allocate(pattern.len()).unwrap());
    let before = COUNTED.map(calls);
    // SAFETY: all live to the end.
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
fn old_and_new_drivers_copy_the_same_each_by_its_own_means() {
    let name = "old_and_new_drivers_copy_the_same_each_by_its_own_means";
    // Settings, and calls of the batch of 12.8, of that of 13.0, and of single copies.
    let cases = [
        ("12000", "0", [0, 0, 16]),
        ("12080", "0", [2, 0, 0]),
        ("12090", "0", [2, 0, 0]),
        ("13000", "0", [0, 2, 0]),
        ("13010", "0", [0, 2, 0]),
        // Once not supported is never tried again.
        ("13000", "1", [0, 1, 16]),
        ("13000", "2", [0, 1, 16]),
    ];
    for (version, without, expected) in cases {
        let settings =
            [("FAKE_CUDA_VERSION", version), ("FAKE_CUDA_NO_BATCH", without), ("FAKE_CUDA_SEED", "7")];
        with(name, &settings, || {
            let device = device(0);
            let stream = device.create_stream().unwrap();
            assert_eq!(shuffle(&device, stream), expected, "CUDA {version}");
        });
    }
}

#[test]
fn the_default_streams_get_no_batch() {
    with("the_default_streams_get_no_batch", &[], || {
        for number in 0..3 {
            assert_eq!(shuffle(&device(0), Stream(number)), [0, 0, 16], "stream {number}");
        }
    });
}

#[test]
fn few_copies_are_one_launch_and_others_are_copied() {
    with("few_copies_are_one_launch_and_others_are_copied", &[("FAKE_CUDA_SEED", "7")], || {
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
            // SAFETY: all live to the end.
            unsafe { device.copy_few(stream, &copies) }.unwrap();
            assert_eq!(calls(c"cuLaunchKernel") - before, launches, "{n} of {bytes}");
            let all = n as usize * bytes;
            assert_eq!(contents(&device, stream, to, all), pattern[..all], "{n} of {bytes}");
        }
    });
}

#[test]
fn a_device_owns_its_memory_and_no_other() {
    with("a_device_owns_its_memory_and_no_other", &[("FAKE_CUDA_DEVICES", "2")], || {
        let (device, other) = (device(0), device(1));
        let mine = device.allocate(4096).unwrap();
        assert!(device.owns(mine + 5));
        assert!(!other.owns(mine));
        assert!(!device.owns(words(&device)));
        assert!(!device.owns(std::ptr::from_ref(&device) as u64));
    });
}

#[test]
fn copies_of_nothing_are_nothing() {
    with("copies_of_nothing_are_nothing", &[], || {
        let device = device(0);
        let stream = device.create_stream().unwrap();
        let nothing = Copy { to: 0, from: 0, bytes: 0 };
        // SAFETY: nothing is touched.
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
fn an_event_passes_when_its_stream_comes_to_it_and_holds_up_the_stream_that_waits() {
    let name = "an_event_passes_when_its_stream_comes_to_it_and_holds_up_the_stream_that_waits";
    with(name, &[("FAKE_CUDA_SEED", "3")], || {
        let device = device(0);
        let (one, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let (first, second) = (device.create_event().unwrap(), device.create_event().unwrap());
        let word = words(&device);
        assert!(device.passed(first).unwrap(), "never recorded");
        // SAFETY: the word lives to the end.
        unsafe {
            device.wait_words(one, &[Wait { word, value: 1 }]).unwrap();
            device.record(first, one).unwrap();
            device.wait_event(other, first).unwrap();
            device.write_word(other, word + 8, 5).unwrap();
            device.record(second, other).unwrap();
            assert!(!device.passed(first).unwrap() && !device.passed(second).unwrap());
            assert_eq!(device.load(word + 8), 0);
            device.store(word, 1);
            until("the second event", || device.passed(second).unwrap());
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
fn waits_compare_the_signed_difference_and_poison_releases_all() {
    with("waits_compare_the_signed_difference_and_poison_releases_all", &[], || {
        let device = device(0);
        let word = words(&device);
        let stream = device.create_stream().unwrap();
        // SAFETY: the words live to the end.
        unsafe {
            // Reached, although the number is the smaller one.
            device.store(word, 2);
            device.wait_words(stream, &[Wait { word, value: u64::MAX - 1 }]).unwrap();
            device.synchronize(stream).unwrap();
            // All ones is just behind zero.
            device.store(word, u64::MAX);
            device.wait_words(stream, &[Wait { word, value: 1 }]).unwrap();
            device.write_word(stream, word + 8, 1).unwrap();
            let event = device.create_event().unwrap();
            device.record(event, stream).unwrap();
            assert!(!device.passed(event).unwrap());
            device.store(word, POISON);
            device.synchronize(stream).unwrap();
            assert_eq!(device.load(word + 8), 1);
        }
    });
}

#[test]
fn many_waits_are_few_calls_and_all_of_them_hold() {
    with("many_waits_are_few_calls_and_all_of_them_hold", &[], || {
        let device = device(0);
        let word = words(&device);
        let stream = device.create_stream().unwrap();
        let event = device.create_event().unwrap();
        let waits: Vec<Wait> = (0..256).map(|i| Wait { word: word + 8 * i, value: i + 1 }).collect();
        // SAFETY: the words live to the end.
        unsafe {
            device.wait_words(stream, &waits).unwrap();
            device.record(event, stream).unwrap();
            assert_eq!((calls(c"cuStreamBatchMemOp_v2"), calls(c"cuStreamWaitValue64_v2")), (2, 0));
            for wait in &waits[..255] {
                device.store(wait.word, wait.value);
            }
            assert!(!device.passed(event).unwrap());
            device.store(waits[255].word, POISON);
        }
        device.synchronize(stream).unwrap();
        assert!(device.passed(event).unwrap());
    });
}

#[test]
fn another_processes_write_and_its_poison_release_a_stream() {
    let name = "another_processes_write_and_its_poison_release_a_stream";
    with_peer(
        name,
        &[("FAKE_CUDA_SEED", "11")],
        |peer| {
            let device = device(0);
            let fd = memfd();
            let memory = page(&fd);
            send(peer, &fd);
            let stream = device.create_stream().unwrap();
            // SAFETY: the page is never taken away.
            unsafe {
                let word = device.register(memory, 4096).unwrap();
                for turn in 1..=200 {
                    device.wait_words(stream, &[Wait { word, value: turn }]).unwrap();
                    device.write_word(stream, word + 8, turn).unwrap();
                }
                device.wait_words(stream, &[Wait { word, value: 1000 }, Wait { word, value: 2000 }]).unwrap();
                device.synchronize(stream).unwrap();
                assert_eq!(device.load(word), POISON);
                device.unregister(memory);
            }
        },
        |peer| {
            let device = device(0);
            let memory = page(&receive(peer));
            let stream = device.create_stream().unwrap();
            // SAFETY: as above.
            unsafe {
                let word = device.register(memory, 4096).unwrap();
                for turn in 1..=200 {
                    // By its stream and by its host in turn.
                    if turn % 2 == 0 {
                        device.store(word, turn);
                    } else {
                        device.write_word(stream, word, turn).unwrap();
                    }
                    device.wait_words(stream, &[Wait { word: word + 8, value: turn }]).unwrap();
                    device.synchronize(stream).unwrap();
                }
                device.store(word, POISON);
            }
        },
    );
}

#[test]
fn a_driver_without_stream_memory_operations_says_so() {
    let name = "a_driver_without_stream_memory_operations_says_so";
    for settings in [("FAKE_CUDA_NO_MEMOPS", "1"), ("FAKE_CUDA_VERSION", "11060")] {
        with(name, &[settings], || {
            let device = device(0);
            let why = device.no_words().unwrap();
            assert!(why.contains("no 64-bit stream memory operations"), "{why}");
            // SAFETY: nothing is enqueued.
            let error = unsafe { device.write_word(device.create_stream().unwrap(), 8, 1) }.unwrap_err();
            assert_eq!(error, Error::Invalid(why));
        });
    }
}

#[test]
fn a_capture_is_reported_and_not_ended_by_what_others_do() {
    with("a_capture_is_reported_and_not_ended_by_what_others_do", &[], || {
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
            assert!(!device.capturing(Stream(0)).unwrap(), "it does not synchronise with the stream");
            let error = device.copy(stream, &[Copy { to: 8, from: 8, bytes: 1 }]).unwrap_err().to_string();
            assert!(error.contains("a stream is being captured into a graph"), "{error}");
            // All that a progress thread may do meanwhile.
            let other = device.create_stream().unwrap();
            let word = words(&device);
            device.write_word(other, word, 1).unwrap();
            let event = device.create_event().unwrap();
            device.record(event, other).unwrap();
            until("the event", || device.passed(event).unwrap());
            device.free(device.allocate(64).unwrap());
            device.free_host(device.allocate_host(64).unwrap());
            device.prepare().unwrap();
            device.synchronize(other).unwrap();
            device.destroy_stream(other);
            assert_eq!(status(stream.0), 1, "the capture goes on");
            assert_eq!(end(stream.0, &raw mut graph), 0);
            assert!(!device.capturing(stream).unwrap());
            // What the legacy default stream did would end this capture.
            assert_eq!(begin(blocking, 0), 0);
            assert!(device.capturing(Stream(0)).unwrap());
            assert_eq!(end(blocking, &raw mut graph), 0);
            assert!(!device.capturing(Stream(0)).unwrap());
        }
    });
}

/// CUDA's word on a stream's capture: 1 under way, 2 broken.
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

/// Makes the first device's primary context current on this thread, as torch has it.
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

/// The context that is current on this thread, or 0.
fn current() -> usize {
    type Get = unsafe extern "C" fn(*mut usize) -> i32;
    let mut context = 0;
    // SAFETY: the type of this function.
    assert_eq!(unsafe { function::<Get>(c"cuCtxGetCurrent")(&raw mut context) }, 0);
    context
}

#[test]
fn calls_leave_the_threads_context_as_it_was() {
    with("calls_leave_the_threads_context_as_it_was", &[("FAKE_CUDA_DEVICES", "2")], || {
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
        assert_eq!(current(), 0, "none was current");
        enter();
        let ours = current();
        let pushed = calls(c"cuCtxPushCurrent_v2");
        use_all();
        assert_eq!(current(), ours);
        assert_eq!(calls(c"cuCtxPushCurrent_v2") - pushed, 3, "the first's was current already");
        std::thread::scope(|scope| drop(scope.spawn(use_all)));
    });
}

fn sum(sources: Vec<u64>, to: u64, count: usize, divide: Option<u32>) -> Reduction {
    Reduction { element: Element::F32, fold: Fold::Sum, sources, to, count, divide, times: None }
}

#[test]
fn sources_are_reduced_in_stream_order() {
    with("sources_are_reduced_in_stream_order", &[("FAKE_CUDA_SEED", "5")], || {
        let device = device(0);
        device.prepare().unwrap();
        let (loaded, found) = (calls(c"cuModuleLoadDataEx"), calls(c"cuModuleGetFunction"));
        assert!(found > 0);
        assert_eq!(calls(c"cuFuncLoad"), found, "drivers load a function at its first use otherwise");
        let stream = device.create_stream().unwrap();
        let floats =
            |by: f32| (0..1000u16).flat_map(|i| (f32::from(i) * by).to_le_bytes()).collect::<Vec<u8>>();
        let sources: Vec<u64> = [1.0, 2.0, 6.0].map(|by| filled(&device, stream, &floats(by))).to_vec();
        let to = device.allocate(4000).unwrap();
        // SAFETY: all live to the end.
        unsafe {
            device.reduce(stream, &sum(sources.clone(), to, 1000, Some(3))).unwrap();
            device.reduce(stream, &sum(vec![to, sources[0]], to, 1000, None)).unwrap();
            device.reduce(stream, &sum(sources, to, 0, None)).unwrap();
        }
        assert_eq!(contents(&device, stream, to, 4000), floats(4.0));
        assert_eq!((loaded, calls(c"cuModuleLoadDataEx")), (1, 1), "once, when prepared");
        assert_eq!(calls(c"cuLaunchKernel"), 2, "none for no elements");
        assert_eq!(calls(c"cuModuleGetFunction"), found, "each once, when prepared");
    });
}

#[test]
fn a_program_that_does_not_compile_tells_what_the_compiler_said_and_is_tried_once() {
    let name = "a_program_that_does_not_compile_tells_what_the_compiler_said_and_is_tried_once";
    with(name, &[("FAKE_CUDA_BAD_JIT", "1")], || {
        let device = device(0);
        let stream = device.create_stream().unwrap();
        let memory = device.allocate(64).unwrap();
        // SAFETY: lives to the end.
        let fail =
            || unsafe { device.reduce(stream, &sum(vec![memory], memory, 1, None)) }.unwrap_err().to_string();
        let error = fail();
        assert!(error.contains("CUDA_ERROR_INVALID_PTX (218)"), "{error}");
        assert!(error.contains("the compiler says: ptxas fatal"), "{error}");
        assert_eq!(fail(), error);
        assert_eq!(calls(c"cuModuleLoadDataEx"), 1);
    });
}
