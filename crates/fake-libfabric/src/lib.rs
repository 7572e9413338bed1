//! Simulated libfabric: `build.rs` builds the shared object from `fake.rs`. It exports libfabric's six functions and returns
//! the results of the EFA provider. Its endpoints move bytes by EFA's rules, within a process and between the processes of one
//! machine (`network.rs`). A violation of a rule is counted and reported on standard error.
//!
//! A process may have several simulated fabrics, which do not disturb each other. Programs use fabric 0, configured by
//! environment variables. A test creates a [`SimulatedFabric`] and configures it with the [`knob`]s.
#![warn(clippy::missing_errors_doc)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Path of the shared object.
pub const PATH: &str = env!("FAKE_LIBFABRIC");

pub mod knob;

pub use knob::Rule;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// A simulated fabric of this process, for the devices that the creating thread opens while this value exists. The devices keep
/// their fabric afterwards.
///
/// With a seed, one thread gets the same events in every run.
pub struct SimulatedFabric {
    number: u64,
    select: extern "C" fn(u64),
    set: extern "C" fn(u64, u64, u64),
    get: extern "C" fn(u64, u64) -> u64,
}

impl SimulatedFabric {
    /// Creates a fabric with one device, libfabric's version 2.1 and the default limits.
    ///
    /// # Panics
    /// If the shared object cannot be loaded.
    #[allow(clippy::new_without_default, reason = "a new fabric changes the state of the thread")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // SAFETY: the library has no initializers, is never closed, and its functions have these types.
        let fabric = unsafe {
            let symbol = |name: &CStr| {
                let library =
                    CString::new(PATH).map_or(std::ptr::null_mut(), |path| dlopen(path.as_ptr(), 2));
                assert!(!library.is_null(), "{PATH} cannot be opened");
                let found = dlsym(library, name.as_ptr());
                assert!(!found.is_null(), "{PATH} has no {name:?}");
                found
            };
            Self {
                number: NEXT.fetch_add(1, Relaxed),
                select: std::mem::transmute::<*mut c_void, extern "C" fn(u64)>(symbol(c"fake_select")),
                set: std::mem::transmute::<*mut c_void, extern "C" fn(u64, u64, u64)>(symbol(c"fake_set")),
                get: std::mem::transmute::<*mut c_void, extern "C" fn(u64, u64) -> u64>(symbol(c"fake_get")),
            }
        };
        (fabric.select)(fabric.number);
        fabric.with(knob::DEVICES, 1)
    }

    /// Creates a fabric with EFA's rules, small limits and emulated writes, then sets `knobs`.
    ///
    /// # Panics
    /// See [`SimulatedFabric::new`].
    pub fn with_small_limits(seed: u64, knobs: &[(u64, u64)]) -> Self {
        let small = [
            (knob::SEED, seed),
            (knob::EMULATED_WRITE, 1),
            (knob::MESSAGE, 8192),
            (knob::ONE_SIDED, 1 << 20),
            (knob::OPERATIONS, 64),
            (knob::RECEIVES, 1024),
        ];
        let fabric = Self::new();
        small.iter().chain(knobs).for_each(|&(knob, value)| fabric.set(knob, value));
        fabric
    }

    /// Sets a knob; returns the fabric.
    pub fn with(self, knob: u64, value: u64) -> Self {
        self.set(knob, value);
        self
    }

    /// Sets a knob. Call it before devices are opened.
    pub fn set(&self, knob: u64, value: u64) {
        (self.set)(self.number, knob, value);
    }

    /// Switches rules off. Call it before devices are opened.
    pub fn set_without(&self, rules: &[Rule]) {
        self.set(knob::WITHOUT, rules.iter().fold(0, |bits, rule| bits | rule.bit()));
    }

    /// Returns the value of a knob.
    pub fn get(&self, knob: u64) -> u64 {
        (self.get)(self.number, knob)
    }

    /// Returns the violated rules.
    pub fn violations(&self) -> Vec<Rule> {
        let violated = self.get(knob::VIOLATED);
        Rule::ALL.into_iter().filter(|rule| violated & rule.bit() != 0).collect()
    }
}

impl Drop for SimulatedFabric {
    fn drop(&mut self) {
        (self.select)(0);
    }
}
