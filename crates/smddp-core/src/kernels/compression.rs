//! Conversion of f32 to the wire formats between nodes, and back.

use std::mem::size_of;

use ::half::{bf16, f16};
use smddp_plan::Format;
use smddp_plan::format::GROUP;

#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
use super::half::Half;
use super::level::{Isa, Level, Scalar};
#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
use crate::kernels::float_mode::DefaultFloatMode;

/// Elements converted at a time.
const BLOCK: usize = 16;

/// Encodes `n` elements of `src` in a format, as `format.bytes(n)` bytes.
///
/// # Safety
/// `src` is readable for `n` f32, `dst` writable for `format.bytes(n)` bytes, and they do not overlap. No alignment is needed.
pub(crate) unsafe fn encode(format: Format, dst: *mut u8, src: *const u8, n: usize) {
    let _mode = DefaultFloatMode::enter();
    // SAFETY: the caller's contract; the level was detected.
    unsafe { encode_at(Level::best(), format, dst, src, n) }
}

/// Decodes `n` f32 from `src`.
///
/// # Safety
/// `src` is readable for `format.bytes(n)` bytes, `dst` writable for `n` f32, and they do not overlap. No alignment is needed.
pub(crate) unsafe fn decode(format: Format, dst: *mut u8, src: *const u8, n: usize) {
    let _mode = DefaultFloatMode::enter();
    // SAFETY: the caller's contract; the level was detected.
    unsafe { decode_at(Level::best(), format, dst, src, n) }
}

/// Rounds `n` f32 to a format, and stores them as f32. Rounding again changes nothing.
///
/// # Safety
/// `src` is readable and `dst` writable for `n` f32; they are the same or do not overlap. No alignment is needed.
pub(crate) unsafe fn round(format: Format, dst: *mut u8, src: *const u8, n: usize) {
    let (level, _mode) = (Level::best(), DefaultFloatMode::enter());
    let mut encoded = [0u8; Format::Bf16.bytes(GROUP)];
    for first in (0..n).step_by(GROUP) {
        let (count, byte) = (GROUP.min(n - first), size_of::<f32>() * first);
        // SAFETY: elements `first..first + count` of both, by the caller's contract; a group in any format is no longer
        // than in 16 bits. The level was detected. What is read of a group is read before it is written.
        unsafe {
            encode_at(level, format, encoded.as_mut_ptr(), src.wrapping_add(byte), count);
            decode_at(level, format, dst.wrapping_add(byte), encoded.as_ptr(), count);
        }
    }
}

/// # Safety
/// As [`encode`], and `level` is available here.
pub(super) unsafe fn encode_at(level: Level, format: Format, dst: *mut u8, src: *const u8, n: usize) {
    // SAFETY: the caller's contract; the level is one that this machine has.
    unsafe {
        match level {
            Level::Scalar => encode_with::<Scalar>(format, dst, src, n),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => encode_with::<Neon>(format, dst, src, n),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => encode_avx2(format, dst, src, n),
        }
    }
}

