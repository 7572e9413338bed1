//! Conversions between 16-bit floats and their f32 accumulators.
//!
//! All variants of a conversion give the same bits. They widen exactly and round to nearest even. NaNs become quiet
//! and keep sign and upper payload. AVX512-BF16 is not used, because it flushes subnormals.

use ::half::{bf16, f16};

/// Portable conversion, one element at a time in memory order. The reference for the other variants.
pub(super) trait Half: Copy {
    fn widen(self) -> f32;
    fn narrow(wide: f32) -> Self;

    /// # Safety
    /// `src` is readable for `W` halves; no alignment needed.
    #[inline(always)]
    unsafe fn widen_each<const W: usize>(src: *const u8, out: &mut [f32; W]) {
        for (k, wide) in out.iter_mut().enumerate() {
            // SAFETY: k < W, and the caller makes W halves readable; the read is unaligned. Every bit pattern is a half.
            *wide = unsafe { src.cast::<Self>().add(k).read_unaligned() }.widen();
        }
    }

    #[inline(always)]
    fn narrow_each<const W: usize>(acc: &[f32; W], out: &mut [Self; W]) {
        for (narrow, wide) in out.iter_mut().zip(acc) {
            *narrow = Self::narrow(*wide);
        }
    }
}

impl Half for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32_const()
    }

    #[inline(always)]
    fn narrow(wide: f32) -> f16 {
        f16::from_f32_const(wide)
    }
}

impl Half for bf16 {
    /// Exact; a NaN becomes quiet when it is narrowed again.
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// Rounding by addition could carry a NaN into an infinity, so NaNs become quiet instead. Branch-free.
    #[inline(always)]
    fn narrow(wide: f32) -> bf16 {
        let bits = wide.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        let quiet = bits | 0x0040_0000;
        bf16::from_bits(((if wide.is_nan() { quiet } else { rounded }) >> 16) as u16)
    }
}
