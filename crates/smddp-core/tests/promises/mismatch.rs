//! Mismatched calls: both ranks raise an error that names both calls, and never block.

use std::time::Instant;

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Error, Options, RedOp, Result};

use crate::common::{Gate, PROMPT_LIMIT, TIMEOUT, Wire, fabric_links, over, shape};

/// Compact description of a call for tables.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CallSpec {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    pub(crate) redop: RedOp,
    pub(crate) root: usize,
    /// Elements per block (whole buffer for all_reduce, broadcast, reduce).
    pub(crate) count: usize,
}

pub(crate) const BASE: CallSpec =
    CallSpec { collective: Collective::AllReduce, dtype: DType::F32, redop: RedOp::Sum, root: 0, count: 100 };

pub(crate) fn run(comm: &Communicator, make: CallSpec) -> Result<()> {
    let (given, taken) = shape(make.collective, comm.rank() == make.root, comm.size(), make.count);
    let mut buffers =
        [given, taken].map(|count| vec![0u128; count.unwrap_or(0).div_ceil(16 / make.dtype.size())]);
    let [input, output] = &mut buffers;
    let flat = |data: &mut Vec<u128>, count: Option<usize>| match count {
        Some(count) => Blocks::Flat { ptr: data.as_mut_ptr().cast(), count },
        None => Blocks::None,
    };
    let call = Call {
        collective: make.collective,
        dtype: make.dtype,
        redop: make.redop,
        root: make.root,
        input: flat(input, given),
        output: flat(output, taken),
    };
    // SAFETY: the buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }
}

fn barrier(comm: &Communicator) -> Result<()> {
    run(comm, CallSpec { collective: Collective::Barrier, count: 0, ..BASE })
}

/// Runs each rank's calls and a barrier. Asserts that every rank raises a mismatch that contains `names`.
fn assert_mismatch(calls: &[&[CallSpec]], names: &[&str]) {
    for wire in Wire::EACH {
        let begun = Instant::now();
        let all_done = Gate::new(calls.len());
        over(wire.links(calls.len()), TIMEOUT, |comm| {
            let mine = calls[comm.rank()];
            let outcome = mine.iter().try_for_each(|&make| run(comm, make)).and_then(|()| barrier(comm));
            let error =
                outcome.expect_err(&format!("{calls:?} over {wire:?}: rank {} raised no error", comm.rank()));
            assert!(matches!(error, Error::Mismatch { .. }), "{calls:?} over {wire:?}: {error}");
            for name in names {
                let text = error.to_string();
                assert!(text.contains(name), "rank {}: `{name}` is missing in: {text}", comm.rank());
            }
            // Keeps all ranks in the group until all have the error: a departure would be another cause.
            all_done.wait();
        });
        assert!(begun.elapsed() < PROMPT_LIMIT, "{calls:?} over {wire:?} took {:?}", begun.elapsed());
    }
}

#[test]
fn different_collectives_fail_on_both_sides_naming_both() {
    for count in [0, 10, 3000, 100_000] {
        let reduce = CallSpec { count, ..BASE };
        let gather = CallSpec { collective: Collective::AllGather, ..reduce };
        assert_mismatch(&[&[reduce], &[gather]], &["all_reduce", "all_gather"]);
        assert_mismatch(&[&[gather], &[gather], &[reduce]], &["all_reduce", "all_gather"]);
        let send = CallSpec { collective: Collective::Broadcast, ..reduce };
        assert_mismatch(&[&[send], &[reduce]], &["all_reduce", "broadcast"]);
    }
}

#[test]
fn different_dtypes_fail_on_both_sides_naming_both() {
    for count in [10, 3000] {
        let single = CallSpec { count, ..BASE };
        let double = CallSpec { dtype: DType::F64, ..single };
        assert_mismatch(&[&[single], &[double]], &["float32", "float64"]);
        let whole = CallSpec { dtype: DType::I32, ..single };
        assert_mismatch(&[&[whole], &[single], &[whole]], &["float32", "int32"]);
    }
}

#[test]
fn different_reductions_fail_on_both_sides_naming_both() {
    let max = CallSpec { redop: RedOp::Max, ..BASE };
    assert_mismatch(&[&[BASE], &[max]], &["sum", "max"]);
    let scaled = CallSpec { redop: RedOp::PremulSum(0.5), ..BASE };
    assert_mismatch(&[&[scaled], &[BASE]], &["sum", "premul_sum"]);
    let otherwise = CallSpec { redop: RedOp::PremulSum(0.25), ..BASE };
    for count in [10, 100_000] {
        let (scaled, otherwise) = (CallSpec { count, ..scaled }, CallSpec { count, ..otherwise });
        assert_mismatch(&[&[scaled], &[otherwise]], &["premul_sum", "factor"]);
        assert_mismatch(&[&[scaled], &[scaled], &[otherwise]], &["premul_sum", "factor"]);
    }
}

