use std::ptr::null_mut;

use ::half::{bf16, f16};
use proptest::prelude::*;

use super::super::{Kernel, premultiply};
use super::{Guarded, Level, Random, oracle};
use crate::call::types::{DType, RedOp};

const REDOPS: [RedOp; 9] = [
    RedOp::Sum,
    RedOp::Avg,
    RedOp::PremulSum(0.5),
    RedOp::Min,
    RedOp::Max,
    RedOp::Prod,
    RedOp::Band,
    RedOp::Bor,
    RedOp::Bxor,
];

/// One kernel run and the alignment of its buffers.
#[derive(Clone, Copy, Debug)]
struct Case {
    level: Level,
    dtype: DType,
    redop: RedOp,
    inputs: usize,
    n: usize,
    /// Offsets from a 64-byte boundary: of dst, and between sources.
    to: usize,
    from: usize,
    scale: Option<u32>,
    also: bool,
    stream: bool,
    /// Index of the source that is also dst.
    in_place: Option<usize>,
}

impl Case {
    fn plain(level: Level, dtype: DType, redop: RedOp, inputs: usize, n: usize) -> Case {
        let (to, from, scale, also, stream, in_place) = (0, 0, None, false, false, None);
        Case { level, dtype, redop, inputs, n, to, from, scale, also, stream, in_place }
    }

    fn inputs(&self) -> Vec<Vec<u8>> {
        let mut random = Random(0x5eed + self.n as u64);
        (0..self.inputs).map(|_| oracle::elements(self.dtype, self.n, &mut random)).collect()
    }

    /// Runs the kernel on `inputs`. Returns `None` if it is not supported.
    fn run(&self, inputs: &[Vec<u8>]) -> Option<Vec<u8>> {
        let kernel = Kernel::at(self.level, self.dtype, self.redop)?;
        let bytes = self.n * self.dtype.size();
        let mut srcs: Vec<_> = inputs
            .iter()
            .enumerate()
            .map(|(k, input)| Guarded::holding(input, (self.from * (k + 1)) % 64))
            .collect();
        let mut out = Guarded::new(bytes, self.to);
        let mut also = Guarded::new(bytes, self.from);
        let second = if self.also { also.mut_ptr() } else { null_mut() };
        let dst = match self.in_place {
            Some(k) => srcs[k].mut_ptr(),
            None => out.mut_ptr(),
        };
        let pointers: Vec<_> = srcs
            .iter()
            .enumerate()
            .map(|(k, src)| if self.in_place == Some(k) { dst.cast_const() } else { src.ptr() })
            .collect();
        // SAFETY: all buffers are owned here and hold n elements; dst is one source or none; the level is available.
        unsafe { kernel.run(dst, second, &pointers, self.n, self.scale, self.stream) };
        for (k, (src, input)) in srcs.iter().zip(inputs).enumerate() {
            assert!(self.in_place == Some(k) || src.content() == input, "source {k} changed: {self:?}");
        }
        let result = match self.in_place {
            Some(k) => srcs[k].content().to_vec(),
            None => out.content().to_vec(),
        };
        assert!(!self.also || also.content() == result, "the second destination differs: {self:?}");
        Some(result)
    }

    fn check(&self) {
        let inputs = self.inputs();
        self.check_against(&inputs, oracle::reduce(self.dtype, self.redop, &inputs, self.scale).as_deref());
    }

    fn check_against(&self, inputs: &[Vec<u8>], expected: Option<&[u8]>) {
        let result = self.run(inputs);
        if result.as_deref() != expected {
            let first = match (&result, expected) {
                (Some(result), Some(expected)) => result.iter().zip(expected).position(|(a, b)| a != b),
                _ => None,
            };
            panic!("{self:?}: first wrong byte {first:?}");
        }
    }
}

/// All supported (dtype, redop).
fn kernels() -> impl Iterator<Item = (DType, RedOp)> {
    DType::ALL
        .into_iter()
        .flat_map(|dtype| REDOPS.map(|redop| (dtype, redop)))
        .filter(|(dtype, redop)| Kernel::new(*dtype, *redop).is_some())
}

#[test]
fn every_kernel_gives_the_oracles_bits_at_every_level() {
    for (dtype, redop) in kernels() {
        for n in [0, 1, 3, 7, 8, 63, 64, 65, 1000, 4099] {
            for inputs in [1, 2, 3, 4, 5, 9] {
                let case = Case::plain(Level::Scalar, dtype, redop, inputs, n);
                let content = case.inputs();
                let expected = oracle::reduce(dtype, redop, &content, None);
                for &level in Level::available() {
                    for (to, from) in [(0, 0), (1, 3), (32, 16)] {
                        Case { level, to, from, ..case }.check_against(&content, expected.as_deref());
                    }
                }
            }
        }
    }
}

