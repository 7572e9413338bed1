//! Bit-identical reductions: on all ranks, in all runs, and for every collective that computes them.

use half::{bf16, f16};
use smddp_core::network::{NetworkEstimate, Origin};
use smddp_core::{Blocks, Call, Collective, Communicator, DType, Network, Options, RedOp};

use crate::common::{TIMEOUT, Wire, over};

/// Buffer sizes in bytes, around the thresholds of algorithms and segments. Where it matters they are multiples of 2,
/// 3 and 4 blocks of whole cache lines.
const BYTES: [usize; 8] = [96, 768, 8_064, 8_448, 65_280, 131_328, 786_432, 3_145_728];

fn scramble(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 27)
}

/// Values of very different magnitudes, so that each summation order gives different bits.
pub(crate) fn data(rank: usize, dtype: DType, bytes: usize) -> Vec<u8> {
    (0..bytes / dtype.size())
        .flat_map(|i| {
            let x = scramble((rank * 1_000_003 + i) as u64);
            let value = ((x >> 40) as f32 - 8_388_608.0) * 2f32.powi((x % 23) as i32 - 30);
            match dtype {
                DType::BF16 => bf16::from_f32(value).to_ne_bytes().to_vec(),
                DType::F16 => f16::from_f32(value / 65_536.0).to_ne_bytes().to_vec(),
                _ => value.to_ne_bytes().to_vec(),
            }
        })
        .collect()
}

fn reduce(
    comm: &Communicator,
    collective: Collective,
    dtype: DType,
    redop: RedOp,
    bytes: usize,
    in_place: bool,
) -> Vec<u8> {
    let mut input = data(comm.rank(), dtype, bytes);
    let count = bytes / dtype.size();
    let out = if collective == Collective::ReduceScatter { count / comm.size() } else { count };
    let mut output = vec![0xa5u8; out * dtype.size()];
    let flat = |data: &mut Vec<u8>| Blocks::Flat { ptr: data.as_mut_ptr(), count: data.len() / dtype.size() };
    let given = flat(&mut input);
    let taken = if in_place { given } else { flat(&mut output) };
    let call = Call { collective, dtype, redop, root: 0, input: given, output: taken };
    // SAFETY: the buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }.unwrap();
    if in_place { input } else { output }
}

#[test]
fn reductions_are_bit_identical_on_all_ranks_and_runs_and_in_reduce_scatter() {
    for n in [2, 3, 4] {
        for dtype in [DType::F32, DType::BF16] {
            for redop in [RedOp::Sum, RedOp::Avg] {
                for bytes in BYTES {
                    let once = |wire: Wire, in_place: bool| {
                        over(wire.links(n), TIMEOUT, |comm| {
                            let all = reduce(comm, Collective::AllReduce, dtype, redop, bytes, in_place);
                            (all, reduce(comm, Collective::ReduceScatter, dtype, redop, bytes, false))
                        })
                    };
                    let first = once(Wire::Shm, false);
                    for (rank, (all, scattered)) in first.iter().enumerate() {
                        let case = format!("{} of {} bytes, rank {rank} of {n}", dtype.name(), bytes);
                        assert!(*all == first[0].0, "{case}: differs from rank 0");
                        let block = bytes / n;
                        assert!(
                            *scattered == all[rank * block..(rank + 1) * block],
                            "{case}: reduce_scatter differs from all_reduce"
                        );
                    }
                    // Repeats the run: over the same wire, and with non-temporal stores; for small buffers in place
                    // too.
                    for repeat in 0..if bytes > 200_000 { 1 } else { 3 } {
                        let wire = if repeat == 0 { Wire::Shm } else { Wire::NonTemporal };
                        assert!(once(wire, repeat == 2) == first, "{} bytes over {wire:?} differ", bytes);
                    }
                }
            }
        }
    }
}

/// The network measurement determines segments, and so the messages of a buffer. The result must not depend on it.
#[test]
fn network_changes_the_segments_but_not_the_bits() {
    let slow = Network { latency_ns: 16_000.0, message_ns: 630.0, bytes_per_ns: 0.125, ..Network::ASSUMED };
    let fast = Network { latency_ns: 160_000.0, message_ns: 6_300.0, bytes_per_ns: 12.5, ..Network::ASSUMED };
    for (collective, bytes) in [
        (Collective::AllReduce, 3_145_728),
        (Collective::ReduceScatter, 3_145_728),
        (Collective::AllReduce, 131_328),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let over_network = |network: Option<Network>| {
                over(Wire::Nodes(2).links(4), TIMEOUT, |comm| {
                    if let Some(network) = network {
                        assert!(comm.set_network(NetworkEstimate { network, origin: Origin::Configured }));
                    }
                    let out = reduce(comm, collective, dtype, RedOp::Sum, bytes, false);
                    let taken = comm.path_counters();
                    (out, comm.path(collective, dtype, bytes), taken[0].variant)
                })
            };
            let [default, slow, fast] = [None, Some(slow), Some(fast)].map(over_network);
            for (rank, (bits, path, algorithm)) in default.iter().enumerate() {
                for other in [&slow[rank], &fast[rank]] {
                    assert_eq!(other.2, *algorithm, "the algorithm must not depend on the network");
                    assert!(other.0 == *bits, "{collective:?} {dtype:?} on rank {rank} differs");
                }
                assert!(slow[rank].1 != *path, "{path}, {}", slow[rank].1);
            }
        }
    }
}
