//! The functions, looked up once.
//!
//! A function whose structures or arguments changed has a version in its name (`_v2`), so the name fixes the signature;
//! those are taken by name. The few whose signature another CUDA release may change under the same name are asked of
//! the driver by the release whose signature is written down here.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::load::Object;
use super::types::*;

/// Where the batched copy is to be had, and with which arguments.
#[derive(Clone, Copy, Debug)]
pub(super) enum MemcpyBatch {
    Cuda12(MemcpyBatch12),
    Cuda13(MemcpyBatch13),
}

/// Stream-ordered waits and writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    pub(super) wait: StreamValue64,
    pub(super) write: StreamValue64,
    pub(super) batch: StreamBatchMemOp,
}

macro_rules! table {
    ($($field:ident = $name:literal: fn($($argument:ty),*);)*) => {
        /// Every driver since CUDA 12.0 has these.
        #[derive(Clone, Copy, Debug)]
        pub(super) struct Required {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> CUresult,)*
        }

        impl Required {
            /// Names what is missing.
            fn find(object: &Object) -> Result<Self, String> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the type is that of the function of this name in cuda.h.
                    let $field = unsafe {
                        object.function::<unsafe extern "C" fn($($argument),*) -> CUresult>($name)
                    };
                    if $field.is_none() {
                        missing.push($name.to_string_lossy());
                    }
                )*
                match ($($field,)*) {
                    ($(Some($field),)*) => Ok(Self { $($field,)* }),
                    _ => Err(format!("opened, but it has no {}", missing.join(", "))),
                }
            }
        }
    };
}

