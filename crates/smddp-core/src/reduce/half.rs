//! Conversions between 16-bit floats and the f32 they accumulate in.
//!
//! All variants of one conversion give the same bits: exact widening, rounding to nearest even, NaNs that are
//! quiet and keep sign and upper payload. AVX512-BF16 is not used: it flushes subnormals.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(super) use portable::{
    narrow_bf16, narrow_bf16_portable, narrow_portable, widen_bf16, widen_bf16_portable, widen_portable,
};
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{narrow_bf16_avx2, narrow_f16c, widen_bf16_avx2, widen_f16c};
