//! Early detection of process deaths on this node, before the kernel has freed the process's memory.
//!
//! A pidfd or socket reports the end of a process only after all of its memory is freed: about one second per 10 GB.
//! However, the kernel first marks the robust futexes that an exiting thread holds (get_robust_list(2)). One thread
//! per process therefore holds such a futex in shared memory and waits until a peer's futex is marked.
//!
//! A marked process runs no code any more. Its devices may continue until the process has ended, so memory that they
//! may access is not reused before `PeerProcess::ended` is set.

use std::cell::Cell;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Wait, WaitFlags, WaitPtr, WaitvFlags};
use rustix::thread::{ClockId, gettid};
use smddp_base::warning::info;
use smddp_base::{fork, lock};

use super::doorbell::Doorbell;
use super::layout::LIVENESS_FUTEX;
use super::memory::SharedMemory;
use super::peer::PeerProcess;

/// Maximum futexes per `futex_waitv` call, this thread's own included. Pidfds alone report the deaths of further
/// processes.
const MAX_WATCHED: usize = 128;

/// Wakeup counter of the watching thread. The same futex carries the request to stop, so the thread cannot sleep through a
/// request made after it read the counter.
#[derive(Default)]
struct WatchGeneration(AtomicU32);

impl WatchGeneration {
    const STOP: u32 = 1;

    /// Returns the value to wait on; `None` after a request to stop.
    fn current(&self) -> Option<u32> {
        let generation = self.0.load(Ordering::Acquire);
        (generation & Self::STOP == 0).then_some(generation)
    }

    fn advance(&self) {
        self.0.fetch_add(2, Ordering::Release);
        let _ = futex::wake(&self.0, Flags::PRIVATE, 1);
    }

    fn stop(&self) {
        self.0.fetch_or(Self::STOP, Ordering::Release);
        let _ = futex::wake(&self.0, Flags::PRIVATE, 1);
    }
}

#[derive(Default)]
struct Shared {
    generation: WatchGeneration,
    added: Mutex<Vec<Weak<PeerProcess>>>,
}

/// Handle of the thread that holds this process's futex and watches those of the peers.
pub(crate) struct DeathWatch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    forks: u32,
}

impl DeathWatch {
    /// Starts the thread. `memory` and `doorbell` belong to this process; the doorbell is notified when a peer dies.
    /// If the thread cannot be started, deaths are detected later.
    pub(crate) fn start(memory: Arc<SharedMemory>, doorbell: Doorbell) -> Self {
        let shared = Arc::new(Shared::default());
        let shared_by_thread = shared.clone();
        let (ready, held) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("smddp-deaths".to_owned())
            .spawn(move || run(&shared_by_thread, &memory, &doorbell, &ready))
            .ok();
        // The futex must be held before this process publishes its address.
        if thread.is_some() {
            let _ = held.recv();
        }
        Self { shared, thread, forks: fork::generation() }
    }

    /// Adds a peer. From the next [`DeathWatch::refresh`] on, its death marks it and notifies the doorbell.
    pub(crate) fn watch(&self, peer: &Arc<PeerProcess>) {
        lock(&self.shared.added).push(Arc::downgrade(peer));
    }

    /// Restarts the wait with the added peers. One call suffices for several peers; each call passes all futexes to
    /// the kernel again.
    pub(crate) fn refresh(&self) {
        self.shared.generation.advance();
    }
}

