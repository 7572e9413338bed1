//! Two ranks make different calls: an error on both sides that names both calls, never a hang.

use std::time::Instant;

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Error, Options, RedOp, Result};

use crate::common::{Gate, PATIENCE, SOON, Wire, fabric_links, over, shape};

/// One call, small enough to be written in a table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Make {
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    pub(crate) redop: RedOp,
    pub(crate) root: usize,
    /// Elements per block (whole buffer for all_reduce, broadcast, reduce).
    pub(crate) count: usize,
}

pub(crate) const BASE: Make =
    Make { collective: Collective::AllReduce, dtype: DType::F32, redop: RedOp::Sum, root: 0, count: 100 };

pub(crate) fn run(comm: &Communicator, make: Make) -> Result<()> {
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
    // SAFETY: the buffers outlive the call, which is synchronous.
    unsafe { comm.run(&call, Options::default()) }
}

fn barrier(comm: &Communicator) -> Result<()> {
    run(comm, Make { collective: Collective::Barrier, count: 0, ..BASE })
}

/// Every rank makes its calls; the first error must be there by the end of a barrier that follows, and name what
/// each side did.
fn differ(calls: &[&[Make]], names: &[&str]) {
    for wire in Wire::EACH {
        let begun = Instant::now();
        let over_here = Gate::new(calls.len());
        over(wire.links(calls.len()), PATIENCE, |comm| {
            let mine = calls[comm.rank()];
            let outcome = mine.iter().try_for_each(|&make| run(comm, make)).and_then(|()| barrier(comm));
            let error =
                outcome.expect_err(&format!("{calls:?} over {wire:?}: rank {} noticed nothing", comm.rank()));
            assert!(matches!(error, Error::Mismatch { .. }), "{calls:?} over {wire:?}: {error}");
            for name in names {
                let text = error.to_string();
                assert!(text.contains(name), "rank {}: `{name}` is not in: {text}", comm.rank());
            }
            // Nobody leaves before all have seen it: leaving would be another reason.
            over_here.wait();
        });
        assert!(begun.elapsed() < SOON, "{calls:?} over {wire:?} took {:?}", begun.elapsed());
    }
}

#[test]
fn different_collectives_fail_on_both_sides_naming_both() {
    for count in [0, 10, 3000, 100_000] {
        let reduce = Make { count, ..BASE };
        let gather = Make { collective: Collective::AllGather, ..reduce };
        differ(&[&[reduce], &[gather]], &["all_reduce", "all_gather"]);
        differ(&[&[gather], &[gather], &[reduce]], &["all_reduce", "all_gather"]);
        let send = Make { collective: Collective::Broadcast, ..reduce };
        differ(&[&[send], &[reduce]], &["all_reduce", "broadcast"]);
    }
}

#[test]
fn different_dtypes_fail_on_both_sides_naming_both() {
    for count in [10, 3000] {
        let single = Make { count, ..BASE };
        let double = Make { dtype: DType::F64, ..single };
        differ(&[&[single], &[double]], &["float32", "float64"]);
        let whole = Make { dtype: DType::I32, ..single };
        differ(&[&[whole], &[single], &[whole]], &["float32", "int32"]);
    }
}

#[test]
fn different_reductions_fail_on_both_sides_naming_both() {
    let max = Make { redop: RedOp::Max, ..BASE };
    differ(&[&[BASE], &[max]], &["sum", "max"]);
    let scaled = Make { redop: RedOp::PremulSum(0.5), ..BASE };
    differ(&[&[scaled], &[BASE]], &["sum", "premul_sum"]);
    let otherwise = Make { redop: RedOp::PremulSum(0.25), ..BASE };
    for count in [10, 100_000] {
        let (scaled, otherwise) = (Make { count, ..scaled }, Make { count, ..otherwise });
        differ(&[&[scaled], &[otherwise]], &["premul_sum", "factor"]);
        differ(&[&[scaled], &[scaled], &[otherwise]], &["premul_sum", "factor"]);
    }
}

