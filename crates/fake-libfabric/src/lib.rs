//! The shared object that `build.rs` makes of `fake.rs`: libfabric's six functions, and answers as EFA's provider
//! gives them. Its endpoints move bytes between the processes of one machine, by EFA's rules (`port.rs`); what breaks
//! one is refused, counted, and told on standard error.
//!
//! Tests set it up through its two functions beside libfabric's: `fake_set(what, value)` and `fake_get(what)`, both
//! of unsigned 64-bit numbers.

/// Its file.
pub const PATH: &str = env!("FAKE_LIBFABRIC");

pub mod knob;
