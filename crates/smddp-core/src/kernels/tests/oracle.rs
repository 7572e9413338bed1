//! Reference reduction: one element at a time, with the types of Rust and of the `half` crate.

use ::half::{bf16, f16};

use super::Random;
use crate::call::types::{DType, RedOp};

/// Expected result of `Kernel::run`, or `None` if the dtype does not support the redop.
pub(super) fn reduce(dtype: DType, redop: RedOp, srcs: &[Vec<u8>], scale: Option<u32>) -> Option<Vec<u8>> {
    macro_rules! fold {
        ($element:ty, $widen:expr, $combine:expr, $finish:expr) => {{
            let size = size_of::<$element>();
            let read = |src: &Vec<u8>, at: usize| {
                let bytes = src[at * size..(at + 1) * size].try_into().unwrap();
                $widen(<$element>::from_ne_bytes(bytes))
            };
            let results = (0..srcs[0].len() / size).flat_map(|at| {
                let first = read(&srcs[0], at);
                let all = srcs[1..].iter().fold(first, |acc, src| $combine(acc, read(src, at)));
                $finish(all).to_ne_bytes()
            });
            Some(results.collect())
        }};
    }
    macro_rules! float {
        ($element:ty, $acc:ty, $widen:expr, $narrow:expr) => {{
            let finish = |sum: $acc| $narrow(scale.map_or(sum, |ranks| sum / ranks as $acc));
            match redop {
                RedOp::Sum | RedOp::Avg | RedOp::PremulSum(_) => {
                    fold!($element, $widen, |a: $acc, b: $acc| a + b, finish)
                }
                RedOp::Prod => fold!($element, $widen, |a: $acc, b: $acc| a * b, $narrow),
                RedOp::Min => fold!($element, $widen, |a: $acc, b: $acc| if b < a { b } else { a }, $narrow),
                RedOp::Max => fold!($element, $widen, |a: $acc, b: $acc| if b > a { b } else { a }, $narrow),
                RedOp::Band | RedOp::Bor | RedOp::Bxor => None,
            }
        }};
    }
    macro_rules! int {
        ($int:ty) => {{
            let same = |value: $int| value;
            let finish = |sum: $int| scale.map_or(sum, |ranks| (i128::from(sum) / i128::from(ranks)) as $int);
            match redop {
                RedOp::Sum | RedOp::Avg | RedOp::PremulSum(_) => {
                    fold!($int, same, |a: $int, b| a.wrapping_add(b), finish)
                }
                RedOp::Prod => fold!($int, same, |a: $int, b| a.wrapping_mul(b), same),
                RedOp::Min => fold!($int, same, |a: $int, b| a.min(b), same),
                RedOp::Max => fold!($int, same, |a: $int, b| a.max(b), same),
                RedOp::Band => fold!($int, same, |a, b| a & b, same),
                RedOp::Bor => fold!($int, same, |a, b| a | b, same),
                RedOp::Bxor => fold!($int, same, |a, b| a ^ b, same),
            }
        }};
    }
    macro_rules! complex {
        ($float:ty) => {{
            if redop != RedOp::Prod {
                let same = |value: $float| value;
                let finish = |sum: $float| scale.map_or(sum, |ranks| sum / ranks as $float);
                return match redop {
                    RedOp::Sum | RedOp::Avg | RedOp::PremulSum(_) => {
                        fold!($float, same, |a: $float, b: $float| a + b, finish)
                    }
                    _ => None,
                };
            }
            let size = size_of::<$float>();
            let part = |src: &Vec<u8>, at: usize| {
                <$float>::from_ne_bytes(src[at * size..(at + 1) * size].try_into().unwrap())
            };
            let results = (0..srcs[0].len() / size).step_by(2).flat_map(|at| {
                let (mut re, mut im) = (part(&srcs[0], at), part(&srcs[0], at + 1));
                for src in &srcs[1..] {
                    let (a, b) = (part(src, at), part(src, at + 1));
                    (re, im) = (re * a - im * b, re * b + im * a);
                }
                [re.to_ne_bytes(), im.to_ne_bytes()].concat()
            });
            Some(results.collect())
        }};
    }
    match dtype {
        DType::F32 => float!(f32, f32, |value| value, |value: f32| value),
        DType::F64 => float!(f64, f64, |value| value, |value: f64| value),
        DType::F16 => float!(f16, f32, f16::to_f32, f16::from_f32),
        DType::BF16 => float!(bf16, f32, bf16::to_f32, bf16::from_f32),
        DType::I8 => int!(i8),
        DType::I16 => int!(i16),
        DType::I32 => int!(i32),
        DType::I64 => int!(i64),
        DType::U8 => int!(u8),
        DType::U16 => int!(u16),
        DType::U32 => int!(u32),
        DType::U64 => int!(u64),
        DType::Bool => {
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
        DType::C64 => complex!(f32),
        DType::C128 => complex!(f64),
        _ => None,
    }
}

/// `n` elements of any value except NaN: floats include a wide range, subnormals, zeros and infinities.
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
