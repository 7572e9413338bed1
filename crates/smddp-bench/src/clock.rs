//! The time of day, as tables and files tell it.

use jiff::{Timestamp, Zoned};

/// In UTC: `2026-11-21T09:08:07Z`.
pub(crate) fn utc() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Where this machine is: `2026-11-21 10:08:07`.
pub(crate) fn local_time() -> String {
    Zoned::now().strftime("%Y-%m-%d %H:%M:%S").to_string()
}
