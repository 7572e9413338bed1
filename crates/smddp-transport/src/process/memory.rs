//! Memory that several processes map: a sealed memfd and typed, bounds-checked windows into it.

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

/// An error that names the system call and says how to permit it.
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

/// A shared mapping. Everything in it is reached as atomics or by raw pointer, never as plain references, so
/// that another process may write at any time.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    base: *mut u8,
    len: usize,
    /// A device may hold pages of it.
    pinned: AtomicBool,
}

// SAFETY: the mapping lives until `drop`, belongs to no thread, and is only reached through atomics or through
// raw pointers whose users say who may write when (outlets.rs, messages.rs).
unsafe impl Send for SharedMemory {}
// SAFETY: as above; shared references hand out atomics and raw pointers only.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// New anonymous memory of `len` bytes whose size nobody can change. Pages appear when first touched.
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

    /// New memory of this process alone: for what goes to other nodes.
    pub(crate) fn private(len: usize) -> io::Result<Self> {
        Self::map(None, len)
    }

    /// Maps another process's memory. A descriptor that could shrink under us is refused: it would be SIGBUS.
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
        // SAFETY: a fresh mapping at an address the kernel picks; owned by the value returned; any thread.
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

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether `bytes` bytes at `offset` lie in it, aligned for words. Asked of every place that another process names,
    /// before it is used.
    #[inline]
    pub(crate) fn contains(&self, offset: usize, bytes: usize) -> bool {
        offset.is_multiple_of(8) && offset <= self.len && bytes <= self.len - offset
    }

    /// How far from the beginning an address lies, if not before it.
    pub(crate) fn offset(&self, at: usize) -> Option<usize> {
        at.checked_sub(self.base as usize)
    }

    /// Address of `bytes` bytes at `offset`. What another process names was looked at before ([`Self::contains`]): out of
    /// range is a bug of this one, and stops here.
    #[inline]
    pub(crate) fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(
            offset <= self.len && bytes <= self.len - offset,
            "offset {offset}+{bytes} outside shared memory"
        );
        self.base.wrapping_add(offset)
    }

    /// A number that one rank tells others.
    #[inline]
    pub(crate) fn counter(&self, offset: usize) -> Counter<'_> {
        Counter(self.flag64(offset))
    }

    /// Words in a row.
    #[inline]
    pub(crate) fn flags<const N: usize>(&self, offset: usize) -> &[AtomicU64; N] {
        let at = self.at(offset, 8 * N);
        assert!(offset.is_multiple_of(8));
        // SAFETY: as in `flag64`; an atomic has the layout of its number, and an array that of its elements in a row.
        unsafe { &*at.cast::<[AtomicU64; N]>() }
    }

    #[inline]
    pub(crate) fn flag64(&self, offset: usize) -> &AtomicU64 {
        let at = self.at(offset, 8);
        assert!(offset.is_multiple_of(8));
        // SAFETY: in range and aligned (checked above; the base is page aligned); lives as long as `self`; all
        // processes use this place as an atomic only.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }

    #[inline]
    pub(crate) fn flag32(&self, offset: usize) -> &AtomicU32 {
        let at = self.at(offset, 4);
        assert!(offset.is_multiple_of(4));
        // SAFETY: as in `flag64`.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    /// Touches pages ahead of use, so that the first operation does not pay for them. Best effort.
    pub(crate) fn populate(&self, offset: usize, bytes: usize, write: bool) {
        let page = page_size();
        let start = offset - offset % page;
        let end = (offset + bytes).next_multiple_of(page).min(self.len);
        let advice = if write { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        // SAFETY: the range lies inside this mapping (checked by `at`); populating changes no bytes.
        let _ = unsafe { rustix::mm::madvise(self.at(start, end - start).cast(), end - start, advice) };
    }

    /// Writes zeros, by words: others may look at some of them meanwhile. Whoever sees one sees all that came before as done.
    pub(crate) fn clear(&self, offset: usize, bytes: usize) {
        fence(Ordering::Release);
        for at in (offset..offset + bytes).step_by(8) {
            self.flag64(at).store(0, Ordering::Relaxed);
        }
    }

    /// Writes a text's length and bytes, `most` of them at most, which others may read at any time: they see it whole, not at
    /// all, or, where it takes the place of another one, perhaps a mixture of both.
    pub(crate) fn write_text(&self, offset: usize, text: &str, most: usize) {
        let bytes = &text.as_bytes()[..text.len().min(most)];
        self.flag64(offset).store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        for (i, chunk) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.flag64(offset + 8 + 8 * i).store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
        self.flag64(offset).store(bytes.len() as u64, Ordering::Release);
    }

    /// What [`Self::write_text`] wrote, or whatever lies there.
    pub(crate) fn read_text(&self, offset: usize, most: usize) -> String {
        let length =
            usize::try_from(self.flag64(offset).load(Ordering::Acquire)).map_or(most, |told| told.min(most));
        let bytes: Vec<u8> = (0..length.div_ceil(8))
            .flat_map(|i| self.flag64(offset + 8 + 8 * i).load(Ordering::Relaxed).to_le_bytes())
            .take(length)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// From now on a device may know any of its pages, and would go on with the old one where a page is given back.
    pub(crate) fn pin(&self) {
        self.pinned.store(true, Ordering::Relaxed);
    }

    pub(crate) fn pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Gives the whole pages in there back to the system; they read as zero afterwards, but for emulators. The kernel would round the end up, and
    /// take along what lies behind it.
    pub(crate) fn discard(&self, offset: usize, bytes: usize) {
        let page = page_size();
        let (start, end) = (offset.next_multiple_of(page), offset + bytes - (offset + bytes) % page);
        if start >= end {
            return;
        }
        // SAFETY: in range (checked by `at`); the caller's allocator owns the range and nobody reads it any more.
        let _ = unsafe { libc::madvise(self.at(start, end - start).cast(), end - start, libc::MADV_REMOVE) };
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, unmapped once; whoever uses pointers into it holds an Arc.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (first address, flags) of each mapping of this process whose name contains `name`.
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
    fn no_mapping_of_shared_memory_is_in_a_core_dump() {
        let (own, fd) = SharedMemory::create(3 * page_size()).unwrap();
        let peers = SharedMemory::open(&fd, 3 * page_size()).unwrap();
        let found = mappings("/memfd:smddp");
        for memory in [&own, &peers] {
            let (_, flags) =
                found.iter().find(|(first, _)| *first == memory.base as usize).expect("it is mapped");
            assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
        }
    }

    #[test]
    fn only_whole_pages_are_given_back() {
        let page = page_size();
        let (memory, _fd) = SharedMemory::create(6 * page).unwrap();
        let flags = |memory: &SharedMemory| -> Vec<u64> {
            (0..12).map(|half| memory.flag64(half * page / 2).load(Ordering::Relaxed)).collect()
        };
        let fill = || (0..12).for_each(|half| memory.flag64(half * page / 2).store(7, Ordering::Relaxed));
        // From the middle of page 1 to the middle of page 4: pages 2 and 3.
        fill();
        memory.discard(page + page / 2, 3 * page);
        assert_eq!(flags(&memory), [7, 7, 7, 7, 0, 0, 0, 0, 7, 7, 7, 7]);
        // A whole one; and one that lies in two, neither of them whole.
        fill();
        memory.discard(page, page);
        memory.discard(4 * page + page / 2, page);
        assert_eq!(flags(&memory), [7, 7, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7]);
    }
}
