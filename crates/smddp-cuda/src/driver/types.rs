//! The CUDA types and constants in use, from cuda.h of CUDA 12.0 to 13.0. This file depends on nothing else in the
//! crate, because the fake driver includes it too.

use std::ffi::{c_char, c_int, c_uint, c_void};

pub(crate) type CUresult = c_int;
pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = u64;
/// Driver handles. They are numbers because they are never dereferenced.
pub(crate) type CUcontext = usize;
pub(crate) type CUstream = u64;
pub(crate) type CUevent = u64;
pub(crate) type CUmodule = usize;
pub(crate) type CUfunction = usize;
pub(crate) type CUmemGenericAllocationHandle = u64;

pub(crate) const CUDA_SUCCESS: CUresult = 0;
pub(crate) const CUDA_ERROR_INVALID_VALUE: CUresult = 1;
pub(crate) const CUDA_ERROR_OUT_OF_MEMORY: CUresult = 2;
pub(crate) const CUDA_ERROR_NOT_INITIALIZED: CUresult = 3;
pub(crate) const CUDA_ERROR_DEINITIALIZED: CUresult = 4;
pub(crate) const CUDA_ERROR_STUB_LIBRARY: CUresult = 34;
pub(crate) const CUDA_ERROR_DEVICE_UNAVAILABLE: CUresult = 46;
pub(crate) const CUDA_ERROR_NO_DEVICE: CUresult = 100;
pub(crate) const CUDA_ERROR_INVALID_DEVICE: CUresult = 101;
pub(crate) const CUDA_ERROR_INVALID_CONTEXT: CUresult = 201;
pub(crate) const CUDA_ERROR_MAP_FAILED: CUresult = 205;
pub(crate) const CUDA_ERROR_ALREADY_MAPPED: CUresult = 208;
pub(crate) const CUDA_ERROR_NO_BINARY_FOR_GPU: CUresult = 209;
pub(crate) const CUDA_ERROR_ECC_UNCORRECTABLE: CUresult = 214;
pub(crate) const CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: CUresult = 217;
pub(crate) const CUDA_ERROR_INVALID_PTX: CUresult = 218;
pub(crate) const CUDA_ERROR_JIT_COMPILER_NOT_FOUND: CUresult = 221;
pub(crate) const CUDA_ERROR_UNSUPPORTED_PTX_VERSION: CUresult = 222;
pub(crate) const CUDA_ERROR_JIT_COMPILATION_DISABLED: CUresult = 223;
pub(crate) const CUDA_ERROR_NOT_FOUND: CUresult = 500;
pub(crate) const CUDA_ERROR_NOT_READY: CUresult = 600;
pub(crate) const CUDA_ERROR_ILLEGAL_ADDRESS: CUresult = 700;
pub(crate) const CUDA_ERROR_CONTEXT_IS_DESTROYED: CUresult = 709;
pub(crate) const CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: CUresult = 712;
pub(crate) const CUDA_ERROR_LAUNCH_FAILED: CUresult = 719;
pub(crate) const CUDA_ERROR_NOT_PERMITTED: CUresult = 800;
pub(crate) const CUDA_ERROR_NOT_SUPPORTED: CUresult = 801;
pub(crate) const CUDA_ERROR_SYSTEM_NOT_READY: CUresult = 802;
pub(crate) const CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: CUresult = 803;
pub(crate) const CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: CUresult = 804;
pub(crate) const CUDA_ERROR_MPS_CONNECTION_FAILED: CUresult = 805;
pub(crate) const CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: CUresult = 900;
pub(crate) const CUDA_ERROR_STREAM_CAPTURE_INVALIDATED: CUresult = 901;
pub(crate) const CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: CUresult = 906;
pub(crate) const CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: CUresult = 908;

// CUdevice_attribute
pub(crate) const UNIFIED_ADDRESSING: c_int = 41;
/// For the second version of the API. The first version had the number 93 and was off by default.
pub(crate) const CAN_USE_64_BIT_STREAM_MEM_OPS: c_int = 122;

// CUpointer_attribute
pub(crate) const MEMORY_TYPE: c_int = 2;
pub(crate) const BUFFER_ID: c_int = 7;
pub(crate) const IS_MANAGED: c_int = 8;
pub(crate) const DEVICE_ORDINAL: c_int = 9;
pub(crate) const IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;
pub(crate) const RANGE_START_ADDR: c_int = 11;
pub(crate) const RANGE_SIZE: c_int = 12;
pub(crate) const MAPPED: c_int = 13;
pub(crate) const MEMPOOL_HANDLE: c_int = 17;
pub(crate) const MAPPING_SIZE: c_int = 18;
pub(crate) const MAPPING_BASE_ADDR: c_int = 19;
pub(crate) const MEMORY_BLOCK_ID: c_int = 20;

// CUmemorytype
pub(crate) const MEMORYTYPE_HOST: c_uint = 1;
pub(crate) const MEMORYTYPE_DEVICE: c_uint = 2;

pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const STREAM_LEGACY: CUstream = 1;
pub(crate) const STREAM_PER_THREAD: CUstream = 2;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const MEMHOSTALLOC_PORTABLE: c_uint = 1;
pub(crate) const MEMHOSTALLOC_DEVICEMAP: c_uint = 2;
pub(crate) const MEMHOSTREGISTER_PORTABLE: c_uint = 1;
pub(crate) const MEMHOSTREGISTER_DEVICEMAP: c_uint = 2;
pub(crate) const IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

// CUstreamCaptureStatus and CUstreamCaptureMode
pub(crate) const CAPTURE_STATUS_NONE: c_int = 0;
pub(crate) const CAPTURE_MODE_RELAXED: c_int = 2;

// CUstreamBatchMemOpType and flags
pub(crate) const STREAM_MEM_OP_WAIT_VALUE_64: c_uint = 4;
pub(crate) const STREAM_MEM_OP_WRITE_VALUE_64: c_uint = 5;
pub(crate) const STREAM_WAIT_VALUE_GEQ: c_uint = 0;
/// Includes the memory barrier: all earlier work in the stream becomes visible system-wide first.
pub(crate) const STREAM_WRITE_VALUE_DEFAULT: c_uint = 0;
/// The driver's manual requires less than 256.
pub(crate) const MAX_BATCH_MEM_OPS: usize = 255;

// Virtual memory
pub(crate) const MEM_LOCATION_TYPE_DEVICE: c_int = 1;
pub(crate) const MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
pub(crate) const MEM_ACCESS_FLAGS_PROT_READWRITE: c_int = 3;

// Batched copies
pub(crate) const MEMCPY_SRC_ACCESS_ORDER_STREAM: c_int = 1;
pub(crate) const MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: c_uint = 1;

// CUjit_option
pub(crate) const JIT_ERROR_LOG_BUFFER: c_int = 5;
pub(crate) const JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_int = 6;

// CUdriverProcAddressQueryResult
pub(crate) const GET_PROC_ADDRESS_SUCCESS: c_int = 0;
pub(crate) const GET_PROC_ADDRESS_SYMBOL_NOT_FOUND: c_int = 1;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUuuid {
    pub(crate) bytes: [u8; 16],
}

/// Passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUipcMemHandle {
    pub(crate) reserved: [u8; 64],
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct CUmemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) kind: c_int,
    pub(crate) requested_handle_types: c_int,
    pub(crate) location: CUmemLocation,
    pub(crate) win32_handle_meta_data: *mut c_void,
    pub(crate) compression_type: u8,
    pub(crate) gpu_direct_rdma_capable: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUmemAccessDesc {
    pub(crate) location: CUmemLocation,
    pub(crate) flags: c_int,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUmemcpyAttributes {
    pub(crate) src_access_order: c_int,
    pub(crate) src_loc_hint: CUmemLocation,
    pub(crate) dst_loc_hint: CUmemLocation,
    pub(crate) flags: c_uint,
}

/// `CUstreamBatchMemOpParams` is a union of 6 words of 64 bits; this is the member for waits and writes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUstreamBatchMemOpParams {
    pub(crate) operation: c_uint,
    pub(crate) _gap: c_uint,
    pub(crate) address: CUdeviceptr,
    pub(crate) value: u64,
    pub(crate) flags: c_uint,
    pub(crate) _gap2: c_uint,
    pub(crate) alias: CUdeviceptr,
    pub(crate) _pad: u64,
}

const _: () = {
    assert!(size_of::<CUuuid>() == 16);
    assert!(size_of::<CUipcMemHandle>() == 64);
    assert!(size_of::<CUmemAllocationProp>() == 32);
    assert!(size_of::<CUmemAccessDesc>() == 12);
    assert!(size_of::<CUmemcpyAttributes>() == 24);
    assert!(size_of::<CUstreamBatchMemOpParams>() == 48);
};

pub(crate) type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> CUresult;
/// cuMemcpyBatchAsync of CUDA 12.8. Arguments: destinations, sources, sizes, count, attributes, the first copy of
/// each attribute, number of attributes, output for the index of the failing copy, stream.
pub(crate) type MemcpyBatch12 = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> CUresult;
/// cuMemcpyBatchAsync of CUDA 13.0, without the index.
pub(crate) type MemcpyBatch13 = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CUmemcpyAttributes,
    *mut usize,
    usize,
    CUstream,
) -> CUresult;
/// Function of a checking driver, not of CUDA. Arguments: context, kind of host access, address, value or size.
pub(crate) type HostTouch = unsafe extern "C" fn(CUcontext, c_int, CUdeviceptr, u64) -> u64;
pub(crate) type FuncLoad = unsafe extern "C" fn(CUfunction) -> CUresult;
pub(crate) type StreamValue64 = unsafe extern "C" fn(CUstream, CUdeviceptr, u64, c_uint) -> CUresult;
pub(crate) type StreamBatchMemOp =
    unsafe extern "C" fn(CUstream, c_uint, *mut CUstreamBatchMemOpParams, c_uint) -> CUresult;
