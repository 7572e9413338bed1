//! Synchronization between threads. `models/` compiles [`completion`], [`job_gate`] and [`ownership`] with loom's types
//! in place of these.

pub(crate) mod caller_threads;
pub(crate) mod completion;
#[cfg(test)]
mod completion_tests;
pub(crate) mod deadline;
pub(crate) mod job_gate;
pub(crate) mod ownership;

pub(super) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering, fence};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

pub(crate) use smddp_base::lock;
