//! A driver from before virtual memory and stream memory operations. Compiled by `build.rs` as a library of its own.

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: u32) -> i32 {
    0
}

/// # Safety
/// `version` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { *version = 8000 };
    0
}
