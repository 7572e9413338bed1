//! Deaths of this node's processes, known before the system has taken their memory back.
//!
//! A process counts as ended (pidfd, sockets) only when all of its memory is freed: about a second for each 10 GB. But the first
//! that the kernel does with a thread that ends is to mark the robust futexes it holds (get_robust_list(2)). So one thread of each
//! process holds such a word in the process's shared memory, and sleeps until one of the words of others is marked.
//!
//! Whoever is marked runs no code any more; what its devices do may go on until it has ended, so memory that it may read or
//! write is not used again before (`PeerProcess::ended`).

use std::cell::Cell;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Wait, WaitFlags, WaitPtr, WaitvFlags};
use rustix::thread::{ClockId, gettid};

use super::doorbell::Doorbell;
use super::layout::LIVENESS_FUTEX;
use super::memory::SharedMemory;
use super::peer::PeerProcess;
use crate::warning::info;
use crate::{fork, lock};

/// What one call can wait for; further processes are told of by their pidfds alone.
const MAX_WATCHED: usize = 128;

/// Wakeup counter of the watching thread. The same word carries the request to stop, so the thread cannot sleep through a
/// request made after it read the counter.
#[derive(Default)]
struct WatchGeneration(AtomicU32);

impl WatchGeneration {
    const STOP: u32 = 1;

    /// The value to sleep at; `None`: there is no turn any more.
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

/// The thread that holds this process's word and watches those of others.
pub(crate) struct DeathWatch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    forks: u32,
}

impl DeathWatch {
    /// `memory`, `doorbell`: this process's; it rings where a peer has died. Without a thread deaths are known later.
    pub(crate) fn start(memory: Arc<SharedMemory>, doorbell: Doorbell) -> Self {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let (ready, held) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("smddp-deaths".to_owned())
            .spawn(move || run(&theirs, &memory, &doorbell, &ready))
            .ok();
        // Nobody is told of this process's memory before the word says something.
        if thread.is_some() {
            let _ = held.recv();
        }
        Self { shared, thread, forks: fork::generation() }
    }

    /// Marks the peer, and rings, when it dies: from the next [`DeathWatch::refresh`] on.
    pub(crate) fn watch(&self, peer: &Arc<PeerProcess>) {
        lock(&self.shared.added).push(Arc::downgrade(peer));
    }

    /// Once for all peers that were met together, since the thread then hands the kernel all of its words anew.
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

/// The kernel's `struct robust_list_head`, with a list of one word at most.
#[repr(C)]
struct RobustList {
    first: Cell<*const RobustEntry>,
    /// From an entry to its word.
    offset: Cell<libc::c_long>,
    pending: *const RobustEntry,
    entry: RobustEntry,
}

/// The kernel's `struct robust_list`; the last one leads back to the head.
#[repr(C)]
struct RobustEntry {
    advance: Cell<*const RobustEntry>,
}

/// Has the kernel look at that list when this thread ends.
fn register_robust_list(list: *const RobustList) {
    // SAFETY: the kernel reads the list when the thread ends, and only then: it is on the stack of that thread, which tells the
    // kernel of none before it leaves. Its C library keeps a list there for mutexes of a kind that this thread has none of.
    let _ = unsafe { libc::syscall(libc::SYS_set_robust_list, list, offset_of!(RobustList, entry)) };
}

fn run(shared: &Shared, memory: &SharedMemory, doorbell: &Doorbell, ready: &SyncSender<()>) {
    let word = memory.flag32(LIVENESS_FUTEX);
    let none = || Cell::new(std::ptr::null());
    let list = RobustList {
        first: none(),
        offset: Cell::new(0),
        pending: std::ptr::null(),
        entry: RobustEntry { advance: none() },
    };
    let entry = &raw const list.entry;
    list.first.set(entry);
    list.entry.advance.set((&raw const list).cast());
    list.offset.set(word.as_ptr().addr().wrapping_sub(entry.addr()).cast_signed() as libc::c_long);
    // The kernel wakes somebody who waits for the word only where it says that somebody does.
    word.store(gettid().as_raw_nonzero().get().cast_unsigned() | libc::FUTEX_WAITERS, Ordering::Release);
    register_robust_list(&raw const list);
    let _ = ready.send(());
    watch(shared, doorbell);
    // It leaves in good order: nothing is marked, and nobody need watch.
    word.store(0, Ordering::Release);
    let _ = futex::wake(word, Flags::empty(), i32::MAX.cast_unsigned());
    register_robust_list(std::ptr::null());
}

fn watch(shared: &Shared, doorbell: &Doorbell) {
    let mut watched: Vec<Weak<PeerProcess>> = Vec::new();
    let mut has_waitv = true;
    while let Some(generation) = shared.generation.current() {
        watched.append(&mut lock(&shared.added));
        let mut list = vec![entry(&shared.generation.0, generation, WaitFlags::PRIVATE)];
        let mut died = false;
        watched.retain(|peer| {
            let Some(peer) = peer.upgrade() else { return false };
            let word = peer.liveness_futex();
            let life = word.load(Ordering::Acquire);
            if life & libc::FUTEX_OWNER_DIED != 0 {
                peer.mark_dead();
                // The kernel wakes one of those who wait.
                let _ = futex::wake(word, Flags::empty(), i32::MAX.cast_unsigned());
                died = true;
            }
            let lives = life != 0 && life & libc::FUTEX_OWNER_DIED == 0;
            if lives && list.len() < MAX_WATCHED {
                list.push(entry(word, life, WaitFlags::empty()));
            }
            lives
        });
        if died {
            doorbell.notify();
        }
        if has_waitv {
            // A peer's memory may go while this thread sleeps: the kernel has looked the words up by then, or refuses the list.
            match futex::waitv(&list, WaitvFlags::empty(), None, ClockId::Monotonic) {
                Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::FAULT) => {}
                Err(reason) => {
                    info(&format!(
                        "deaths on this node are known only when the system has freed the dead process's memory: this kernel or \
                         its seccomp filter has no futex_waitv ({reason}; Linux 5.16 has)"
                    ));
                    has_waitv = false;
                }
            }
        } else {
            // This process is watched by others at best.
            let _ = futex::wait(&shared.generation.0, Flags::PRIVATE, generation, None);
        }
    }
}

/// Sleeps where the word has that value.
fn entry(word: &AtomicU32, value: u32, flags: WaitFlags) -> Wait {
    let mut wait = Wait::new();
    wait.val = u64::from(value);
    wait.uaddr = WaitPtr::new(word.as_ptr().cast());
    wait.flags = WaitFlags::SIZE_U32 | flags;
    wait
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Between a look and the sleep anything may happen.
    #[test]
    fn nobody_sleeps_at_the_value_of_before_a_turn_or_the_end() {
        let generation = WatchGeneration::default();
        let before = generation.current().unwrap();
        generation.advance();
        let after = generation.current().unwrap();
        assert_ne!(before, after);
        generation.stop();
        assert!(generation.0.load(Ordering::Relaxed) != after && generation.current().is_none());
        generation.advance();
        assert_eq!(generation.current(), None, "a later turn takes nothing back");
    }
}
