//! Simulated libfabric: `build.rs` builds the shared object from `fake.rs`. It exports libfabric's six functions and returns
//! the results of the EFA provider. Its endpoints move bytes between the processes of one machine by EFA's rules
//! (`port.rs`). A call that violates a rule is counted and reported on standard error.
//!
//! Tests configure it through two additional functions, `fake_set(knob, value)` and `fake_get(knob)`, on unsigned 64-bit
//! numbers.

/// Path of the shared object.
pub const PATH: &str = env!("FAKE_LIBFABRIC");

pub mod knob;
