//! Every element type, reduction and uneven form, compared with plain arithmetic.

use half::{bf16, f16};
use smddp_core::{Algorithm, Blocks, Call, Collective, Communicator, DType, Error, Options, RedOp, Result};

use crate::common::procs::{RankProcess, start};
use crate::common::{TIMEOUT, Wire, over};

pub(crate) const REDOPS: [RedOp; 9] = [
    RedOp::Sum,
    RedOp::Avg,
    RedOp::PremulSum(0.0),
    RedOp::Min,
    RedOp::Max,
    RedOp::Prod,
    RedOp::Band,
    RedOp::Bor,
    RedOp::Bxor,
];

/// Returns true if the reduction is defined for the type.
pub(crate) fn defined(dtype: DType, redop: RedOp) -> bool {
    use DType::{Bool, C32, C64, C128, Opaque1, Opaque2, Opaque4, Opaque8, Opaque16};
    let bitwise = matches!(redop, RedOp::Band | RedOp::Bor | RedOp::Bxor);
    let order = matches!(redop, RedOp::Min | RedOp::Max);
    match dtype {
        Opaque1 | Opaque2 | Opaque4 | Opaque8 | Opaque16 | C32 => false,
        Bool => !matches!(redop, RedOp::PremulSum(_)),
        C64 | C128 => !bitwise && !order,
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 => !bitwise,
        _ => true,
    }
}

/// One element: integers that are exact in every type. The second number is the imaginary part.
type Value = (i64, i64);

fn encode(dtype: DType, (re, im): Value) -> Vec<u8> {
    match dtype {
        DType::F32 => (re as f32).to_ne_bytes().to_vec(),
        DType::F64 => (re as f64).to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(re as f64).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(re as f64).to_ne_bytes().to_vec(),
        DType::C64 => [re as f32, im as f32].map(f32::to_ne_bytes).concat(),
        DType::C128 => [re as f64, im as f64].map(f64::to_ne_bytes).concat(),
        DType::Bool => vec![u8::from(re != 0)],
        _ => re.to_le_bytes().into_iter().chain([0; 8]).take(dtype.size()).collect(),
    }
}

fn complex(dtype: DType) -> bool {
    matches!(dtype, DType::C64 | DType::C128)
}

/// Input of rank `r`: small, non-negative for unsigned types, and divisible so that averages are integers.
fn given(r: usize, i: usize, n: usize, redop: RedOp) -> Value {
    let x = ((i * 5 + r * 3) % 4) as i64;
    match redop {
        RedOp::Avg => (x * n as i64, ((i + r) % 3) as i64 * n as i64),
        _ => (x, ((i + r) % 3) as i64),
    }
}

/// The factor of a premultiplied sum.
const FACTOR: i64 = 3;

fn want(dtype: DType, redop: RedOp, n: usize, i: usize) -> Value {
    let values = (0..n).map(|r| given(r, i, n, redop));
    if dtype == DType::Bool {
        let votes = values.map(|v| v.0 != 0);
        let yes = votes.filter(|&vote| vote).count();
        let vote = match redop {
            RedOp::Prod | RedOp::Min | RedOp::Band => yes == n,
            RedOp::Bxor => yes % 2 == 1,
            _ => yes > 0,
        };
        return (i64::from(vote), 0);
    }
    let fold = |f: fn(i64, i64) -> i64| values.clone().reduce(|a, b| (f(a.0, b.0), f(a.1, b.1))).unwrap();
    match redop {
        RedOp::Sum => fold(|a, b| a + b),
        RedOp::Avg => {
            let sum = fold(|a, b| a + b);
            (sum.0 / n as i64, sum.1 / n as i64)
        }
        RedOp::PremulSum(_) => values.fold((0, 0), |s, v| (s.0 + v.0 * FACTOR, s.1 + v.1 * FACTOR)),
        RedOp::Min => fold(i64::min),
        RedOp::Max => fold(i64::max),
        RedOp::Prod if complex(dtype) => {
            values.reduce(|a, b| (a.0 * b.0 - a.1 * b.1, a.0 * b.1 + a.1 * b.0)).unwrap()
        }
        RedOp::Prod => fold(|a, b| a * b),
        RedOp::Band => fold(|a, b| a & b),
        RedOp::Bor => fold(|a, b| a | b),
        RedOp::Bxor => fold(|a, b| a ^ b),
    }
}

fn flat(data: &mut [u8], dtype: DType) -> Blocks<'static> {
    Blocks::Flat { ptr: data.as_mut_ptr(), count: data.len() / dtype.size() }
}

