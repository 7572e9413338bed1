//! Repeated calls reuse their preparation. Calls that merely resemble an earlier one must not.

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp};

use crate::common::{TIMEOUT, Wire, over};

/// One all_reduce or all_gather: elements, reduction, and whether it is in place.
type Variety = (Collective, usize, RedOp, bool);

/// More varieties than the cache keeps, mostly small and one with several slots. Neighbours differ in one property.
const VARIETIES: [Variety; 12] = [
    (Collective::AllReduce, 3, RedOp::Sum, false),
    (Collective::AllReduce, 3, RedOp::Sum, true),
    (Collective::AllReduce, 3, RedOp::Max, false),
    (Collective::AllReduce, 4, RedOp::Sum, false),
    (Collective::AllReduce, 3, RedOp::Avg, true),
    (Collective::AllReduce, 3, RedOp::PremulSum(2.0), false),
    (Collective::AllReduce, 3, RedOp::PremulSum(3.0), false),
    (Collective::AllReduce, 60_000, RedOp::Sum, false),
    (Collective::AllGather, 3, RedOp::Sum, false),
    (Collective::AllGather, 4, RedOp::Sum, false),
    (Collective::AllReduce, 0, RedOp::Sum, false),
    (Collective::AllReduce, 5, RedOp::Min, true),
];

fn once(comm: &Communicator, (collective, count, redop, in_place): Variety, round: usize) {
    let (rank, n) = (comm.rank(), comm.size());
    let given = |r: usize, i: usize| ((r + 1) * (i % 7 + 1) + round) as f32 * n as f32;
    // A new allocation each time, usually at another address.
    let mut input: Vec<f32> = (0..count).map(|i| given(rank, i)).collect();
    let gathers = collective == Collective::AllGather;
    let mut output =
        if in_place { input.clone() } else { vec![0.0; if gathers { n * count } else { count }] };
    let flat = |data: &mut Vec<f32>| Blocks::Flat { ptr: data.as_mut_ptr().cast(), count: data.len() };
    let to = flat(&mut output);
    let from = if in_place { to } else { flat(&mut input) };
    let call = Call { collective, dtype: DType::F32, redop, root: 0, input: from, output: to };
    // SAFETY: both buffers outlive the call, which is awaited.
    unsafe { comm.run(&call, Options::default()) }.unwrap();
    let want = |i: usize| {
        let all = (0..n).map(|r| given(r, i));
        match redop {
            RedOp::Max => all.fold(f32::MIN, f32::max),
            RedOp::Min => all.fold(f32::MAX, f32::min),
            RedOp::Avg => all.sum::<f32>() / n as f32,
            RedOp::PremulSum(factor) => all.sum::<f32>() * factor as f32,
            _ => all.sum(),
        }
    };
    for (i, &found) in output.iter().enumerate() {
        let want = if gathers { given(i / count, i % count) } else { want(i) };
        assert_eq!(found, want, "element {i} of {collective:?} of {count}, {redop:?}, round {round}");
    }
}

#[test]
fn repeated_calls_use_new_buffers_and_match_only_equal_calls() {
    for wire in [Wire::Shm, Wire::Nodes(1), Wire::Nodes(2)] {
        for size in [2, 3] {
            over(wire.links(size), TIMEOUT, |comm| {
                for round in 0..40 {
                    // Two alternating varieties, all in order, and each several times.
                    once(comm, VARIETIES[round % 2], round);
                    once(comm, VARIETIES[round % VARIETIES.len()], round);
                    for variety in VARIETIES.iter().filter(|_| round % 10 == 9) {
                        once(comm, *variety, round);
                    }
                }
                assert_eq!(comm.sequence(), 2 * 40 + 4 * VARIETIES.len() as u64);
            });
        }
    }
}

#[test]
fn invalid_call_is_rejected_after_a_similar_valid_call() {
    over(Wire::Shm.links(2), TIMEOUT, |comm| {
        let mut data = vec![1f32; 8];
        let place = |data: &mut Vec<f32>, count| Blocks::Flat { ptr: data.as_mut_ptr().cast(), count };
        let mut make = |given: usize, taken: usize| {
            let (input, output) = (place(&mut data, given), place(&mut data, taken));
            let (collective, dtype) = (Collective::AllReduce, DType::F32);
            let call = Call { collective, dtype, redop: RedOp::Sum, root: 0, input, output };
            // SAFETY: `data` contains both and outlives the call.
            unsafe { comm.run(&call, Options::default()) }
        };
        for _ in 0..3 {
            make(8, 8).unwrap();
            assert!(make(8, 4).is_err() && make(4, 8).is_err());
        }
    });
}
