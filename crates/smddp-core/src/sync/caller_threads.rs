//! Threads of this process that have made calls. Any of them may make the call that another rank waits for.

use std::cell::Cell;
use std::sync::Mutex;
use std::thread::ThreadId;

use smddp_base::fork::{self, PerProcess};

use super::lock;

/// Live threads that have made calls.
static CALLERS: PerProcess<Mutex<Vec<ThreadId>>> = PerProcess::new();

thread_local! {
    /// Fork generation, plus 1, in which this thread was registered; 0 before. The list of a forked child is new.
    static NOTED: Cell<u32> = const { Cell::new(0) };
    static CALLER: Caller = Caller(std::thread::current().id());
}

/// Registration of a thread until its end.
struct Caller(ThreadId);

impl Drop for Caller {
    fn drop(&mut self) {
        lock(CALLERS.get()).retain(|&thread| thread != self.0);
    }
}

/// Records that the current thread makes calls.
#[inline]
pub(crate) fn note_caller() {
    let generation = fork::generation().wrapping_add(1);
    if NOTED.get() != generation {
        note(generation);
    }
}

#[cold]
fn note(generation: u32) {
    NOTED.set(generation);
    // A thread whose thread-local values are already destroyed makes no further calls.
    let _ = CALLER.try_with(|caller| add(caller.0));
}

/// Registers a thread, unless it is registered. A forked child starts without the threads of its parent.
pub(crate) fn add(thread: ThreadId) {
    let mut threads = lock(CALLERS.get());
    if !threads.contains(&thread) {
        threads.push(thread);
    }
}

/// Returns the live threads that have made calls.
pub(crate) fn live() -> Vec<ThreadId> {
    lock(CALLERS.get()).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_counts_from_its_first_call_to_its_end() {
        let inside = std::thread::spawn(|| {
            let me = std::thread::current().id();
            let before = live().contains(&me);
            note_caller();
            note_caller();
            (me, before, live().iter().filter(|&&thread| thread == me).count())
        });
        let (thread, before, count) = inside.join().unwrap();
        assert_eq!((before, count, live().contains(&thread)), (false, 1, false));
    }

    #[test]
    fn thread_counts_again_in_a_forked_child() {
        let inside = std::thread::spawn(|| {
            let me = std::thread::current().id();
            note_caller();
            // The state of the only thread of a child: noted by its parent, with a new list.
            NOTED.set(NOTED.get().wrapping_sub(1));
            lock(CALLERS.get()).retain(|&thread| thread != me);
            note_caller();
            live().contains(&me)
        });
        assert!(inside.join().unwrap(), "the thread of the child is not registered");
    }
}
