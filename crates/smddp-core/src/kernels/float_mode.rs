//! The floating-point mode of reductions: the IEEE 754 default on every thread.
//!
//! The mode is a property of the thread: `torch.set_flush_denormal`, `fesetround` and `feenableexcept` set it. A
//! reduction may run on a caller's thread, the progress thread or a helper, so the caller's mode would give ranks
//! different bits.

/// Runs the current thread in the default mode until dropped: denormals kept, rounding to nearest even, exceptions masked.
///
/// Dropping it restores the caller's registers if their mode differs from the default. In the default mode, nothing
/// is read or written again, because that would wait for the arithmetic to end. Exception flags may then be set, as
/// by any operation.
#[must_use]
pub(crate) struct DefaultFloatMode {
    saved: Option<Registers>,
}

impl DefaultFloatMode {
    #[inline]
    pub(crate) fn enter() -> Self {
        let saved = Registers::read();
        let default = saved.with_default_mode();
        let differs = default != saved;
        if differs {
            default.write();
        }
        Self { saved: differs.then_some(saved) }
    }
}

impl Drop for DefaultFloatMode {
    #[inline]
    fn drop(&mut self) {
        if let Some(saved) = self.saved {
            saved.write();
        }
    }
}

/// Sets the default mode on a thread of the library, which inherits the mode of its creator.
pub(crate) fn set_default_float_mode() {
    Registers::read().with_default_mode().write();
}

/// MXCSR: mode, and exception flags in the lowest six bits.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, PartialEq)]
struct Registers(u32);

#[cfg(target_arch = "x86_64")]
impl Registers {
    const FLAGS: u32 = 0x3f;
    /// The value at process start: all exceptions masked, round to nearest even, neither FTZ nor DAZ.
    const DEFAULT: u32 = 0x1f80;

    #[inline]
    fn read() -> Self {
        let mut value = 0u32;
        // SAFETY: stores MXCSR of this thread to a local. Without `nomem`, no access to memory moves across it.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags));
        }
        Self(value)
    }

    #[inline]
    fn with_default_mode(self) -> Self {
        Self(self.0 & Self::FLAGS | Self::DEFAULT)
    }

    #[inline]
    fn write(self) {
        // SAFETY: a value read from MXCSR, or its flags with the default mode: no reserved bit is set. The mode
        // affects this thread only, and no mode but the caller's own remains. Without `nomem`, no memory access moves
        // across the instruction, so operands are loaded and results stored in the intended mode.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const self.0, options(nostack, preserves_flags));
        }
    }
}

/// FPCR (mode, traps) and FPSR (exception flags).
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy, PartialEq)]
struct Registers {
    mode: u64,
    flags: u64,
}

#[cfg(target_arch = "aarch64")]
impl Registers {
    #[inline]
    fn read() -> Self {
        let (mode, flags): (u64, u64);
        // SAFETY: reads this thread's floating-point registers. Without `nomem`, no access to memory moves across it.
        unsafe {
            std::arch::asm!("mrs {}, fpcr", "mrs {}, fpsr", out(reg) mode, out(reg) flags,
                options(nostack, preserves_flags));
        }
        Self { mode, flags }
    }

    #[inline]
    fn with_default_mode(self) -> Self {
        Self { mode: 0, ..self }
    }

    #[inline]
    fn write(self) {
        // SAFETY: values read from these registers, or the zero mode that every thread starts with. They affect this
        // thread only, and no mode but the caller's own remains. Without `nomem`, no memory access moves across the
        // instruction, so operands are loaded and results stored in the intended mode.
        unsafe {
            std::arch::asm!("msr fpcr, {}", "msr fpsr, {}", in(reg) self.mode, in(reg) self.flags,
                options(nostack, preserves_flags));
        }
    }
}

/// Other processors use the mode of the calling thread.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[derive(Clone, Copy, PartialEq)]
struct Registers;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
impl Registers {
    fn read() -> Self {
        Self
    }

    fn with_default_mode(self) -> Self {
        self
    }

    fn write(self) {}
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::hint::black_box;

    use super::{DefaultFloatMode, Registers, set_default_float_mode};

    /// FTZ, DAZ, three rounding directions, all exceptions unmasked; each with and without an exception flag.
    const MODES: [u32; 7] = [0x1f80, 0x9f80, 0x1fc0, 0x3f80, 0x5f80, 0x7f80, 0x0000];

    #[test]
    fn the_callers_mode_is_restored() {
        for mode in MODES {
            for flags in [0, 0x01, 0x20] {
                let caller = Registers(mode | flags);
                caller.write();
                let mode = DefaultFloatMode::enter();
                let inside = Registers::read();
                // Inexact, underflow, division by zero, overflow: traps where exceptions are unmasked.
                black_box(black_box(1.0f32) / black_box(3.0));
                black_box(black_box(f32::MIN_POSITIVE) * black_box(0.3));
                black_box(black_box(1.0f32) / black_box(0.0));
                drop(mode);
                let after = Registers::read();
                Registers(Registers::DEFAULT).write();
                assert!(inside.0 == Registers::DEFAULT | flags, "{:#x} inside of {:#x}", inside.0, caller.0);
                // In the default mode, the flags remain as the arithmetic set them.
                let compared =
                    if caller.0 & !Registers::FLAGS == Registers::DEFAULT { !Registers::FLAGS } else { !0 };
                assert!(after.0 & compared == caller.0 & compared, "{:#x} after {:#x}", after.0, caller.0);
            }
        }
        Registers(0x8000).write();
        set_default_float_mode();
        assert!(Registers::read().0 == Registers::DEFAULT);
    }
}
