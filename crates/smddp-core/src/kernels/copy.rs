//! Copies with an explicit register loop.
//!
//! `memcpy` may use `rep movsb`, which is about twenty times slower if source and destination are equal modulo 4,096.
//! Staging slots and page-aligned tensors often are. Short copies use `memcpy`, which then uses ordinary registers.

#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
use super::level::{Isa, LINE, Level, Scalar};
#[cfg(target_arch = "aarch64")]
use super::neon::Neon;

/// Minimum bytes for the register loop. It needs at least two registers of the widest set.
const OWN_LOOP: usize = 256;

/// Copies `n` bytes to `kept`, and with `TEE` to `slot` as well. `stream` applies to `kept`.
///
/// # Safety
/// As [`super::copy`] and [`super::copy_tee`]; `level` is available here.
#[inline]
pub(super) unsafe fn copy_at<const TEE: bool>(
    level: Level,
    kept: *mut u8,
    slot: *mut u8,
    src: *const u8,
    n: usize,
    stream: bool,
) {
    if n < OWN_LOOP {
        // SAFETY: the caller's contract: n bytes each, no overlap.
        return unsafe { edge::<TEE>(kept, slot, src, 0, n) };
    }
    // SAFETY: the caller's contract, n >= OWN_LOOP, and the level is one this machine has.
    unsafe {
        match level {
            Level::Scalar => move_bytes::<Scalar, TEE>(kept, slot, src, n, stream),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => move_bytes::<Neon, TEE>(kept, slot, src, n, stream),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::<TEE>(kept, slot, src, n, stream),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<const TEE: bool>(kept: *mut u8, slot: *mut u8, src: *const u8, n: usize, stream: bool) {
    // SAFETY: the caller's contract; compiled for AVX2.
    unsafe { move_bytes::<Avx2, TEE>(kept, slot, src, n, stream) }
}

/// Registers per iteration. All are read before the first is written: a load never follows a store of the same
/// iteration whose lower address bits match, which would stall.
const UNROLL: usize = 8;

/// Copies `n` bytes to `dst`, and with `TEE` to `slot` as well.
///
/// # Safety
/// `n >= OWN_LOOP`; `src` readable, `dst` (and with `TEE` `slot`) writable for `n` bytes, none overlapping
/// another; runs inside a function compiled for `I`.
#[inline(always)]
unsafe fn move_bytes<I: Isa, const TEE: bool>(
    dst: *mut u8,
    slot: *mut u8,
    src: *const u8,
    n: usize,
    stream: bool,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if stream {
            move_around_caches::<I, TEE>(dst, slot, src, n);
        } else {
            move_through_caches::<I, TEE>(dst, slot, src, n);
        }
    }
}

/// Uses ordinary stores. The first and the last register are unaligned and overlap their neighbours.
///
/// # Safety
/// As [`move_bytes`].
#[inline(always)]
unsafe fn move_through_caches<I: Isa, const TEE: bool>(
    dst: *mut u8,
    slot: *mut u8,
    src: *const u8,
    n: usize,
) {
    // SAFETY: every register lies at `at..at + BYTES <= n` of buffers that the caller made valid for n bytes.
    unsafe {
        registers::<I, TEE, false, 1>(dst, slot, src, 0);
        let mut at = I::BYTES - (dst as usize) % I::BYTES;
        while at + UNROLL * I::BYTES <= n {
            registers::<I, TEE, false, UNROLL>(dst, slot, src, at);
            at += UNROLL * I::BYTES;
        }
        while at + I::BYTES <= n {
            registers::<I, TEE, false, 1>(dst, slot, src, at);
            at += I::BYTES;
        }
        if at < n {
            registers::<I, TEE, false, 1>(dst, slot, src, n - I::BYTES);
        }
    }
}

/// Uses streaming stores to `dst`, for whole cache lines only: a line written by both kinds of stores would be sent
/// to memory in pieces.
///
/// # Safety
/// As [`move_bytes`].
#[inline(always)]
unsafe fn move_around_caches<I: Isa, const TEE: bool>(dst: *mut u8, slot: *mut u8, src: *const u8, n: usize) {
    let prefix = (LINE - dst as usize % LINE) % LINE;
    // SAFETY: prefix < LINE < n. Every access lies in 0..n of buffers that the caller made valid for n bytes;
    // streamed registers start at multiples of their size from an address aligned to a line.
    unsafe {
        edge::<TEE>(dst, slot, src, 0, prefix);
        let mut at = prefix;
        while at + UNROLL * I::BYTES <= n {
            registers::<I, TEE, true, UNROLL>(dst, slot, src, at);
            at += UNROLL * I::BYTES;
        }
        let lines_end = n - (n - prefix) % LINE;
        while at < lines_end {
            registers::<I, TEE, true, 1>(dst, slot, src, at);
            at += I::BYTES;
        }
        edge::<TEE>(dst, slot, src, at, n - at);
        I::fence();
    }
}

/// Moves `K` registers at `at`.
///
/// # Safety
/// The registers lie inside all buffers; with `STREAM`, `dst + at` is aligned to a register; runs inside a
/// function compiled for `I`.
#[inline(always)]
unsafe fn registers<I: Isa, const TEE: bool, const STREAM: bool, const K: usize>(
    dst: *mut u8,
    slot: *mut u8,
    src: *const u8,
    at: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut held = [I::load(src.add(at)); K];
        for (k, register) in held.iter_mut().enumerate().skip(1) {
            *register = I::load(src.add(at + k * I::BYTES));
        }
        for (k, register) in held.iter().enumerate() {
            let to = dst.add(at + k * I::BYTES);
            if STREAM {
                I::stream(to, *register);
            } else {
                I::store(to, *register);
            }
        }
        if TEE {
            for (k, register) in held.iter().enumerate() {
                I::store(slot.add(at + k * I::BYTES), *register);
            }
        }
    }
}

/// Moves a few bytes: all of them, or the ones before or after the streamed bytes.
///
/// # Safety
/// `at..at + n` lies inside all buffers, which do not overlap.
#[inline(always)]
unsafe fn edge<const TEE: bool>(dst: *mut u8, slot: *mut u8, src: *const u8, at: usize, n: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        std::ptr::copy_nonoverlapping(src.add(at), dst.add(at), n);
        if TEE {
            std::ptr::copy_nonoverlapping(src.add(at), slot.add(at), n);
        }
    }
}
