//! Instruction sets of the kernels, and detection of the best one.
//!
//! Every kernel is one generic body, instantiated once per [`Isa`]. An instruction set changes the width of a
//! register and the streaming store, never the arithmetic. No level enables fused multiply-add, so all levels give
//! the same bits.

use std::sync::OnceLock;

use ::half::{bf16, f16};

use super::half::Half;

/// Bytes of a cache line, which streaming stores should fill. A multiple of every register.
pub(super) const LINE: usize = 64;

/// An instantiation of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Baseline of the target (SSE2 on x86-64, NEON on aarch64). Streaming stores are ordinary stores here.
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// Returns the levels that this machine supports, the best one last. Kernels accept only these.
    pub(super) fn available() -> &'static [Level] {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("f16c") {
                return &[Level::Scalar, Level::Avx2];
            }
        }
        #[cfg(target_arch = "aarch64")]
        return &[Level::Scalar, Level::Neon];
        #[cfg(not(target_arch = "aarch64"))]
        &[Level::Scalar]
    }

    /// Returns the best level of this machine, detected once.
    pub(super) fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| Level::available().last().copied().unwrap_or(Level::Scalar))
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
        }
    }
}

/// One instruction set: a register of bytes and its loads and stores.
///
/// # Safety
/// The methods may only run on a machine that has the instruction set, inside a function compiled for it
/// (they are inlined there). Pointers must be valid for the bytes touched; only `stream` needs alignment.
pub(super) trait Isa {
    /// A register's content.
    type Register: Copy;
    /// Bytes in a register, and the alignment `stream` needs.
    const BYTES: usize;

    /// # Safety
    /// `src` is readable for `BYTES` bytes; no alignment needed. See the trait.
    unsafe fn load(src: *const u8) -> Self::Register;
    /// # Safety
    /// `dst` is writable for `BYTES` bytes; no alignment needed. See the trait.
    unsafe fn store(dst: *mut u8, value: Self::Register);
    /// Non-temporal store: around the caches, weakly ordered until `fence`.
    /// # Safety
    /// `dst` is writable for `BYTES` bytes and aligned to `BYTES`. See the trait.
    unsafe fn stream(dst: *mut u8, value: Self::Register);
    /// Orders earlier `stream` stores before every later store of this thread.
    /// # Safety
    /// See the trait.
    unsafe fn fence();

    /// `out[k] = src[k]` widened, exactly; NaNs become quiet and keep sign and payload.
    /// # Safety
    /// `src` is readable for `W` halves; no alignment needed. See the trait.
    #[inline(always)]
    unsafe fn widen_f16<const W: usize>(src: *const u8, out: &mut [f32; W]) {
        // SAFETY: readable for W halves by the trait's contract.
        unsafe { f16::widen_each(src, out) }
    }
    /// `out[k] = acc[k]` rounded to nearest even; NaNs become quiet and keep sign and upper payload.
    /// # Safety
    /// See the trait.
    #[inline(always)]
    unsafe fn narrow_f16<const W: usize>(acc: &[f32; W], out: &mut [f16; W]) {
        f16::narrow_each(acc, out);
    }

    /// Widens `W` bf16 exactly. The order in `out` is that of the instruction set's pairs.
    /// # Safety
    /// `src` is readable for `W` halves; no alignment needed. See the trait.
    #[inline(always)]
    unsafe fn widen_bf16<const W: usize>(src: *const u8, out: &mut [f32; W]) {
        // SAFETY: readable for W halves by the trait's contract.
        unsafe { bf16::widen_each(src, out) }
    }
    /// Undoes the order of `widen_bf16`, and rounds as `narrow_f16` does.
    /// # Safety
    /// See the trait.
    #[inline(always)]
    unsafe fn narrow_bf16<const W: usize>(acc: &[f32; W], out: &mut [bf16; W]) {
        bf16::narrow_each(acc, out);
    }
}

/// The portable instruction set.
pub(super) struct Scalar;

impl Isa for Scalar {
    type Register = u128;
    const BYTES: usize = 16;

    #[inline(always)]
    unsafe fn load(src: *const u8) -> u128 {
        // SAFETY: readable for 16 bytes by the trait's contract; the read is unaligned.
        unsafe { src.cast::<u128>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, value: u128) {
        // SAFETY: writable for 16 bytes by the trait's contract; the write is unaligned.
        unsafe { dst.cast::<u128>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn stream(dst: *mut u8, value: u128) {
        // SAFETY: the contract of `stream` includes that of `store`.
        unsafe { Self::store(dst, value) }
    }

    #[inline(always)]
    unsafe fn fence() {}
}