table! {
    init = c"cuInit": fn(c_uint);
    driver_get_version = c"cuDriverGetVersion": fn(*mut c_int);
    get_error_name = c"cuGetErrorName": fn(CUresult, *mut *const c_char);
    device_get_count = c"cuDeviceGetCount": fn(*mut c_int);
    device_get = c"cuDeviceGet": fn(*mut CUdevice, c_int);
    device_get_name = c"cuDeviceGetName": fn(*mut c_char, c_int, CUdevice);
    device_get_uuid = c"cuDeviceGetUuid_v2": fn(*mut CUuuid, CUdevice);
    device_get_attribute = c"cuDeviceGetAttribute": fn(*mut c_int, c_int, CUdevice);
    device_can_access_peer = c"cuDeviceCanAccessPeer": fn(*mut c_int, CUdevice, CUdevice);
    primary_retain = c"cuDevicePrimaryCtxRetain": fn(*mut CUcontext, CUdevice);
    primary_release = c"cuDevicePrimaryCtxRelease_v2": fn(CUdevice);
    ctx_get_current = c"cuCtxGetCurrent": fn(*mut CUcontext);
    ctx_push = c"cuCtxPushCurrent_v2": fn(CUcontext);
    ctx_pop = c"cuCtxPopCurrent_v2": fn(*mut CUcontext);
    ctx_priorities = c"cuCtxGetStreamPriorityRange": fn(*mut c_int, *mut c_int);
    exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode": fn(*mut c_int);
    stream_create = c"cuStreamCreateWithPriority": fn(*mut CUstream, c_uint, c_int);
    stream_destroy = c"cuStreamDestroy_v2": fn(CUstream);
    stream_synchronize = c"cuStreamSynchronize": fn(CUstream);
    stream_wait_event = c"cuStreamWaitEvent": fn(CUstream, CUevent, c_uint);
    stream_is_capturing = c"cuStreamIsCapturing": fn(CUstream, *mut c_int);
    event_create = c"cuEventCreate": fn(*mut CUevent, c_uint);
    event_destroy = c"cuEventDestroy_v2": fn(CUevent);
    event_record = c"cuEventRecord": fn(CUevent, CUstream);
    event_query = c"cuEventQuery": fn(CUevent);
    mem_alloc = c"cuMemAlloc_v2": fn(*mut CUdeviceptr, usize);
    mem_free = c"cuMemFree_v2": fn(CUdeviceptr);
    mem_host_alloc = c"cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    mem_free_host = c"cuMemFreeHost": fn(*mut c_void);
    mem_host_register = c"cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
    mem_host_unregister = c"cuMemHostUnregister": fn(*mut c_void);
    mem_host_get_device_pointer = c"cuMemHostGetDevicePointer_v2": fn(*mut CUdeviceptr, *mut c_void, c_uint);
    mem_get_address_range = c"cuMemGetAddressRange_v2": fn(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    pointer_get_attribute = c"cuPointerGetAttribute": fn(*mut c_void, c_int, CUdeviceptr);
    pointer_get_attributes = c"cuPointerGetAttributes": fn(c_uint, *mut c_int, *mut *mut c_void, CUdeviceptr);
    memcpy_async = c"cuMemcpyAsync": fn(CUdeviceptr, CUdeviceptr, usize, CUstream);
    ipc_get_mem_handle = c"cuIpcGetMemHandle": fn(*mut CUipcMemHandle, CUdeviceptr);
    ipc_open_mem_handle = c"cuIpcOpenMemHandle_v2": fn(*mut CUdeviceptr, CUipcMemHandle, c_uint);
    ipc_close_mem_handle = c"cuIpcCloseMemHandle": fn(CUdeviceptr);
    mem_address_reserve = c"cuMemAddressReserve": fn(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
    mem_address_free = c"cuMemAddressFree": fn(CUdeviceptr, usize);
    mem_map = c"cuMemMap": fn(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, u64);
    mem_unmap = c"cuMemUnmap": fn(CUdeviceptr, usize);
    mem_set_access = c"cuMemSetAccess": fn(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    mem_release = c"cuMemRelease": fn(CUmemGenericAllocationHandle);
    mem_retain = c"cuMemRetainAllocationHandle": fn(*mut CUmemGenericAllocationHandle, *mut c_void);
    mem_properties = c"cuMemGetAllocationPropertiesFromHandle": fn(*mut CUmemAllocationProp, CUmemGenericAllocationHandle);
    mem_export = c"cuMemExportToShareableHandle": fn(*mut c_void, CUmemGenericAllocationHandle, c_int, u64);
    mem_import = c"cuMemImportFromShareableHandle": fn(*mut CUmemGenericAllocationHandle, *mut c_void, c_int);
    module_load = c"cuModuleLoadDataEx": fn(*mut CUmodule, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
    module_unload = c"cuModuleUnload": fn(CUmodule);
    module_get_function = c"cuModuleGetFunction": fn(*mut CUfunction, CUmodule, *const c_char);
    launch_kernel = c"cuLaunchKernel": fn(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);
}

/// The functions of a driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    pub(super) required: Required,
    pub(super) words: Option<Words>,
    pub(super) memcpy_batch: Option<MemcpyBatch>,
    /// Since CUDA 12.4; before, cuModuleGetFunction loaded what it found.
    pub(super) func_load: Option<FuncLoad>,
    /// A checking driver's alone: see `host`.
    pub(super) host: Option<HostTouch>,
    /// 12080 is CUDA 12.8.
    pub(super) version: c_int,
}

impl Table {
    pub(super) fn find(object: &Object) -> Result<Self, String> {
        let required = Required::find(object)?;
        let mut version = 0;
        // SAFETY: fills the number; allowed before cuInit.
        let code = unsafe { (required.driver_get_version)(&raw mut version) };
        if code != CUDA_SUCCESS {
            return Err(format!("opened, but cuDriverGetVersion fails with {code}"));
        }
        let versioned = Versioned {
            object,
            // SAFETY: the type is that of the function of this name.
            by_release: unsafe { object.function(c"cuGetProcAddress_v2") },
            version,
        };
        // SAFETY: the types are those of the functions as of these releases.
        let words = unsafe {
            match (
                versioned.function(c"cuStreamWaitValue64", 11070, Some(c"cuStreamWaitValue64_v2")),
                versioned.function(c"cuStreamWriteValue64", 11070, Some(c"cuStreamWriteValue64_v2")),
                versioned.function(c"cuStreamBatchMemOp", 11070, Some(c"cuStreamBatchMemOp_v2")),
            ) {
                (Some(wait), Some(write), Some(batch)) => Some(Words { wait, write, batch }),
                _ => None,
            }
        };
        // A driver that is asked for a later release than its own gives the newest it has, whose arguments would be
        // those of 12.8 here. `function` asks none for more than it is.
        // SAFETY: as above.
        let memcpy_batch = unsafe {
            versioned
                .function(c"cuMemcpyBatchAsync", 13000, None)
                .map(MemcpyBatch::Cuda13)
                .or_else(|| versioned.function(c"cuMemcpyBatchAsync", 12080, None).map(MemcpyBatch::Cuda12))
        };
        // SAFETY: as above.
        let func_load = unsafe { versioned.function(c"cuFuncLoad", 12040, None) };
        // SAFETY: the type of fake-libcuda's function of this name; no other driver has one.
        let host = unsafe { object.function(c"fake_host") };
        Ok(Self { required, words, memcpy_batch, func_load, host, version })
    }
}

/// Looks functions up by the CUDA release whose signature is meant.
struct Versioned<'a> {
    object: &'a Object,
    by_release: Option<GetProcAddress>,
    version: c_int,
}

impl Versioned<'_> {
    /// The function `name` as of `release`. A driver that cannot be asked by release (older than 12.0) is asked for
    /// the name with the version in it, if that fixes the signature.
    ///
    /// # Safety
    /// `F` is the type of the function of that name as of that release, and of the named one.
    unsafe fn function<F: Copy>(&self, name: &CStr, release: c_int, named: Option<&CStr>) -> Option<F> {
        if self.version < release {
            return None;
        }
        let Some(by_release) = self.by_release else {
            // SAFETY: the caller's promise.
            return named.and_then(|named| unsafe { self.object.function(named) });
        };
        let (mut found, mut status) = (std::ptr::null_mut(), GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
        // SAFETY: a string and two places to write to; flags 0 is the default (legacy streams).
        let code = unsafe { by_release(name.as_ptr(), &raw mut found, release, 0, &raw mut status) };
        if code != CUDA_SUCCESS || status != GET_PROC_ADDRESS_SUCCESS || found.is_null() {
            return None;
        }
        // SAFETY: the caller's promise, and the driver says that it is this function.
        Some(unsafe { super::load::cast(found) })
    }
}
