//! Reductions are bit-identical for every floating-point mode of the caller: flushed denormals, other rounding modes,
//! trapping exceptions. Calls preserve the caller's mode.

use std::arch::asm;
use std::time::{Duration, Instant};

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp};

use crate::common::procs::{RankProcess, start};
use crate::common::{TIMEOUT, Wire, over};

/// Modes by name, as MXCSR values.
#[cfg(target_arch = "x86_64")]
const MODES: [(&str, u64); 6] = [
    ("default", 0x1f80),
    ("FTZ", 0x9f80),
    ("DAZ", 0x1fc0),
    ("FTZ and DAZ", 0x9fc0),
    ("round up", 0x5f80),
    // Unmasked: invalid operation, division by zero, overflow.
    ("traps", 0x1980),
];
/// Modes by name, as FPCR values. Not every processor supports traps.
#[cfg(target_arch = "aarch64")]
const MODES: [(&str, u64); 4] =
    [("default", 0), ("FZ", 1 << 24), ("FZ and FZ16", 1 << 24 | 1 << 19), ("round up", 1 << 22)];

#[cfg(target_arch = "x86_64")]
fn set_mode(mode: u64) {
    let value = mode as u32;
    // SAFETY: a valid MXCSR value for this thread.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack)) };
}

#[cfg(target_arch = "x86_64")]
fn mode() -> u64 {
    let mut value = 0u32;
    // SAFETY: stores to a local variable.
    unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack)) };
    // Clears the status flags.
    u64::from(value & !0x3f)
}

#[cfg(target_arch = "aarch64")]
fn set_mode(mode: u64) {
    // SAFETY: a valid FPCR value for this thread.
    unsafe { asm!("msr fpcr, {}", in(reg) mode, options(nostack)) };
}

#[cfg(target_arch = "aarch64")]
fn mode() -> u64 {
    let value: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nostack)) };
    value
}

const DTYPES: [DType; 8] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::C64,
    DType::C128,
    // Averages and factors of integers are computed in floating point.
    DType::I32,
    DType::U16,
];
const REDOPS: [RedOp; 6] =
    [RedOp::Sum, RedOp::Avg, RedOp::Prod, RedOp::Min, RedOp::Max, RedOp::PremulSum(0.3)];
/// Elements: one message; and for averages of two types, segments that helper threads share.
const SMALL: usize = 96;
const LARGE: usize = 40_000;

fn is_large(dtype: DType, redop: RedOp) -> bool {
    matches!(dtype, DType::F32 | DType::F16) && redop == RedOp::Avg
}

fn is_defined(dtype: DType, redop: RedOp) -> bool {
    let ordered = !matches!(dtype, DType::C64 | DType::C128);
    ordered || !matches!(redop, RedOp::Min | RedOp::Max)
}

/// Values of all magnitudes: denormals, inexact sums, underflowing products, overflowing sums, cancelling infinities.
fn data(rank: usize, dtype: DType, count: usize) -> Vec<u8> {
    let (mantissa, bytes) = match dtype {
        DType::F32 | DType::C64 => (23, 4),
        DType::F64 | DType::C128 => (52, 8),
        DType::F16 => (10, 2),
        DType::BF16 => (7, 2),
        _ => (0, dtype.size()),
    };
    let top = 8 * bytes - 1 - mantissa;
    let exponents = (1u64 << top) - 1;
    let number = |i: usize| {
        let mut x = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (i as u64) << 20;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 27;
        if mantissa == 0 {
            return x;
        }
        let fraction = x >> 8 & ((1 << mantissa) - 1);
        let (exponent, fraction) = match i % 8 {
            0 | 1 => (0, fraction),
            2 => (1 + x % 2, fraction),
            3 | 4 => (exponents / 2 + x % 3, fraction),
            5 => (exponents / 4, fraction),
            6 => (exponents - 1, fraction),
            // Infinities on two ranks, with opposite signs.
            _ if rank < 2 => return exponents << mantissa | (rank as u64) << (8 * bytes - 1),
            _ => (exponents / 2, fraction),
        };
        exponent << mantissa | fraction | (i as u64 % 3 / 2) << (8 * bytes - 1)
    };
    let numbers = count * dtype.size() / bytes;
    (0..numbers).flat_map(|i| number(i).to_le_bytes()[..bytes].to_vec()).collect()
}

