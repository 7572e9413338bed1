//! What threads share. `models/` gives the files that use it others, which try every order there is.

pub(super) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering, fence};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

/// Whoever panicked with it left what it guards as good as it was.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
