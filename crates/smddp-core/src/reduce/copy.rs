//! Copies by an explicit register loop.
//!
//! `memcpy` may turn into `rep movsb`, which is about twenty times slower where source and destination are
//! equal modulo 4,096, as cells and page-aligned tensors often are. Short copies, which it does with plain
//! registers, are left to it.

#[cfg(target_arch = "x86_64")]
use super::level::{Avx2, Avx512};
use super::level::{Isa, Level, Scalar};

/// Bytes from which the register loop runs. It needs at least two registers of the widest set.
const OWN_LOOP: usize = 256;

/// # Safety
/// As [`super::copy`]; `level` is available here.
#[inline]
pub(super) unsafe fn copy_at(level: Level, dst: *mut u8, src: *const u8, n: usize, stream: bool) {
    if n < OWN_LOOP {
        // SAFETY: the caller's contract: n bytes each, no overlap.
        return unsafe { std::ptr::copy_nonoverlapping(src, dst, n) };
    }
    // SAFETY: the caller's contract, n >= OWN_LOOP, and the level is one this machine has.
    unsafe {
        match level {
            Level::Scalar => move_bytes::<Scalar, false>(dst, dst, src, n, stream),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => copy_avx2(dst, src, n, stream),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => copy_avx512(dst, src, n, stream),
        }
    }
}

/// # Safety
/// As [`super::copy_tee`]; `level` is available here.
#[inline]
pub(super) unsafe fn tee_at(
    level: Level,
    cell: *mut u8,
    kept: *mut u8,
    src: *const u8,
    n: usize,
    stream: bool,
) {
    if n < OWN_LOOP {
        // SAFETY: the caller's contract: n bytes each, no overlap.
        return unsafe {
            std::ptr::copy_nonoverlapping(src, cell, n);
            std::ptr::copy_nonoverlapping(src, kept, n);
        };
    }
    // SAFETY: the caller's contract, n >= OWN_LOOP, and the level is one this machine has.
    unsafe {
        match level {
            Level::Scalar => move_bytes::<Scalar, true>(kept, cell, src, n, stream),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => tee_avx2(cell, kept, src, n, stream),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => tee_avx512(cell, kept, src, n, stream),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_avx2(dst: *mut u8, src: *const u8, n: usize, stream: bool) {
    // SAFETY: the caller's contract; compiled for AVX2.
    unsafe { move_bytes::<Avx2, false>(dst, dst, src, n, stream) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn copy_avx512(dst: *mut u8, src: *const u8, n: usize, stream: bool) {
    // SAFETY: the caller's contract; compiled for AVX-512.
    unsafe { move_bytes::<Avx512, false>(dst, dst, src, n, stream) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn tee_avx2(cell: *mut u8, kept: *mut u8, src: *const u8, n: usize, stream: bool) {
    // SAFETY: the caller's contract; compiled for AVX2.
    unsafe { move_bytes::<Avx2, true>(kept, cell, src, n, stream) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn tee_avx512(cell: *mut u8, kept: *mut u8, src: *const u8, n: usize, stream: bool) {
    // SAFETY: the caller's contract; compiled for AVX-512.
    unsafe { move_bytes::<Avx512, true>(kept, cell, src, n, stream) }
}

/// Registers moved per turn: all are read before the first is written, so that a store never has to be
/// told from a later load of the same turn by its lower address bits.
const TURN: usize = 8;

/// Copies `n` bytes to `dst`, and with `TEE` to `cell` as well.
///
/// # Safety
/// `n >= OWN_LOOP`; `src` readable, `dst` (and with `TEE` `cell`) writable for `n` bytes, none overlapping
/// another; runs inside a function compiled for `I`.
#[inline(always)]
unsafe fn move_bytes<I: Isa, const TEE: bool>(
    dst: *mut u8,
    cell: *mut u8,
    src: *const u8,
    n: usize,
    stream: bool,
) {
    // SAFETY: every access is at `at..at + k * BYTES <= n` of a buffer the caller made valid for n bytes.
    // Streamed addresses are multiples of BYTES: `at` starts at the first such address of dst (the register
    // before it is written unaligned and overlaps) and moves by whole registers.
    unsafe {
        let first = I::load(src);
        I::store(dst, first);
        if TEE {
            I::store(cell, first);
        }
        let mut at = I::BYTES - (dst as usize) % I::BYTES;
        if stream {
            at = turns::<I, TEE, true>(dst, cell, src, n, at);
        } else {
            at = turns::<I, TEE, false>(dst, cell, src, n, at);
        }
        while at + I::BYTES <= n {
            let value = I::load(src.add(at));
            I::store(dst.add(at), value);
            if TEE {
                I::store(cell.add(at), value);
            }
            at += I::BYTES;
        }
        if at < n {
            let at = n - I::BYTES;
            let last = I::load(src.add(at));
            I::store(dst.add(at), last);
            if TEE {
                I::store(cell.add(at), last);
            }
        }
        if stream {
            I::fence();
        }
    }
}

/// The whole turns from `at` on; returns where they end.
///
/// # Safety
/// As [`move_bytes`]; with `STREAM`, `dst + at` is aligned to a register.
#[inline(always)]
unsafe fn turns<I: Isa, const TEE: bool, const STREAM: bool>(
    dst: *mut u8,
    cell: *mut u8,
    src: *const u8,
    n: usize,
    mut at: usize,
) -> usize {
    // SAFETY: `at + TURN * BYTES <= n` inside the loop; alignment by the caller's contract.
    unsafe {
        while at + TURN * I::BYTES <= n {
            let mut held = [I::load(src.add(at)); TURN];
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
                    I::store(cell.add(at + k * I::BYTES), *register);
                }
            }
            at += TURN * I::BYTES;
        }
    }
    at
}
