//! Fork detection, and values that a forked child does not inherit.

use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Number of forks. Objects created before a fork are unusable in the child.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    crate::close_on_fork::forked();
}

/// Returns the number of forks between this process and the ancestor in which the library was first used.
pub fn generation() -> u32 {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        // SAFETY: `forked` adds to an atomic and calls `open`, `dup3` and `close`, which is allowed between fork and exec;
        // registered once.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    });
    FORKS.load(Ordering::Relaxed)
}

/// Value per process; a forked child starts with a new one. At the fork, another thread may hold the parent's lock or
/// be in the middle of a change. That thread does not exist in the child.
pub struct PerProcess<T>(AtomicPtr<Cell<T>>);

struct Cell<T> {
    generation: u32,
    value: T,
}

impl<T: Default + Send + Sync + 'static> PerProcess<T> {
    #[expect(clippy::new_without_default, reason = "for statics")]
    /// Creates a value that its first use in a process initializes.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// Returns the value of this process.
    pub fn get(&self) -> &'static T {
        let generation = generation();
        let mut found = self.0.load(Ordering::Acquire);
        loop {
            // SAFETY: null or a leaked box, because only those are stored; so the cell lives as long as the process.
            if let Some(cell) = unsafe { found.as_ref() }
                && cell.generation == generation
            {
                return &cell.value;
            }
            let fresh = Box::into_raw(Box::new(Cell { generation, value: T::default() }));
            found = match self.0.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => fresh,
                Err(other) => {
                    // SAFETY: `fresh` was returned by `Box::into_raw` above and was never shared.
                    drop(unsafe { Box::from_raw(fresh) });
                    other
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn forked_child_has_a_new_value_while_a_parent_thread_holds_the_lock() {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::new();
        *VALUE.get().lock().unwrap() = 5;
        let (started, held) = channel();
        let (end, ended) = channel::<()>();
        let holder = std::thread::spawn(move || {
            let guard = VALUE.get().lock().unwrap();
            started.send(()).unwrap();
            let _ = ended.recv();
            drop(guard);
        });
        held.recv().unwrap();
        // SAFETY: the child reads one value and exits.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let fresh = VALUE.get().try_lock().is_ok_and(|value| *value == 0);
            // SAFETY: ends the child without handlers that belong to the parent.
            unsafe { libc::_exit(i32::from(!fresh)) };
        }
        let mut status = 0;
        // SAFETY: a child of this test.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0, "the child read the value of its parent");
        end.send(()).unwrap();
        holder.join().unwrap();
        assert_eq!(*VALUE.get().lock().unwrap(), 5, "the value of the parent changed");
    }
}
