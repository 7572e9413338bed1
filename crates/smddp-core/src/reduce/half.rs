//! Conversions between 16-bit floats and the f32 they accumulate in.
//!
//! All variants of one conversion give the same bits: exact widening, rounding to nearest even, NaNs that are
//! quiet and keep sign and upper payload. AVX512-BF16 is not used: it flushes subnormals.

#[cfg(target_arch = "x86_64")]
mod x86;

use ::half::bf16;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{narrow_bf16_avx2, narrow_f16c, widen_bf16_avx2, widen_f16c};

/// Plain rounding could carry a NaN into an infinity, so that one becomes quiet instead. No branch.
#[inline(always)]
pub(super) fn narrow_bf16(wide: f32) -> bf16 {
    let bits = wide.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet = bits | 0x0040_0000;
    bf16::from_bits(((if wide.is_nan() { quiet } else { rounded }) >> 16) as u16)
}

/// Exact; a NaN becomes quiet when it is narrowed again.
#[inline(always)]
pub(super) fn widen_bf16(narrow: bf16) -> f32 {
    f32::from_bits(u32::from(narrow.to_bits()) << 16)
}
