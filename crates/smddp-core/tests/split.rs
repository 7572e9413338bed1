//! Groups created by splitting a group: members, rank order and function.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "each test file uses a part of it")]
mod common;

use std::time::Duration;

use common::{TIMEOUT, Wire, over, try_one};
use smddp_core::{Collective, Options};

/// Returns the expected members of this rank's new group: parent ranks in order.
fn expected(size: usize, me: usize, request: impl Fn(usize) -> (Option<i64>, i64)) -> Option<Vec<usize>> {
    let color = request(me).0?;
    let mut members: Vec<usize> = (0..size).filter(|&rank| request(rank).0 == Some(color)).collect();
    members.sort_by_key(|&rank| (request(rank).1, rank));
    Some(members)
}

#[test]
fn ranks_of_one_color_form_a_group_ordered_by_key() {
    type Request = fn(usize) -> (Option<i64>, i64);
    let requests: [Request; 5] = [
        |rank| (Some(rank as i64 % 2), 0),
        |rank| (Some(-7), -(rank as i64)),
        |rank| ((rank != 1).then_some(i64::MAX), i64::MIN),
        |rank| (Some(rank as i64), 0),
        |_| (None, 3),
    ];
    for (wire, size) in [(Wire::Shm, 5), (Wire::Nodes(2), 5), (Wire::Nodes(1), 3), (Wire::Shm, 1)] {
        over(wire.links(size), TIMEOUT, |comm| {
            for request in requests {
                let (color, key) = request(comm.rank());
                let group = comm.split(color, key).unwrap();
                let members = expected(size, comm.rank(), request);
                assert_eq!(group.is_some(), members.is_some());
                let (Some(group), Some(members)) = (group, members) else { continue };
                assert_eq!(group.size(), members.len());
                assert_eq!(members[group.rank()], comm.rank());
                for collective in [Collective::AllReduce, Collective::AllGather, Collective::Broadcast] {
                    try_one(&group, collective, 1000, 0, false).unwrap();
                }
                group.close();
            }
            comm.barrier(Options::default()).unwrap();
        });
    }
}

#[test]
fn split_groups_can_be_split_again_and_work_concurrently() {
    over(Wire::Nodes(2).links(4), TIMEOUT, |comm| {
        let half = comm.split(Some(comm.rank() as i64 / 2), 0).unwrap().unwrap();
        let one = half.split(Some(half.rank() as i64), 0).unwrap().unwrap();
        assert_eq!((half.size(), one.size()), (2, 1));
        for iteration in 0..20 {
            try_one(comm, Collective::AllReduce, 300 + iteration, 0, false).unwrap();
            try_one(&half, Collective::ReduceScatter, 300 + iteration, 0, false).unwrap();
            try_one(&one, Collective::AllReduce, 300 + iteration, 0, true).unwrap();
        }
    });
}

#[test]
fn rank_that_does_not_split_is_reported() {
    let errors = over(Wire::Shm.links(3), Duration::from_millis(300), |comm| {
        (comm.rank() != 1).then(|| comm.split(Some(0), 0).err().unwrap().to_string())
    });
    for error in errors.into_iter().flatten() {
        // Rank 1 has left, or the deadline has expired before.
        assert!(error.starts_with("split #0 (all_gather #0) on group `test` "), "{error}");
        assert!(error.contains("rank 1 (host ") && error.contains("; "), "{error}");
    }
}
