//! Errors that the fake driver detects in a checked world for all delays: order, lifetime, and a small protocol.

#![allow(clippy::unwrap_used, reason = "test helpers")]

mod exchange;
mod lifetime;
mod order;
mod rank;
#[path = "../common/world.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod world;
