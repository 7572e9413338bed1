//! SMDDP_WIRE_FORMAT reduces the bits of 32-bit floats between nodes. Results have the format's accuracy and are
//! equal on all ranks.

use std::collections::HashMap;
use std::sync::Mutex;

use half::{bf16, f16};
use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp};

use crate::common::procs::{RankProcess, start};
use crate::common::{TIMEOUT, Wire, over};

/// Elements of the whole buffer: slightly above 64 KiB, the minimum for a format; several segments without small
/// divisors; and a size below the minimum.
const COUNTS: [usize; 3] = [16_386, 50_021, 1_000];

/// Values of very different magnitudes, at most 8.
fn data(rank: usize, count: usize) -> Vec<f32> {
    let number = |i: usize| {
        let x = ((rank * 1_000_003 + i) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x >> 40) as f32 / 8_388_608.0 - 1.0) * 2f32.powi((x % 11) as i32 - 7)
    };
    (0..count).map(number).collect()
}

/// Returns an element after its conversion; `None` for an accuracy of 1/127 of the largest value in its group.
fn rounded(format: &str, x: f32) -> Option<f32> {
    match format {
        "bf16" => Some(bf16::from_f32(x).to_f32()),
        "f16" => Some(f16::from_f32(x).to_f32()),
        _ => None,
    }
}

/// Returns the error bound of an element after `links` conversions. `size` is the sum of the magnitudes.
fn allowed(format: &str, size: f32, most: f32, links: usize) -> f32 {
    let (relative, absolute) = match format {
        "bf16" => (1.0 / 256.0, 0.0),
        "f16" => (1.0 / 2048.0, 1e-7),
        _ => (0.0, most / 127.0),
    };
    links as f32 * (relative * size + absolute) + 1e-5 * size
}

fn call(comm: &Communicator, collective: Collective, redop: RedOp, input: &mut [f32], output: &mut [f32]) {
    let flat = |data: &mut [f32]| Blocks::Flat { ptr: data.as_mut_ptr().cast(), count: data.len() };
    let (input, output) = (flat(input), flat(output));
    let call = Call { collective, dtype: DType::F32, redop, root: 0, input, output };
    // SAFETY: the buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }.unwrap();
}

