//! Date and time in tables and files.

use jiff::{Timestamp, Zoned};

/// Returns the time in UTC: `2026-11-21T09:08:07Z`.
pub(crate) fn utc() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Returns the time in this machine's time zone: `2026-11-21 10:08:07`.
pub(crate) fn local_time() -> String {
    Zoned::now().strftime("%Y-%m-%d %H:%M:%S").to_string()
}
