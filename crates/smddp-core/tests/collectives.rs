//! Correct results of every collective over each wire.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "each test file uses a part of it")]
mod common;

use common::{ALL, TIMEOUT, Wire, node_ranks, over, shm_ranks, try_one};

const COUNTS: [usize; 8] = [0, 1, 5, 33, 1000, 5_000, 70_001, 300_000];

#[test]
fn collectives_are_correct_with_delayed_and_reordered_messages() {
    for n in [2, 3, 4, 5, 7, 8] {
        over(Wire::Efa(n as u64).links(n), TIMEOUT, |comm| {
            for &count in &COUNTS[..if n > 4 { 6 } else { 7 }] {
                for collective in ALL {
                    for root in [0, n - 1] {
                        try_one(comm, collective, count, root, false).unwrap();
                        try_one(comm, collective, count, root, true).unwrap();
                    }
                }
            }
        });
    }
}

#[test]
fn collectives_are_correct_over_shared_memory_for_all_sizes_and_odd_rank_counts() {
    for n in [1, 2, 3, 4, 7] {
        shm_ranks(n, |comm| {
            for &count in &COUNTS[..if n > 4 { 7 } else { 8 }] {
                for collective in ALL {
                    for root in [0, n - 1] {
                        try_one(comm, collective, count, root, false).unwrap();
                        try_one(comm, collective, count, root, true).unwrap();
                    }
                }
            }
        });
    }
}

#[test]
fn collectives_are_correct_between_nodes_for_all_sizes_and_uneven_nodes() {
    for (n, each) in [(2, 1), (3, 1), (4, 2), (5, 2), (7, 3), (8, 4)] {
        node_ranks(n, each, |comm| {
            for &count in &COUNTS[..if n > 4 { 7 } else { 8 }] {
                for collective in ALL {
                    for root in [0, n - 1] {
                        try_one(comm, collective, count, root, false).unwrap();
                        try_one(comm, collective, count, root, true).unwrap();
                    }
                }
            }
        });
    }
}
