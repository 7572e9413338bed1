//! Host accesses to memory that streams use too.
//!
//! A checking driver, used in tests, cannot observe them. It exports a function that records and performs each
//! access.

use std::sync::atomic::{AtomicU64, Ordering};

use super::device::Device;
use super::types::HostTouch;
use crate::device::{Address, reached};

/// Kinds of accesses, as in fake-libcuda.
const LOAD: i32 = 0;
const REACHED: i32 = 1;
const STORE: i32 = 2;
const READ: i32 = 3;
const WRITE: i32 = 4;

#[expect(clippy::missing_safety_doc, reason = "one contract for all, at the type")]
impl Device {
    fn checker(&self) -> Option<HostTouch> {
        self.cuda.table.host
    }

    /// Loads a word that streams and other processes write. Their earlier writes are visible after the load.
    pub unsafe fn load(&self, word: Address) -> u64 {
        match self.checker() {
            // SAFETY: the caller guarantees an aligned word of host memory that all parties access atomically.
            None => unsafe { AtomicU64::from_ptr(word as *mut u64) }.load(Ordering::Acquire),
            // SAFETY: as above.
            Some(host) => unsafe { host(self.context.handle(), LOAD, word, 0) },
        }
    }

    /// Returns true if the word has [`reached`] `value`. Writes that precede this value are then visible; later
    /// writes may not be.
    pub unsafe fn has_reached(&self, word: Address, value: u64) -> bool {
        match self.checker() {
            // SAFETY: the caller's contract.
            None => reached(unsafe { self.load(word) }, value),
            // SAFETY: as above.
            Some(host) => unsafe { host(self.context.handle(), REACHED, word, value) != 0 },
        }
    }

    /// Stores to such a word, after all earlier accesses of this thread.
    pub unsafe fn store(&self, word: Address, value: u64) {
        match self.checker() {
            // SAFETY: as in `load`.
            None => unsafe { AtomicU64::from_ptr(word as *mut u64) }.store(value, Ordering::Release),
            // SAFETY: as in `load`.
            Some(host) => drop(unsafe { host(self.context.handle(), STORE, word, value) }),
        }
    }

    /// Reports a read or write by the host of memory that streams use too.
    pub fn report_host_access(&self, address: Address, bytes: usize, writes: bool) {
        if let Some(host) = self.checker() {
            let kind = if writes { WRITE } else { READ };
            // SAFETY: for these kinds the function accesses no memory.
            unsafe { host(self.context.handle(), kind, address, bytes as u64) };
        }
    }
}