impl Drop for DeathWatch {
    fn drop(&mut self) {
        // A forked child has no such thread.
        if self.forks != fork::generation() {
            return;
        }
        self.shared.generation.stop();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// The kernel's `struct robust_list_head`, with at most one entry.
#[repr(C)]
struct RobustList {
    first: Cell<*const RobustEntry>,
    /// Offset from an entry to its futex.
    offset: Cell<libc::c_long>,
    pending: *const RobustEntry,
    entry: RobustEntry,
}

/// The kernel's `struct robust_list`; the last entry points to the head.
#[repr(C)]
struct RobustEntry {
    next: Cell<*const RobustEntry>,
}

/// Registers the list that the kernel processes when this thread ends.
fn register_robust_list(list: *const RobustList) {
    // SAFETY: the kernel reads the list only when the thread ends. The list is on the stack of that thread, which
    // unregisters it before it returns. It replaces the C library's list for robust mutexes; this thread holds none.
    let _ = unsafe { libc::syscall(libc::SYS_set_robust_list, list, offset_of!(RobustList, entry)) };
}

fn run(shared: &Shared, memory: &SharedMemory, doorbell: &Doorbell, ready: &SyncSender<()>) {
    let futex = memory.flag32(LIVENESS_FUTEX);
    let none = || Cell::new(std::ptr::null());
    let list = RobustList {
        first: none(),
        offset: Cell::new(0),
        pending: std::ptr::null(),
        entry: RobustEntry { next: none() },
    };
    let entry = &raw const list.entry;
    list.first.set(entry);
    list.entry.next.set((&raw const list).cast());
    list.offset.set(futex.as_ptr().addr().wrapping_sub(entry.addr()).cast_signed() as libc::c_long);
    // The kernel wakes waiters of the futex only if FUTEX_WAITERS is set.
    futex.store(gettid().as_raw_nonzero().get().cast_unsigned() | libc::FUTEX_WAITERS, Ordering::Release);
    register_robust_list(&raw const list);
    let _ = ready.send(());
    watch(shared, doorbell);
    // Orderly end: the futex is not marked, and peers stop watching it.
    futex.store(0, Ordering::Release);
    let _ = futex::wake(futex, Flags::empty(), i32::MAX.cast_unsigned());
    register_robust_list(std::ptr::null());
}

fn watch(shared: &Shared, doorbell: &Doorbell) {
    let mut watched: Vec<Weak<PeerProcess>> = Vec::new();
    let mut has_waitv = true;
    while let Some(generation) = shared.generation.current() {
        watched.append(&mut lock(&shared.added));
        let mut list = vec![entry(&shared.generation.0, generation, WaitFlags::PRIVATE)];
        let mut any_died = false;
        watched.retain(|peer| {
            let Some(peer) = peer.upgrade() else { return false };
            let futex = peer.liveness_futex();
            let value = futex.load(Ordering::Acquire);
            if value & libc::FUTEX_OWNER_DIED != 0 {
                peer.mark_dead();
                // The kernel wakes only one waiter.
                let _ = futex::wake(futex, Flags::empty(), i32::MAX.cast_unsigned());
                any_died = true;
            }
            let alive = value != 0 && value & libc::FUTEX_OWNER_DIED == 0;
            if alive && list.len() < MAX_WATCHED {
                list.push(entry(futex, value, WaitFlags::empty()));
            }
            alive
        });
        if any_died {
            doorbell.notify();
        }
        if has_waitv {
            // A peer's memory may be unmapped during the wait: the kernel has resolved the addresses by then, or
            // rejects the list.
            match futex::waitv(&list, WaitvFlags::empty(), None, ClockId::Monotonic) {
                Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::FAULT) => {}
                Err(reason) => {
                    info(&format!(
                        "process deaths on this node are detected only after the kernel has freed the process's memory: this \
                         kernel (older than Linux 5.16) or its seccomp filter has no futex_waitv ({reason})"
                    ));
                    has_waitv = false;
                }
            }
        } else {
            // Peers may still watch this process.
            let _ = futex::wait(&shared.generation.0, Flags::PRIVATE, generation, None);
        }
    }
}

/// Returns a wait entry that sleeps while the futex has this value.
fn entry(futex: &AtomicU32, value: u32, flags: WaitFlags) -> Wait {
    let mut wait = Wait::new();
    wait.val = u64::from(value);
    wait.uaddr = WaitPtr::new(futex.as_ptr().cast());
    wait.flags = WaitFlags::SIZE_U32 | flags;
    wait
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request may arrive between the read of the counter and the wait.
    #[test]
    fn counter_value_read_before_a_request_is_stale() {
        let generation = WatchGeneration::default();
        let before = generation.current().unwrap();
        generation.advance();
        let after = generation.current().unwrap();
        assert_ne!(before, after);
        generation.stop();
        assert!(generation.0.load(Ordering::Relaxed) != after && generation.current().is_none());
        generation.advance();
        assert_eq!(generation.current(), None, "a later wakeup revoked the request to stop");
    }
}