#[test]
fn different_roots_fail_on_both_sides_naming_both_even_if_nobody_reads() {
    for collective in [Collective::Broadcast, Collective::Reduce, Collective::Gather, Collective::Scatter] {
        for count in [0, 10, 3000] {
            let first = Make { collective, count, ..BASE };
            let second = Make { root: 1, ..first };
            differ(&[&[first], &[second]], &["root 0", "root 1"]);
            differ(&[&[first], &[first], &[second]], &["root 0", "root 1"]);
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
            let (a, b) = (Make { collective, count: a, ..BASE }, Make { collective, count: b, ..BASE });
            differ(&[&[a], &[b]], &["elements"]);
        }
    }
}

#[test]
fn another_order_of_the_same_calls_fails_on_both_sides() {
    let gather = Make { collective: Collective::AllGather, ..BASE };
    differ(&[&[BASE, gather], &[gather, BASE]], &["all_reduce", "all_gather"]);
    differ(&[&[BASE, BASE, gather], &[BASE, gather, BASE]], &["#1", "all_reduce", "all_gather"]);
}

/// all_gather or reduce_scatter of blocks of these counts.
pub(crate) fn listed(comm: &Communicator, collective: Collective, counts: &[usize]) -> Result<()> {
    let mine = counts[comm.rank()];
    let (mut whole, mut own) = (vec![1f32; counts.iter().sum()], vec![1f32; mine]);
    let whole = Blocks::Cut { ptr: whole.as_mut_ptr().cast(), counts };
    let own = Blocks::Flat { ptr: own.as_mut_ptr().cast(), count: mine };
    let (input, output) = if collective == Collective::AllGather { (own, whole) } else { (whole, own) };
    let call = Call { collective, dtype: DType::F32, redop: RedOp::Sum, root: 0, input, output };
    // SAFETY: the buffers outlive the call, which is synchronous.
    unsafe { comm.run(&call, Options::default()) }
}

#[test]
fn lists_that_add_up_to_the_same_but_differ_fail_on_all_ranks() {
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
            let over_here = Gate::new(3);
            println!("{collective:?} of {lists:?} x {scale} over {wire:?}");
            over(wire.links(3), PATIENCE, |comm| {
                let counts = lists[comm.rank()].map(|count| count * scale);
                let outcome = listed(comm, collective, &counts).and_then(|()| barrier(comm));
                let error = outcome.expect_err(&format!(
                    "{collective:?} of {lists:?} x {scale} over {wire:?}: rank {} noticed nothing",
                    comm.rank()
                ));
                let text = error.to_string();
                assert!(matches!(error, Error::Mismatch { .. }), "{text}");
                assert!(text.contains("elements"), "{text}");
                over_here.wait();
            });
        }
    }
}

/// all_to_all with what each rank sends to and expects from each.
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
    // SAFETY: the buffers outlive the call, which is synchronous.
    unsafe { comm.run(&call, Options::default()) }
}

fn uneven(send: [[usize; 2]; 2], receive: [[usize; 2]; 2]) {
    for wire in Wire::EACH {
        let over_here = Gate::new(2);
        let begun = Instant::now();
        over(wire.links(2), PATIENCE, |comm| {
            let me = comm.rank();
            let outcome = pairs(comm, &send[me], &receive[me]).and_then(|()| barrier(comm));
            let error = outcome.expect_err(&format!(
                "{send:?} against {receive:?} over {wire:?}: rank {me} noticed nothing"
            ));
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { .. }), "{text}");
            assert!(text.contains("bytes") && text.contains("rank 0") && text.contains("rank 1"), "{text}");
            over_here.wait();
        });
        assert!(begun.elapsed() < SOON, "{send:?} against {receive:?} over {wire:?}");
    }
}

#[test]
fn uneven_pairs_that_disagree_fail_on_both_sides() {
    uneven([[1, 5], [7, 2]], [[1, 7], [6, 2]]);
    uneven([[1, 50_000], [7, 2]], [[1, 7], [60_000, 2]]);
    uneven([[1, 0], [7, 2]], [[1, 7], [6, 2]]);
}

