//! The conversions without intrinsics: the portable level, single elements, and the reference for the others.

use ::half::{bf16, f16};

/// # Safety
/// `src` is readable for `W` halves; no alignment needed.
#[inline(always)]
pub(in crate::reduce) unsafe fn widen_portable<const W: usize>(src: *const u8, out: &mut [f32; W]) {
    for (k, wide) in out.iter_mut().enumerate() {
        // SAFETY: k < W, and the caller makes W halves readable; the read is unaligned.
        let bits = unsafe { src.cast::<u16>().add(k).read_unaligned() };
        *wide = f16::from_bits(bits).to_f32_const();
    }
}

#[inline(always)]
pub(in crate::reduce) fn narrow_portable<const W: usize>(acc: &[f32; W], out: &mut [f16; W]) {
    for (narrow, wide) in out.iter_mut().zip(acc) {
        *narrow = f16::from_f32_const(*wide);
    }
}

/// # Safety
/// `src` is readable for `W` halves; no alignment needed.
#[inline(always)]
pub(in crate::reduce) unsafe fn widen_bf16_portable<const W: usize>(src: *const u8, out: &mut [f32; W]) {
    for (k, wide) in out.iter_mut().enumerate() {
        // SAFETY: k < W, and the caller makes W halves readable; the read is unaligned.
        let bits = unsafe { src.cast::<u16>().add(k).read_unaligned() };
        *wide = widen_bf16(bf16::from_bits(bits));
    }
}

#[inline(always)]
pub(in crate::reduce) fn narrow_bf16_portable<const W: usize>(acc: &[f32; W], out: &mut [bf16; W]) {
    for (narrow, wide) in out.iter_mut().zip(acc) {
        *narrow = narrow_bf16(*wide);
    }
}

/// Plain rounding could carry a NaN into an infinity, so that one becomes quiet instead. No branch.
#[inline(always)]
pub(in crate::reduce) fn narrow_bf16(wide: f32) -> bf16 {
    let bits = wide.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet = bits | 0x0040_0000;
    bf16::from_bits(((if wide.is_nan() { quiet } else { rounded }) >> 16) as u16)
}

/// Exact; a NaN becomes quiet when it is narrowed again.
#[inline(always)]
pub(in crate::reduce) fn widen_bf16(narrow: bf16) -> f32 {
    f32::from_bits(u32::from(narrow.to_bits()) << 16)
}
