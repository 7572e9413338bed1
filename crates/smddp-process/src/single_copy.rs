//! Reads of private memory of another process of this node (`process_vm_readv`), if permitted and faster than two
//! copies.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use smddp_base::fork::PerProcess;

use super::layout::SELF_ADDRESS;
use super::memory::SharedMemory;

/// Use of single copies by the ranks of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SingleCopy {
    /// Never used.
    Never,
    /// Used if a measurement on this machine shows that it is faster.
    #[default]
    Auto,
    /// Used wherever permitted, without a measurement.
    Always,
}

impl SingleCopy {
    /// Returns true if peers should read private memory of this process, if they can.
    pub fn is_enabled(self) -> bool {
        self == Self::Always || self == Self::Auto && Self::is_quicker()
    }

    /// Returns true if the kernel's copy is faster on this machine than two copies through staging; measured once, in
    /// a few milliseconds.
    pub fn is_quicker() -> bool {
        static FOUND: PerProcess<OnceLock<bool>> = PerProcess::new();
        *FOUND.get().get_or_init(measure)
    }
}

/// Copies `bytes` bytes from the address `from` of process `pid` to `to`, through the kernel.
///
/// # Errors
/// The process has ended, does not permit the access, or has no such memory. A part of the bytes may be copied.
///
/// # Safety
/// `to` is valid for writes of `bytes` bytes, which no other thread accesses meanwhile.
pub unsafe fn read(pid: Pid, from: usize, to: *mut u8, bytes: usize) -> io::Result<()> {
    let mut done = 0;
    while done < bytes {
        let local = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: bytes - done };
        let remote = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(from.wrapping_add(done)),
            iov_len: bytes - done,
        };
        // SAFETY: the kernel writes into `local`, which the caller provides, and checks what it reads; both vectors
        // live until it returns.
        let read =
            unsafe { libc::process_vm_readv(pid.as_raw_pid(), &raw const local, 1, &raw const remote, 1, 0) };
        match usize::try_from(read) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// Returns true if the kernel reads that process's memory for this one: a field of it contains its own address there.
pub(super) fn is_permitted(pid: Pid, memory: &SharedMemory) -> bool {
    let address = memory.flag64(SELF_ADDRESS).load(Ordering::Acquire);
    let mut found = [0; 8];
    // SAFETY: `found` is a local variable.
    let read = usize::try_from(address).map(|at| unsafe { read(pid, at, found.as_mut_ptr(), found.len()) });
    matches!(read, Ok(Ok(()))) && u64::from_ne_bytes(found) == address
}

/// Returns true if the kernel can read the first and last byte of `bytes` bytes at `at` of this process. It cannot
/// read mappings of device drivers.
pub fn is_readable(at: *const u8, bytes: usize) -> bool {
    let me = rustix::process::getpid();
    let mut end = 0_u8;
    // SAFETY: `end` is a local variable.
    bytes > 0 && [0, bytes - 1].iter().all(|&i| unsafe { read(me, at as usize + i, &raw mut end, 1) }.is_ok())
}

/// Bytes of the measured copy; usually more than a second-level cache.
const SAMPLE: usize = 2 << 20;

fn measure() -> bool {
    let me = rustix::process::getpid();
    let page = rustix::param::page_size();
    // The kernel's copy is slowest if both buffers have the same page offset, as large tensors do. On some
    // processors `memcpy` is too.
    let [from, mut to, mut between] = [(); 3].map(|()| vec![1_u8; SAMPLE + 2 * page]);
    let begin = |at: &[u8]| page - at.as_ptr() as usize % page;
    let (source, target) = (begin(&from), begin(&to));
    let best = |copy: &mut dyn FnMut() -> bool| {
        let took = (0..3).map(|_| {
            let begun = Instant::now();
            if copy() { begun.elapsed() } else { Duration::MAX }
        });
        took.min().unwrap_or(Duration::MAX)
    };
    let at = from[source..].as_ptr() as usize;
    // SAFETY: this function owns both buffers.
    let single = best(&mut || unsafe { read(me, at, to[target..].as_mut_ptr(), SAMPLE) }.is_ok());
    let staged = best(&mut || {
        between[64..64 + SAMPLE].copy_from_slice(&from[source..source + SAMPLE]);
        to[target..target + SAMPLE].copy_from_slice(&between[64..64 + SAMPLE]);
        std::hint::black_box(&mut to);
        true
    });
    single < staged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_is_read_and_unmapped_memory_is_an_error() {
        let me = rustix::process::getpid();
        let (from, mut to) = ([7_u8; 100], [0_u8; 100]);
        // SAFETY: `to` is a local variable.
        unsafe { read(me, from.as_ptr() as usize, to.as_mut_ptr(), 100) }.unwrap();
        assert_eq!(to, from);
        // SAFETY: as above; the address is not mapped.
        assert!(unsafe { read(me, 8, to.as_mut_ptr(), 100) }.is_err());
        assert!(is_readable(from.as_ptr(), 100) && !is_readable(std::ptr::without_provenance(8), 100));
    }

    #[test]
    fn reads_are_permitted_only_if_the_field_contains_its_own_address() {
        let me = rustix::process::getpid();
        let (memory, _fd) = SharedMemory::create(1 << 16).unwrap();
        assert!(!is_permitted(me, &memory), "the field is empty");
        let field = memory.flag64(SELF_ADDRESS);
        field.store(field.as_ptr() as u64, Ordering::Release);
        assert!(is_permitted(me, &memory));
        let other = 5_u64;
        field.store(&raw const other as u64, Ordering::Release);
        assert!(!is_permitted(me, &memory), "the field contains another address");
    }
}