/// Runs every collective once. Returns the results that must be equal on all ranks.
fn each(comm: &Communicator, format: &str, several: bool, count: usize) -> Vec<f32> {
    let (me, n) = (comm.rank(), comm.size());
    let coded = several && count >= COUNTS[0];
    let even = count / n * n;
    let all: Vec<Vec<f32>> = (0..n).map(|rank| data(rank, count)).collect();
    let format = if coded { format } else { "" };
    let sums: Vec<f32> = (0..count).map(|i| all.iter().map(|data| data[i]).sum()).collect();
    let sizes: Vec<f32> = (0..count).map(|i| all.iter().map(|data| data[i].abs()).sum()).collect();
    let assert_close = |got: &[f32], first: usize, divisor: f32, name: &str| {
        for (i, got) in got.iter().enumerate() {
            let (sum, size) = (sums[first + i] / divisor, sizes[first + i] / divisor);
            let may = if coded { allowed(format, size, 8.0 * n as f32, n + 1) } else { 1e-5 * size };
            assert!(
                (got - sum).abs() <= may,
                "{name} {format} {i} of {count}: {got}, expected {sum} +- {may}"
            );
        }
    };
    let mut alike = Vec::new();

    let mut input = data(me, even / n);
    let mut gathered = vec![9f32; even];
    call(comm, Collective::AllGather, RedOp::Sum, &mut input, &mut gathered);
    assert!(input == data(me, even / n), "a separate input is unchanged");
    for (rank, part) in gathered.chunks(even / n).enumerate() {
        for (got, x) in part.iter().zip(data(rank, even / n)) {
            match rounded(format, x) {
                _ if !coded => assert!(*got == x),
                Some(exactly) => assert!(*got == exactly, "{format}: {got} for {x}"),
                None => assert!((got - x).abs() <= 8.0 / 127.0 * 0.51),
            }
        }
    }
    // In place, with garbage in the other blocks.
    let mut place = vec![7f32; even];
    place[me * (even / n)..][..even / n].copy_from_slice(&input);
    let ptr = place.as_mut_ptr();
    let own = Blocks::Flat { ptr: ptr.wrapping_add(me * (even / n)).cast(), count: even / n };
    let whole = Blocks::Flat { ptr: ptr.cast(), count: even };
    let (collective, dtype, redop) = (Collective::AllGather, DType::F32, RedOp::Sum);
    let in_place = Call { collective, dtype, redop, root: 0, input: own, output: whole };
    // SAFETY: the buffer outlives the synchronous call.
    unsafe { comm.run(&in_place, Options::default()) }.unwrap();
    assert!(place == gathered, "the in-place result differs");
    alike.extend(gathered);

    for (redop, divisor) in [(RedOp::Sum, 1.0), (RedOp::Avg, n as f32)] {
        let mut input = data(me, count);
        let mut out = vec![9f32; count];
        call(comm, Collective::AllReduce, redop, &mut input, &mut out);
        assert_close(&out, 0, divisor, "all_reduce");
        let ptr = input.as_mut_ptr();
        let place = Blocks::Flat { ptr: ptr.cast(), count };
        let call =
            Call { collective: Collective::AllReduce, dtype, redop, root: 0, input: place, output: place };
        // SAFETY: as above.
        unsafe { comm.run(&call, Options::default()) }.unwrap();
        assert!(input == out, "the in-place result differs");
        alike.extend(out);

        let (mut input, mut part) = (data(me, even), vec![9f32; even / n]);
        let first = me * part.len();
        self::call(comm, Collective::ReduceScatter, redop, &mut input, &mut part);
        assert_close(&part, first, divisor, "reduce_scatter");
    }
    // The maximum is one of the inputs.
    let mut out = vec![9f32; count];
    call(comm, Collective::AllReduce, RedOp::Max, &mut data(me, count), &mut out);
    for (i, got) in out.iter().enumerate() {
        let most = all.iter().map(|data| data[i]).fold(f32::MIN, f32::max);
        match rounded(format, most) {
            _ if !coded => assert!(*got == most),
            Some(exactly) => assert!(*got == exactly, "{format} {got} {most}"),
            None => assert!((got - most).abs() <= 2.0 * 8.0 / 127.0),
        }
    }
    alike.extend(out);
    alike
}

/// Runs all ranks as threads in this process, which has the settings in its environment.
pub(crate) fn rank(me: &RankProcess) {
    let format = std::env::var("SMDDP_WIRE_FORMAT").unwrap();
    // A selected algorithm differs from the default only in groups with several choices.
    let forced = std::env::var("SMDDP_ALGO").is_ok_and(|name| !name.is_empty());
    let sizes = if forced { &[3, 6][..] } else { &[2, 3, 6] };
    for &n in sizes {
        let nodes = [1, 2, 3].into_iter().filter(|each| *each < n).map(Wire::Nodes);
        for wire in nodes.chain([Wire::Shm, Wire::Efa(7), Wire::Encrypted(1)]) {
            let seen: Mutex<HashMap<usize, Vec<f32>>> = Mutex::default();
            over(wire.links(n), TIMEOUT, |comm| {
                for count in COUNTS {
                    let found = each(comm, &format, !matches!(wire, Wire::Shm), count);
                    let mut seen = seen.lock().unwrap();
                    let first = seen.entry(count).or_insert_with(|| found.clone());
                    assert!(*first == found, "ranks of {n} over {wire:?} differ, {count}");
                }
            });
        }
    }
    me.report("done");
}

#[test]
fn wire_formats_are_accurate_and_equal_on_all_ranks() {
    for (format, algorithm, segment) in [
        ("bf16", "", ""),
        ("f16", "hier-ring", "4096"),
        ("int8", "", ""),
        ("int8", "hier-log", "192"),
        ("bf16", "hier-tree", "1024"),
        ("int8", "hier-recursive", "65536"),
    ] {
        let environment =
            [("SMDDP_WIRE_FORMAT", format), ("SMDDP_ALGO", algorithm), ("SMDDP_SEGMENT_BYTES", segment)];
        let mut ranks = start("formats", 1, &environment, 4 * TIMEOUT);
        ranks.wait_for(0, "done");
        ranks.finish([0]);
    }
}