#[test]
fn streaming_in_place_and_second_destination_change_no_bit() {
    for (dtype, redop) in kernels() {
        for &level in Level::available() {
            for n in [1, 65, 1000] {
                for to in [0, 8, 1] {
                    let case = Case { to, ..Case::plain(level, dtype, redop, 3, n) };
                    Case { stream: true, ..case }.check();
                    Case { stream: true, also: true, from: 5, ..case }.check();
                    Case { in_place: Some(0), ..case }.check();
                    Case { in_place: Some(2), also: true, stream: true, from: to, ..case }.check();
                }
            }
        }
    }
}

#[test]
fn averages_divide_the_finished_sum_once() {
    for dtype in DType::ALL.into_iter().filter(|dtype| Kernel::new(*dtype, RedOp::Avg).is_some()) {
        for &level in Level::available() {
            for ranks in [1, 2, 3, 8, 7, 200, 1000, 70_001] {
                let case = Case::plain(level, dtype, RedOp::Avg, 3, 1000);
                Case { scale: Some(ranks), ..case }.check();
            }
        }
    }
}

#[test]
fn small_integers_average_exactly() {
    let every: Vec<u8> = (i16::MIN..=i16::MAX).flat_map(i16::to_ne_bytes).collect();
    for ranks in (1..300).chain([32_767, 32_768, 40_000, 1 << 24, (1 << 24) + 1, u32::MAX]) {
        for dtype in [DType::I16, DType::U16] {
            let case = Case::plain(Level::best(), dtype, RedOp::Avg, 1, 65_536);
            let expected = oracle::reduce(dtype, RedOp::Avg, std::slice::from_ref(&every), Some(ranks));
            Case { scale: Some(ranks), ..case }
                .check_against(std::slice::from_ref(&every), expected.as_deref());
        }
    }
}

#[test]
fn unsupported_reductions_have_no_kernel() {
    for dtype in DType::ALL {
        for redop in REDOPS {
            let bits = matches!(redop, RedOp::Band | RedOp::Bor | RedOp::Bxor);
            let order = matches!(redop, RedOp::Min | RedOp::Max);
            let can = match dtype {
                DType::F32 | DType::F64 | DType::F16 | DType::BF16 => !bits,
                DType::C64 | DType::C128 => !bits && !order,
                DType::C32 => false,
                DType::Bool => !matches!(redop, RedOp::PremulSum(_)),
                _ => !dtype.name().starts_with("opaque"),
            };
            assert_eq!(Kernel::new(dtype, redop).is_some(), can, "{dtype:?} {redop:?}");
        }
    }
}

fn is_nan(dtype: DType, element: &[u8]) -> bool {
    match dtype {
        DType::F32 => f32::from_ne_bytes(element.try_into().unwrap()).is_nan(),
        DType::F64 => f64::from_ne_bytes(element.try_into().unwrap()).is_nan(),
        DType::F16 => f16::from_ne_bytes(element.try_into().unwrap()).is_nan(),
        _ => bf16::from_ne_bytes(element.try_into().unwrap()).is_nan(),
    }
}

#[test]
fn nan_in_any_input_gives_nan_at_every_level() {
    let floats = [
        (DType::F32, f32::NAN.to_ne_bytes().to_vec()),
        (DType::F64, f64::NAN.to_ne_bytes().to_vec()),
        (DType::F16, f16::NAN.to_ne_bytes().to_vec()),
        (DType::BF16, bf16::NAN.to_ne_bytes().to_vec()),
        // All payload bits set: rounding by addition would wrap it to a number.
        (DType::BF16, 0xffff_u16.to_ne_bytes().to_vec()),
        (DType::F16, 0x7fff_u16.to_ne_bytes().to_vec()),
    ];
    for (dtype, nan) in floats {
        let size = dtype.size();
        for redop in [RedOp::Min, RedOp::Max, RedOp::Sum, RedOp::Prod] {
            for holder in 0..3 {
                let case = Case::plain(Level::Scalar, dtype, redop, 3, 150);
                let mut inputs = vec![vec![0; 150 * size]; 3];
                for at in (0..150).step_by(7) {
                    inputs[holder][at * size..][..size].copy_from_slice(&nan);
                }
                let results: Vec<_> = Level::available()
                    .iter()
                    .map(|level| Case { level: *level, ..case }.run(&inputs).unwrap())
                    .collect();
                assert!(results.iter().all(|result| *result == results[0]), "{dtype:?} {redop:?}");
                for (at, element) in results[0].chunks_exact(size).enumerate() {
                    assert_eq!(is_nan(dtype, element), at % 7 == 0, "{dtype:?} {redop:?} {holder} {at}");
                }
            }
        }
    }
}

