//! Sockets that a forked child does not keep.
//!
//! A child that is forked (a data loader's worker) has copies of all descriptors. Were they left open there, peers would
//! take this process for alive as long as any such child is. So a child closes them at once, and leaves their owners'
//! copies in its memory alone.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::shm::fork_generation;

/// More sockets than this stay open in children.
const MOST: usize = 4096;
const NONE: RawFd = -1;

static OPEN: [AtomicI32; MOST] = [const { AtomicI32::new(NONE) }; MOST];

/// Called in a forked child, before anything else runs there.
pub(crate) fn close_in_child() {
    for entry in &OPEN {
        let fd = entry.swap(NONE, Ordering::Relaxed);
        if fd != NONE {
            // SAFETY: close is allowed between fork and exec. The descriptor is this process's copy of an open socket
            // whose owner (a `Kept`) does not touch it any more, because the generation has changed.
            unsafe { libc::close(fd) };
        }
    }
}

/// A socket (a stream or a listener) of this process and of none of its forked children.
pub(super) struct Kept<T: AsRawFd> {
    socket: ManuallyDrop<T>,
    entry: Option<usize>,
    forks: u32,
}

impl<T: AsRawFd> Kept<T> {
    pub(super) fn new(socket: T) -> Self {
        let fd = socket.as_raw_fd();
        let free = |entry: &AtomicI32| {
            entry.load(Ordering::Relaxed) == NONE
                && entry.compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let entry = OPEN.iter().position(free);
        Self { socket: ManuallyDrop::new(socket), entry, forks: fork_generation() }
    }

    /// False in a forked child, where the socket is closed.
    pub(super) fn ours(&self) -> bool {
        self.forks == fork_generation()
    }
}

impl<T: AsRawFd> Deref for Kept<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.socket
    }
}

impl<T: AsRawFd> Drop for Kept<T> {
    fn drop(&mut self) {
        if !self.ours() {
            return;
        }
        if let Some(entry) = self.entry {
            OPEN[entry].store(NONE, Ordering::Relaxed);
        }
        // SAFETY: dropped once, here, by its owner's thread, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.socket) };
    }
}
