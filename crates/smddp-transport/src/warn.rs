//! What somebody should know though nothing has failed. The core's log is above this crate, so it lends an ear.

use std::sync::OnceLock;

static EAR: OnceLock<fn(&str)> = OnceLock::new();

/// Whoever keeps the log hears of it from now on; the first one counts.
pub fn hear(ear: fn(&str)) {
    let _ = EAR.set(ear);
}

pub(crate) fn warn(text: &str) {
    if let Some(ear) = EAR.get() {
        ear(text);
    }
}
