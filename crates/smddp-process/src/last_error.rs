//! Last error of a process, which peers read after it has ended. The end is usually a consequence, and the peers of
//! one group may not know about an error in another group.

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use smddp_base::fork::PerProcess;
use smddp_base::lock;

use super::endpoint::Endpoint;
use super::layout::{ERROR_TEXT, ERROR_TIME, MAX_ERROR_BYTES};
use super::memory::SharedMemory;

/// Serializes writers.
static WRITING: PerProcess<Mutex<()>> = PerProcess::new();

/// Returns the monotonic clock, which all processes of a host share.
fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

/// Records this process's current error. `text` also names the rank and group; it is truncated to
/// [`MAX_ERROR_BYTES`].
pub fn record_error(text: &str) {
    let Some(endpoint) = Endpoint::existing() else { return };
    let _one = lock(WRITING.get());
    write(&endpoint.memory, text, now());
}

fn write(memory: &SharedMemory, text: &str, now: Duration) {
    let end = (0..=text.len().min(MAX_ERROR_BYTES)).rev().find(|&at| text.is_char_boundary(at));
    // 0 means that no error was recorded.
    let nanos = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).max(1);
    memory.flag64(ERROR_TIME).store(nanos, Ordering::Relaxed);
    memory.write_text(ERROR_TEXT, &text[..end.unwrap_or(0)], MAX_ERROR_BYTES);
}

/// Returns this process's last error and its age, for peers that cannot read its memory.
pub fn own() -> Option<(Duration, String)> {
    read_from(&Endpoint::existing()?.memory)
}

/// Returns the last error that the owner of `memory` recorded, and its age.
pub fn read_from(memory: &SharedMemory) -> Option<(Duration, String)> {
    let text = memory.read_text(ERROR_TEXT, MAX_ERROR_BYTES);
    let at = Duration::from_nanos(memory.flag64(ERROR_TIME).load(Ordering::Relaxed));
    (!text.is_empty()).then(|| (now().saturating_sub(at), text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::PAGE;

    #[test]
    fn last_error_is_truncated_between_characters() {
        let (memory, _fd) = SharedMemory::create(PAGE).unwrap();
        assert_eq!(read_from(&memory), None);
        for length in [1, 7, 8, 9, MAX_ERROR_BYTES / 2, MAX_ERROR_BYTES] {
            let text = "\u{fc}".repeat(length);
            write(&memory, &text, now());
            let (ago, read) = read_from(&memory).unwrap();
            assert!(text.starts_with(&read) && read.len() == (2 * length).min(MAX_ERROR_BYTES), "{length}");
            assert!(ago < Duration::from_secs(60), "{ago:?}");
        }
    }

    #[test]
    fn arbitrary_contents_are_read_within_bounds() {
        let (memory, _fd) = SharedMemory::create(PAGE).unwrap();
        for at in (ERROR_TIME..PAGE).step_by(8) {
            memory.flag64(at).store(u64::MAX, Ordering::Relaxed);
        }
        let (ago, read) = read_from(&memory).unwrap();
        assert_eq!((ago, read.chars().count()), (Duration::ZERO, MAX_ERROR_BYTES));
    }
}
