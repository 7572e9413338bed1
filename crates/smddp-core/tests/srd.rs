//! Every collective over a fabric with EFA's rules: what arrives in no order still comes out right.
//!
//! `SRD_SEEDS`: how many seeds (`SRD_FIRST_SEED`: from which on).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "each test file uses a part of it")]
mod common;

use common::{ALL, PATIENCE, over, try_one};
use smddp_transport::fabric::srd::SrdScript;
use smddp_transport::joint::over_srd;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

#[test]
fn every_collective_is_right_over_a_fabric_without_order_for_every_seed() {
    let first = number("SRD_FIRST_SEED", 0);
    for seed in first..first + number("SRD_SEEDS", 20) {
        let rails = [1, 2, 4][seed as usize % 3];
        let size = 2 + seed as usize % 4;
        // Nodes of one rank, or two nodes of two.
        let each = if size == 4 { 1 + seed as usize / 4 % 2 } else { 1 };
        let script = SrdScript {
            seed,
            rails,
            writes: seed / 3 % 2 == 1,
            one_sided: [1 << 20, 32_768][seed as usize / 6 % 2],
            ..SrdScript::default()
        };
        let (srd, links) = over_srd(size, each, script).unwrap();
        over(links, PATIENCE, |comm| {
            for (i, collective) in ALL.into_iter().enumerate() {
                for count in [1, 3000, 70_001] {
                    let root = (seed as usize + i) % size;
                    try_one(comm, collective, count, root, i % 2 == 0).unwrap_or_else(|e| {
                        panic!("seed {seed}, {size} ranks, {rails} rails: {collective:?} of {count}: {e}")
                    });
                }
            }
        });
        assert_eq!(srd.violations(), [], "seed {seed}");
    }
}
