//! The driver's functions, looked up once.
//!
//! A function whose structures or arguments changed has a version suffix (`_v2`), so its name defines the signature.
//! Those functions are looked up by name. A few functions may change their signature under one name between CUDA
//! releases. The driver returns those for the release whose signature is declared here.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::load::Object;
use super::types::*;
use crate::device::Error;

/// The batched copy with the arguments of one CUDA release.
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
    ($(fn $field:ident($($argument:ident: $kind:ty),*) = $name:literal;)*) => {
        /// Functions that every driver since CUDA 12.0 exports.
        #[derive(Clone, Copy, Debug)]
        pub(super) struct Required {
            $(pub(super) $field: unsafe extern "C" fn($($kind),*) -> CUresult,)*
        }

        #[expect(clippy::too_many_arguments, reason = "the driver's signatures")]
        #[expect(dead_code, reason = "code that inspects or ignores a result calls the bare function")]
        impl Required {
            /// Looks up all functions. The error lists the missing ones.
            fn find(object: &Object) -> Result<Self, String> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: the type is that of the function of this name in cuda.h.
                    let $field = unsafe {
                        object.function::<unsafe extern "C" fn($($kind),*) -> CUresult>($name)
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

            $(
                /// Makes the call and converts its code to an error.
                ///
                /// # Safety
                /// The driver's contract of the function.
                pub(super) unsafe fn $field(&self, $($argument: $kind),*) -> Result<(), Error> {
                    // SAFETY: the caller's contract.
                    self.check($name, unsafe { (self.$field)($($argument),*) })
                }
            )*
        }
    };
}

table! {
    fn init(flags: c_uint) = c"cuInit";
    fn driver_get_version(version: *mut c_int) = c"cuDriverGetVersion";
    fn get_error_name(code: CUresult, name: *mut *const c_char) = c"cuGetErrorName";
    fn device_get_count(count: *mut c_int) = c"cuDeviceGetCount";
    fn device_get(device: *mut CUdevice, ordinal: c_int) = c"cuDeviceGet";
    fn device_get_name(name: *mut c_char, bytes: c_int, device: CUdevice) = c"cuDeviceGetName";
    fn device_get_uuid(uuid: *mut CUuuid, device: CUdevice) = c"cuDeviceGetUuid_v2";
    fn device_get_attribute(value: *mut c_int, attribute: c_int, device: CUdevice) = c"cuDeviceGetAttribute";
    fn device_can_access_peer(can: *mut c_int, device: CUdevice, peer: CUdevice) = c"cuDeviceCanAccessPeer";
    fn primary_retain(context: *mut CUcontext, device: CUdevice) = c"cuDevicePrimaryCtxRetain";
    fn primary_release(device: CUdevice) = c"cuDevicePrimaryCtxRelease_v2";
    fn ctx_get_current(context: *mut CUcontext) = c"cuCtxGetCurrent";
    fn ctx_push(context: CUcontext) = c"cuCtxPushCurrent_v2";
    fn ctx_pop(context: *mut CUcontext) = c"cuCtxPopCurrent_v2";
    fn ctx_priorities(least: *mut c_int, greatest: *mut c_int) = c"cuCtxGetStreamPriorityRange";
    fn exchange_capture_mode(mode: *mut c_int) = c"cuThreadExchangeStreamCaptureMode";
    fn stream_create(stream: *mut CUstream, flags: c_uint, priority: c_int) = c"cuStreamCreateWithPriority";
    fn stream_destroy(stream: CUstream) = c"cuStreamDestroy_v2";
    fn stream_synchronize(stream: CUstream) = c"cuStreamSynchronize";
    fn stream_wait_event(stream: CUstream, event: CUevent, flags: c_uint) = c"cuStreamWaitEvent";
    fn stream_is_capturing(stream: CUstream, status: *mut c_int) = c"cuStreamIsCapturing";
    fn event_create(event: *mut CUevent, flags: c_uint) = c"cuEventCreate";
    fn event_destroy(event: CUevent) = c"cuEventDestroy_v2";
    fn event_record(event: CUevent, stream: CUstream) = c"cuEventRecord";
    fn event_query(event: CUevent) = c"cuEventQuery";
    fn mem_alloc(address: *mut CUdeviceptr, bytes: usize) = c"cuMemAlloc_v2";
    fn mem_free(address: CUdeviceptr) = c"cuMemFree_v2";
    fn mem_host_alloc(memory: *mut *mut c_void, bytes: usize, flags: c_uint) = c"cuMemHostAlloc";
    fn mem_free_host(memory: *mut c_void) = c"cuMemFreeHost";
    fn mem_host_register(memory: *mut c_void, bytes: usize, flags: c_uint) = c"cuMemHostRegister_v2";
    fn mem_host_unregister(memory: *mut c_void) = c"cuMemHostUnregister";
    fn mem_host_get_device_pointer(address: *mut CUdeviceptr, memory: *mut c_void, flags: c_uint) = c"cuMemHostGetDevicePointer_v2";
    fn mem_get_address_range(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr) = c"cuMemGetAddressRange_v2";
    fn pointer_get_attribute(answer: *mut c_void, attribute: c_int, address: CUdeviceptr) = c"cuPointerGetAttribute";
    fn pointer_get_attributes(count: c_uint, attributes: *mut c_int, answers: *mut *mut c_void, address: CUdeviceptr) = c"cuPointerGetAttributes";
    fn memcpy_async(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) = c"cuMemcpyAsync";
    fn ipc_get_mem_handle(handle: *mut CUipcMemHandle, address: CUdeviceptr) = c"cuIpcGetMemHandle";
    fn ipc_open_mem_handle(address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) = c"cuIpcOpenMemHandle_v2";
    fn ipc_close_mem_handle(address: CUdeviceptr) = c"cuIpcCloseMemHandle";
    fn mem_address_reserve(address: *mut CUdeviceptr, bytes: usize, alignment: usize, wanted: CUdeviceptr, flags: u64) = c"cuMemAddressReserve";
    fn mem_address_free(address: CUdeviceptr, bytes: usize) = c"cuMemAddressFree";
    fn mem_map(address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64) = c"cuMemMap";
    fn mem_unmap(address: CUdeviceptr, bytes: usize) = c"cuMemUnmap";
    fn mem_set_access(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize) = c"cuMemSetAccess";
    fn mem_release(handle: CUmemGenericAllocationHandle) = c"cuMemRelease";
    fn mem_retain(handle: *mut CUmemGenericAllocationHandle, address: *mut c_void) = c"cuMemRetainAllocationHandle";
    fn mem_properties(properties: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle) = c"cuMemGetAllocationPropertiesFromHandle";
    fn mem_export(exported: *mut c_void, handle: CUmemGenericAllocationHandle, kind: c_int, flags: u64) = c"cuMemExportToShareableHandle";
    fn mem_import(handle: *mut CUmemGenericAllocationHandle, imported: *mut c_void, kind: c_int) = c"cuMemImportFromShareableHandle";
    fn module_load(module: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut c_int, values: *mut *mut c_void) = c"cuModuleLoadDataEx";
    fn module_unload(module: CUmodule) = c"cuModuleUnload";
    fn module_get_function(function: *mut CUfunction, module: CUmodule, name: *const c_char) = c"cuModuleGetFunction";
    fn launch_kernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, arguments: *mut *mut c_void, extra: *mut *mut c_void) = c"cuLaunchKernel";
}

