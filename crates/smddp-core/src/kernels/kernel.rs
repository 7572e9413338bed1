//! The reduction loop and its instantiations.
//!
//! A *column* is `W` consecutive elements of all inputs. Its accumulators fill half of the vector registers and
//! remain there for all inputs. Therefore each input is read once and each result is written once, for any number of
//! inputs. The loops over a column have constant length and work on local arrays. The compiler vectorises them
//! without checking whether the destination is one of the sources.

#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
use super::element::{And, Combine, Complex, Element, Finish, Max, Min, Or, Prod, Sum, Truth, Xor};
use super::level::{Isa, LINE, Level, Scalar};
#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
use crate::call::types::{DType, RedOp};
use ::half::{bf16, f16};

/// Bytes of accumulators in a column: eight AVX2 registers.
const COLUMN: usize = 256;
/// Factor between wide columns and the narrow columns for the remainder.
const NARROW: usize = 8;

/// Arguments of one kernel call; see [`super::Kernel::run`].
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) dst: *mut u8,
    /// Second destination, or null.
    pub(super) also: *mut u8,
    pub(super) srcs: &'a [*const u8],
    /// Elements, in the kernel's own unit.
    pub(super) n: usize,
    pub(super) finish: Finish,
    pub(super) stream: bool,
}

