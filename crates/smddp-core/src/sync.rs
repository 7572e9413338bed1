//! What threads share. `models/` gives the files that use it others, which try every order there is.

pub(super) use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
