//! Reductions one element at a time: what the mock's streams compute, and the oracle for tests over it.

use half::{bf16, f16};

use crate::{Element, Error, Fold, Result};

/// Whether elements of this type can be folded so.
pub fn reduces(element: Element, fold: Fold) -> bool {
    let complex = matches!(element, Element::C64 | Element::C128);
    let float = matches!(element, Element::F32 | Element::F64 | Element::F16 | Element::BF16);
    match fold {
        Fold::Sum | Fold::Prod => true,
        Fold::Min | Fold::Max => !complex,
        Fold::Band | Fold::Bor | Fold::Bxor => !complex && !float,
    }
}

/// The last step before rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Last {
    Keep,
    Divide(u32),
    Times(f64),
}

/// `((sources[0] op sources[1]) op sources[2]) ...`, element by element; see [`crate::Reduction`].
///
/// # Errors
/// [`Error::Invalid`] for no sources or uneven ones, a fold that the type does not have, a divisor or factor that
/// does not go with it.
pub fn reduce(
    element: Element,
    fold: Fold,
    divide: Option<u32>,
    times: Option<f64>,
    sources: &[&[u8]],
) -> Result<Vec<u8>> {
    let last = last_step(element, fold, divide, times)?;
    let Some(first) = sources.first() else { return refuse(element, fold, "no sources") };
    if sources.iter().any(|source| source.len() != first.len()) {
        return refuse(element, fold, "sources of different lengths");
    }
    if !first.len().is_multiple_of(element.size()) {
        return refuse(element, fold, "parts of elements");
    }
    Ok(match element {
        Element::F32 => each(sources, f32::from_le_bytes, f32::to_le_bytes, fold, last),
        Element::F64 => each(sources, f64::from_le_bytes, f64::to_le_bytes, fold, last),
        Element::F16 => each(
            sources,
            |bytes| f16::from_le_bytes(bytes).to_f32_const(),
            |acc| f16::from_f32_const(acc).to_le_bytes(),
            fold,
            last,
        ),
        Element::BF16 => each(sources, widen_bf16, round_bf16, fold, last),
        Element::I8 => each(sources, i8::from_le_bytes, i8::to_le_bytes, fold, last),
        Element::I16 => each(sources, i16::from_le_bytes, i16::to_le_bytes, fold, last),
        Element::I32 => each(sources, i32::from_le_bytes, i32::to_le_bytes, fold, last),
        Element::I64 => each(sources, i64::from_le_bytes, i64::to_le_bytes, fold, last),
        Element::U8 => each(sources, u8::from_le_bytes, u8::to_le_bytes, fold, last),
        Element::U16 => each(sources, u16::from_le_bytes, u16::to_le_bytes, fold, last),
        Element::U32 => each(sources, u32::from_le_bytes, u32::to_le_bytes, fold, last),
        Element::U64 => each(sources, u64::from_le_bytes, u64::to_le_bytes, fold, last),
        Element::Bool => each(sources, |[byte]| byte != 0, |acc| [u8::from(acc)], fold, last),
        // Sums of complex numbers are sums of their parts.
        Element::C64 if fold == Fold::Sum => each(sources, f32::from_le_bytes, f32::to_le_bytes, fold, last),
        Element::C128 if fold == Fold::Sum => each(sources, f64::from_le_bytes, f64::to_le_bytes, fold, last),
        Element::C64 => each(sources, read_c64, write_c64, fold, last),
        Element::C128 => each(sources, read_c128, write_c128, fold, last),
    })
}

/// Refuses what [`reduce`] refuses whatever the sources are.
pub(super) fn check(element: Element, fold: Fold, divide: Option<u32>, times: Option<f64>) -> Result<()> {
    last_step(element, fold, divide, times).map(drop)
}

fn refuse<T>(element: Element, fold: Fold, why: &str) -> Result<T> {
    Err(Error::Invalid(format!("reduction of {element:?} by {fold:?}: {why}")))
}

