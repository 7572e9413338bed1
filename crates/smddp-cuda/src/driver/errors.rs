//! Names of the driver's error codes, and advice for the common ones.

use std::ffi::CStr;

use super::table::Required;
use super::types::*;
use crate::device::{Error, Result};

impl Required {
    /// Returns the driver's name of a code.
    fn name(&self, code: CUresult) -> String {
        let mut text = std::ptr::null();
        // SAFETY: sets the pointer to a static string, or to null for an unknown code.
        unsafe { (self.get_error_name)(code, &raw mut text) };
        if text.is_null() {
            return "unknown error".to_owned();
        }
        // SAFETY: null-terminated string of the library, which is never unloaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Returns an error that names the function `call`, unless the code is success.
    #[inline]
    pub(super) fn check(&self, call: &'static CStr, code: CUresult) -> Result<()> {
        if code == CUDA_SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    #[cold]
    fn error(&self, call: &'static CStr, code: CUresult) -> Error {
        // Removes the version suffix of the signature.
        let call = call.to_str().unwrap_or_default().trim_end_matches("_v2");
        Error::Driver { call, code, name: self.name(code), advice: advice(code).to_owned() }
    }
}

/// Returns the driver's code; success for an error without one.
pub(super) fn code_of(error: &Error) -> CUresult {
    if let Error::Driver { code, .. } = error { *code } else { CUDA_SUCCESS }
}

/// Returns advice for a code; empty if there is none.
fn advice(code: CUresult) -> &'static str {
    match code {
        CUDA_ERROR_OUT_OF_MEMORY => {
            "the device is out of memory: torch's cache may hold it (torch.cuda.empty_cache()), or other processes"
        }
        CUDA_ERROR_INVALID_VALUE => "the memory may have been freed, or may not be the device's",
        CUDA_ERROR_NOT_INITIALIZED => {
            "a process that was forked after CUDA was used cannot use it: start it with the method spawn"
        }
        CUDA_ERROR_DEINITIALIZED => "the process is exiting, and the driver has shut down already",
        CUDA_ERROR_STUB_LIBRARY => {
            "a toolkit's stub library was loaded instead of the driver: remove it from the loader path"
        }
        CUDA_ERROR_DEVICE_UNAVAILABLE => "another process uses the device exclusively (compute mode)",
        CUDA_ERROR_NO_DEVICE => "no device is visible: see CUDA_VISIBLE_DEVICES",
        CUDA_ERROR_INVALID_DEVICE => "the device does not exist, or CUDA_VISIBLE_DEVICES hides it",
        CUDA_ERROR_INVALID_CONTEXT | CUDA_ERROR_CONTEXT_IS_DESTROYED => {
            "the device's context was destroyed: the device was reset, or the process is exiting"
        }
        CUDA_ERROR_MAP_FAILED | CUDA_ERROR_PEER_ACCESS_UNSUPPORTED => {
            "the devices cannot access each other's memory, or a container or MIG separates them"
        }
        CUDA_ERROR_ALREADY_MAPPED => {
            "the exporting process freed memory that is still mapped here, and a new allocation got the same addresses: \
             close the old mapping first"
        }
        CUDA_ERROR_NO_BINARY_FOR_GPU
        | CUDA_ERROR_INVALID_PTX
        | CUDA_ERROR_JIT_COMPILER_NOT_FOUND
        | CUDA_ERROR_UNSUPPORTED_PTX_VERSION
        | CUDA_ERROR_JIT_COMPILATION_DISABLED => {
            "the driver cannot compile the reductions: it may be too old"
        }
        CUDA_ERROR_ECC_UNCORRECTABLE | CUDA_ERROR_ILLEGAL_ADDRESS | CUDA_ERROR_LAUNCH_FAILED => {
            "the device's context is corrupted and the process must exit; the cause may be earlier work of any library \
             (set CUDA_LAUNCH_BLOCKING=1 to find the kernel)"
        }
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => {
            "the memory, or a part of it, is already registered with CUDA"
        }
        CUDA_ERROR_NOT_PERMITTED => "a sandbox, container or operation in progress does not allow it",
        CUDA_ERROR_NOT_SUPPORTED => "this device, driver or virtual machine does not support it",
        CUDA_ERROR_SYSTEM_NOT_READY => "the system is not ready: nvidia-fabricmanager may not be running",
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "the driver's library and its kernel module differ: reboot after an upgrade"
        }
        CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "the forward-compatibility library is loaded, which this device does not support"
        }
        CUDA_ERROR_MPS_CONNECTION_FAILED => "the MPS daemon does not respond",
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        | CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        | CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        | CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD => "a stream is being captured into a graph",
        _ => "",
    }
}