#[test]
fn reduction_of_one_input_preserves_every_half() {
    let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    for dtype in [DType::F16, DType::BF16] {
        let expected: Vec<u8> = (0..=u16::MAX)
            .flat_map(|bits| match dtype {
                DType::F16 => f16::from_f32(f16::from_bits(bits).to_f32()).to_ne_bytes(),
                _ => bf16::from_f32(bf16::from_bits(bits).to_f32()).to_ne_bytes(),
            })
            .collect();
        for &level in Level::available() {
            let case = Case::plain(level, dtype, RedOp::Max, 1, 65_536);
            case.check_against(std::slice::from_ref(&every), Some(&expected));
        }
    }
}

#[test]
fn halves_round_once_over_all_inputs() {
    // In f16, 2048 + 1 rounds to 2048 at every step; in f32, the four ones are added.
    let halves = |value: f32| f16::from_f32(value).to_ne_bytes().repeat(100);
    let inputs: Vec<_> = [2048.0, 1.0, 1.0, 1.0, 1.0].map(halves).into();
    for &level in Level::available() {
        let case = Case::plain(level, DType::F16, RedOp::Sum, 5, 100);
        case.check_against(&inputs, Some(&halves(2052.0)));
    }
}

fn premultiplied(dtype: DType, input: &[u8], factor: f64) -> Option<Vec<u8>> {
    let src = Guarded::holding(input, 3);
    let mut dst = Guarded::new(input.len(), 1);
    // SAFETY: both buffers are owned here and hold the same number of elements.
    let done = unsafe { premultiply(dtype, dst.mut_ptr(), src.ptr(), input.len() / dtype.size(), factor) };
    let content = dst.content().to_vec();
    assert!(done || content.iter().all(|byte| *byte == super::UNTOUCHED));
    done.then_some(content)
}

#[test]
fn premultiply_uses_the_arithmetic_of_the_dtype() {
    macro_rules! product {
        ($dtype:ident, $value:expr, $factor:expr, $result:expr) => {
            let input = $value.to_ne_bytes().repeat(78);
            let expected = $result.to_ne_bytes().repeat(78);
            assert_eq!(premultiplied(DType::$dtype, &input, $factor), Some(expected));
        };
    }
    product!(F32, 1.1_f32, 0.3, (1.1_f32 * 0.3_f32));
    product!(F64, 1.1_f64, 0.3, (1.1_f64 * 0.3));
    product!(C64, 1.1_f32, 0.3, (1.1_f32 * 0.3_f32));
    product!(C128, 1.1_f64, 0.3, (1.1_f64 * 0.3));
    product!(F16, f16::from_f32(1.1), 0.3, f16::from_f32(f16::from_f32(1.1).to_f32() * 0.3));
    product!(BF16, bf16::from_f32(1.1), 0.3, bf16::from_f32(bf16::from_f32(1.1).to_f32() * 0.3));
    product!(I8, -7_i8, 0.5, -3_i8);
    product!(U8, 200_u8, 2.0, 255_u8);
    product!(I32, -7_i32, 1.5, -10_i32);
    product!(I64, 1_000_000_007_i64, -3.0, -3_000_000_021_i64);
    product!(U16, 9_u16, -1.0, 0_u16);
}

#[test]
fn premultiply_rejects_unsupported_dtypes() {
    for dtype in [DType::Bool, DType::C32, DType::Opaque1, DType::Opaque16] {
        assert_eq!(premultiplied(dtype, &[1; 16 * 16], 2.0), None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_layout_gives_the_oracles_bits(
        dtype in 0..21_u8,
        redop in prop::sample::select(REDOPS.to_vec()),
        inputs in 1..12_usize,
        n in 0..3_000_usize,
        (to, from) in (0..64_usize, 0..64_usize),
        scale in prop::option::of(1..5_000_u32),
        (also, stream) in (any::<bool>(), any::<bool>()),
        place in prop::option::of(0..12_usize),
    ) {
        let dtype = DType::from_u8(dtype).unwrap();
        let (scale, in_place) = (scale.filter(|_| redop == RedOp::Avg), place.map(|k| k % inputs));
        let level = Level::best();
        if Kernel::new(dtype, redop).is_some() {
            Case { level, dtype, redop, inputs, n, to, from, scale, also, stream, in_place }.check();
        }
    }
}