fn reduce(
    comm: &Communicator,
    collective: Collective,
    dtype: DType,
    redop: RedOp,
    count: usize,
) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let total = if collective == Collective::ReduceScatter { n * count } else { count };
    let mut input: Vec<u8> = (0..total).flat_map(|i| encode(dtype, given(me, i, n, redop))).collect();
    let mut output = vec![0xa5; count * dtype.size()];
    let mine = if let RedOp::PremulSum(_) = redop { RedOp::PremulSum(FACTOR as f64) } else { redop };
    let has_output = collective != Collective::Reduce || me == 0;
    let taken = if has_output { flat(&mut output, dtype) } else { Blocks::None };
    let before = input.clone();
    let call =
        Call { collective, dtype, redop: mine, root: 0, input: flat(&mut input, dtype), output: taken };
    // SAFETY: the buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }?;
    let first = if collective == Collective::ReduceScatter { me * count } else { 0 };
    let expected: Vec<u8> =
        (first..first + count).flat_map(|i| encode(dtype, want(dtype, redop, n, i))).collect();
    let case =
        format!("{collective:?}, {} of {}, {count} elements, rank {me} of {n}", redop.name(), dtype.name());
    if has_output {
        assert_eq!(output, expected, "{case}");
    }
    assert_eq!(input, before, "{case}: the input was changed");
    Ok(())
}

#[test]
fn defined_reductions_are_correct_and_undefined_ones_are_rejected() {
    for wire in Wire::EACH {
        for n in [1, 2, 3] {
            over(wire.links(n), TIMEOUT, |comm| {
                for dtype in DType::ALL {
                    for redop in REDOPS {
                        for collective in
                            [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce]
                        {
                            for count in [0, 1, 37, 3000] {
                                match reduce(comm, collective, dtype, redop, count) {
                                    Ok(()) => {
                                        assert!(defined(dtype, redop), "{} of {}", redop.name(), dtype.name())
                                    }
                                    Err(Error::Invalid(text)) => {
                                        assert!(!defined(dtype, redop), "{text}");
                                        assert!(
                                            text.contains(redop.name()) && text.contains(dtype.name()),
                                            "{text}"
                                        );
                                    }
                                    Err(other) => panic!("{other}"),
                                }
                            }
                        }
                    }
                }
            });
        }
    }
}

/// Byte `i` of block `b` of rank `r`.
fn byte(r: usize, b: usize, i: usize) -> u8 {
    (r * 89 + b * 31 + i * 7) as u8
}

fn block(r: usize, b: usize, elements: usize, dtype: DType) -> Vec<u8> {
    (0..elements * dtype.size()).map(|i| byte(r, b, i)).collect()
}

/// A buffer of blocks of these counts, contiguous or as a list.
struct Parts {
    dtype: DType,
    counts: Vec<usize>,
    /// One contiguous buffer for `Cut`, one buffer per block for `List`.
    data: Vec<Vec<u8>>,
    places: Vec<(*mut u8, usize)>,
}

impl Parts {
    fn new(dtype: DType, blocks: Vec<Vec<u8>>, list: bool) -> Self {
        let counts: Vec<usize> = blocks.iter().map(|b| b.len() / dtype.size()).collect();
        let mut data = if list { blocks } else { vec![blocks.concat()] };
        let places = if list {
            data.iter_mut().zip(&counts).map(|(b, &c)| (b.as_mut_ptr(), c)).collect()
        } else {
            Vec::new()
        };
        Self { dtype, counts, data, places }
    }

    fn empty(dtype: DType, counts: &[usize], list: bool) -> Self {
        Self::new(dtype, counts.iter().map(|c| vec![0xa5; c * dtype.size()]).collect(), list)
    }

    fn blocks(&mut self) -> Blocks<'_> {
        if self.places.is_empty() {
            Blocks::Cut { ptr: self.data[0].as_mut_ptr(), counts: &self.counts }
        } else {
            Blocks::List { parts: &self.places }
        }
    }

    fn check(&self, want: &[Vec<u8>], what: &str) {
        let _ = self.dtype;
        assert!(self.data.concat() == want.concat(), "{what}");
    }
}

/// Block counts of several shapes for `n` ranks: some empty, one much longer, all empty except for one.
fn shapes(n: usize) -> Vec<Vec<usize>> {
    vec![
        (0..n).map(|r| r * 3).collect(),
        (0..n).map(|r| if r == 1 { 100_000 } else { r }).collect(),
        (0..n).map(|r| if r == n - 1 { 700 } else { 0 }).collect(),
        (0..n).map(|r| 4000 + 517 * r).collect(),
        vec![5; n],
        vec![0; n],
    ]
}

fn call(comm: &Communicator, collective: Collective, dtype: DType, input: Blocks<'_>, output: Blocks<'_>) {
    let call = Call { collective, dtype, redop: RedOp::Sum, root: 0, input, output };
    // SAFETY: the callers' buffers outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }.unwrap();
}