/// The functions of a driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    pub(super) required: Required,
    pub(super) words: Option<Words>,
    pub(super) memcpy_batch: Option<MemcpyBatch>,
    /// Exported since CUDA 12.4; in older drivers cuModuleGetFunction loads the function.
    pub(super) func_load: Option<FuncLoad>,
    /// Exported by a checking driver only; see `host`.
    pub(super) host: Option<HostTouch>,
    /// CUDA version as the driver encodes it: 12080 is CUDA 12.8.
    pub(super) version: c_int,
}

impl Table {
    pub(super) fn find(object: &Object) -> Result<Self, String> {
        let required = Required::find(object)?;
        let mut version = 0;
        // SAFETY: the call writes the number; it is allowed before cuInit.
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
        // SAFETY: the types are those of the functions in these releases.
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
        // A driver that gets a request for a later release than its own returns its newest function, which here would
        // have the arguments of 12.8. `function` rejects requests for later releases. SAFETY: as above.
        let memcpy_batch = unsafe {
            versioned
                .function(c"cuMemcpyBatchAsync", 13000, None)
                .map(MemcpyBatch::Cuda13)
                .or_else(|| versioned.function(c"cuMemcpyBatchAsync", 12080, None).map(MemcpyBatch::Cuda12))
        };
        // SAFETY: as above.
        let func_load = unsafe { versioned.function(c"cuFuncLoad", 12040, None) };
        // SAFETY: the type of fake-libcuda's function of this name; no other driver exports one.
        let host = unsafe { object.function(c"fake_host") };
        Ok(Self { required, words, memcpy_batch, func_load, host, version })
    }
}

/// Lookup of functions by the CUDA release that defines their signature.
struct Versioned<'a> {
    object: &'a Object,
    by_release: Option<GetProcAddress>,
    version: c_int,
}

impl Versioned<'_> {
    /// Returns the function `name` with the signature of `release`.
    ///
    /// A driver without lookup by release (older than 12.0) is searched for the versioned name `named`, if that
    /// defines the signature.
    ///
    /// # Safety
    /// `F` is the type of the function `name` in that release, and of the function `named`.
    unsafe fn function<F: Copy>(&self, name: &CStr, release: c_int, named: Option<&CStr>) -> Option<F> {
        if self.version < release {
            return None;
        }
        let Some(by_release) = self.by_release else {
            // SAFETY: the caller's contract.
            return named.and_then(|named| unsafe { self.object.function(named) });
        };
        let (mut found, mut status) = (std::ptr::null_mut(), GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
        // SAFETY: a null-terminated string and two output pointers; flags 0 is the default (legacy streams).
        let code = unsafe { by_release(name.as_ptr(), &raw mut found, release, 0, &raw mut status) };
        if code != CUDA_SUCCESS || status != GET_PROC_ADDRESS_SUCCESS || found.is_null() {
            return None;
        }
        // SAFETY: the caller's contract, and the driver reported a match.
        Some(unsafe { super::load::cast(found) })
    }
}
