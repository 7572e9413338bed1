//! Operations on one element: read to the accumulator, combine, finish and round.
//!
//! Operations that must vectorise are branch-free.

use ::half::{bf16, f16};

use super::half::Half;
use super::level::Isa;

/// The last step of a reduction, applied once to each accumulator before rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Finish {
    /// Keep the reduction.
    Keep,
    /// Divide by the number of ranks, at least 1.
    Divide(u32),
    /// Multiply by the caller's factor.
    Times(f64),
}

/// An element type. `Self` is its form in memory, `Acc` the accumulator.
pub(super) trait Element: Copy {
    type Acc: Copy;
    /// Initial values of results and accumulators before they are written.
    const BLANK: (Self, Self::Acc);

    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self;

    /// Applies `finish` to a column. Called for sums only.
    fn finish<const W: usize>(column: &mut [Self::Acc; W], finish: Finish);

    /// Reads `W` elements into accumulators, in an order that `round` reverses.
    ///
    /// # Safety
    /// `src` is readable for `W` elements, no alignment needed; runs inside a function compiled for `I`.
    #[inline(always)]
    unsafe fn read<I: Isa, const W: usize>(src: *const u8, out: &mut [Self::Acc; W]) {
        for (k, acc) in out.iter_mut().enumerate() {
            // SAFETY: k < W elements are readable; the read is unaligned. Every bit pattern is an element.
            *acc = unsafe { src.cast::<Self>().add(k).read_unaligned() }.widen();
        }
    }

    /// Rounds `W` accumulators to elements, in memory order.
    ///
    /// # Safety
    /// Runs inside a function compiled for `I`.
    #[inline(always)]
    unsafe fn round<I: Isa, const W: usize>(acc: &[Self::Acc; W], out: &mut [Self; W]) {
        for (narrow, wide) in out.iter_mut().zip(acc) {
            *narrow = Self::narrow(*wide);
        }
    }
}

/// Implements an element that is its own accumulator.
macro_rules! accumulates_in_itself {
    ($blank:expr) => {
        type Acc = Self;
        const BLANK: (Self, Self) = ($blank, $blank);

        #[inline(always)]
        fn widen(self) -> Self {
            self
        }

        #[inline(always)]
        fn narrow(acc: Self) -> Self {
            acc
        }
    };
}

/// Computes `column[k] / n`, correctly rounded. A power of two has an exact reciprocal: the product rounds the same
/// real number and gives the same bits without a division.
macro_rules! finish_float {
    ($float:ty) => {
        #[inline(always)]
        fn finish<const W: usize>(column: &mut [$float; W], finish: Finish) {
            match finish {
                Finish::Keep => {}
                Finish::Divide(n) if n.is_power_of_two() => {
                    let reciprocal = 1.0 / n as $float;
                    column.iter_mut().for_each(|acc| *acc *= reciprocal);
                }
                Finish::Divide(n) => {
                    let n = n as $float;
                    column.iter_mut().for_each(|acc| *acc /= n);
                }
                Finish::Times(factor) => {
                    let factor = factor as $float;
                    column.iter_mut().for_each(|acc| *acc *= factor);
                }
            }
        }
    };
}

impl Element for f32 {
    accumulates_in_itself!(0.0);
    finish_float!(f32);
}

impl Element for f64 {
    accumulates_in_itself!(0.0);
    finish_float!(f64);
}

macro_rules! half_element {
    ($half:ty, $widen:ident, $narrow:ident) => {
        impl Element for $half {
            type Acc = f32;
            const BLANK: ($half, f32) = (<$half>::ZERO, 0.0);

            #[inline(always)]
            fn widen(self) -> f32 {
                Half::widen(self)
            }

            #[inline(always)]
            fn narrow(acc: f32) -> $half {
                Half::narrow(acc)
            }

            finish_float!(f32);

            #[inline(always)]
            unsafe fn read<I: Isa, const W: usize>(src: *const u8, out: &mut [f32; W]) {
                // SAFETY: the caller's contract.
                unsafe { I::$widen(src, out) }
            }

            #[inline(always)]
            unsafe fn round<I: Isa, const W: usize>(acc: &[f32; W], out: &mut [$half; W]) {
                // SAFETY: the caller's contract.
                unsafe { I::$narrow(acc, out) }
            }
        }
    };
}

half_element!(bf16, widen_bf16, narrow_bf16);
half_element!(f16, widen_f16, narrow_f16);

