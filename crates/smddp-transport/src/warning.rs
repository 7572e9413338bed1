//! What somebody should know though nothing has failed. The core's log is above this crate, so it lends an ear.

use std::sync::OnceLock;

/// What is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// It should be mended.
    Warning,
    /// It is so; for who asks which way was taken.
    Fact,
}

static WARN_HOOK: OnceLock<fn(Told, &str)> = OnceLock::new();

/// Whoever keeps the log hears of it from now on; the first one counts.
pub fn hear(ear: fn(Told, &str)) {
    let _ = WARN_HOOK.set(ear);
}

fn tell(what: Told, text: &str) {
    if let Some(ear) = WARN_HOOK.get() {
        ear(what, text);
    }
}

pub(crate) fn warn(text: &str) {
    tell(Told::Warning, text);
}

pub(crate) fn note(text: &str) {
    tell(Told::Fact, text);
}
