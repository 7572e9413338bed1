//! Timestamps that cost one instruction: the processor's cycle counter, converted to nanoseconds only on read.

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[inline]
pub(crate) fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction; it reads a register.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(target_arch = "aarch64")]
    {
        let ticks: u64;
        // SAFETY: Linux lets every process read this register, as its own clock does in user space; nothing else changes.
        unsafe {
            core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags))
        };
        ticks
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    (base().1.elapsed().as_nanos() as u64)
}

/// First counter value, from which the rate is measured. x86-64 has no register with the rate, and the one of aarch64
/// depends on the firmware.
fn base() -> &'static (u64, Instant) {
    static BASE: OnceLock<(u64, Instant)> = OnceLock::new();
    BASE.get_or_init(|| {
        let now = Instant::now();
        (if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) { ticks() } else { 0 }, now)
    })
}

/// Takes the first counter value. The longer ago it was taken, the more accurate are the conversions.
pub(super) fn begin() {
    base();
}

/// Conversion of ticks at one point in time.
pub(super) struct Clock {
    now: u64,
    /// Nanoseconds since 1970.
    wall: u64,
    ns_per_tick: f64,
}

impl Clock {
    pub(super) fn now() -> Self {
        let (first, begun) = base();
        while begun.elapsed() < Duration::from_millis(2) {
            std::thread::yield_now();
        }
        let (now, elapsed) = (ticks(), begun.elapsed());
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        Self { now, wall, ns_per_tick: elapsed.as_nanos() as f64 / now.wrapping_sub(*first).max(1) as f64 }
    }

    /// Time since `ticks`.
    pub(super) fn since(&self, ticks: u64) -> Duration {
        Duration::from_nanos((self.now.saturating_sub(ticks) as f64 * self.ns_per_tick) as u64)
    }

    /// Nanoseconds since 1970.
    pub(super) fn wall(&self, ticks: u64) -> u64 {
        self.wall.saturating_sub(self.since(ticks).as_nanos() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_convert_to_the_elapsed_time() {
        begin();
        let (then, begun) = (ticks(), Instant::now());
        while begun.elapsed() < Duration::from_millis(20) {}
        let (clock, true_time) = (Clock::now(), begun.elapsed());
        let converted = clock.since(then);
        assert!(
            converted > true_time / 2 && converted < true_time * 2,
            "{converted:?}, expected about {true_time:?}"
        );
    }
}
