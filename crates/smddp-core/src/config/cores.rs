//! Cores of this host, and the number of ranks that share them.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Size of the largest group of this process: an estimate of the ranks that share the cores of this host.
static LOCAL_RANKS: AtomicUsize = AtomicUsize::new(1);

/// Records a group of `size` ranks.
pub(crate) fn record_group_size(size: usize) {
    LOCAL_RANKS.fetch_max(size, Ordering::Relaxed);
}

/// Estimated number of ranks that share the cores of this host.
pub(crate) fn local_ranks() -> usize {
    LOCAL_RANKS.load(Ordering::Relaxed)
}

/// Online cores of this host. The affinity of the calling thread is ignored: ranks pinned to one core each do not share it.
pub fn cores() -> usize {
    std::fs::read_to_string("/sys/devices/system/cpu/online")
        .ok()
        .and_then(|text| {
            text.trim().split(',').try_fold(0, |sum, range| {
                let (a, b) = range.split_once('-').unwrap_or((range, range));
                Some(sum + b.parse::<usize>().ok()? + 1 - a.parse::<usize>().ok()?)
            })
        })
        .or_else(|| std::thread::available_parallelism().ok().map(std::num::NonZero::get))
        .unwrap_or(1)
}
