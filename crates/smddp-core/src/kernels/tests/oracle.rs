//! Reference reduction: one element at a time, with the types of Rust and of the `half` crate.

use std::convert::identity;

use ::half::{bf16, f16};

use super::Random;
use crate::call::types::{DType, RedOp};

/// Returns the expected result of `Kernel::run`, or `None` if the dtype does not support the redop.
pub(super) fn reduce(dtype: DType, redop: RedOp, srcs: &[Vec<u8>], scale: Option<u32>) -> Option<Vec<u8>> {
    let reduce = match dtype {
        DType::F32 => reduce_f32,
        DType::F64 => reduce_f64,
        DType::F16 => reduce_f16,
        DType::BF16 => reduce_bf16,
        DType::I8 => reduce_i8,
        DType::I16 => reduce_i16,
        DType::I32 => reduce_i32,
        DType::I64 => reduce_i64,
        DType::U8 => reduce_u8,
        DType::U16 => reduce_u16,
        DType::U32 => reduce_u32,
        DType::U64 => reduce_u64,
        DType::Bool => reduce_bool,
        DType::C64 => reduce_c64,
        DType::C128 => reduce_c128,
        _ => return None,
    };
    reduce(redop, srcs, scale)
}

/// Combines the elements of `SIZE` bytes at each position, in the order of the sources.
fn fold<const SIZE: usize, A>(
    srcs: &[Vec<u8>],
    read: impl Fn([u8; SIZE]) -> A,
    combine: impl Fn(A, A) -> A,
    finish: impl Fn(A) -> [u8; SIZE],
) -> Option<Vec<u8>> {
    let element = |src: &[u8], at: usize| read(src[at..at + SIZE].try_into().unwrap());
    let results = (0..srcs[0].len()).step_by(SIZE).flat_map(|at| {
        let first = element(&srcs[0], at);
        finish(srcs[1..].iter().fold(first, |acc, src| combine(acc, element(src, at))))
    });
    Some(results.collect())
}

macro_rules! float {
    ($name:ident, $element:ty, $acc:ty, $widen:expr, $narrow:expr) => {
        fn $name(redop: RedOp, srcs: &[Vec<u8>], scale: Option<u32>) -> Option<Vec<u8>> {
            let read = |bytes| $widen(<$element>::from_ne_bytes(bytes));
            let write = |value: $acc| $narrow(value).to_ne_bytes();
            let finish = |sum: $acc| write(scale.map_or(sum, |ranks| sum / ranks as $acc));
            match redop {
                RedOp::Sum | RedOp::Avg | RedOp::PremulSum(_) => fold(srcs, read, |a, b| a + b, finish),
                RedOp::Prod => fold(srcs, read, |a, b| a * b, write),
                RedOp::Min => fold(srcs, read, |a, b| if b < a { b } else { a }, write),
                RedOp::Max => fold(srcs, read, |a, b| if b > a { b } else { a }, write),
                RedOp::Band | RedOp::Bor | RedOp::Bxor => None,
            }
        }
    };
}

float!(reduce_f32, f32, f32, identity, identity);
float!(reduce_f64, f64, f64, identity, identity);
float!(reduce_f16, f16, f32, f16::to_f32, f16::from_f32);
float!(reduce_bf16, bf16, f32, bf16::to_f32, bf16::from_f32);

macro_rules! int {
    ($name:ident, $int:ty) => {
        fn $name(redop: RedOp, srcs: &[Vec<u8>], scale: Option<u32>) -> Option<Vec<u8>> {
            let (read, write) = (<$int>::from_ne_bytes, <$int>::to_ne_bytes);
            let finish =
                |sum: $int| write(scale.map_or(sum, |ranks| (i128::from(sum) / i128::from(ranks)) as $int));
            match redop {
                RedOp::Sum | RedOp::Avg | RedOp::PremulSum(_) => {
                    fold(srcs, read, <$int>::wrapping_add, finish)
                }
                RedOp::Prod => fold(srcs, read, <$int>::wrapping_mul, write),
                RedOp::Min => fold(srcs, read, <$int>::min, write),
                RedOp::Max => fold(srcs, read, <$int>::max, write),
                RedOp::Band => fold(srcs, read, |a, b| a & b, write),
                RedOp::Bor => fold(srcs, read, |a, b| a | b, write),
                RedOp::Bxor => fold(srcs, read, |a, b| a ^ b, write),
            }
        }
    };
}

int!(reduce_i8, i8);
int!(reduce_i16, i16);
int!(reduce_i32, i32);
int!(reduce_i64, i64);
int!(reduce_u8, u8);
int!(reduce_u16, u16);
int!(reduce_u32, u32);
int!(reduce_u64, u64);

macro_rules! complex {
    ($name:ident, $float:ty, $reduce_part:ident) => {
        fn $name(redop: RedOp, srcs: &[Vec<u8>], scale: Option<u32>) -> Option<Vec<u8>> {
            const SIZE: usize = size_of::<$float>();
            let part = |bytes: &[u8]| <$float>::from_ne_bytes(bytes.try_into().unwrap());
            let read = |bytes: [u8; 2 * SIZE]| (part(&bytes[..SIZE]), part(&bytes[SIZE..]));
            let write = |(re, im): ($float, $float)| {
                [re.to_ne_bytes(), im.to_ne_bytes()].concat().try_into().unwrap()
            };
            match redop {
                RedOp::Sum | RedOp::Avg | RedOp::PremulSum(_) => $reduce_part(redop, srcs, scale),
                RedOp::Prod => fold(srcs, read, |(re, im), (a, b)| (re * a - im * b, re * b + im * a), write),
                _ => None,
            }
        }
    };
}

complex!(reduce_c64, f32, reduce_f32);
complex!(reduce_c128, f64, reduce_f64);

fn reduce_bool(redop: RedOp, srcs: &[Vec<u8>], _: Option<u32>) -> Option<Vec<u8>> {
    let results = (0..srcs[0].len()).map(|at| {
        let mut votes = srcs.iter().map(|src| src[at] != 0);
        u8::from(match redop {
            RedOp::Prod | RedOp::Min | RedOp::Band => votes.all(|vote| vote),
            RedOp::Bxor => votes.filter(|vote| *vote).count() % 2 == 1,
            _ => votes.any(|vote| vote),
        })
    });
    Some(results.collect())
}

/// Returns `n` elements of any value except NaN. Floats include a wide range, subnormals, zeros and infinities.
pub(super) fn elements(dtype: DType, n: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = random.bytes(n * dtype.size());
    macro_rules! without_nan {
        ($float:ty) => {
            for element in bytes.chunks_exact_mut(size_of::<$float>()) {
                let value = <$float>::from_ne_bytes((&*element).try_into().unwrap());
                if value.is_nan() {
                    element.copy_from_slice(&<$float>::INFINITY.to_ne_bytes());
                }
            }
        };
    }
    match dtype {
        DType::F32 | DType::C64 => without_nan!(f32),
        DType::F64 | DType::C128 => without_nan!(f64),
        DType::F16 => without_nan!(f16),
        DType::BF16 => without_nan!(bf16),
        // Valid bools are 0 or 1; other bytes count as true.
        DType::Bool => bytes.iter_mut().filter(|byte| **byte % 4 != 3).for_each(|byte| *byte %= 2),
        _ => {}
    }
    bytes
}
