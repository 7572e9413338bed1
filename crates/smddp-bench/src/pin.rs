//! CPU affinity of a rank.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::{Error, Result};

/// Pins this thread, and the threads that it starts later, to the `index`-th of its allowed cores, modulo their number.
pub(crate) fn pin(index: usize) -> Result<()> {
    let failed = |e: rustix::io::Errno| Error::Io { what: "pinning to a core".into(), source: e.into() };
    let allowed = sched_getaffinity(None).map_err(failed)?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let Some(core) = cores.get(index % cores.len().max(1)) else {
        return Ok(());
    };
    let mut one = CpuSet::new();
    one.set(*core);
    sched_setaffinity(None, &one).map_err(failed)
}
