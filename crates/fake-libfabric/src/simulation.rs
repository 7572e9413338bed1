//! The simulated fabrics of this process.

use std::cell::Cell;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicPtr, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::knob;
use crate::knobs::Knobs;
use crate::network::{Network, Random};

/// A simulated fabric of one process. It is never freed: objects refer to it.
pub struct Simulation {
    number: u64,
    /// Process that created it. A forked child has separate fabrics, because another thread may have held the lock.
    process: u32,
    knobs: Knobs,
    network: Mutex<Network>,
    next: *mut Simulation,
}

/// The fabrics of this process and of its ancestors, as a linked list.
static ALL: AtomicPtr<Simulation> = AtomicPtr::new(null_mut());

thread_local! {
    static SELECTED: Cell<u64> = const { Cell::new(0) };
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_select(number: u64) {
    SELECTED.set(number);
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_set(number: u64, knob: u64, value: u64) {
    let simulation = Simulation::find(number);
    simulation.set(knob, value);
    if knob == knob::SEED {
        simulation.network().random = Random(value);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_get(number: u64, knob: u64) -> u64 {
    Simulation::find(number).get(knob)
}

impl Simulation {
    /// Returns the fabric that this thread has selected.
    pub fn selected() -> &'static Self {
        Self::find(SELECTED.get())
    }

    fn find(number: u64) -> &'static Self {
        let process = std::process::id();
        loop {
            let first = ALL.load(Acquire);
            let mut at = first;
            while let Some(found) = unsafe { at.as_ref() } {
                if (found.number, found.process) == (number, process) {
                    return found;
                }
                at = found.next;
            }
            let new = Box::into_raw(Box::new(Self::new(number, process, first)));
            if ALL.compare_exchange(first, new, AcqRel, Relaxed).is_err() {
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }

    fn new(number: u64, process: u32, next: *mut Self) -> Self {
        let knobs = Knobs::new();
        let mut seed = unique();
        for (knob, name) in knob::VARIABLES.into_iter().filter(|_| number == 0) {
            if let Some(value) = std::env::var(name).ok().and_then(|value| value.parse().ok()) {
                knobs.set(knob, value);
                seed = if knob == knob::SEED { value } else { seed };
            }
        }
        Self { number, process, knobs, network: Mutex::new(Network::new(seed)), next }
    }

    pub fn network(&self) -> MutexGuard<'_, Network> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deref for Simulation {
    type Target = Knobs;

    fn deref(&self) -> &Knobs {
        &self.knobs
    }
}

/// Returns a number that is unique on this machine and not 0.
pub fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos());
    let number = u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Relaxed);
    Random(now as u64 ^ number.rotate_left(20)).next() | 1
}