#[test]
fn uneven_all_gathers_are_correct() {
    for wire in Wire::EACH {
        for n in [2, 3, 4] {
            over(wire.links(n), TIMEOUT, |comm| {
                let me = comm.rank();
                for dtype in [DType::Opaque1, DType::F64, DType::Opaque16, DType::C32] {
                    for counts in shapes(n) {
                        for list in [false, true] {
                            let mut mine = block(me, 0, counts[me], dtype);
                            let mut all = Parts::empty(dtype, &counts, list);
                            call(comm, Collective::AllGather, dtype, flat(&mut mine, dtype), all.blocks());
                            let want: Vec<_> = (0..n).map(|r| block(r, 0, counts[r], dtype)).collect();
                            all.check(
                                &want,
                                &format!("{counts:?} of {}, rank {me}, list {list}", dtype.name()),
                            );
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn uneven_reduce_scatters_are_correct() {
    for wire in Wire::EACH {
        for n in [2, 3, 4] {
            over(wire.links(n), TIMEOUT, |comm| {
                let me = comm.rank();
                let number = |r: usize, b: usize, i: usize| ((r * 5 + b * 3 + i) % 17) as i32;
                let bytes = |r: usize, b: usize, c: usize| -> Vec<u8> {
                    (0..c).flat_map(|i| number(r, b, i).to_ne_bytes()).collect()
                };
                for counts in shapes(n) {
                    for list in [false, true] {
                        let blocks = (0..n).map(|b| bytes(me, b, counts[b])).collect();
                        let mut all = Parts::new(DType::I32, blocks, list);
                        let mut mine = vec![0xa5; counts[me] * 4];
                        let taken = flat(&mut mine, DType::I32);
                        call(comm, Collective::ReduceScatter, DType::I32, all.blocks(), taken);
                        let want: Vec<u8> = (0..counts[me])
                            .flat_map(|i| (0..n).map(|r| number(r, me, i)).sum::<i32>().to_ne_bytes())
                            .collect();
                        assert!(mine == want, "{counts:?}, rank {me} of {n}, list {list}");
                    }
                }
            });
        }
    }
}

#[test]
fn uneven_all_to_alls_are_correct() {
    for wire in Wire::EACH {
        for n in [2, 3, 4] {
            over(wire.links(n), TIMEOUT, |comm| {
                let me = comm.rank();
                // Elements from rank `a` to rank `b`.
                let tables: [fn(usize, usize) -> usize; 5] = [
                    |a, b| a * 7 + b * 3,
                    |a, b| if a == 0 && b == 1 { 90_000 } else { (a + b) % 2 },
                    |a, b| if b == 0 { 600 + a } else { 0 },
                    |_, _| 0,
                    |_, _| 1234,
                ];
                for dtype in [DType::Opaque1, DType::BF16, DType::C128] {
                    for table in tables {
                        for list in [false, true] {
                            let sent = (0..n).map(|b| block(me, b, table(me, b), dtype)).collect();
                            let mut input = Parts::new(dtype, sent, list);
                            let counts: Vec<usize> = (0..n).map(|a| table(a, me)).collect();
                            let mut output = Parts::empty(dtype, &counts, !list);
                            call(comm, Collective::AllToAll, dtype, input.blocks(), output.blocks());
                            let want: Vec<_> = (0..n).map(|a| block(a, me, table(a, me), dtype)).collect();
                            output.check(&want, &format!("{counts:?} of {}, rank {me} of {n}", dtype.name()));
                        }
                    }
                }
            });
        }
    }
}

/// Element `i` of rank `r`, so large that sums wrap in every type.
fn large(r: usize, i: usize) -> u64 {
    (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(r as u64 * 0x7f7f_7f7f_7f7f_7f7f)
        | 0x40 << 56
}

/// Returns the sum modulo 2^bits, divided with truncation.
fn wrapped_average(dtype: DType, n: usize, i: usize) -> Vec<u8> {
    let sum = (0..n).map(|r| large(r, i)).fold(0, u64::wrapping_add);
    let unused = 64 - 8 * dtype.size();
    let signed = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    let average = if signed {
        (((sum << unused) as i64 >> unused) / n as i64) as u64
    } else {
        (sum << unused >> unused) / n as u64
    };
    average.to_le_bytes()[..dtype.size()].to_vec()
}

/// Runs all ranks as threads in this process, which has the algorithm in its environment.
pub(crate) fn averages(me: &RankProcess) {
    let n = 3;
    for wire in [Wire::Shm, Wire::Nodes(1), Wire::Nodes(2)] {
        over(wire.links(n), TIMEOUT, |comm| {
            for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_integer()) {
                for count in [5, 3_000] {
                    let element = |i| large(comm.rank(), i).to_le_bytes()[..dtype.size()].to_vec();
                    let mut data: Vec<u8> = (0..count).flat_map(element).collect();
                    let place = flat(&mut data, dtype);
                    let (collective, redop) = (Collective::AllReduce, RedOp::Avg);
                    let call = Call { collective, dtype, redop, root: 0, input: place, output: place };
                    // SAFETY: the buffer outlives the synchronous call.
                    unsafe { comm.run(&call, Options::default()) }.unwrap();
                    let want: Vec<u8> = (0..count).flat_map(|i| wrapped_average(dtype, n, i)).collect();
                    assert!(data == want, "{dtype:?}, {count} elements over {wire:?}");
                }
            }
        });
    }
    me.report("done");
}

#[test]
fn integer_averages_divide_the_wrapped_sum_for_every_algorithm_and_wire() {
    for algorithm in Algorithm::ALL {
        let mut ranks = start("averages", 1, &[("SMDDP_ALGO", algorithm.name())], TIMEOUT);
        ranks.wait_for(0, "done");
        ranks.finish([0]);
    }
}
