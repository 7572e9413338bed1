//! Ownership of a value that one thread at a time uses. No thread blocks to own the value. Other threads submit
//! commands, which the owner executes.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

use super::{AtomicU32, Mutex, MutexGuard, Ordering};

/// Bit of `state`: a thread owns the value.
const OWNED: u32 = 1;
/// Bit of `state`: the queue contains commands.
const SUBMITTED: u32 = 2;

/// A value with at most one owner, and the queue of commands for the owner.
pub(crate) struct Ownership<T, C> {
    state: AtomicU32,
    /// Locked only to append or to take commands. `SUBMITTED` changes under this lock.
    commands: Mutex<Vec<C>>,
    value: UnsafeCell<T>,
}

// SAFETY: only the owner accesses `value`, and `state` orders each owner after the previous one. Values and commands
// move between threads, so both must be `Send`; no two threads share a value.
unsafe impl<T: Send, C: Send> Sync for Ownership<T, C> {}

/// State of a command after its submission.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub(crate) enum Submitted {
    /// A thread owns the value. It takes the command, or finds it when it releases the value.
    Accepted,
    /// No thread owned the value. The submitting thread must own it, or make another thread do so.
    Orphaned,
}

impl<T, C> Ownership<T, C> {
    pub(crate) fn new(value: T) -> Self {
        Self { state: AtomicU32::new(0), commands: Mutex::new(Vec::new()), value: UnsafeCell::new(value) }
    }

    /// Returns the value if no thread owns it.
    #[inline]
    pub(crate) fn try_own(&self) -> Option<Owned<'_, T, C>> {
        let mut state = 0;
        loop {
            // Acquire: this thread observes all changes of the previous owner.
            match self.state.compare_exchange(state, state | OWNED, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Some(Owned { ownership: self, value: PhantomData }),
                Err(found) if found & OWNED != 0 => return None,
                Err(found) => state = found,
            }
        }
    }

    /// Appends the command that `create` returns. It runs under the lock of the queue, so numbers that it assigns
    /// follow the order of the queue.
    pub(crate) fn submit(&self, create: impl FnOnce() -> C) -> Submitted {
        let mut commands = self.lock();
        let command = create();
        commands.push(command);
        // Relaxed: the lock orders the queue. All changes of `state` have one order, so a thread that owns the value
        // now finds the bit when it releases the value.
        match self.state.fetch_or(SUBMITTED, Ordering::Relaxed) & OWNED {
            0 => Submitted::Orphaned,
            _ => Submitted::Accepted,
        }
    }

    /// Returns true if the queue contains commands.
    #[inline]
    pub(crate) fn has_commands(&self) -> bool {
        self.state.load(Ordering::Relaxed) & SUBMITTED != 0
    }

    fn lock(&self) -> MutexGuard<'_, Vec<C>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The value, owned by this thread. A drop releases it too, but leaves new commands to the next owner.
pub(crate) struct Owned<'a, T, C> {
    ownership: &'a Ownership<T, C>,
    /// Threads may share this only if they may share the value.
    value: PhantomData<&'a mut T>,
}

impl<T, C> Owned<'_, T, C> {
    /// Appends all commands to `into`, in the order of their submission.
    #[inline]
    pub(crate) fn take_commands(&mut self, into: &mut Vec<C>) {
        if self.ownership.has_commands() {
            self.take(into);
        }
    }

    #[cold]
    fn take(&mut self, into: &mut Vec<C>) {
        let mut commands = self.ownership.lock();
        self.ownership.state.fetch_and(!SUBMITTED, Ordering::Relaxed);
        into.append(&mut commands);
    }

    /// Releases the value. Returns true if commands arrived that this owner has not taken. The caller then must own the
    /// value again, or make another thread do so.
    #[must_use]
    pub(crate) fn release(self) -> bool {
        let ownership = self.ownership;
        drop(self);
        // After the release, so that no command is lost: a later submission returns `Orphaned`.
        ownership.has_commands()
    }
}

impl<T, C> Deref for Owned<'_, T, C> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread owns the value until the drop, so only references borrowed from `self` exist.
        unsafe { &*self.ownership.value.get() }
    }
}

impl<T, C> DerefMut for Owned<'_, T, C> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `self` is borrowed mutably, so this is the only reference.
        unsafe { &mut *self.ownership.value.get() }
    }
}

impl<T, C> Drop for Owned<'_, T, C> {
    #[inline]
    fn drop(&mut self) {
        // Release: the next owner observes all changes of this one.
        self.ownership.state.fetch_and(!OWNED, Ordering::Release);
    }
}
