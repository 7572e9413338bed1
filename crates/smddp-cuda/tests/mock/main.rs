//! The mock holds programs to the order that they promise, whatever the delays were.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod device;
mod exchange;
mod lifetime;
mod order;
mod rank;
