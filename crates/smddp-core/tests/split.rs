//! Groups cut out of a group: who is in which, in which order, and what they can do.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "each test file uses a part of it")]
mod common;

use std::time::Duration;

use common::{PATIENCE, Wire, over, try_one};
use smddp_core::{Collective, Options};

/// The new group that this rank should be in: the world's ranks in order.
fn expected(size: usize, me: usize, asked: impl Fn(usize) -> (Option<i64>, i64)) -> Option<Vec<usize>> {
    let color = asked(me).0?;
    let mut members: Vec<usize> = (0..size).filter(|&rank| asked(rank).0 == Some(color)).collect();
    members.sort_by_key(|&rank| (asked(rank).1, rank));
    Some(members)
}

#[test]
fn ranks_of_a_color_are_a_group_in_the_order_of_their_keys() {
    type Ask = fn(usize) -> (Option<i64>, i64);
    let asks: [Ask; 5] = [
        |rank| (Some(rank as i64 % 2), 0),
        |rank| (Some(-7), -(rank as i64)),
        |rank| ((rank != 1).then_some(i64::MAX), i64::MIN),
        |rank| (Some(rank as i64), 0),
        |_| (None, 3),
    ];
    for (wire, size) in [(Wire::Shm, 5), (Wire::Nodes(2), 5), (Wire::Nodes(1), 3), (Wire::Shm, 1)] {
        over(wire.links(size), PATIENCE, |comm| {
            for ask in asks {
                let (color, key) = ask(comm.rank());
                let made = comm.split(color, key).unwrap();
                let members = expected(size, comm.rank(), ask);
                assert_eq!(made.is_some(), members.is_some());
                let (Some(made), Some(members)) = (made, members) else { continue };
                assert_eq!(made.size(), members.len());
                assert_eq!(members[made.rank()], comm.rank());
                for collective in [Collective::AllReduce, Collective::AllGather, Collective::Broadcast] {
                    try_one(&made, collective, 1000, 0, false).unwrap();
                }
                made.close();
            }
            comm.barrier(Options::default()).unwrap();
        });
    }
}

#[test]
fn a_part_can_be_cut_again_and_works_beside_the_whole() {
    over(Wire::Nodes(2).links(4), PATIENCE, |comm| {
        let half = comm.split(Some(comm.rank() as i64 / 2), 0).unwrap().unwrap();
        let one = half.split(Some(half.rank() as i64), 0).unwrap().unwrap();
        assert_eq!((half.size(), one.size()), (2, 1));
        for turn in 0..20 {
            try_one(comm, Collective::AllReduce, 300 + turn, 0, false).unwrap();
            try_one(&half, Collective::ReduceScatter, 300 + turn, 0, false).unwrap();
            try_one(&one, Collective::AllReduce, 300 + turn, 0, true).unwrap();
        }
    });
}

#[test]
fn a_rank_that_does_not_split_is_named() {
    let errors = over(Wire::Shm.links(3), Duration::from_millis(300), |comm| {
        (comm.rank() != 1).then(|| comm.split(Some(0), 0).err().unwrap().to_string())
    });
    for error in errors.into_iter().flatten() {
        assert!(error.contains("rank 1"), "{error}");
    }
}
