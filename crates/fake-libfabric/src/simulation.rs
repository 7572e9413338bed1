//! The simulated fabrics of this process: their knobs, and the counts of violations.

use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicPtr, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::knob::{self, Rule};
use crate::network::{Network, Random};

/// Number of violations that a fabric reports on standard error. A program may repeat a violation without end.
const REPORTS: u64 = 20;

/// A simulated fabric of one process. It is never freed: objects refer to it.
pub struct Simulation {
    number: u64,
    /// Process that created it. A forked child has separate fabrics, because another thread may have held the lock.
    process: u32,
    knobs: [AtomicU64; knob::COUNT],
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
    simulation.knobs[knob as usize].store(value, Relaxed);
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
        let knobs = [const { AtomicU64::new(0) }; knob::COUNT];
        let mut seed = unique();
        for (knob, name) in knob::VARIABLES.into_iter().filter(|_| number == 0) {
            if let Some(value) = std::env::var(name).ok().and_then(|value| value.parse().ok()) {
                knobs[knob as usize].store(value, Relaxed);
                seed = if knob == knob::SEED { value } else { seed };
            }
        }
        Self { number, process, knobs, network: Mutex::new(Network::new(seed)), next }
    }

    pub fn network(&self) -> MutexGuard<'_, Network> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, knob: u64) -> u64 {
        self.knobs[knob as usize].load(Relaxed)
    }

    /// Returns the value of a limit, or the default if it is not set.
    pub fn limit(&self, knob: u64, default: usize) -> usize {
        match self.get(knob) {
            0 => default,
            limit => limit as usize,
        }
    }

    /// Adds a number to a counter; returns the counter's former value.
    pub fn add(&self, knob: u64, number: u64) -> u64 {
        self.knobs[knob as usize].fetch_add(number, Relaxed)
    }

    /// Sets bits in a bit set.
    pub fn mark(&self, knob: u64, bits: u64) {
        self.knobs[knob as usize].fetch_or(bits, Relaxed);
    }

    pub fn enforces(&self, rule: Rule) -> bool {
        self.get(knob::WITHOUT) & rule.bit() == 0
    }

    /// Counts and reports a violation.
    pub fn violation(&self, rule: Rule, description: &str) {
        self.mark(knob::VIOLATED, rule.bit());
        if self.add(knob::WRONG, 1) < REPORTS {
            eprintln!("fake EFA: {description}");
        }
    }

    /// Counts and reports invalid arguments of a call.
    pub fn check(&self, valid: bool, description: &str) {
        if !valid {
            self.violation(Rule::Call, description);
        }
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
