//! Values of the rendezvous store, and the bounds on memory and members.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use rustix::event::{EventfdFlags, eventfd};
use smddp_core::{lock, system_call_error};

use crate::protocol::{MAX_KEY, MAX_VALUE};

/// Members beyond one connection for each rank.
pub(super) const SPARE_MEMBERS: usize = 64;
/// Bytes for each rank in addition to one value of maximum size: a rank's dump and its address.
const BYTES_PER_RANK: usize = 4 << 20;
const MAX_BYTES: usize = 1 << 30;
/// Bytes of an entry in addition to its value.
pub(super) const ENTRY: usize = MAX_KEY + 64;

/// A stored value. Its size is counted as long as the table or a reply refers to it.
pub(super) struct Value {
    pub(super) bytes: Vec<u8>,
    shared: Arc<AtomicUsize>,
}

impl Drop for Value {
    fn drop(&mut self) {
        self.shared.fetch_sub(self.bytes.len() + ENTRY, Ordering::Relaxed);
    }
}

pub(super) struct Shared {
    values: Mutex<HashMap<Vec<u8>, Arc<Value>>>,
    pub(super) changed: Condvar,
    pub(super) closing: AtomicBool,
    pub(super) wake: OwnedFd,
    /// Bytes of values and of unfinished requests, and their bound.
    pub(super) used: Arc<AtomicUsize>,
    pub(super) max_bytes: AtomicUsize,
    /// Connected members, and their bound.
    pub(super) members: AtomicUsize,
    max_members: AtomicUsize,
}

impl Shared {
    pub(super) fn new(ranks: usize) -> io::Result<Self> {
        let shared = Self {
            values: Mutex::default(),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|reason| system_call_error("eventfd2", reason))?,
            used: Arc::default(),
            max_bytes: AtomicUsize::new(0),
            members: AtomicUsize::new(0),
            max_members: AtomicUsize::new(0),
        };
        shared.expect(ranks);
        Ok(shared)
    }

    /// Locks the table. No code panics with the lock held, so the table is always consistent.
    pub(super) fn values(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Arc<Value>>> {
        lock(&self.values)
    }

    pub(super) fn expect(&self, ranks: usize) {
        let bytes = MAX_VALUE.saturating_add(ranks.saturating_mul(BYTES_PER_RANK)).min(MAX_BYTES);
        self.max_bytes.fetch_max(bytes, Ordering::Relaxed);
        self.max_members.fetch_max(ranks.saturating_add(SPARE_MEMBERS), Ordering::Relaxed);
    }

    /// Reserves `bytes` bytes of the memory bound.
    ///
    /// # Errors
    /// The bound would be exceeded.
    pub(super) fn reserve(&self, bytes: usize) -> io::Result<()> {
        let max = self.max_bytes.load(Ordering::Relaxed);
        if self.used.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) > max {
            self.release(bytes);
            return Err(io::Error::other(format!("the store would hold more than {max} bytes")));
        }
        Ok(())
    }

    pub(super) fn release(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Counts a new member.
    ///
    /// # Errors
    /// The maximum number of members is connected.
    pub(super) fn join(&self) -> io::Result<()> {
        let max = self.max_members.load(Ordering::Relaxed);
        if self.members.fetch_add(1, Ordering::Relaxed) >= max {
            self.members.fetch_sub(1, Ordering::Relaxed);
            return Err(io::Error::other(format!("{max} clients are connected already")));
        }
        Ok(())
    }

    pub(super) fn set(&self, key: &[u8], bytes: Vec<u8>) -> io::Result<()> {
        self.reserve(bytes.len() + ENTRY)?;
        let value = Value { bytes, shared: Arc::clone(&self.used) };
        self.values().insert(key.to_vec(), Arc::new(value));
        self.changed.notify_all();
        Ok(())
    }
}