fn last_step(element: Element, fold: Fold, divide: Option<u32>, times: Option<f64>) -> Result<Last> {
    if !reduces(element, fold) {
        return refuse(element, fold, "there is none");
    }
    if (divide.is_some() || times.is_some()) && fold != Fold::Sum {
        return refuse(element, fold, "only sums are divided or multiplied");
    }
    match (divide, times) {
        (None | Some(0 | 1), None) => Ok(Last::Keep),
        (Some(ranks), None) => Ok(Last::Divide(ranks)),
        (None, Some(_)) if element == Element::Bool => refuse(element, fold, "a bool has no factor"),
        (None, Some(factor)) => Ok(Last::Times(factor)),
        (Some(_), Some(_)) => refuse(element, fold, "both a divisor and a factor"),
    }
}

/// What accumulates.
trait Accumulate: Copy {
    fn fold(self, fold: Fold, next: Self) -> Self;
    fn last(self, last: Last) -> Self;
}

fn each<A: Accumulate, const N: usize>(
    sources: &[&[u8]],
    read: impl Fn([u8; N]) -> A,
    write: impl Fn(A) -> [u8; N],
    fold: Fold,
    last: Last,
) -> Vec<u8> {
    let mut columns: Vec<_> = sources.iter().map(|source| source.as_chunks::<N>().0.iter()).collect();
    let mut out = Vec::with_capacity(sources.first().map_or(0, |first| first.len()));
    loop {
        let mut column = columns.iter_mut().map_while(Iterator::next).map(|bytes| read(*bytes));
        let Some(first) = column.next() else { return out };
        let acc = column.fold(first, |acc, next| acc.fold(fold, next));
        out.extend_from_slice(&write(acc.last(last)));
    }
}

macro_rules! floats {
    ($($float:ty),*) => {$(
        impl Accumulate for $float {
            fn fold(self, fold: Fold, next: Self) -> Self {
                match fold {
                    Fold::Sum => self + next,
                    Fold::Prod => self * next,
                    // A NaN on either side, and the earlier of two equal values (0.0 and -0.0).
                    Fold::Min if next < self || next.is_nan() => next,
                    Fold::Max if next > self || next.is_nan() => next,
                    _ => self,
                }
            }
            fn last(self, last: Last) -> Self {
                match last {
                    Last::Keep => self,
                    Last::Divide(ranks) => self / ranks as $float,
                    Last::Times(factor) => self * factor as $float,
                }
            }
        }
    )*};
}

floats!(f32, f64);

macro_rules! ints {
    ($($int:ty),*) => {$(
        impl Accumulate for $int {
            fn fold(self, fold: Fold, next: Self) -> Self {
                match fold {
                    Fold::Sum => self.wrapping_add(next),
                    Fold::Prod => self.wrapping_mul(next),
                    Fold::Min => self.min(next),
                    Fold::Max => self.max(next),
                    Fold::Band => self & next,
                    Fold::Bor => self | next,
                    Fold::Bxor => self ^ next,
                }
            }
            fn last(self, last: Last) -> Self {
                match last {
                    Last::Keep => self,
                    // Truncates.
                    Last::Divide(ranks) => (i128::from(self) / i128::from(ranks)) as $int,
                    // Truncates and saturates.
                    Last::Times(factor) => (self as f64 * factor) as $int,
                }
            }
        }
    )*};
}

ints!(i8, i16, i32, i64, u8, u16, u32, u64);

impl Accumulate for bool {
    fn fold(self, fold: Fold, next: Self) -> Self {
        match fold {
            Fold::Sum | Fold::Max | Fold::Bor => self | next,
            Fold::Prod | Fold::Min | Fold::Band => self & next,
            Fold::Bxor => self ^ next,
        }
    }
    fn last(self, _: Last) -> Self {
        self
    }
}

/// Real and imaginary part, for products.
#[derive(Clone, Copy)]
struct Complex<T>(T, T);

macro_rules! complex {
    ($($float:ty),*) => {$(
        impl Accumulate for Complex<$float> {
            fn fold(self, _: Fold, next: Self) -> Self {
                let (Complex(a, b), Complex(c, d)) = (self, next);
                Complex(a * c - b * d, a * d + b * c)
            }
            fn last(self, _: Last) -> Self {
                self
            }
        }
    )*};
}

