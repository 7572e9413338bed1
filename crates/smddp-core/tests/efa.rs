//! Every collective over a simulated fabric with EFA's rules: unordered delivery, small messages, full queues,
//! emulated writes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "each test file uses a part of it")]
mod common;

use common::{ALL, TIMEOUT, efa_links, over, try_one};
use fake_libfabric::{SimulatedFabric, knob};

/// Runs all collectives for one seed, with sizes from zero to many segments. The seed determines ranks, nodes and
/// rails.
fn seed(seed: u64) {
    let size = 2 + (seed % 5) as usize;
    let each = 1 + (seed / 5 % 3) as usize;
    let knobs =
        [(knob::DEVICES, [1, 2, 4][(seed / 15 % 3) as usize]), (knob::EMULATED_WRITE, (seed / 45 + 1) % 2)];
    let fabric = SimulatedFabric::with_small_limits(seed, &knobs);
    over(efa_links(size, each, &fabric), TIMEOUT, |comm| {
        for (i, &collective) in ALL.iter().enumerate() {
            let counts = [0, 3, 700, 5_000, 40_000, 90_001];
            let count = counts[(seed as usize + i) % if seed.is_multiple_of(4) { 6 } else { 4 }];
            try_one(comm, collective, count, seed as usize % size, seed.is_multiple_of(2))
                .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
    });
    assert_eq!(fabric.violations(), [], "seed {seed}");
}

#[test]
fn collectives_are_correct_under_efa_rules_for_a_thousand_seeds() {
    (0..1000).for_each(seed);
}

#[test]
#[ignore = "takes minutes; run with --ignored"]
fn collectives_are_correct_under_efa_rules_for_ten_thousand_seeds() {
    (1000..11_000).for_each(seed);
}
