//! What the fake driver finds in a checked world, whatever the delays were: order, lifetimes, and a protocol in small.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod exchange;
mod lifetime;
mod order;
mod rank;
#[path = "../common/world.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod world;
