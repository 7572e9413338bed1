//! Initialisation, devices, contexts, and function lookup by release.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::api;
use crate::state::*;
use crate::numbers::{CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, CUDA_ERROR_INVALID_HANDLE, GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED};
use crate::types::*;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuInit(flags: c_uint) -> CUresult {
    count("cuInit");
    if flags != 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    initialise().err().unwrap_or(CUDA_SUCCESS)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    write_out(version, settings().version).err().unwrap_or(CUDA_SUCCESS)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorName(code: CUresult, name: *mut *const c_char) -> CUresult {
    macro_rules! names {
        ($($known:ident)*) => {
            [$(($known, concat!(stringify!($known), "\0"))),*]
        };
    }
    let known = names! {
        CUDA_SUCCESS CUDA_ERROR_INVALID_VALUE CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_NOT_INITIALIZED
        CUDA_ERROR_DEINITIALIZED CUDA_ERROR_NO_DEVICE CUDA_ERROR_INVALID_DEVICE CUDA_ERROR_INVALID_CONTEXT
        CUDA_ERROR_MAP_FAILED CUDA_ERROR_ALREADY_MAPPED CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        CUDA_ERROR_INVALID_PTX CUDA_ERROR_INVALID_HANDLE CUDA_ERROR_NOT_FOUND CUDA_ERROR_NOT_READY
        CUDA_ERROR_ILLEGAL_ADDRESS CUDA_ERROR_CONTEXT_IS_DESTROYED CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED CUDA_ERROR_LAUNCH_FAILED CUDA_ERROR_NOT_PERMITTED
        CUDA_ERROR_NOT_SUPPORTED CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    };
    let Some((_, text)) = known.iter().find(|(known, _)| *known == code) else {
        name.write(std::ptr::null());
        return CUDA_ERROR_INVALID_VALUE;
    };
    name.write(text.as_ptr().cast());
    CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_calls(name: *const c_char) -> u64 {
    calls(CStr::from_ptr(name).to_str().unwrap_or_default())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_open() -> u64 {
    crate::memory::open() + crate::streams::open() + crate::modules::open() + retained()
}

/// Returns the newest function that is not newer than the requested release and the driver.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    release: c_int,
    flags: u64,
    status: *mut c_int,
) -> CUresult {
    use crate::{copies, modules, words};
    count("cuGetProcAddress_v2");
    if symbol.is_null() || function.is_null() || flags > 2 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let known: [(&CStr, c_int, *mut c_void); 6] = [
        (c"cuFuncLoad", 12040, modules::cuFuncLoad as *mut c_void),
        (c"cuStreamWaitValue64", 11070, words::cuStreamWaitValue64_v2 as *mut c_void),
        (c"cuStreamWriteValue64", 11070, words::cuStreamWriteValue64_v2 as *mut c_void),
        (c"cuStreamBatchMemOp", 11070, words::cuStreamBatchMemOp_v2 as *mut c_void),
        (c"cuMemcpyBatchAsync", 12080, copies::memcpy_batch_12 as *mut c_void),
        (c"cuMemcpyBatchAsync", 13000, copies::memcpy_batch_13 as *mut c_void),
    ];
    let symbol = CStr::from_ptr(symbol);
    let newest = release.min(settings().version);
    let named = || known.iter().filter(|(name, ..)| *name == symbol);
    let found = named().filter(|(_, since, _)| *since <= newest).max_by_key(|(_, since, _)| *since);
    function.write(found.map_or(std::ptr::null_mut(), |(_, _, function)| *function));
    let result = match (found, named().next()) {
        (Some(_), _) => GET_PROC_ADDRESS_SUCCESS,
        (None, Some(_)) => GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT,
        (None, None) => GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
    };
    if !status.is_null() {
        status.write(result);
    }
    if found.is_some() { CUDA_SUCCESS } else { CUDA_ERROR_NOT_FOUND }
}

api! {
    fn cuDeviceGetCount(count: *mut c_int) {
        write_out(count, settings().visible.len() as c_int)
    }

    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        write_out(device, check_device(ordinal)? as CUdevice)
    }

    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: CUdevice) {
        let text = format!("Fake GPU {}\0", settings().visible[check_device(device)?]);
        let count = text.len().min(bytes as usize);
        std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), count);
        Ok(())
    }

    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) {
        let mut bytes = *b"fake-cuda-gpu-00";
        let number = settings().visible[check_device(device)?] as u8;
        bytes[14] += number / 10;
        bytes[15] += number % 10;
        write_out(uuid, CUuuid { bytes })
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice) {
        check_device(device)?;
        write_out(value, match attribute {
            UNIFIED_ADDRESSING | VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => 1,
            CAN_USE_64_BIT_STREAM_MEM_OPS => settings().memops.into(),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        })
    }

    fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice) {
        let (device, peer) = (check_device(device)?, check_device(peer)?);
        // A device is not its own peer.
        write_out(can, (device != peer && settings().reaches(device, settings().visible[peer])).into())
    }

    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) {
        write_out(context, retain(check_device(device)?))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) {
        release(check_device(device)?)
    }

    fn cuCtxGetCurrent(context: *mut CUcontext) {
        write_out(context, contexts(|contexts| contexts.last().copied().unwrap_or(0))?)
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        contexts(|contexts| contexts.pop())?;
        if context == 0 { Ok(()) } else { push(context) }
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        push(context)
    }

    fn cuCtxPopCurrent_v2(context: *mut CUcontext) {
        write_out(context, contexts(Vec::pop)?.ok_or(CUDA_ERROR_INVALID_CONTEXT)?)
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        current()?;
        write_out(least, 0)?;
        write_out(greatest, -5)
    }
}