#[test]
fn pairs_of_which_one_side_expects_nothing_fail_on_both_sides() {
    uneven([[1, 5], [7, 2]], [[1, 7], [0, 2]]);
    uneven([[1, 500_000], [7, 2]], [[1, 7], [0, 2]]);
    uneven([[0, 5], [0, 0]], [[0, 0], [0, 0]]);
}

/// Rank 0 sends, rank 1 receives.
fn mail(comm: &Communicator, dtype: DType, count: usize) -> Result<()> {
    let mut data = vec![0u128; (count * dtype.size()).div_ceil(16)];
    let ptr: *mut u8 = data.as_mut_ptr().cast();
    // SAFETY: the buffer outlives the work, which is waited for.
    unsafe {
        match comm.rank() {
            0 => comm.send(ptr, count, dtype, 1, 3, Options::default())?.wait(None),
            _ => comm.recv(ptr, count, dtype, Some(0), 3, Options::default())?.wait(None),
        }
    }
}

#[test]
fn a_message_of_another_size_or_type_fails_on_both_sides_naming_both() {
    for wire in Wire::EACH {
        for ((a, m), (b, n)) in [
            ((DType::F32, 10), (DType::F32, 11)),
            ((DType::F32, 10), (DType::I32, 10)),
            ((DType::F32, 0), (DType::F32, 1)),
            ((DType::F32, 1_000_000), (DType::F32, 1_000_001)),
            ((DType::F64, 1_000_000), (DType::I64, 1_000_000)),
        ] {
            let over_here = Gate::new(2);
            over(wire.links(2), PATIENCE, |comm| {
                let (dtype, count) = [(a, m), (b, n)][comm.rank()];
                let error = mail(comm, dtype, count).and_then(|()| barrier(comm)).unwrap_err();
                let text = error.to_string();
                assert!(matches!(error, Error::Mismatch { .. }), "{text}");
                for (dtype, count) in [(a, m), (b, n)] {
                    assert!(text.contains(&format!("{count} elements of {}", dtype.name())), "{text}");
                }
                over_here.wait();
            });
        }
    }
}

#[test]
fn a_message_with_another_tag_than_its_recv_is_told_to_its_sender_at_the_latest_when_that_leaves() {
    let begun = Instant::now();
    for links in Wire::EACH.map(|wire| wire.links(3)).into_iter().chain(fabric_links(3)) {
        over(links, PATIENCE, |comm| {
            let mut data = [0f32; 10];
            let ptr: *mut u8 = data.as_mut_ptr().cast();
            // SAFETY: the buffer outlives the work, which is waited for.
            let called = unsafe {
                match comm.rank() {
                    0 => comm.send(ptr, 10, DType::F32, 1, 3, Options::default()).map(Some),
                    1 => comm.recv(ptr, 10, DType::F32, Some(0), 4, Options::default()).map(Some),
                    _ => Ok(None),
                }
            };
            let outcome = called.unwrap().map_or(Ok(()), |work| work.wait(None));
            let error = outcome.and_then(|()| comm.finish(PATIENCE)).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { .. }), "rank {}: {text}", comm.rank());
            for tag in ["tag 3", "tag 4"] {
                assert!(text.contains(tag), "rank {}: `{tag}` is not in: {text}", comm.rank());
            }
        });
    }
    assert!(begun.elapsed() < SOON, "took {:?}", begun.elapsed());
}

/// The word that the group is dead may overtake what a slower rank still waits for in an earlier call, which has ended elsewhere.
#[test]
fn a_call_that_has_ended_anywhere_ends_everywhere_though_the_next_one_differs() {
    for turn in 0..200 {
        over(Wire::Nodes(2).links(8), PATIENCE, |comm| {
            barrier(comm).unwrap_or_else(|error| panic!("turn {turn}, rank {}: {error}", comm.rank()));
            let error = run(comm, Make { count: 10 + usize::from(comm.rank() == 0), ..BASE }).unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "turn {turn}: {error}");
        });
    }
}
