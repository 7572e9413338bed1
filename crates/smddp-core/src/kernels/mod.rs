//! Copies and reductions: all code of this crate that processes payload bytes with arithmetic or vector registers.
//!
//! A [`Kernel`] is resolved once, when a plan is bound. It reduces any number of inputs in one pass, in the given
//! order, with the same bits at every SIMD level. The only exception is the payload of a NaN if several inputs hold
//! different NaNs at one index. The caller chooses streaming (non-temporal) stores. All arithmetic runs in the
//! default floating-point mode ([`DefaultFloatMode`]), independent of the mode of the calling thread.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod compression;
mod copy;
mod element;
pub(crate) mod float_mode;
mod half;
pub(crate) mod helpers;
mod kernel;
mod level;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
mod tests;
mod tree;

pub(crate) use self::compression::{decode, encode, round};
use self::element::Finish;
use self::kernel::{Call, Loop};
use self::level::Level;
use crate::call::types::{DType, RedOp};
use crate::kernels::float_mode::DefaultFloatMode;
use crate::kernels::helpers::split_work;

/// Returns the instruction set of the kernels on this machine: `avx2`, `neon` or `scalar`.
pub fn simd_level() -> &'static str {
    Level::best().name()
}

/// Copies `n` bytes. `stream` bypasses the caches (for outputs larger than the last-level cache) and orders those
/// writes before any later store of this thread.
///
/// # Safety
/// `src` is readable and `dst` writable for `n` bytes, and they do not overlap. No alignment is needed.
#[inline]
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, n: usize, stream: bool) {
    let level = Level::best();
    // SAFETY: the caller's contract; the level was detected, and no two parts have a byte in common.
    unsafe {
        split_work(n, |at, n| {
            let (dst, src) = (dst.wrapping_add(at), src.wrapping_add(at));
            copy::copy_at::<false>(level, dst, dst, src, n, stream);
        });
    }
}

/// Writes `n` bytes of `src` to two destinations and reads them once. `stream` applies to `kept` only: peers are
/// about to read `slot`, which should remain in cache.
///
/// # Safety
/// As [`copy`], for both destinations; no two of the three buffers overlap.
#[inline]
pub(crate) unsafe fn copy_tee(slot: *mut u8, kept: *mut u8, src: *const u8, n: usize, stream: bool) {
    let level = Level::best();
    // SAFETY: as in `copy`.
    unsafe {
        split_work(n, |at, n| {
            let [kept, slot] = [kept, slot].map(|to| to.wrapping_add(at));
            copy::copy_at::<true>(level, kept, slot, src.wrapping_add(at), n, stream);
        });
    }
}

/// A reduction of one dtype by one redop, resolved for this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    run: Loop,
    /// Elements of `run` in one element of the dtype.
    per: usize,
}

impl Kernel {
    /// Returns `None` if the dtype does not support the redop: bitwise operations on floats, order or bitwise
    /// operations on complex numbers, factors on bools, anything on opaque dtypes and complex32. The factor of a
    /// PREMUL_SUM is applied separately: see [`premultiply`].
    pub(crate) fn new(dtype: DType, redop: RedOp) -> Option<Kernel> {
        Self::at(Level::best(), dtype, redop)
    }

    fn at(level: Level, dtype: DType, redop: RedOp) -> Option<Kernel> {
        kernel::resolve(level, dtype, redop).map(|(run, per)| Kernel { run, per })
    }

    /// `dst[i] = ((srcs[0][i] op srcs[1][i]) op srcs[2][i]) ...` for `n` elements, in one pass.
    ///
    /// - `also`: a second destination for the same result, or null.
    /// - `scale`: the number of ranks that a sum is divided by, on the last step of an average. Floats and
    ///   complex numbers divide in the accumulator, correctly rounded; integers divide the wrapped sum,
    ///   truncating. Ignored by other redops and by bool.
    /// - `stream`: non-temporal stores to `dst`, never to `also`; ordered before later stores of this thread.
    ///   A `dst` that is not aligned to its element size is written with ordinary stores.
    ///
    /// 16-bit floats accumulate in f32 over all of `srcs` and round once, to nearest even. Integers wrap. For bools,
    /// sum, max and avg are *or*, prod and min *and*. Min and max of floats give a NaN if any input is one.
    ///
    /// # Safety
    /// `srcs` is not empty. Every source is readable, `dst` and a non-null `also` are writable for `n`
    /// elements. A destination overlaps nothing, save that `dst` may be exactly one or more of the sources.
    /// No alignment is needed.
    #[inline]
    pub(crate) unsafe fn run(
        &self,
        dst: *mut u8,
        also: *mut u8,
        srcs: &[*const u8],
        n: usize,
        scale: Option<u32>,
        stream: bool,
    ) {
        let _mode = DefaultFloatMode::enter();
        // SAFETY: the caller's contract.
        unsafe { self.run_in_mode(dst, also, srcs, n, scale, stream) }
    }

    /// As [`Kernel::run`], in the mode of the calling thread.
    ///
    /// # Safety
    /// As [`Kernel::run`].
    #[inline]
    unsafe fn run_in_mode(
        &self,
        dst: *mut u8,
        also: *mut u8,
        srcs: &[*const u8],
        n: usize,
        scale: Option<u32>,
        stream: bool,
    ) {
        debug_assert!(!srcs.is_empty());
        let finish = match scale {
            // A divisor of 0 is invalid and treated like 1, the identity.
            None | Some(0 | 1) => Finish::Keep,
            Some(ranks) => Finish::Divide(ranks),
        };
        // SAFETY: the caller's contract; the loop was resolved for a detected level.
        unsafe { (self.run)(&Call { dst, also, srcs, n: n * self.per, finish, stream }) }
    }
}

/// Computes `dst[i] = src[i] * factor` for `n` elements: the step that each rank applies to its own input of a
/// PREMUL_SUM. Floats and complex numbers multiply in their own precision, halves in f32, integers in f64
/// (truncating, saturating). Returns false and writes nothing if the dtype does not support it: bool, opaque dtypes,
/// complex32.
///
/// # Safety
/// `src` is readable and `dst` writable for `n` elements; they are the same or do not overlap.
pub(crate) unsafe fn premultiply(dtype: DType, dst: *mut u8, src: *const u8, n: usize, factor: f64) -> bool {
    if dtype == DType::Bool {
        return false;
    }
    let Some(Kernel { run, per }) = Kernel::new(dtype, RedOp::Sum) else {
        return false;
    };
    let finish = Finish::Times(factor);
    let also = std::ptr::null_mut();
    let _mode = DefaultFloatMode::enter();
    // SAFETY: one source; the caller's contract; the loop was resolved for a detected level.
    unsafe { run(&Call { dst, also, srcs: &[src], n: n * per, finish, stream: false }) };
    true
}
