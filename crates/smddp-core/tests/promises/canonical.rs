//! Reductions with SMDDP_CANONICAL_ORDER=1 are bit-identical for every layout: they use a fixed tree over the ranks.
//! Without it, sibling groups (of one mesh dimension, made by one split) are bit-identical.

use std::hash::{DefaultHasher, Hash, Hasher};

use half::{bf16, f16};
use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp};

use crate::bits::data;
use crate::common::group::world as world_of;
use crate::common::procs::{RankProcess, start};
use crate::common::{TIMEOUT, Wire, over};

/// Elements of the whole buffer: one, a number without small divisors, and several segments.
const COUNTS: [usize; 3] = [1, 1_555, 12_000];

/// Combines the ranks' values in a binary tree and rounds at each node.
fn tree(values: &[f32], redop: RedOp, round: fn(f32) -> f32, top: bool) -> f32 {
    let n = values.len();
    if n == 1 {
        return values[0];
    }
    let (left, right) = values.split_at(n.next_power_of_two() / 2);
    let (a, b) = (tree(left, redop, round, false), tree(right, redop, round, false));
    let both = if redop == RedOp::Prod { a * b } else { a + b };
    round(if top && redop == RedOp::Avg { both / n as f32 } else { both })
}

/// Returns the expected result of `count` elements as bytes.
fn want(n: usize, dtype: DType, redop: RedOp, count: usize) -> Vec<u8> {
    type Read = fn(&[u8]) -> f32;
    let (read, round): (Read, fn(f32) -> f32) = match dtype {
        DType::BF16 => (|b| bf16::from_ne_bytes([b[0], b[1]]).to_f32(), |x| bf16::from_f32(x).to_f32()),
        DType::F16 => (|b| f16::from_ne_bytes([b[0], b[1]]).to_f32(), |x| f16::from_f32(x).to_f32()),
        _ => (|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]), |x| x),
    };
    let all: Vec<Vec<u8>> = (0..n).map(|rank| data(rank, dtype, count * dtype.size())).collect();
    (0..count)
        .flat_map(|i| {
            let at = i * dtype.size();
            let values: Vec<f32> = all.iter().map(|bytes| read(&bytes[at..])).collect();
            let result = tree(&values, redop, round, true);
            match dtype {
                DType::BF16 => bf16::from_f32(result).to_ne_bytes().to_vec(),
                DType::F16 => f16::from_f32(result).to_ne_bytes().to_vec(),
                _ => result.to_ne_bytes().to_vec(),
            }
        })
        .collect()
}

/// Returns this rank's result and its offset in the whole buffer in bytes.
fn reduced(
    comm: &Communicator,
    collective: Collective,
    dtype: DType,
    redop: RedOp,
    count: usize,
    root: usize,
) -> Option<(usize, Vec<u8>)> {
    let (me, n, size) = (comm.rank(), comm.size(), dtype.size());
    let count = if collective == Collective::ReduceScatter { count / n * n } else { count };
    let mut input = data(me, dtype, count * size);
    let out = if collective == Collective::ReduceScatter { count / n } else { count };
    let mut output = vec![0xa5u8; out * size];
    let flat = |data: &mut Vec<u8>| Blocks::Flat { ptr: data.as_mut_ptr(), count: data.len() / size };
    let has_output = collective != Collective::Reduce || me == root;
    let given = flat(&mut input);
    let taken = if has_output { flat(&mut output) } else { Blocks::None };
    let call = Call { collective, dtype, redop, root, input: given, output: taken };
    // SAFETY: the buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }.unwrap();
    let start = if collective == Collective::ReduceScatter { me * output.len() } else { 0 };
    has_output.then_some((start, output))
}

/// Runs all ranks as threads in this process, which has the settings in its environment.
pub(crate) fn rank(me: &RankProcess) {
    // A selected algorithm differs from the default only in groups with several choices.
    let forced = std::env::var("SMDDP_ALGO").is_ok_and(|name| !name.is_empty());
    let sizes = if forced { &[4, 6][..] } else { &[2, 3, 4, 6, 8] };
    for &n in sizes {
        let cases: Vec<_> = [
            (DType::F32, RedOp::Sum),
            (DType::F32, RedOp::Prod),
            (DType::BF16, RedOp::Avg),
            (DType::F16, RedOp::Sum),
        ]
        .into_iter()
        .flat_map(|(dtype, redop)| COUNTS.map(|count| (dtype, redop, count, want(n, dtype, redop, count))))
        .collect();
        let nodes = [1, 2, 3, 4].into_iter().filter(|each| *each < n).map(Wire::Nodes);
        for wire in nodes.chain([Wire::Shm, Wire::NonTemporal, Wire::Efa(7), Wire::Encrypted(2)]) {
            over(wire.links(n), TIMEOUT, |comm| {
                for &(dtype, redop, count, ref want) in &cases {
                    for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce] {
                        let got = reduced(comm, collective, dtype, redop, count, n - 1);
                        let Some((start, got)) = got else { continue };
                        assert!(
                            got == want[start..start + got.len()],
                            "{collective:?} {dtype:?} {redop:?} of {count} on rank {} of {n} over {wire:?}",
                            comm.rank()
                        );
                    }
                }
            });
        }
    }
    me.report("done");
}

