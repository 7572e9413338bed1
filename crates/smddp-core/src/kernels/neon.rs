//! NEON, the baseline of aarch64: registers, and conversions of f16 by its instructions. The compiler generates
//! everything else from the portable code.

use std::arch::aarch64::{
    float32x4_t, uint8x16_t, uint16x4_t, vld1_u16, vld1q_f32, vld1q_u8, vst1_u16, vst1q_f32, vst1q_u8,
};
use std::arch::asm;

use ::half::f16;

use super::half::Half;
use super::level::Isa;

pub(super) struct Neon;

impl Isa for Neon {
    type Register = uint8x16_t;
    const BYTES: usize = 16;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> uint8x16_t {
        // SAFETY: readable for 16 bytes by the trait's contract; no alignment is needed.
        unsafe { vld1q_u8(src) }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: uint8x16_t) {
        // SAFETY: writable for 16 bytes by the trait's contract; no alignment is needed.
        unsafe { vst1q_u8(dst, value) }
    }

    /// Uses an ordinary store: these processors detect streams in hardware, and the architecture offers hints only.
    #[inline(always)]
    unsafe fn stream(dst: *mut u8, value: uint8x16_t) {
        // SAFETY: the contract of `stream` includes that of `store`.
        unsafe { Self::store(dst, value) }
    }

    #[inline(always)]
    unsafe fn fence() {}

    #[inline(always)]
    unsafe fn widen_f16<const W: usize>(src: *const u8, out: &mut [f32; W]) {
        if !W.is_multiple_of(4) {
            // SAFETY: the caller's contract.
            return unsafe { f16::widen_each(src, out) };
        }
        for (k, four) in out.chunks_exact_mut(4).enumerate() {
            // SAFETY: block k is halves 4k..4k+4 of W readable ones and 4 owned floats. The instruction accesses two
            // registers only.
            unsafe {
                let narrow: uint16x4_t = vld1_u16(src.add(8 * k).cast());
                let wide: float32x4_t;
                asm!("fcvtl {0:v}.4s, {1:v}.4h", lateout(vreg) wide, in(vreg) narrow,
                    options(pure, nomem, nostack, preserves_flags));
                vst1q_f32(four.as_mut_ptr(), wide);
            }
        }
    }

    #[inline(always)]
    unsafe fn narrow_f16<const W: usize>(acc: &[f32; W], out: &mut [f16; W]) {
        if !W.is_multiple_of(4) {
            return f16::narrow_each(acc, out);
        }
        for (narrow, wide) in out.chunks_exact_mut(4).zip(acc.chunks_exact(4)) {
            // SAFETY: both blocks hold four elements, and an f16 is its bits. The instruction accesses two registers
            // only.
            unsafe {
                let wide: float32x4_t = vld1q_f32(wide.as_ptr());
                let rounded: uint16x4_t;
                asm!("fcvtn {0:v}.4h, {1:v}.4s", lateout(vreg) rounded, in(vreg) wide,
                    options(pure, nomem, nostack, preserves_flags));
                vst1_u16(narrow.as_mut_ptr().cast(), rounded);
            }
        }
    }
}
