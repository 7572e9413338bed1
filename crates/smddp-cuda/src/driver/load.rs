//! Search and opening of the shared library.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// File name of the driver library on Linux, for every version.
pub const SONAME: &str = "libcuda.so.1";

/// An open shared library. It stays open until process exit, because the driver starts threads.
pub(super) struct Object(*mut c_void);

impl Object {
    /// Opens the library and passes it to `make`.
    ///
    /// Uses only the named file if there is one. Otherwise uses the library that the process has already loaded (for
    /// example by torch), or the library that the loader finds. The error lists each attempt with its reason.
    pub(super) fn open<T>(
        explicit: Option<&Path>,
        mut make: impl FnMut(&Self) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut looked = Vec::new();
        let mut attempt = |at: &Path, flags, how: &str| match Self::load(at, flags).and_then(|o| make(&o)) {
            Ok(made) => Some(made),
            Err(why) => {
                looked.push(format!("{} ({how}): {why}", at.display()));
                None
            }
        };
        let found = match explicit {
            Some(path) => attempt(path, 0, "named by the caller"),
            None => attempt(Path::new(SONAME), libc::RTLD_NOLOAD, "already loaded")
                .or_else(|| attempt(Path::new(SONAME), 0, "loader path")),
        };
        found.ok_or_else(|| format!("looked at: {}", looked.join("; ")))
    }

    fn load(at: &Path, flags: c_int) -> Result<Self, String> {
        let name = CString::new(at.as_os_str().as_bytes()).map_err(|_| "not a path".to_owned())?;
        // SAFETY: opening runs the library's initialisers; the caller or the system's administrator chose it. The
        // handle is never closed.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | flags) };
        if handle.is_null() {
            return Err(if flags == libc::RTLD_NOLOAD { "not loaded".to_owned() } else { last_error() });
        }
        Ok(Self(handle))
    }

    /// # Safety
    /// `F` is the type of the function `name`.
    pub(super) unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        // SAFETY: an open handle and a null-terminated string.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        // SAFETY: the caller's contract.
        (!found.is_null()).then(|| unsafe { cast(found) })
    }
}

/// # Safety
/// `F` is the type of the function at `found`.
pub(super) unsafe fn cast<F: Copy>(found: *mut c_void) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: equal sizes (asserted), and the caller guarantees a function of this type.
    unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) }
}

fn last_error() -> String {
    // SAFETY: returns a string of this thread, or null.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: null-terminated, and copied before the next call of the loader.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
