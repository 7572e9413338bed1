//! The last error of a process, where its peers find it when it has ended: an end is a consequence as a rule, and who waits for
//! the dead in one group need not know what went wrong in another.

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::endpoint::Endpoint;
use super::layout::{ERROR_TEXT, ERROR_TIME, MAX_ERROR_BYTES};
use super::memory::SharedMemory;
use crate::fork::PerProcess;
use crate::lock;

/// One writer at a time.
static WRITING: PerProcess<Mutex<()>> = PerProcess::new();

/// The monotonic clock, which is the same for all processes of a host.
fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

/// Writes down that this process has this error now: `text` says whose it is, too. More than fits is cut off.
pub fn record_error(text: &str) {
    let Some(endpoint) = Endpoint::existing() else { return };
    let _one = lock(WRITING.get());
    write(&endpoint.memory, text, now());
}

fn write(memory: &SharedMemory, text: &str, now: Duration) {
    let end = (0..=text.len().min(MAX_ERROR_BYTES)).rev().find(|&at| text.is_char_boundary(at));
    // Never 0, which says that there was none.
    let nanos = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).max(1);
    memory.flag64(ERROR_TIME).store(nanos, Ordering::Relaxed);
    memory.write_text(ERROR_TEXT, &text[..end.unwrap_or(0)], MAX_ERROR_BYTES);
}

/// The last error of this process, which is to be told where its memory cannot be read, and how long ago that was.
pub(crate) fn own() -> Option<(Duration, String)> {
    read_from(&Endpoint::existing()?.memory)
}

/// What the process whose memory this is wrote down last, and how long ago.
pub(crate) fn read_from(memory: &SharedMemory) -> Option<(Duration, String)> {
    let text = memory.read_text(ERROR_TEXT, MAX_ERROR_BYTES);
    let at = Duration::from_nanos(memory.flag64(ERROR_TIME).load(Ordering::Relaxed));
    (!text.is_empty()).then(|| (now().saturating_sub(at), text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::layout::PAGE;

    #[test]
    fn the_last_error_is_read_as_it_was_written_cut_between_characters() {
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
    fn what_no_process_of_ours_would_write_is_read_within_its_bounds() {
        let (memory, _fd) = SharedMemory::create(PAGE).unwrap();
        for at in (ERROR_TIME..PAGE).step_by(8) {
            memory.flag64(at).store(u64::MAX, Ordering::Relaxed);
        }
        let (ago, read) = read_from(&memory).unwrap();
        assert_eq!((ago, read.chars().count()), (Duration::ZERO, MAX_ERROR_BYTES));
    }
}