/// A loop for one (element, reduction, level).
///
/// # Safety
/// `srcs` is not empty; every source is readable and every destination writable for `n` elements;
/// destinations overlap nothing, save that `dst` may be one of the sources; the machine has the level.
pub(super) type Loop = unsafe fn(&Call<'_>);

/// Returns the loop for `dtype` and `redop`, and the number of its elements per element of `dtype`.
pub(super) fn resolve(level: Level, dtype: DType, redop: RedOp) -> Option<(Loop, usize)> {
    macro_rules! at {
        ($element:ty, $op:ty) => {
            at_level::<
                $element,
                $op,
                { COLUMN / size_of::<<$element as Element>::Acc>() },
                { COLUMN / size_of::<<$element as Element>::Acc>() / NARROW },
            >(level)
        };
    }
    macro_rules! real {
        // `$bits` is the unsigned integer type whose product has the same bits.
        ($element:ty, $bits:ty) => {
            match redop {
                RedOp::Sum | RedOp::Avg | RedOp::PremulSum(_) => at!($element, Sum),
                RedOp::Prod => at!($bits, Prod),
                RedOp::Min => at!($element, Min),
                RedOp::Max => at!($element, Max),
                RedOp::Band | RedOp::Bor | RedOp::Bxor => return None,
            }
        };
    }
    let bitwise = match redop {
        RedOp::Band => Some(at!(u8, And)),
        RedOp::Bor => Some(at!(u8, Or)),
        RedOp::Bxor => Some(at!(u8, Xor)),
        _ => None,
    };
    if let (Some(bitwise), true) = (bitwise, dtype.is_integer()) {
        return Some((bitwise, dtype.size()));
    }
    let kernel = match dtype {
        DType::F32 => real!(f32, f32),
        DType::F64 => real!(f64, f64),
        DType::F16 => real!(f16, f16),
        DType::BF16 => real!(bf16, bf16),
        DType::I8 => real!(i8, u8),
        DType::I16 => real!(i16, u16),
        DType::I32 => real!(i32, u32),
        DType::I64 => real!(i64, u64),
        DType::U8 => real!(u8, u8),
        DType::U16 => real!(u16, u16),
        DType::U32 => real!(u32, u32),
        DType::U64 => real!(u64, u64),
        DType::Bool => match redop {
            RedOp::Prod | RedOp::Min | RedOp::Band => at!(Truth, And),
            RedOp::Bxor => at!(Truth, Xor),
            RedOp::Sum | RedOp::Avg | RedOp::Max | RedOp::Bor => at!(Truth, Or),
            // A product of a bool and a factor is not a bool.
            RedOp::PremulSum(_) => return None,
        },
        DType::C64 | DType::C128 => {
            return match (redop, dtype) {
                (RedOp::Sum | RedOp::Avg | RedOp::PremulSum(_), DType::C64) => Some((at!(f32, Sum), 2)),
                (RedOp::Sum | RedOp::Avg | RedOp::PremulSum(_), _) => Some((at!(f64, Sum), 2)),
                (RedOp::Prod, DType::C64) => Some((at!(Complex<f32>, Prod), 1)),
                (RedOp::Prod, _) => Some((at!(Complex<f64>, Prod), 1)),
                _ => None,
            };
        }
        DType::Opaque1 | DType::Opaque2 | DType::Opaque4 | DType::Opaque8 | DType::Opaque16 | DType::C32 => {
            return None;
        }
    };
    Some((kernel, 1))
}

fn at_level<E: Element, O: Combine<E::Acc>, const W: usize, const V: usize>(level: Level) -> Loop {
    match level {
        Level::Scalar => scalar::<E, O, W, V>,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::<E, O, W, V>,
        #[cfg(target_arch = "aarch64")]
        Level::Neon => neon::<E, O, W, V>,
    }
}

unsafe fn scalar<E: Element, O: Combine<E::Acc>, const W: usize, const V: usize>(call: &Call<'_>) {
    // SAFETY: the caller's contract; the portable set needs no feature.
    unsafe { reduce::<Scalar, E, O, W, V>(call) }
}

#[cfg(target_arch = "aarch64")]
unsafe fn neon<E: Element, O: Combine<E::Acc>, const W: usize, const V: usize>(call: &Call<'_>) {
    // SAFETY: the caller's contract; every processor of the target has NEON.
    unsafe { reduce::<Neon, E, O, W, V>(call) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<E: Element, O: Combine<E::Acc>, const W: usize, const V: usize>(call: &Call<'_>) {
    // SAFETY: the caller's contract; compiled for AVX2 and F16C.
    unsafe { reduce::<Avx2, E, O, W, V>(call) }
}

/// Processes wide columns first, then narrow ones (`V` elements) and single elements at the ends.
///
/// # Safety
/// As [`Loop`]; runs inside a function compiled for `I`.
#[inline(always)]
unsafe fn reduce<I: Isa, E: Element, O: Combine<E::Acc>, const W: usize, const V: usize>(call: &Call<'_>) {
    let size = size_of::<E>();
    // Bytes before the first whole line of dst. If no element starts there, stores cannot stream.
    let prefix = (LINE - call.dst as usize % LINE) % LINE;
    let stream = call.stream && prefix.is_multiple_of(size) && (W * size).is_multiple_of(LINE);
    let prefix = if stream { (prefix / size).min(call.n) } else { 0 };
    let mut at = prefix;
    // SAFETY: every column lies in 0..n; streamed ones start at a line and are whole lines.
    unsafe {
        while call.n - at >= W {
            column::<I, E, O, W>(call, at, stream);
            at += W;
        }
        // Elements are independent, so one loop handles both ends.
        for (mut at, end) in [(0, prefix), (at, call.n)] {
            while end - at >= V {
                column::<I, E, O, V>(call, at, false);
                at += V;
            }
            while at < end {
                column::<I, E, O, 1>(call, at, false);
                at += 1;
            }
        }
        if stream {
            I::fence();
        }
    }
}

/// Reduces elements `at..at + W`.
///
/// # Safety
/// As [`Loop`], with `at + W <= n`; with `stream`, element `at` of dst is aligned to a register of `I` and
/// `W` elements are whole registers; runs inside a function compiled for `I`.
#[inline(always)]
unsafe fn column<I: Isa, E: Element, O: Combine<E::Acc>, const W: usize>(
    call: &Call<'_>,
    at: usize,
    stream: bool,
) {
    let (blank, blank_acc) = E::BLANK;
    let byte = at * size_of::<E>();
    let mut acc = [blank_acc; W];
    // SAFETY: there is a first source, and each is readable for elements at..at + W.
    unsafe {
        E::read::<I, W>(call.srcs.get_unchecked(0).add(byte), &mut acc);
        for src in call.srcs.get_unchecked(1..) {
            // Volatile: otherwise the compiler gathers single elements over the sources if the order is free.
            let src = std::ptr::from_ref(src).read_volatile();
            let mut next = [blank_acc; W];
            E::read::<I, W>(src.add(byte), &mut next);
            for (a, b) in acc.iter_mut().zip(&next) {
                *a = O::combine(*a, *b);
            }
        }
    }
    if O::FINISHES && call.finish != Finish::Keep {
        E::finish(&mut acc, call.finish);
    }
    let mut out = [blank; W];
    // SAFETY: the destinations are writable for elements at..at + W, all sources of which were read above,
    // so dst may be one of them; alignment for streaming by the caller's contract.
    unsafe {
        E::round::<I, W>(&acc, &mut out);
        let dst = call.dst.add(byte);
        if stream {
            write::<I, E, W, true>(dst, &out);
        } else {
            write::<I, E, W, false>(dst, &out);
        }
        if !call.also.is_null() {
            write::<I, E, W, false>(call.also.add(byte), &out);
        }
    }
}

/// Writes a column, by registers if it consists of whole ones.
///
/// # Safety
/// `dst` is writable for `W` elements; with `STREAM` it is aligned to a register of `I` and `W` elements are
/// whole registers; runs inside a function compiled for `I`.
#[inline(always)]
unsafe fn write<I: Isa, E: Element, const W: usize, const STREAM: bool>(dst: *mut u8, out: &[E; W]) {
    let from = out.as_ptr().cast::<u8>();
    let bytes = W * size_of::<E>();
    // SAFETY: the loops stay inside both the W elements of `out` and those of `dst`.
    unsafe {
        if bytes.is_multiple_of(I::BYTES) {
            for k in (0..bytes).step_by(I::BYTES) {
                let register = I::load(from.add(k));
                if STREAM {
                    I::stream(dst.add(k), register);
                } else {
                    I::store(dst.add(k), register);
                }
            }
        } else {
            dst.cast::<[E; W]>().write_unaligned(*out);
        }
    }
}