/// Point at which the caller waits: in the call, after it, or after the progress thread has completed it.
#[derive(Clone, Copy, Debug)]
enum Wait {
    InCall,
    AfterCall,
    ForProgressThread,
}

const WAITS: [Wait; 3] = [Wait::InCall, Wait::AfterCall, Wait::ForProgressThread];

fn reduced(
    comm: &Communicator,
    (dtype, redop): (DType, RedOp),
    input: &mut [u8],
    wait: Wait,
    set: u64,
) -> Vec<u8> {
    let mut output = vec![0u8; input.len()];
    let count = input.len() / dtype.size();
    let flat = |bytes: &mut [u8]| Blocks::Flat { ptr: bytes.as_mut_ptr(), count };
    let (given, taken) = (flat(input), flat(&mut output));
    let collective = Collective::AllReduce;
    let call = Call { collective, dtype, redop, root: 0, input: given, output: taken };
    set_mode(set);
    let outcome = match wait {
        // SAFETY: the buffers outlive the call, which ends before this function returns, or the test has failed.
        Wait::InCall => unsafe { comm.run(&call, Options::default()) },
        // SAFETY: as above.
        _ => unsafe { comm.start(&call, Options::default()) }.and_then(|work| {
            let begun = Instant::now();
            while matches!(wait, Wait::ForProgressThread) && !work.is_done() && begun.elapsed() < TIMEOUT {
                std::thread::park_timeout(Duration::from_micros(20));
            }
            work.wait(None)
        }),
    };
    let after = mode();
    set_mode(MODES[0].1);
    outcome.unwrap();
    assert_eq!(after, set, "the caller's mode has changed, {wait:?}");
    output
}

/// Runs all ranks as threads in this process, which has the settings in its environment.
pub(crate) fn rank(me: &RankProcess) {
    let n = 3;
    // The last entry has a different mode on each rank.
    let modes: Vec<Vec<usize>> = (0..MODES.len())
        .map(|mode| vec![mode; n])
        .chain([(1..=n).map(|rank| rank % MODES.len()).collect()])
        .collect();
    let coded = std::env::var("SMDDP_WIRE_FORMAT").is_ok_and(|format| !format.is_empty());
    // Wire formats apply to float32 between nodes only.
    let (dtypes, wires) = if coded {
        (&DTYPES[..1], &[Wire::Nodes(2)][..])
    } else {
        (&DTYPES[..], &[Wire::Shm, Wire::Nodes(2)][..])
    };
    for wire in wires {
        over(wire.links(n), TIMEOUT, |comm| {
            for &dtype in dtypes {
                let inputs = [SMALL, LARGE].map(|count| data(comm.rank(), dtype, count));
                for redop in REDOPS.into_iter().filter(|&redop| is_defined(dtype, redop)) {
                    let large = is_large(dtype, redop);
                    for mut input in inputs.iter().take(1 + usize::from(large)).cloned() {
                        let case = (dtype, redop);
                        let want = reduced(comm, case, &mut input, Wait::InCall, MODES[0].1);
                        for (i, modes) in modes.iter().enumerate() {
                            let (name, set) = MODES[modes[comm.rank()]];
                            // Sums use every wait; other reductions use one each.
                            let waits = if redop == RedOp::Sum { &WAITS[..] } else { &WAITS[i % 3..=i % 3] };
                            for &wait in waits {
                                let got = reduced(comm, case, &mut input, wait, set);
                                assert!(
                                    got == want,
                                    "{case:?}, {} bytes over {wire:?}, mode {name}, {wait:?}",
                                    want.len()
                                );
                            }
                        }
                    }
                }
            }
        });
    }
    me.report("done");
}

#[test]
fn reductions_are_bit_identical_in_every_floating_point_mode() {
    for environment in [
        [("SMDDP_THREADS", "3"), ("SMDDP_WIRE_FORMAT", "")],
        [("SMDDP_THREADS", "3"), ("SMDDP_CANONICAL_ORDER", "1")],
        [("SMDDP_THREADS", "1"), ("SMDDP_WIRE_FORMAT", "int8")],
        [("SMDDP_THREADS", "1"), ("SMDDP_WIRE_FORMAT", "f16")],
    ] {
        let mut ranks = start("float_modes", 1, &environment, 4 * TIMEOUT);
        ranks.wait_for(0, "done");
        ranks.finish([0]);
    }
}
