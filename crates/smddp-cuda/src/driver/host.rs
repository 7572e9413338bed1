//! What the host does with memory that streams use too.
//!
//! A driver that checks orders, for tests, cannot see it: it has a function that is told, and does it.

use std::sync::atomic::{AtomicU64, Ordering};

use super::device::Device;
use super::types::HostTouch;
use crate::device::{Address, reached};

/// What is told.
const LOAD: i32 = 0;
const REACHED: i32 = 1;
const STORE: i32 = 2;
const READ: i32 = 3;
const WRITE: i32 = 4;

#[expect(clippy::missing_safety_doc, reason = "one contract for all, at the type")]
impl Device {
    fn told(&self) -> Option<HostTouch> {
        self.cuda.table.host
    }

    /// The host reads a word that streams and other processes write; what they wrote before is visible then.
    pub unsafe fn load(&self, word: Address) -> u64 {
        match self.told() {
            // SAFETY: the caller's promise: an aligned word of host memory, reached as an atomic by all.
            None => unsafe { AtomicU64::from_ptr(word as *mut u64) }.load(Ordering::Acquire),
            // SAFETY: as above.
            Some(host) => unsafe { host(self.context.handle(), LOAD, word, 0) },
        }
    }

    /// Whether such a word has [`reached`] `value`. What was written before it did is visible then; of what came later
    /// nothing is promised.
    pub unsafe fn has_reached(&self, word: Address, value: u64) -> bool {
        match self.told() {
            // SAFETY: the caller's promise.
            None => reached(unsafe { self.load(word) }, value),
            // SAFETY: as above.
            Some(host) => unsafe { host(self.context.handle(), REACHED, word, value) != 0 },
        }
    }

    /// The host writes such a word, after everything that this thread did before.
    pub unsafe fn store(&self, word: Address, value: u64) {
        match self.told() {
            // SAFETY: as in `load`.
            None => unsafe { AtomicU64::from_ptr(word as *mut u64) }.store(value, Ordering::Release),
            // SAFETY: as in `load`.
            Some(host) => drop(unsafe { host(self.context.handle(), STORE, word, value) }),
        }
    }

    /// The processor is about to read (or write) memory that streams use too.
    pub fn host_touches(&self, address: Address, bytes: usize, writes: bool) {
        if let Some(host) = self.told() {
            let what = if writes { WRITE } else { READ };
            // SAFETY: told of these, it touches nothing.
            unsafe { host(self.context.handle(), what, address, bytes as u64) };
        }
    }
}
