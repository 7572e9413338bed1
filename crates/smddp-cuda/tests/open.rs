//! Search for the driver, and the errors when it is missing.

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
fn missing_named_file_is_reported_without_a_search() {
    let why = absent("/nowhere/libcuda.so.1");
    assert!(why.starts_with("looked at: /nowhere/libcuda.so.1 (named by the caller): "), "{why}");
    assert!(!why.contains("loader path"), "{why}");
}

#[test]
fn other_library_is_rejected_with_its_missing_functions() {
    let why = absent("libc.so.6");
    assert!(why.contains("opened, but it has no cuInit, cuDriverGetVersion, "), "{why}");
}

#[test]
fn old_driver_is_rejected_with_all_missing_functions() {
    let why = absent(ANCIENT);
    assert!(!why.contains("cuInit"), "{why}");
    for name in ["cuIpcOpenMemHandle_v2", "cuMemRetainAllocationHandle", "cuLaunchKernel"] {
        assert!(why.contains(name), "{name}: {why}");
    }
}

#[test]
fn loaded_library_is_tried_before_the_loader_path() {
    in_child("loaded_library_is_tried_before_the_loader_path", &[], || {
        match Cuda::open(None) {
            // This machine has a driver. Without a device, cuInit fails.
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
fn already_loaded_driver_is_used() {
    in_child("already_loaded_driver_is_used", &[("FAKE_CUDA_DEVICES", "3")], || {
        let path = std::ffi::CString::new(PATH).unwrap();
        // SAFETY: the fake has no initialisers.
        assert!(!unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) }.is_null());
        assert_eq!(Cuda::open(None).unwrap().count(), 3);
    });
}

#[test]
fn driver_without_a_device_is_absent() {
    in_child("driver_without_a_device_is_absent", &[("CUDA_VISIBLE_DEVICES", "")], || {
        let why = absent(PATH);
        assert!(why.contains("cuInit failed: CUDA_ERROR_NO_DEVICE (100)"), "{why}");
        assert!(why.contains("CUDA_VISIBLE_DEVICES"), "{why}");
    });
}

#[test]
fn devices_are_described_and_counted_like_in_torch() {
    let settings = [("FAKE_CUDA_DEVICES", "4"), ("CUDA_VISIBLE_DEVICES", "2,0")];
    in_child("devices_are_described_and_counted_like_in_torch", &settings, || {
        let cuda = open();
        assert_eq!((cuda.count(), cuda.version()), (2, (13, 0)));
        let device = cuda.device(0).unwrap();
        assert!(device.describe().starts_with("Fake GPU 2, "), "{}", device.describe());
        assert!(device.describe().ends_with("CUDA 13.0"), "{}", device.describe());
        assert_eq!((device.ordinal(), device.mem_ops_error()), (0, None));
        assert_eq!(cuda.device(1).unwrap().uuid(), *b"fake-cuda-gpu-00");
        let error = cuda.device(2).err().unwrap().to_string();
        assert!(error.contains("CUDA device 2 does not exist: this process sees 2"), "{error}");
    });
}

#[test]
fn device_reaches_itself_visible_peers_and_hidden_devices() {
    let name = "device_reaches_itself_visible_peers_and_hidden_devices";
    let reaches = |peers: bool| {
        let device = device(0);
        assert!(device.reaches(b"fake-cuda-gpu-00"));
        assert_eq!(device.reaches(b"fake-cuda-gpu-01"), peers);
        assert!(
            device.reaches(b"fake-cuda-gpu-02"),
            "hidden by CUDA_VISIBLE_DEVICES: only an import can decide"
        );
    };
    let settings = [("FAKE_CUDA_DEVICES", "3"), ("CUDA_VISIBLE_DEVICES", "0,1"), ("FAKE_CUDA_NO_PEER", "1")];
    in_child(name, &settings[..2], || reaches(true));
    in_child(name, &settings, || reaches(false));
}