/// Integers divide exactly, truncating. They multiply in f64, truncating towards zero and saturating. Both work on a
/// copy, out of line: they are rare and long, and would spill the column from the registers.
macro_rules! int_element {
    ($($int:ty: $wide:ty),*) => {$(
        impl Element for $int {
            accumulates_in_itself!(0);

            #[inline(always)]
            fn finish<const W: usize>(column: &mut [$int; W], finish: Finish) {
                #[inline(never)]
                fn finish_rarely(column: &mut [$int], finish: Finish) {
                    match finish {
                        Finish::Keep => {}
                        // `$wide` holds every value exactly. It has enough extra bits that a quotient that is not an
                        // integer cannot round up to one. (f32 rounds a divisor above 2^24, but the quotient of 16
                        // bits is 0 then.)
                        Finish::Divide(n) => {
                            let n = n as $wide;
                            column.iter_mut().for_each(|acc| *acc = (*acc as $wide / n) as $int);
                        }
                        Finish::Times(factor) => {
                            column.iter_mut().for_each(|acc| *acc = (*acc as f64 * factor) as $int);
                        }
                    }
                }
                let mut copy = *column;
                finish_rarely(&mut copy, finish);
                *column = copy;
            }
        }
    )*};
}

int_element!(i8: f32, i16: f32, i32: f64, i64: i64, u8: f32, u16: f32, u32: f64, u64: u64);

/// torch's bool: a byte, true if not 0; results are 0 or 1.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Truth(u8);

impl Element for Truth {
    type Acc = u8;
    const BLANK: (Truth, u8) = (Truth(0), 0);

    #[inline(always)]
    fn widen(self) -> u8 {
        u8::from(self.0 != 0)
    }

    #[inline(always)]
    fn narrow(acc: u8) -> Truth {
        Truth(acc)
    }

    #[inline(always)]
    fn finish<const W: usize>(_: &mut [u8; W], _: Finish) {}
}

/// Real and imaginary part. Sums of complex numbers run as sums of their parts; this is for products.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Complex<T> {
    re: T,
    im: T,
}

macro_rules! complex_element {
    ($float:ty) => {
        impl Element for Complex<$float> {
            accumulates_in_itself!(Self { re: 0.0, im: 0.0 });

            #[inline(always)]
            fn finish<const W: usize>(_: &mut [Self; W], _: Finish) {}
        }
    };
}

complex_element!(f32);
complex_element!(f64);

/// A reduction of two accumulators.
pub(super) trait Combine<A> {
    /// True if results may be finished by anything but [`Finish::Keep`].
    const FINISHES: bool;

    fn combine(a: A, b: A) -> A;
}

pub(super) struct Sum;
pub(super) struct Prod;
pub(super) struct Min;
pub(super) struct Max;
pub(super) struct And;
pub(super) struct Or;
pub(super) struct Xor;

/// Operation, whether it finishes, accumulator types, result of an earlier and a later value.
macro_rules! combine {
    ($($op:ident, $finishes:literal, [$($acc:ty),*], |$a:ident, $b:ident| $result:expr;)*) => {$($(
        impl Combine<$acc> for $op {
            const FINISHES: bool = $finishes;

            #[inline(always)]
            fn combine($a: $acc, $b: $acc) -> $acc {
                $result
            }
        }
    )*)*};
}

combine! {
    Sum, true, [f32, f64], |a, b| a + b;
    Prod, false, [f32, f64], |a, b| a * b;
    // The result is a NaN if either value is one. Of two equal values (0.0 and -0.0) it is the earlier one, as in
    // torch.
    Min, false, [f32, f64], |a, b| if (b < a) | b.is_nan() { b } else { a };
    Max, false, [f32, f64], |a, b| if (b > a) | b.is_nan() { b } else { a };
    Prod, false, [Complex<f32>, Complex<f64>], |a, b| Complex {
        re: a.re * b.re - a.im * b.im,
        im: a.re * b.im + a.im * b.re,
    };
    Sum, true, [i8, i16, i32, i64, u8, u16, u32, u64], |a, b| a.wrapping_add(b);
    Prod, false, [i8, i16, i32, i64, u8, u16, u32, u64], |a, b| a.wrapping_mul(b);
    Min, false, [i8, i16, i32, i64, u8, u16, u32, u64], |a, b| a.min(b);
    Max, false, [i8, i16, i32, i64, u8, u16, u32, u64], |a, b| a.max(b);
    // Integers of any width combine their bits bytewise; bools (0 or 1) use the same operations.
    And, false, [u8], |a, b| a & b;
    Or, false, [u8], |a, b| a | b;
    Xor, false, [u8], |a, b| a ^ b;
}
