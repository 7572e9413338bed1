//! Shared memory: a sealed memfd with typed, bounds-checked access.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};

use super::order::Counter;
use super::room::too_small;

/// Returns an error that names the system call and how to permit it.
pub fn system_call_error(call: &str, reason: Errno) -> io::Error {
    let advice = match reason {
        Errno::PERM | Errno::ACCESS | Errno::NOSYS => {
            "; a seccomp filter or sandbox forbids it: allow this system call"
        }
        Errno::MFILE | Errno::NFILE => "; raise the limit of open files (ulimit -n)",
        _ => "",
    };
    io::Error::new(io::Error::from(reason).kind(), format!("the system call {call} failed: {reason}{advice}"))
}

/// Shared mapping. Access uses atomics or raw pointers, never plain references, because another process may write at
/// any time.
#[derive(Debug)]
pub struct SharedMemory {
    base: *mut u8,
    len: usize,
    /// A device may have mapped pages.
    pinned: AtomicBool,
}

// SAFETY: the mapping lives until `drop` and belongs to no thread. Access uses atomics, or raw pointers whose users
// order their accesses (`channels` and `messages` in `smddp-shm`).
unsafe impl Send for SharedMemory {}
// SAFETY: as above; shared references hand out atomics and raw pointers only.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates memory of `len` bytes of fixed size. Pages are allocated on first touch.
    pub(crate) fn create(len: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("smddp", flags)
            .map_err(|reason| system_call_error("memfd_create", reason))?;
        // The kernel would send SIGXFSZ, which ends a process that does not ignore it.
        if getrlimit(Resource::Fsize).current.is_some_and(|most| most < len as u64) {
            return Err(io::Error::other(too_small(&format!("{} MiB of shared memory", len >> 20), 1)));
        }
        rustix::fs::ftruncate(&fd, len as u64).map_err(|reason| system_call_error("ftruncate", reason))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)
            .map_err(|reason| system_call_error("fcntl(F_ADD_SEALS)", reason))?;
        Ok((Self::map(Some(fd.as_fd()), len)?, fd))
    }

    /// Creates memory that is private to this process, for data of other nodes.
    pub(crate) fn private(len: usize) -> io::Result<Self> {
        Self::map(None, len)
    }

    /// Maps another process's memory. Rejects a descriptor that could shrink, because accesses would raise SIGBUS.
    pub(crate) fn open(fd: impl AsFd, len: usize) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(fd.as_fd())?;
        let size = rustix::fs::fstat(fd.as_fd())?.st_size;
        if !seals.contains(SealFlags::SHRINK) || u64::try_from(size).ok() != Some(len as u64) {
            return Err(io::Error::other(format!(
                "shared memory of {size} bytes is not sealed or not of {len} bytes"
            )));
        }
        Self::map(Some(fd.as_fd()), len)
    }

    fn map(fd: Option<BorrowedFd<'_>>, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses; the returned value owns it; valid on any
        // thread.
        let base = unsafe {
            let (protection, flags) =
                (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
            match fd {
                Some(fd) => rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0),
                None => rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, flags),
            }
        };
        let base = base.map_err(|reason| match reason {
            Errno::NOMEM => {
                let text = too_small(&format!("a mapping of {} MiB", len >> 20), 1);
                io::Error::new(io::ErrorKind::OutOfMemory, text)
            }
            reason => system_call_error("mmap", reason),
        })?;
        // A core dump would contain the whole reserve once for each rank of the host, and reading its holes would allocate them.
        // SAFETY: the mapping made above; the advice changes no bytes.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxDontDump) };
        Ok(Self { base: base.cast(), len, pinned: AtomicBool::new(false) })
    }

    /// Returns the size in bytes. Never zero.
    #[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if `bytes` bytes at `offset` are inside and 8-byte aligned. Every location that another process
    /// names is checked before use.
    #[inline]
    pub fn contains(&self, offset: usize, bytes: usize) -> bool {
        offset.is_multiple_of(8) && offset <= self.len && bytes <= self.len - offset
    }

    /// Returns the offset of an address; `None` if it precedes the mapping.
    pub(crate) fn offset(&self, at: usize) -> Option<usize> {
        at.checked_sub(self.base as usize)
    }

    /// Returns the address of `bytes` bytes at `offset`. Locations from other processes were checked before
    /// ([`Self::contains`]), so an offset out of range is a bug of this process and panics.
    #[inline]
    pub fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(
            offset <= self.len && bytes <= self.len - offset,
            "offset {offset}+{bytes} outside shared memory"
        );
        self.base.wrapping_add(offset)
    }

    /// Returns a counter that one rank publishes to others.
    #[inline]
    pub fn counter(&self, offset: usize) -> Counter<'_> {
        Counter(self.flag64(offset))
    }

    /// Returns adjacent 8-byte fields.
    #[inline]
    pub fn flags<const N: usize>(&self, offset: usize) -> &[AtomicU64; N] {
        let at = self.at(offset, 8 * N);
        assert!(offset.is_multiple_of(8));
        // SAFETY: as in `flag64`; an atomic has the layout of its integer, and an array that of adjacent elements.
        unsafe { &*at.cast::<[AtomicU64; N]>() }
    }

    /// Returns the atomic of eight bytes at that offset.
    ///
    /// # Panics
    /// The offset is outside or not a multiple of 8.
    #[inline]
    pub fn flag64(&self, offset: usize) -> &AtomicU64 {
        let at = self.at(offset, 8);
        assert!(offset.is_multiple_of(8));
        // SAFETY: in range and aligned (checked above; the base is page aligned); lives as long as `self`; all
        // processes access this location only as an atomic.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }

    /// Returns the atomic of four bytes at that offset.
    ///
    /// # Panics
    /// The offset is outside or not a multiple of 4.
    #[inline]
    pub fn flag32(&self, offset: usize) -> &AtomicU32 {
        let at = self.at(offset, 4);
        assert!(offset.is_multiple_of(4));
        // SAFETY: as in `flag64`.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    /// Touches pages before use, so that the first operation does not pay for the page faults. Best effort.
    pub(crate) fn populate(&self, offset: usize, bytes: usize, write: bool) {
        let page = page_size();
        let start = offset - offset % page;
        let end = (offset + bytes).next_multiple_of(page).min(self.len);
        let advice = if write { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        // SAFETY: the range lies inside this mapping (checked by `at`); populating changes no bytes.
        let _ = unsafe { rustix::mm::madvise(self.at(start, end - start).cast(), end - start, advice) };
    }

    /// Zeroes the range with 8-byte stores, because others may read it meanwhile. A reader of a zero observes all
    /// earlier writes of this thread.
    pub(crate) fn clear(&self, offset: usize, bytes: usize) {
        fence(Ordering::Release);
        for at in (offset..offset + bytes).step_by(8) {
            self.flag64(at).store(0, Ordering::Relaxed);
        }
    }

    /// Writes the length and bytes of a text, truncated to `most` bytes. Others may read it at any time: they observe
    /// all of it or nothing, or, if it replaces another text, possibly a mixture.
    pub fn write_text(&self, offset: usize, text: &str, most: usize) {
        let bytes = &text.as_bytes()[..text.len().min(most)];
        self.flag64(offset).store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        for (i, chunk) in bytes.chunks(8).enumerate() {
            let mut value = [0; 8];
            value[..chunk.len()].copy_from_slice(chunk);
            self.flag64(offset + 8 + 8 * i).store(u64::from_le_bytes(value), Ordering::Relaxed);
        }
        self.flag64(offset).store(bytes.len() as u64, Ordering::Release);
    }

    /// Reads what [`Self::write_text`] wrote; tolerates arbitrary contents.
    pub fn read_text(&self, offset: usize, most: usize) -> String {
        let length = usize::try_from(self.flag64(offset).load(Ordering::Acquire))
            .map_or(most, |length| length.min(most));
        let bytes: Vec<u8> = (0..length.div_ceil(8))
            .flat_map(|i| self.flag64(offset + 8 + 8 * i).load(Ordering::Relaxed).to_le_bytes())
            .take(length)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Marks all pages as possibly mapped by a device. A device would keep using the old page after `discard`.
    pub(crate) fn pin(&self) {
        self.pinned.store(true, Ordering::Relaxed);
    }

    pub(crate) fn pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Returns the whole pages in the range to the system; they read as zero afterwards (not under emulators). The
    /// end is rounded down here, because the kernel would round it up and discard what follows.
    pub(crate) fn discard(&self, offset: usize, bytes: usize) {
        let page = page_size();
        let (start, end) = (offset.next_multiple_of(page), offset + bytes - (offset + bytes) % page);
        if start >= end {
            return;
        }
        // SAFETY: in range (checked by `at`); the caller's allocator owns the range, which has no readers.
        let _ = unsafe { libc::madvise(self.at(start, end - start).cast(), end - start, libc::MADV_REMOVE) };
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length and unmapped once; users of pointers into it hold an `Arc`.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns (first address, flags) of each mapping of this process whose name contains `name`.
    fn mappings(name: &str) -> Vec<(usize, String)> {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut found, mut first) = (Vec::new(), None);
        for line in text.lines() {
            if let Some(flags) = line.strip_prefix("VmFlags:") {
                found.extend(first.take().map(|first| (first, flags.to_owned())));
            } else if let Some((start, _)) = line.split_once('-')
                && let Ok(start) = usize::from_str_radix(start, 16)
            {
                first = line.contains(name).then_some(start);
            }
        }
        found
    }

    #[test]
    fn shared_memory_is_excluded_from_core_dumps() {
        let (own, fd) = SharedMemory::create(3 * page_size()).unwrap();
        let peers = SharedMemory::open(&fd, 3 * page_size()).unwrap();
        let found = mappings("/memfd:smddp");
        for memory in [&own, &peers] {
            let (_, flags) =
                found.iter().find(|(first, _)| *first == memory.base as usize).expect("a mapping");
            assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
        }
    }

    #[test]
    fn discard_releases_only_whole_pages() {
        let page = page_size();
        let (memory, _fd) = SharedMemory::create(6 * page).unwrap();
        let values = |memory: &SharedMemory| -> Vec<u64> {
            (0..12).map(|half| memory.flag64(half * page / 2).load(Ordering::Relaxed)).collect()
        };
        let fill = || (0..12).for_each(|half| memory.flag64(half * page / 2).store(7, Ordering::Relaxed));
        // From the middle of page 1 to the middle of page 4: pages 2 and 3.
        fill();
        memory.discard(page + page / 2, 3 * page);
        assert_eq!(values(&memory), [7, 7, 7, 7, 0, 0, 0, 0, 7, 7, 7, 7]);
        // One whole page; then a range that spans two pages and contains neither.
        fill();
        memory.discard(page, page);
        memory.discard(4 * page + page / 2, page);
        assert_eq!(values(&memory), [7, 7, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7]);
    }
}
