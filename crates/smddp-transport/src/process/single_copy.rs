//! Memory that another process of this node does not share: read by the kernel, where that permits it and is quicker than two copies.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::layout::SELF_ADDRESS;
use super::memory::SharedMemory;
use crate::fork::PerProcess;

/// What may be read where it lies by the ranks of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SingleCopy {
    Never,
    /// Where a measurement of this machine says that it is quicker.
    #[default]
    Auto,
    Always,
}

impl SingleCopy {
    /// Whether memory of this process is to be read so, if others may.
    pub(crate) fn is_enabled(self) -> bool {
        self == Self::Always || self == Self::Auto && Self::is_quicker()
    }

    /// Whether the kernel's copy is quicker on this machine than the two of staging; measured once, in a few milliseconds.
    pub fn is_quicker() -> bool {
        static FOUND: PerProcess<OnceLock<bool>> = PerProcess::new();
        *FOUND.get().get_or_init(measure)
    }
}

/// The kernel copies `bytes` bytes at `from`, an address of process `pid`, to `to`.
///
/// # Safety
/// `to` is writable for so many bytes, which nobody else touches meanwhile.
pub(crate) unsafe fn read(pid: Pid, from: usize, to: *mut u8, bytes: usize) -> io::Result<()> {
    let mut done = 0;
    while done < bytes {
        let local = libc::iovec { iov_base: to.wrapping_add(done).cast(), iov_len: bytes - done };
        let remote = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(from.wrapping_add(done)),
            iov_len: bytes - done,
        };
        // SAFETY: the kernel writes into `local`, the caller's, and checks what it reads; both vectors live until it returns.
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

/// Whether the kernel reads that process's memory for this one: a word of it holds its own address there.
pub(super) fn is_permitted(pid: Pid, memory: &SharedMemory) -> bool {
    let address = memory.flag64(SELF_ADDRESS).load(Ordering::Acquire);
    let mut found = [0; 8];
    // SAFETY: `found` is this thread's.
    let read = usize::try_from(address).map(|at| unsafe { read(pid, at, found.as_mut_ptr(), found.len()) });
    matches!(read, Ok(Ok(()))) && u64::from_ne_bytes(found) == address
}

/// Whether the kernel reads the ends of this process's `bytes` at `at`: it does not read what a device's driver has mapped.
pub(crate) fn is_readable(at: *const u8, bytes: usize) -> bool {
    let me = rustix::process::getpid();
    let mut end = 0_u8;
    // SAFETY: `end` is this thread's.
    bytes > 0 && [0, bytes - 1].iter().all(|&i| unsafe { read(me, at as usize + i, &raw mut end, 1) }.is_ok())
}

/// What is copied to see: more than a second-level cache as a rule.
const SAMPLE: usize = 2 << 20;

fn measure() -> bool {
    let me = rustix::process::getpid();
    let page = rustix::param::page_size();
    // The kernel's copy is slowest where both begin alike in their pages, as large tensors do; `memcpy` of some makes as well.
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
    // SAFETY: both are this function's own.
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
    fn what_is_mapped_is_read_and_what_is_not_is_an_error() {
        let me = rustix::process::getpid();
        let (from, mut to) = ([7_u8; 100], [0_u8; 100]);
        // SAFETY: `to` is this thread's.
        unsafe { read(me, from.as_ptr() as usize, to.as_mut_ptr(), 100) }.unwrap();
        assert_eq!(to, from);
        // SAFETY: as above; nothing is mapped there.
        assert!(unsafe { read(me, 8, to.as_mut_ptr(), 100) }.is_err());
        assert!(is_readable(from.as_ptr(), 100) && !is_readable(std::ptr::without_provenance(8), 100));
    }

    #[test]
    fn a_process_is_read_where_it_says_so_itself() {
        let me = rustix::process::getpid();
        let (memory, _fd) = SharedMemory::create(1 << 16).unwrap();
        assert!(!is_permitted(me, &memory), "nothing is told");
        let word = memory.flag64(SELF_ADDRESS);
        word.store(word.as_ptr() as u64, Ordering::Release);
        assert!(is_permitted(me, &memory));
        let other = 5_u64;
        word.store(&raw const other as u64, Ordering::Release);
        assert!(!is_permitted(me, &memory), "another process's");
    }
}
