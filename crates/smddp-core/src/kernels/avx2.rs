//! AVX2 with F16C: registers, and conversions of 16-bit floats by intrinsics on full blocks. Other widths use the
//! portable conversion.
//!
//! bf16 is split and joined in pairs inside 32-bit lanes, so that no data crosses lanes. The accumulators of a block
//! hold the lower halves of its pairs first, then the upper halves.

use std::arch::x86_64::{
    __m128i, __m256i, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _mm_add_epi32, _mm_and_si128, _mm_blend_epi16,
    _mm_blendv_epi8, _mm_castps_si128, _mm_cmpunord_ps, _mm_loadu_ps, _mm_loadu_si128, _mm_or_si128,
    _mm_set1_epi32, _mm_sfence, _mm_slli_epi32, _mm_srli_epi32, _mm_storeu_si128, _mm256_add_epi32,
    _mm256_and_si256, _mm256_blend_epi16, _mm256_blendv_epi8, _mm256_castps_si256, _mm256_cmp_ps,
    _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_or_si256,
    _mm256_set1_epi32, _mm256_slli_epi32, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_storeu_si256,
    _mm256_stream_si256,
};

use ::half::{bf16, f16};

use super::half::Half;
use super::level::Isa;

/// Rounding to nearest even, independent of the thread's control register.
const NEAREST_EVEN: i32 = _MM_FROUND_TO_NEAREST_INT;

/// Upper half of a 32-bit lane.
const UPPER: i32 = 0xffff_0000_u32.cast_signed();
/// The bit that makes an f32 NaN quiet.
const QUIET: i32 = 0x0040_0000;

/// AVX2 with F16C.
pub(super) struct Avx2;

impl Isa for Avx2 {
    type Register = __m256i;
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> __m256i {
        // SAFETY: readable for 32 bytes, on a machine with AVX2, by the trait's contract; unaligned load.
        unsafe { _mm256_loadu_si256(src.cast()) }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: __m256i) {
        // SAFETY: writable for 32 bytes, on a machine with AVX2, by the trait's contract; unaligned store.
        unsafe { _mm256_storeu_si256(dst.cast(), value) }
    }

    #[inline(always)]
    unsafe fn stream(dst: *mut u8, value: __m256i) {
        // SAFETY: as `store`, and aligned to 32 by the trait's contract; `fence` follows in the kernel.
        unsafe { _mm256_stream_si256(dst.cast(), value) }
    }

    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: SSE is part of x86-64; no memory is touched.
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    unsafe fn widen_f16<const W: usize>(src: *const u8, out: &mut [f32; W]) {
        if !W.is_multiple_of(8) {
            // SAFETY: the caller's contract.
            return unsafe { f16::widen_each(src, out) };
        }
        for (k, eight) in out.chunks_exact_mut(8).enumerate() {
            // SAFETY: block k is halves 8k..8k+8 of W readable ones and 8 owned floats; unaligned accesses.
            unsafe {
                let narrow = _mm_loadu_si128(src.add(16 * k).cast());
                _mm256_storeu_ps(eight.as_mut_ptr(), _mm256_cvtph_ps(narrow));
            }
        }
    }

    #[inline(always)]
    unsafe fn narrow_f16<const W: usize>(acc: &[f32; W], out: &mut [f16; W]) {
        if !W.is_multiple_of(8) {
            return f16::narrow_each(acc, out);
        }
        for (narrow, wide) in out.chunks_exact_mut(8).zip(acc.chunks_exact(8)) {
            // SAFETY: both blocks hold eight elements; unaligned accesses.
            unsafe {
                let rounded = _mm256_cvtps_ph::<NEAREST_EVEN>(_mm256_loadu_ps(wide.as_ptr()));
                _mm_storeu_si128(narrow.as_mut_ptr().cast(), rounded);
            }
        }
    }

    #[inline(always)]
    unsafe fn widen_bf16<const W: usize>(src: *const u8, out: &mut [f32; W]) {
        if !W.is_multiple_of(8) {
            // SAFETY: the caller's contract.
            return unsafe { bf16::widen_each(src, out) };
        }
        let to = out.as_mut_ptr();
        let mut at = 0;
        // SAFETY: blocks of 16, and of 8 at the end, halves of W readable ones and floats of W owned ones;
        // unaligned accesses.
        unsafe {
            while at + 16 <= W {
                let pairs = _mm256_loadu_si256(src.add(2 * at).cast());
                _mm256_storeu_si256(to.add(at).cast(), _mm256_slli_epi32::<16>(pairs));
                _mm256_storeu_si256(to.add(at + 8).cast(), _mm256_and_si256(pairs, _mm256_set1_epi32(UPPER)));
                at += 16;
            }
            if at < W {
                let pairs = _mm_loadu_si128(src.add(2 * at).cast());
                _mm_storeu_si128(to.add(at).cast(), _mm_slli_epi32::<16>(pairs));
                _mm_storeu_si128(to.add(at + 4).cast(), _mm_and_si128(pairs, _mm_set1_epi32(UPPER)));
            }
        }
    }

    #[inline(always)]
    unsafe fn narrow_bf16<const W: usize>(acc: &[f32; W], out: &mut [bf16; W]) {
        if !W.is_multiple_of(8) {
            return bf16::narrow_each(acc, out);
        }
        let from = acc.as_ptr();
        let to = out.as_mut_ptr();
        let mut at = 0;
        // SAFETY: the blocks of `widen_bf16`, all inside the W elements of both arrays; unaligned accesses.
        unsafe {
            while at + 16 <= W {
                let lower = _mm256_srli_epi32::<16>(round_avx2(from.add(at)));
                let upper = round_avx2(from.add(at + 8));
                _mm256_storeu_si256(to.add(at).cast(), _mm256_blend_epi16::<0xaa>(lower, upper));
                at += 16;
            }
            if at < W {
                let lower = _mm_srli_epi32::<16>(round_sse(from.add(at)));
                let upper = round_sse(from.add(at + 4));
                _mm_storeu_si128(to.add(at).cast(), _mm_blend_epi16::<0xaa>(lower, upper));
            }
        }
    }
}

/// Four floats whose upper halves are the rounded bf16; see [`Half::narrow`].
///
/// # Safety
/// `from` is readable for four floats; the machine has SSE4.1.
#[inline(always)]
unsafe fn round_sse(from: *const f32) -> __m128i {
    // SAFETY: the caller's contract; unaligned load.
    unsafe {
        let wide = _mm_loadu_ps(from);
        let bits = _mm_castps_si128(wide);
        let odd = _mm_and_si128(_mm_srli_epi32::<16>(bits), _mm_set1_epi32(1));
        let rounded = _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff)));
        let quiet = _mm_or_si128(bits, _mm_set1_epi32(QUIET));
        _mm_blendv_epi8(rounded, quiet, _mm_castps_si128(_mm_cmpunord_ps(wide, wide)))
    }
}

/// As [`round_sse`], eight floats.
///
/// # Safety
/// `from` is readable for eight floats; the machine has AVX2.
#[inline(always)]
unsafe fn round_avx2(from: *const f32) -> __m256i {
    // SAFETY: the caller's contract; unaligned load.
    unsafe {
        let wide = _mm256_loadu_ps(from);
        let bits = _mm256_castps_si256(wide);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(QUIET));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(wide, wide));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }
}