complex!(f32, f64);

fn read_c64(bytes: [u8; 8]) -> Complex<f32> {
    let bits = u64::from_le_bytes(bytes);
    Complex(f32::from_bits(bits as u32), f32::from_bits((bits >> 32) as u32))
}

fn write_c64(Complex(re, im): Complex<f32>) -> [u8; 8] {
    (u64::from(im.to_bits()) << 32 | u64::from(re.to_bits())).to_le_bytes()
}

fn read_c128(bytes: [u8; 16]) -> Complex<f64> {
    let bits = u128::from_le_bytes(bytes);
    Complex(f64::from_bits(bits as u64), f64::from_bits((bits >> 64) as u64))
}

fn write_c128(Complex(re, im): Complex<f64>) -> [u8; 16] {
    (u128::from(im.to_bits()) << 64 | u128::from(re.to_bits())).to_le_bytes()
}

fn widen_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// To nearest even; a NaN keeps its upper payload and becomes quiet, since rounding could make it an infinity.
fn round_bf16(acc: f32) -> [u8; 2] {
    let bits = acc.to_bits();
    let rounded = if acc.is_nan() { bits | 0x0040_0000 } else { bits + 0x7fff + (bits >> 16 & 1) };
    bf16::from_bits((rounded >> 16) as u16).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn sixteen_bits_accumulate_in_f32_and_round_once() {
        let one = bf16::from_f32(1.0).to_le_bytes();
        let small = bf16::from_f32(1.0 / 256.0).to_le_bytes();
        // Each small one alone would round away.
        let sources = [&one[..], &small, &small, &small, &small];
        let sum = reduce(Element::BF16, Fold::Sum, None, None, &sources).unwrap();
        assert_eq!(sum, bf16::from_f32(1.0 + 4.0 / 256.0).to_le_bytes());
    }

    #[test]
    fn a_nan_wins_from_either_side_and_the_earlier_zero_stays() {
        let (a, b) = (f32s(&[f32::NAN, 1.0, 0.0]), f32s(&[1.0, f32::NAN, -0.0]));
        for fold in [Fold::Min, Fold::Max] {
            let out = reduce(Element::F32, fold, None, None, &[&a, &b]).unwrap();
            let (out, _) = out.as_chunks::<4>();
            assert!(f32::from_le_bytes(out[0]).is_nan() && f32::from_le_bytes(out[1]).is_nan());
            assert_eq!(out[2], 0.0f32.to_le_bytes());
        }
    }

    #[test]
    fn integers_wrap_truncate_and_saturate() {
        let sum = |divide, times, a: i8, b: i8| {
            let sources = [a.to_le_bytes(), b.to_le_bytes()];
            let sources: Vec<&[u8]> = sources.iter().map(|source| &source[..]).collect();
            reduce(Element::I8, Fold::Sum, divide, times, &sources).unwrap()[0] as i8
        };
        assert_eq!(sum(None, None, 100, 100), -56);
        assert_eq!(sum(Some(2), None, 0, -7), -3);
        assert_eq!(sum(None, Some(2.5), 100, 0), 127);
        assert_eq!(sum(None, Some(0.5), 0, -3), -1);
    }

    #[test]
    fn what_is_not_defined_is_refused() {
        let source = [0u8; 16];
        for (element, fold, divide, times) in [
            (Element::F32, Fold::Band, None, None),
            (Element::C64, Fold::Max, None, None),
            (Element::I32, Fold::Max, Some(2), None),
            (Element::Bool, Fold::Sum, None, Some(2.0)),
            (Element::F32, Fold::Sum, Some(2), Some(2.0)),
        ] {
            assert!(reduce(element, fold, divide, times, &[&source]).is_err(), "{element:?} {fold:?}");
        }
        assert!(reduce(Element::F32, Fold::Sum, None, None, &[]).is_err());
        assert!(reduce(Element::F32, Fold::Sum, None, None, &[&source, &source[..8]]).is_err());
        assert!(reduce(Element::F32, Fold::Sum, None, None, &[&source[..6]]).is_err());
    }
}
