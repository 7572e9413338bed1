//! The shared object that `build.rs` makes of `fake.rs`: libfabric's six functions, and answers as EFA's provider
//! gives them. Nothing is ever sent.
//!
//! Tests set it up through its two functions beside libfabric's: `fake_set(what, value)` and `fake_get(what)`, both
//! of unsigned 64-bit numbers.

/// Its file.
pub const PATH: &str = env!("FAKE_LIBFABRIC");

pub mod knob;