#[test]
fn different_roots_fail_on_both_sides_naming_both() {
    for collective in [Collective::Broadcast, Collective::Reduce, Collective::Gather, Collective::Scatter] {
        for count in [0, 10, 3000] {
            let first = CallSpec { collective, count, ..BASE };
            let second = CallSpec { root: 1, ..first };
            assert_mismatch(&[&[first], &[second]], &["root 0", "root 1"]);
            assert_mismatch(&[&[first], &[first], &[second]], &["root 0", "root 1"]);
        }
    }
}

#[test]
fn different_counts_fail_on_both_sides_naming_both() {
    for collective in [
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllReduce,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
    ] {
        for (a, b) in [(10, 12), (100, 40_000), (50_000, 50_001)] {
            let (a, b) =
                (CallSpec { collective, count: a, ..BASE }, CallSpec { collective, count: b, ..BASE });
            assert_mismatch(&[&[a], &[b]], &["elements"]);
        }
    }
}

#[test]
fn reordered_calls_fail_on_both_sides() {
    let gather = CallSpec { collective: Collective::AllGather, ..BASE };
    assert_mismatch(&[&[BASE, gather], &[gather, BASE]], &["all_reduce", "all_gather"]);
    assert_mismatch(&[&[BASE, BASE, gather], &[BASE, gather, BASE]], &["#1", "all_reduce", "all_gather"]);
}

/// all_gather or reduce_scatter of blocks of these counts.
pub(crate) fn listed(comm: &Communicator, collective: Collective, counts: &[usize]) -> Result<()> {
    let mine = counts[comm.rank()];
    let (mut whole, mut own) = (vec![1f32; counts.iter().sum()], vec![1f32; mine]);
    let whole = Blocks::Cut { ptr: whole.as_mut_ptr().cast(), counts };
    let own = Blocks::Flat { ptr: own.as_mut_ptr().cast(), count: mine };
    let (input, output) = if collective == Collective::AllGather { (own, whole) } else { (whole, own) };
    let call = Call { collective, dtype: DType::F32, redop: RedOp::Sum, root: 0, input, output };
    // SAFETY: the buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }
}

#[test]
fn different_lists_with_equal_sums_fail_on_all_ranks() {
    let lists: [[[usize; 3]; 3]; 5] = [
        [[2, 1, 3], [2, 3, 1], [2, 1, 3]],
        [[2, 2, 2], [2, 1, 3], [2, 2, 2]],
        [[1, 0, 2], [1, 0, 2], [1, 1, 1]],
        [[0, 0, 3], [0, 0, 3], [0, 3, 0]],
        [[3, 2, 1], [1, 2, 3], [2, 2, 2]],
    ];
    for (collective, scale) in [Collective::ReduceScatter, Collective::AllGather]
        .into_iter()
        .flat_map(|collective| [1, 300, 40_000].map(|scale| (collective, scale)))
    {
        for (lists, wire) in lists.iter().flat_map(|lists| Wire::EACH.map(|wire| (lists, wire))) {
            let all_done = Gate::new(3);
            println!("{collective:?} of {lists:?} x {scale} over {wire:?}");
            over(wire.links(3), TIMEOUT, |comm| {
                let counts = lists[comm.rank()].map(|count| count * scale);
                let outcome = listed(comm, collective, &counts).and_then(|()| barrier(comm));
                let error = outcome.expect_err(&format!(
                    "{collective:?} of {lists:?} x {scale} over {wire:?}: rank {} raised no error",
                    comm.rank()
                ));
                let text = error.to_string();
                assert!(matches!(error, Error::Mismatch { .. }), "{text}");
                assert!(text.contains("elements"), "{text}");
                all_done.wait();
            });
        }
    }
}

/// all_to_all with the given send and receive counts per peer.
fn pairs(comm: &Communicator, send: &[usize], receive: &[usize]) -> Result<()> {
    let (mut a, mut b) = (vec![1f32; send.iter().sum()], vec![0f32; receive.iter().sum()]);
    let call = Call {
        collective: Collective::AllToAll,
        dtype: DType::F32,
        redop: RedOp::Sum,
        root: 0,
        input: Blocks::Cut { ptr: a.as_mut_ptr().cast(), counts: send },
        output: Blocks::Cut { ptr: b.as_mut_ptr().cast(), counts: receive },
    };
    // SAFETY: the buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }
}

