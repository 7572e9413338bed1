//! What somebody should know though nothing has failed. The core's log is above this crate, so it lends an ear.

use std::sync::OnceLock;

/// What is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// It should be mended.
    Warning,
    /// It is so; for who asks which way was taken.
    Info,
}

static WARN_HOOK: OnceLock<fn(Notice, &str)> = OnceLock::new();

/// Whoever keeps the log hears of it from now on; the first one counts.
pub fn set_hook(hook: fn(Notice, &str)) {
    let _ = WARN_HOOK.set(hook);
}

fn emit(what: Notice, text: &str) {
    if let Some(hook) = WARN_HOOK.get() {
        hook(what, text);
    }
}

pub(crate) fn warn(text: &str) {
    emit(Notice::Warning, text);
}

pub(crate) fn info(text: &str) {
    emit(Notice::Info, text);
}
