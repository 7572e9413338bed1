//! Locks that survive a panic of an earlier owner.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex` even after a panic: no state that a panic leaves under these locks is worse than a failure here.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