fn uneven(send: [[usize; 2]; 2], receive: [[usize; 2]; 2]) {
    for wire in Wire::EACH {
        let all_done = Gate::new(2);
        let begun = Instant::now();
        over(wire.links(2), TIMEOUT, |comm| {
            let me = comm.rank();
            let outcome = pairs(comm, &send[me], &receive[me]).and_then(|()| barrier(comm));
            let error = outcome.expect_err(&format!(
                "{send:?} against {receive:?} over {wire:?}: rank {me} raised no error"
            ));
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { .. }), "{text}");
            assert!(text.contains("bytes") && text.contains("rank 0") && text.contains("rank 1"), "{text}");
            all_done.wait();
        });
        assert!(begun.elapsed() < PROMPT_LIMIT, "{send:?} against {receive:?} over {wire:?}");
    }
}

#[test]
fn inconsistent_all_to_all_counts_fail_on_both_sides() {
    uneven([[1, 5], [7, 2]], [[1, 7], [6, 2]]);
    uneven([[1, 50_000], [7, 2]], [[1, 7], [60_000, 2]]);
    uneven([[1, 0], [7, 2]], [[1, 7], [6, 2]]);
}

#[test]
fn all_to_all_without_a_receive_fails_on_both_sides() {
    uneven([[1, 5], [7, 2]], [[1, 7], [0, 2]]);
    uneven([[1, 500_000], [7, 2]], [[1, 7], [0, 2]]);
    uneven([[0, 5], [0, 0]], [[0, 0], [0, 0]]);
}

/// Rank 0 sends, rank 1 receives.
fn message(comm: &Communicator, dtype: DType, count: usize) -> Result<()> {
    let mut data = vec![0u128; (count * dtype.size()).div_ceil(16)];
    let ptr: *mut u8 = data.as_mut_ptr().cast();
    // SAFETY: the buffer outlives the work, which is awaited.
    unsafe {
        match comm.rank() {
            0 => comm.send(ptr, count, dtype, 1, 3, Options::default())?.wait(None),
            _ => comm.recv(ptr, count, dtype, Some(0), 3, Options::default())?.wait(None),
        }
    }
}

#[test]
fn message_of_another_size_or_type_fails_on_both_sides_naming_both() {
    for wire in Wire::EACH {
        for ((a, m), (b, n)) in [
            ((DType::F32, 10), (DType::F32, 11)),
            ((DType::F32, 10), (DType::I32, 10)),
            ((DType::F32, 0), (DType::F32, 1)),
            ((DType::F32, 1_000_000), (DType::F32, 1_000_001)),
            ((DType::F64, 1_000_000), (DType::I64, 1_000_000)),
        ] {
            let all_done = Gate::new(2);
            over(wire.links(2), TIMEOUT, |comm| {
                let (dtype, count) = [(a, m), (b, n)][comm.rank()];
                let error = message(comm, dtype, count).and_then(|()| barrier(comm)).unwrap_err();
                let text = error.to_string();
                assert!(matches!(error, Error::Mismatch { .. }), "{text}");
                for (dtype, count) in [(a, m), (b, n)] {
                    assert!(text.contains(&format!("{count} elements of {}", dtype.name())), "{text}");
                }
                all_done.wait();
            });
        }
    }
}

#[test]
fn message_with_another_tag_raises_on_its_sender_before_it_leaves() {
    let begun = Instant::now();
    for links in Wire::EACH.map(|wire| wire.links(3)).into_iter().chain(fabric_links(3)) {
        over(links, TIMEOUT, |comm| {
            let mut data = [0f32; 10];
            let ptr: *mut u8 = data.as_mut_ptr().cast();
            // SAFETY: the buffer outlives the work, which is awaited.
            let called = unsafe {
                match comm.rank() {
                    0 => comm.send(ptr, 10, DType::F32, 1, 3, Options::default()).map(Some),
                    1 => comm.recv(ptr, 10, DType::F32, Some(0), 4, Options::default()).map(Some),
                    _ => Ok(None),
                }
            };
            let outcome = called.unwrap().map_or(Ok(()), |work| work.wait(None));
            let error = outcome.and_then(|()| comm.shutdown_checked(TIMEOUT)).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { .. }), "rank {}: {text}", comm.rank());
            for tag in ["tag 3", "tag 4"] {
                assert!(text.contains(tag), "rank {}: `{tag}` is missing in: {text}", comm.rank());
            }
        });
    }
    assert!(begun.elapsed() < PROMPT_LIMIT, "took {:?}", begun.elapsed());
}

/// The abort notice of a group may overtake data that a slower rank still needs for an earlier call, which has
/// completed on other ranks.
#[test]
fn call_that_completed_on_one_rank_completes_on_all_before_a_mismatch() {
    for iteration in 0..200 {
        over(Wire::Nodes(2).links(8), TIMEOUT, |comm| {
            barrier(comm)
                .unwrap_or_else(|error| panic!("iteration {iteration}, rank {}: {error}", comm.rank()));
            let error =
                run(comm, CallSpec { count: 10 + usize::from(comm.rank() == 0), ..BASE }).unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "iteration {iteration}: {error}");
        });
    }
}
