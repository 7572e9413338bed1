//! Warnings and information for the log. The log belongs to the core crate, which depends on this crate; it registers
//! a hook.

use std::sync::OnceLock;

/// Severity of a log text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The user should correct something.
    Warning,
    /// Information, such as the selected transport.
    Info,
}

static WARN_HOOK: OnceLock<fn(Notice, &str)> = OnceLock::new();

/// Registers the hook that receives all texts. Later registrations are ignored.
pub fn set_hook(hook: fn(Notice, &str)) {
    let _ = WARN_HOOK.set(hook);
}

fn emit(notice: Notice, text: &str) {
    if let Some(hook) = WARN_HOOK.get() {
        hook(notice, text);
    }
}

/// Reports something that the user should correct.
pub fn warn(text: &str) {
    emit(Notice::Warning, text);
}

/// Reports information.
pub fn info(text: &str) {
    emit(Notice::Info, text);
}
