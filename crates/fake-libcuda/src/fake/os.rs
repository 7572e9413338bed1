//! System calls, declared here to avoid a dependency.

use std::ffi::{c_char, c_int, c_uint, c_void};

pub(crate) const PROT_NONE: c_int = 0;
pub(crate) const PROT_RW: c_int = 3;
pub(crate) const MAP_SHARED: c_int = 1;
pub(crate) const MAP_PRIVATE: c_int = 2;
pub(crate) const MAP_FIXED: c_int = 0x10;
pub(crate) const MAP_ANONYMOUS: c_int = 0x20;
pub(crate) const MAP_NORESERVE: c_int = 0x4000;
pub(crate) const MFD_CLOEXEC: c_uint = 1;
pub(crate) const F_DUPFD_CLOEXEC: c_int = 1030;

#[repr(C)]
pub(crate) struct IoVec {
    pub(crate) base: *mut c_void,
    pub(crate) bytes: usize,
}

unsafe extern "C" {
    pub(crate) fn mmap(
        at: *mut c_void,
        bytes: usize,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        offset: i64,
    ) -> *mut c_void;
    pub(crate) fn munmap(at: *mut c_void, bytes: usize) -> c_int;
    pub(crate) fn mprotect(at: *mut c_void, bytes: usize, prot: c_int) -> c_int;
    pub(crate) fn mincore(at: *mut c_void, bytes: usize, resident: *mut u8) -> c_int;
    pub(crate) fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    pub(crate) fn ftruncate(fd: c_int, bytes: i64) -> c_int;
    pub(crate) fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
    pub(crate) fn atexit(call: extern "C" fn()) -> c_int;
    fn process_vm_readv(
        pid: c_int,
        to: *const IoVec,
        n: usize,
        from: *const IoVec,
        m: usize,
        flags: usize,
    ) -> isize;
    fn process_vm_writev(
        pid: c_int,
        from: *const IoVec,
        n: usize,
        to: *const IoVec,
        m: usize,
        flags: usize,
    ) -> isize;
}

/// Creates memory that other processes can map. Returns the descriptor.
pub(crate) fn memfd(name: &str, bytes: usize) -> Option<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    let name = std::ffi::CString::new(name).ok()?;
    unsafe {
        let fd = memfd_create(name.as_ptr(), MFD_CLOEXEC);
        if fd < 0 {
            return None;
        }
        let fd = std::os::fd::OwnedFd::from_raw_fd(fd);
        (ftruncate(std::os::fd::AsRawFd::as_raw_fd(&fd), bytes as i64) == 0).then_some(fd)
    }
}

/// Returns the name that `memfd` gave to the memory behind a path in /proc.
pub(crate) fn memfd_name(path: &str) -> Option<String> {
    let target = std::fs::read_link(path).ok()?;
    let target = target.to_str()?;
    Some(target.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?.to_owned())
}

/// Maps memory; `None` if that fails.
pub(crate) fn map(at: u64, bytes: usize, prot: c_int, flags: c_int, fd: c_int) -> Option<u64> {
    let got = unsafe { mmap(at as *mut c_void, bytes, prot, flags, fd, 0) } as u64;
    (got != u64::MAX).then_some(got)
}

/// Reads memory that may be unmapped. Returns false if it is.
pub(crate) fn peek(from: u64, to: &mut [u8]) -> bool {
    let (ours, theirs) = (
        IoVec { base: to.as_mut_ptr().cast(), bytes: to.len() },
        IoVec { base: from as *mut c_void, bytes: to.len() },
    );
    unsafe { process_vm_readv(std::process::id() as c_int, &ours, 1, &theirs, 1, 0) == to.len() as isize }
}

/// Writes memory that may be unmapped. Returns false if it is.
pub(crate) fn poke(to: u64, from: u64, bytes: usize) -> bool {
    let (ours, theirs) =
        (IoVec { base: from as *mut c_void, bytes }, IoVec { base: to as *mut c_void, bytes });
    unsafe { process_vm_writev(std::process::id() as c_int, &ours, 1, &theirs, 1, 0) == bytes as isize }
}