#[test]
fn canonical_order_is_bit_identical_for_every_algorithm_segment_and_wire() {
    for (algorithm, segment) in [("", ""), ("", "4096"), ("mesh", ""), ("hier-ring", "65536")] {
        let environment =
            [("SMDDP_CANONICAL_ORDER", "1"), ("SMDDP_ALGO", algorithm), ("SMDDP_SEGMENT_BYTES", segment)];
        let mut ranks = start("canonical", 1, &environment, 4 * TIMEOUT);
        ranks.wait_for(0, "done");
        ranks.finish([0]);
    }
}

/// Worlds by the node of each rank: contiguous, interleaved, and uneven.
const WORLDS: [&str; 4] = ["000111", "012012", "00000011", "00011122"];

/// Gathers one number of every rank.
fn gathered(comm: &Communicator, mut value: u64) -> Vec<u64> {
    let mut all = vec![0u64; comm.size()];
    let input = Blocks::Flat { ptr: (&raw mut value).cast(), count: 1 };
    let output = Blocks::Flat { ptr: all.as_mut_ptr().cast(), count: all.len() };
    let (collective, dtype, redop) = (Collective::AllGather, DType::U64, RedOp::Sum);
    let call = Call { collective, dtype, redop, root: 0, input, output };
    // SAFETY: the buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }.unwrap();
    all
}

/// Runs one rank of a world with named nodes: both dimensions of two meshes, with equal inputs for equal group ranks.
pub(crate) fn sibling(me: &RankProcess) {
    let world = std::env::var("SMDDP_TEST_NODES").unwrap();
    let nodes: Vec<char> = world.chars().collect();
    // SAFETY: no other thread of this process reads or writes the environment yet.
    unsafe { std::env::set_var("SMDDP_NODE", nodes[me.rank].to_string()) };
    let (comm, n) = (world_of(me, TIMEOUT), me.size);
    for columns in [n / 2, 2] {
        let (row, column) = (me.rank / columns, me.rank % columns);
        for (length, color, key) in [(n / columns, column, row), (columns, row, column)] {
            let group = comm.split(Some(color as i64), key as i64).unwrap().unwrap();
            // The nodes of the group's ranks, numbered in order of appearance.
            let division = group.nodes().iter().fold(0, |all, node| 8 * all + *node as u64);
            let alike = gathered(&comm, division).iter().all(|other| *other == division);
            let path = group.path(Collective::AllReduce, DType::F32, 4096);
            let case = format!("nodes {world}, {columns} columns, groups of {length}: {path}");
            assert_eq!(path.contains("canonical"), !alike && length > 2, "{case}");
            let keys = gathered(&comm, key as u64);
            for (dtype, redop) in [(DType::F32, RedOp::Sum), (DType::BF16, RedOp::Avg)] {
                for collective in [Collective::AllReduce, Collective::ReduceScatter] {
                    let found = reduced(&group, collective, dtype, redop, COUNTS[2], 0).unwrap().1;
                    let mut hasher = DefaultHasher::new();
                    found.hash(&mut hasher);
                    let hash = hasher.finish();
                    let others = gathered(&comm, hash);
                    let compared = |k: u64| k == key as u64 || collective == Collective::AllReduce;
                    let same = keys.iter().zip(others).all(|(k, other)| !compared(*k) || other == hash);
                    assert!(same, "{collective:?} {dtype:?}, {case}");
                }
            }
        }
    }
    comm.close();
}

#[test]
fn sibling_groups_are_bit_identical_for_every_division_into_nodes() {
    for nodes in WORLDS {
        let ranks = start("sibling", nodes.len(), &[("SMDDP_TEST_NODES", nodes)], TIMEOUT);
        ranks.finish(0..nodes.len());
    }
}
