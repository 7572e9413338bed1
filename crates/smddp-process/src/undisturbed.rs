//! Protection of the process's state while a library is loaded and initialized.
//!
//! Some libraries install signal handlers when they are loaded (libfabric's PSM providers do, for backtraces). Others
//! change the floating-point mode (objects that were linked with `-ffast-math`). Both belong to the program. Changed environment variables and
//! resource limits are logged only: the library may depend on them. Handlers of `pthread_atfork` can be neither seen nor removed.

use std::collections::HashMap;
use std::ffi::OsString;

use smddp_base::warning::info;

const SIGNALS: std::ops::RangeInclusive<i32> = 1..=64;

/// Resource limits that libraries are known to change.
const LIMITS: [(libc::__rlimit_resource_t, &str); 5] = [
    (libc::RLIMIT_AS, "address space"),
    (libc::RLIMIT_CORE, "core dumps"),
    (libc::RLIMIT_MEMLOCK, "locked memory"),
    (libc::RLIMIT_NOFILE, "open files"),
    (libc::RLIMIT_STACK, "stack"),
];

/// Calls `load`, which loads or initializes `library`. Afterwards signal handlers, and the floating-point mode of this thread, are as
/// before; the log names what was restored.
pub fn undisturbed<T>(library: &str, load: impl FnOnce() -> T) -> T {
    let before = State::new();
    let loaded = load();
    before.restore(library);
    loaded
}

struct State {
    /// Actions by signal; `None` for signals that the C library reserves.
    actions: Vec<Option<libc::sigaction>>,
    mode: u64,
    limits: Vec<Option<u64>>,
    environment: HashMap<OsString, OsString>,
}

impl State {
    fn new() -> Self {
        Self {
            actions: SIGNALS.map(action).collect(),
            mode: floating_point_mode(),
            limits: LIMITS.iter().map(|&(which, _)| soft_limit(which)).collect(),
            environment: std::env::vars_os().collect(),
        }
    }

    fn restore(&self, library: &str) {
        let mut restored = Vec::new();
        for (signal, before) in SIGNALS.zip(&self.actions) {
            let (Some(before), Some(now)) = (before, action(signal)) else { continue };
            if (before.sa_sigaction, before.sa_flags) == (now.sa_sigaction, now.sa_flags) {
                continue;
            }
            // SAFETY: an action that this process had for this signal; its handler is still loaded, as nothing was unloaded.
            if unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) } == 0 {
                restored.push(format!("the handler of signal {signal}"));
            }
        }
        if self.mode != floating_point_mode() {
            set_floating_point_mode(self.mode);
            restored.push("the floating-point mode".to_owned());
        }
        if !restored.is_empty() {
            info(&format!(
                "{library} changed state of this process while it was loaded; restored {}",
                restored.join(", ")
            ));
        }
        let mut changed = Vec::new();
        for (&(which, name), before) in LIMITS.iter().zip(&self.limits) {
            if soft_limit(which) != *before {
                changed.push(format!("the limit of {name}"));
            }
        }
        let environment: HashMap<OsString, OsString> = std::env::vars_os().collect();
        let names = environment.keys().chain(self.environment.keys());
        let differs = |name: &&OsString| environment.get(*name) != self.environment.get(*name);
        let mut names: Vec<_> = names.filter(differs).map(|name| name.to_string_lossy()).collect();
        names.sort_unstable();
        names.dedup();
        changed.extend(names.iter().map(|name| format!("the environment variable {name}")));
        if !changed.is_empty() {
            info(&format!("{library} changed {} of this process; this is not restored", changed.join(", ")));
        }
    }
}

fn action(signal: i32) -> Option<libc::sigaction> {
    let mut action = std::mem::MaybeUninit::uninit();
    // SAFETY: reads the action of a signal into a value of this function; any thread may do so.
    let found = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: filled by the call above if that succeeded.
    (found == 0).then(|| unsafe { action.assume_init() })
}

fn soft_limit(which: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads a limit into a value of this function.
    (unsafe { libc::getrlimit(which, &raw mut limit) } == 0).then_some(limit.rlim_cur)
}

/// Rounding, denormals and exception masks of this thread, without the exceptions that have occurred.
#[cfg(target_arch = "x86_64")]
fn floating_point_mode() -> u64 {
    const OCCURRED: u32 = 0x3f;
    let (mut sse, mut x87) = (0u32, 0u16);
    // SAFETY: stores two control registers of this thread into values of this function.
    unsafe {
        std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut sse, options(nostack, preserves_flags));
        std::arch::asm!("fnstcw [{}]", in(reg) &raw mut x87, options(nostack, preserves_flags));
    }
    u64::from(sse & !OCCURRED) | u64::from(x87) << 32
}

#[cfg(target_arch = "x86_64")]
fn set_floating_point_mode(mode: u64) {
    let (sse, x87) = (mode as u32, (mode >> 32) as u16);
    // SAFETY: loads control registers of this thread with values that they had before.
    unsafe {
        std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const sse, options(nostack, preserves_flags));
        std::arch::asm!("fldcw [{}]", in(reg) &raw const x87, options(nostack, preserves_flags));
    }
}

#[cfg(target_arch = "aarch64")]
fn floating_point_mode() -> u64 {
    let mode: u64;
    // SAFETY: reads a control register of this thread.
    unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) mode, options(nomem, nostack, preserves_flags)) };
    mode
}

#[cfg(target_arch = "aarch64")]
fn set_floating_point_mode(mode: u64) {
    // SAFETY: writes a control register of this thread with a value that it had before.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) mode, options(nomem, nostack, preserves_flags)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn floating_point_mode() -> u64 {
    0
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn set_floating_point_mode(_: u64) {}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Signal of the test; no other test uses SIGSYS.
    const SIGNAL: i32 = libc::SIGSYS;

    extern "C" fn programs(_: i32) {}
    extern "C" fn librarys(_: i32) {}

    fn install(handler: extern "C" fn(i32)) {
        // SAFETY: a handler that does nothing, for a signal that nothing sends.
        unsafe { libc::signal(SIGNAL, handler as *const () as libc::sighandler_t) };
    }

    /// Flushes denormal numbers to zero, as `-ffast-math` does.
    #[cfg(target_arch = "x86_64")]
    fn flush_denormals() {
        set_floating_point_mode(floating_point_mode() | 0x8040);
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn flush_denormals() {
        set_floating_point_mode(floating_point_mode() | 1 << 24);
    }

    #[test]
    fn handlers_and_floating_point_mode_are_restored_after_loading() {
        install(programs);
        let mode = floating_point_mode();
        let value = undisturbed("a library", || {
            install(librarys);
            flush_denormals();
            7
        });
        assert_eq!(value, 7);
        let handler = action(SIGNAL).unwrap().sa_sigaction;
        assert_eq!(handler, programs as *const () as libc::sighandler_t);
        assert_eq!(floating_point_mode(), mode);
        let tiny = std::hint::black_box(f32::MIN_POSITIVE);
        assert!(tiny / 2.0 > 0.0, "denormals are flushed");
    }
}
