//! Finding the driver, and what is said where there is none.

mod common;

use std::path::Path;

use common::*;
use fake_libcuda::{ANCIENT, PATH};
use smddp_cuda::Error;
use smddp_cuda::driver::{Cuda, SONAME};

fn absent(path: &str) -> String {
    match Cuda::open(Some(Path::new(path))) {
        Err(Error::Absent(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_named_file_that_is_not_there_is_named_and_nothing_else_is_looked_at() {
    let why = absent("/nowhere/libcuda.so.1");
    assert!(why.starts_with("looked at: /nowhere/libcuda.so.1 (named by the caller): "), "{why}");
    assert!(!why.contains("loader path"), "{why}");
}

#[test]
fn a_library_that_is_no_driver_is_refused_by_what_it_lacks() {
    let why = absent("libc.so.6");
    assert!(why.contains("opened, but it has no cuInit, cuDriverGetVersion, "), "{why}");
}

#[test]
fn a_driver_too_old_is_refused_by_every_function_that_it_lacks() {
    let why = absent(ANCIENT);
    assert!(!why.contains("cuInit"), "{why}");
    for name in ["cuIpcOpenMemHandle_v2", "cuMemRetainAllocationHandle", "cuLaunchKernel"] {
        assert!(why.contains(name), "{name}: {why}");
    }
}

#[test]
fn without_a_name_the_loaded_and_the_loaders_are_looked_at_in_this_order() {
    with("without_a_name_the_loaded_and_the_loaders_are_looked_at_in_this_order", &[], || {
        match Cuda::open(None) {
            // This machine has a driver. Where it has no device, that is what is said.
            Ok(cuda) => println!("this machine has {} devices, CUDA {:?}", cuda.count(), cuda.version()),
            Err(Error::Absent(why)) if why.contains("cuInit") => println!("{why}"),
            Err(Error::Absent(why)) => {
                let places =
                    [format!("{SONAME} (already loaded): not loaded"), format!("{SONAME} (loader path): ")];
                let found = places.map(|place| why.find(&place).unwrap_or_else(|| panic!("{place}: {why}")));
                assert!(found[0] < found[1], "{why}");
            }
            Err(other) => panic!("{other}"),
        }
    });
}

#[test]
fn a_driver_that_the_process_has_open_is_the_one_that_is_used() {
    with("a_driver_that_the_process_has_open_is_the_one_that_is_used", &[("FAKE_CUDA_DEVICES", "3")], || {
        let path = std::ffi::CString::new(PATH).unwrap();
        // SAFETY: the fake has no initialisers.
        assert!(!unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) }.is_null());
        assert_eq!(Cuda::open(None).unwrap().count(), 3);
    });
}

#[test]
fn a_driver_without_a_device_is_absent() {
    with("a_driver_without_a_device_is_absent", &[("CUDA_VISIBLE_DEVICES", "")], || {
        let why = absent(PATH);
        assert!(why.contains("cuInit failed: CUDA_ERROR_NO_DEVICE (100)"), "{why}");
        assert!(why.contains("CUDA_VISIBLE_DEVICES"), "{why}");
    });
}

#[test]
fn devices_say_who_they_are_and_are_counted_as_torch_counts() {
    let settings = [("FAKE_CUDA_DEVICES", "4"), ("CUDA_VISIBLE_DEVICES", "2,0")];
    with("devices_say_who_they_are_and_are_counted_as_torch_counts", &settings, || {
        let cuda = open();
        assert_eq!((cuda.count(), cuda.version()), (2, (13, 0)));
        let device = cuda.device(0).unwrap();
        assert!(device.describe().starts_with("Fake GPU 2, "), "{}", device.describe());
        assert!(device.describe().ends_with("CUDA 13.0"), "{}", device.describe());
        assert_eq!((device.ordinal(), device.no_words()), (0, None));
        assert_eq!(cuda.device(1).unwrap().uuid(), *b"fake-cuda-gpu-00");
        let error = cuda.device(2).err().unwrap().to_string();
        assert!(error.contains("there is no CUDA device 2: this process sees 2"), "{error}");
    });
}

#[test]
fn a_device_reaches_itself_its_visible_peers_and_perhaps_hidden_ones() {
    let name = "a_device_reaches_itself_its_visible_peers_and_perhaps_hidden_ones";
    let reaches = |peers: bool| {
        let device = device(0);
        assert!(device.reaches(b"fake-cuda-gpu-00"));
        assert_eq!(device.reaches(b"fake-cuda-gpu-01"), peers);
        assert!(device.reaches(b"fake-cuda-gpu-02"), "CUDA_VISIBLE_DEVICES hides it: only a handle tells");
    };
    let settings = [("FAKE_CUDA_DEVICES", "3"), ("CUDA_VISIBLE_DEVICES", "0,1"), ("FAKE_CUDA_NO_PEER", "1")];
    with(name, &settings[..2], || reaches(true));
    with(name, &settings, || reaches(false));
}
