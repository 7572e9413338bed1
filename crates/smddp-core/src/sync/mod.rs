//! Synchronization between threads. `models/` compiles [`completion`] and [`job_gate`] with loom's types in place of these.

pub(crate) mod completion;
#[cfg(test)]
mod completion_tests;
pub(crate) mod deadline;
pub(crate) mod job_gate;

pub(super) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering, fence};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};

pub(crate) use smddp_transport::lock;
