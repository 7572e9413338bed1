//! A driver older than the virtual memory API and stream memory operations. `build.rs` compiles it as a separate
//! library.

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: u32) -> i32 {
    0
}

/// # Safety
/// `version` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { *version = 8000 };
    0
}