/// # Safety
/// As [`decode`], and `level` is available here.
pub(super) unsafe fn decode_at(level: Level, format: Format, dst: *mut u8, src: *const u8, n: usize) {
    // SAFETY: the caller's contract; the level is one that this machine has.
    unsafe {
        match level {
            Level::Scalar => decode_with::<Scalar>(format, dst, src, n),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => decode_with::<Neon>(format, dst, src, n),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => decode_avx2(format, dst, src, n),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn encode_avx2(format: Format, dst: *mut u8, src: *const u8, n: usize) {
    // SAFETY: the caller's contract; compiled for AVX2 and F16C.
    unsafe { encode_with::<Avx2>(format, dst, src, n) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn decode_avx2(format: Format, dst: *mut u8, src: *const u8, n: usize) {
    // SAFETY: the caller's contract; compiled for AVX2 and F16C.
    unsafe { decode_with::<Avx2>(format, dst, src, n) }
}

/// # Safety
/// As [`encode`]; runs inside a function compiled for `I`.
#[inline(always)]
unsafe fn encode_with<I: Isa>(format: Format, dst: *mut u8, src: *const u8, n: usize) {
    // SAFETY: the caller's contract, for each format's elements; `I` is what this is compiled for.
    unsafe {
        match format {
            Format::Bf16 => each(dst, src, n, |wide: [f32; BLOCK]| wide.map(bf16::narrow)),
            Format::F16 => each(dst, src, n, |wide: [f32; BLOCK]| {
                let mut narrow = [f16::ZERO; BLOCK];
                I::narrow_f16(&wide, &mut narrow);
                narrow
            }),
            Format::Int8 => {
                for first in (0..n).step_by(GROUP) {
                    let count = GROUP.min(n - first);
                    let mut wide = [0f32; GROUP];
                    let from = src.add(size_of::<f32>() * first);
                    std::ptr::copy_nonoverlapping(from, wide.as_mut_ptr().cast(), size_of::<f32>() * count);
                    let (scale, whole) = quantise(&wide);
                    let group = dst.add(Format::Int8.bytes(first));
                    group.cast::<f32>().write_unaligned(scale);
                    std::ptr::copy_nonoverlapping(whole.as_ptr().cast(), group.add(size_of::<f32>()), count);
                }
            }
        }
    }
}

/// # Safety
/// As [`decode`]; runs inside a function compiled for `I`.
#[inline(always)]
unsafe fn decode_with<I: Isa>(format: Format, dst: *mut u8, src: *const u8, n: usize) {
    // SAFETY: the caller's contract, for each format's elements; `I` is what this is compiled for.
    unsafe {
        match format {
            Format::Bf16 => each(dst, src, n, |narrow: [bf16; BLOCK]| narrow.map(bf16::widen)),
            Format::F16 => each(dst, src, n, |narrow: [f16; BLOCK]| {
                let mut wide = [0f32; BLOCK];
                I::widen_f16(narrow.as_ptr().cast(), &mut wide);
                wide
            }),
            Format::Int8 => {
                for first in (0..n).step_by(GROUP) {
                    let count = GROUP.min(n - first);
                    let group = src.add(Format::Int8.bytes(first));
                    let scale = group.cast::<f32>().read_unaligned();
                    let to = dst.add(size_of::<f32>() * first);
                    each(to, group.add(size_of::<f32>()), count, |whole: [i8; BLOCK]| {
                        whole.map(|whole| f32::from(whole) * scale)
                    });
                }
            }
        }
    }
}

/// `dst[i] = convert(src)[i]` for `n` elements, a few at a time.
///
/// # Safety
/// `src` is readable for `n` elements of `A`, whose every bit pattern is one, `dst` writable for `n` of `B`, and they do not
/// overlap. No alignment is needed.
#[inline(always)]
unsafe fn each<A: Copy + Default, B: Copy>(
    dst: *mut u8,
    src: *const u8,
    n: usize,
    convert: impl Fn([A; BLOCK]) -> [B; BLOCK],
) {
    let (from, to) = (src.cast::<[A; BLOCK]>(), dst.cast::<[B; BLOCK]>());
    let (whole, rest) = (n / BLOCK, n % BLOCK);
    for i in 0..whole {
        // SAFETY: elements `BLOCK * i` and on, all below `n`; unaligned accesses.
        unsafe { to.add(i).write_unaligned(convert(from.add(i).read_unaligned())) };
    }
    if rest > 0 {
        let mut last = [A::default(); BLOCK];
        // SAFETY: the `rest` elements after the full blocks; `last` holds more, before and after the conversion.
        unsafe {
            let (from, to) = (from.add(whole).cast::<u8>(), to.add(whole).cast::<u8>());
            std::ptr::copy_nonoverlapping(from, last.as_mut_ptr().cast(), rest * size_of::<A>());
            let last = convert(last);
            std::ptr::copy_nonoverlapping(last.as_ptr().cast::<u8>(), to, rest * size_of::<B>());
        }
    }
}

/// Minimum of a group's largest magnitude. Smaller groups become zeros, because their scales would be subnormal.
const MIN_SCALED: f32 = f32::from_bits((127 - 100) << 23);
/// Added to a number below 2^22, leaves the nearest integer, ties to even, in the lowest bits.
const TO_WHOLE: f32 = 12_582_912.0;

/// Returns a group's scale, and its elements as integer multiples of it.
///
/// The scale has 16 bits of precision and is rounded up. Therefore the largest element becomes 127, and 127 times the
/// scale is exact. Encoding the decoded group again gives the same scale and integers. A group with a NaN or an
/// infinity has a NaN as its scale, so all its elements become NaNs.
#[inline(always)]
fn quantise(group: &[f32; GROUP]) -> (f32, [i8; GROUP]) {
    let magnitude = |x: f32| x.to_bits() & 0x7fff_ffff;
    let most = f32::from_bits(group.iter().fold(0, |most, &x| magnitude(x).max(most)));
    let (scale, inverse) = if !most.is_finite() {
        (f32::NAN, 0.0)
    } else if most < MIN_SCALED {
        (0.0, 0.0)
    } else {
        let exact = (most / 127.0).to_bits();
        let above = f32::from_bits((exact + 0xff) & !0xff);
        // Close to the largest f32, the scale is rounded down instead.
        let scale = if (127.0 * above).is_finite() { above } else { f32::from_bits(exact & !0xff) };
        (scale, 1.0 / scale)
    };
    let whole = group.map(|x| ((x * inverse + TO_WHOLE).to_bits() & 0xff) as u8 as i8);
    (scale, whole)
}
