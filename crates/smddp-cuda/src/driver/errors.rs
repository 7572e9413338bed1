//! What the driver's codes mean, and what to do about the common ones.

use std::ffi::CStr;

use super::table::Required;
use super::types::*;
use crate::device::{Error, Result};

impl Required {
    /// The driver's name for a code.
    fn name(&self, code: CUresult) -> String {
        let mut text = std::ptr::null();
        // SAFETY: sets the pointer to a static string, or to null for a code that it does not know.
        unsafe { (self.get_error_name)(code, &raw mut text) };
        if text.is_null() {
            return "unknown error".to_owned();
        }
        // SAFETY: null-terminated, the library's own, which is never unloaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// The error of the function `call` where it returned another code than success.
    #[inline]
    pub(super) fn check(&self, call: &'static CStr, code: CUresult) -> Result<()> {
        if code == CUDA_SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    #[cold]
    fn error(&self, call: &'static CStr, code: CUresult) -> Error {
        // Without the version of its signature.
        let call = call.to_str().unwrap_or_default().trim_end_matches("_v2");
        Error::Driver { call, code, name: self.name(code), advice: advice(code).to_owned() }
    }
}

/// The driver's code, or success for an error that is not the driver's.
pub(super) fn code_of(error: &Error) -> CUresult {
    if let Error::Driver { code, .. } = error { *code } else { CUDA_SUCCESS }
}

/// What to do about it; empty where there is nothing to say.
fn advice(code: CUresult) -> &'static str {
    match code {
        CUDA_ERROR_OUT_OF_MEMORY => {
            "the device is out of memory: torch's cache may hold it (torch.cuda.empty_cache()), or other processes"
        }
        CUDA_ERROR_INVALID_VALUE => "the memory may have been freed, or may not be the device's",
        CUDA_ERROR_NOT_INITIALIZED => {
            "a process that was forked after CUDA was used cannot use it: start it with the method spawn"
        }
        CUDA_ERROR_DEINITIALIZED => "the process is ending, and the driver has shut down already",
        CUDA_ERROR_STUB_LIBRARY => {
            "a toolkit's stub was loaded in place of the driver: take it off the loader path"
        }
        CUDA_ERROR_DEVICE_UNAVAILABLE => "another process has the device for itself (compute mode)",
        CUDA_ERROR_NO_DEVICE => "no device is visible: see CUDA_VISIBLE_DEVICES",
        CUDA_ERROR_INVALID_DEVICE => "there is no such device, or CUDA_VISIBLE_DEVICES hides it",
        CUDA_ERROR_INVALID_CONTEXT | CUDA_ERROR_CONTEXT_IS_DESTROYED => {
            "the device's context is gone: it was reset, or the process is ending"
        }
        CUDA_ERROR_MAP_FAILED | CUDA_ERROR_PEER_ACCESS_UNSUPPORTED => {
            "the devices cannot reach each other's memory, or a container or MIG is between them"
        }
        CUDA_ERROR_ALREADY_MAPPED => {
            "its owner freed memory that is still mapped here, and got the same addresses for this: the old mapping \
             has to be closed first"
        }
        CUDA_ERROR_NO_BINARY_FOR_GPU
        | CUDA_ERROR_INVALID_PTX
        | CUDA_ERROR_JIT_COMPILER_NOT_FOUND
        | CUDA_ERROR_UNSUPPORTED_PTX_VERSION
        | CUDA_ERROR_JIT_COMPILATION_DISABLED => {
            "the driver cannot compile the reductions: it may be too old"
        }
        CUDA_ERROR_ECC_UNCORRECTABLE | CUDA_ERROR_ILLEGAL_ADDRESS | CUDA_ERROR_LAUNCH_FAILED => {
            "the device's context is broken and the process has to end; the cause may be earlier work of anybody's \
             (CUDA_LAUNCH_BLOCKING=1 finds kernels)"
        }
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => {
            "the memory, or a part of it, is known to the device already"
        }
        CUDA_ERROR_NOT_PERMITTED => "a sandbox, container or operation in progress does not allow it",
        CUDA_ERROR_NOT_SUPPORTED => "this device, driver or virtual machine does not have it",
        CUDA_ERROR_SYSTEM_NOT_READY => "the system is not ready: nvidia-fabricmanager may not be running",
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "the driver's library and its kernel module differ: reboot after an upgrade"
        }
        CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "the forward-compatibility library is loaded, which this device does not support"
        }
        CUDA_ERROR_MPS_CONNECTION_FAILED => "the MPS daemon does not answer",
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        | CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        | CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        | CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD => "a stream is being captured into a graph",
        _ => "",
    }
}
