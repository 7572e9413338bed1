//! Sizes of a process's shared memory under its resource limits (`ulimit -v`, `ulimit -f`).
//!
//! Most of the mapping is address space for later use, and every rank maps the memory of each other rank of its host.
//! Without limits this costs nothing. A limited process reserves less.

use rustix::process::{Resource, getrlimit};

use super::layout::{RESERVE_BYTES, SYMMETRIC_BYTES};

/// Minimum reserve in bytes.
const MIN_RESERVE: usize = 32 << 20;
/// Minimum symmetric memory in bytes; less is not worth its address space.
const MIN_SYMMETRIC: usize = 16 << 20;
const MAPPING_GRAIN: usize = 2 << 20;

/// Sizes in bytes of the parts that adapt to the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) reserve: usize,
    pub(super) symmetric: usize,
}

/// Limits of this process in bytes; `None`: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// Remaining address space.
    space: Option<u64>,
    file: Option<u64>,
}

impl Limits {
    pub(super) fn of_this_process() -> Self {
        // Without /proc half of the limit counts as used.
        let left = |limit: u64| limit.saturating_sub(address_space_in_use().unwrap_or(limit / 2));
        let space = getrlimit(Resource::As).current.map(left);
        Self { space, file: getrlimit(Resource::Fsize).current }
    }
}

impl Room {
    /// Returns sizes beside `fixed` bytes for a process whose host has `ranks` ranks that all map each other's
    /// memory. Half of the remaining address space is left to the program.
    pub(super) fn fitting(fixed: usize, ranks: usize, limits: Limits) -> Result<Self, String> {
        let full = Self { reserve: RESERVE_BYTES, symmetric: SYMMETRIC_BYTES };
        let share = limits.space.map_or(u64::MAX, |space| space / 2 / ranks.max(1) as u64);
        let most = usize::try_from(share.min(limits.file.unwrap_or(u64::MAX))).unwrap_or(usize::MAX);
        if most >= full.bytes(fixed) {
            return Ok(full);
        }
        let least = Self::least();
        let Some(rest) = most.checked_sub(least.bytes(fixed)) else {
            return Err(too_small(&format!("{} of shared memory", mib(least.bytes(fixed))), ranks));
        };
        let reserve = (MIN_RESERVE + rest).min(RESERVE_BYTES);
        let symmetric = (MIN_RESERVE + rest - reserve).min(SYMMETRIC_BYTES);
        let whole = |bytes: usize| bytes - bytes % MAPPING_GRAIN;
        let symmetric = if symmetric < MIN_SYMMETRIC { 0 } else { whole(symmetric) };
        Ok(Self { reserve: whole(reserve), symmetric })
    }

    /// Returns sizes for a process that shares no memory, only for data of other nodes.
    pub(super) fn private(fixed: usize, limits: Limits) -> Self {
        let fitting = Self::fitting(fixed, 1, Limits { file: None, ..limits });
        Self { symmetric: 0, ..fitting.unwrap_or(Self::least()) }
    }

    const fn least() -> Self {
        Self { reserve: MIN_RESERVE, symmetric: 0 }
    }

    /// Returns the size of the whole memory, of which `fixed` bytes do not adapt.
    pub(super) fn bytes(self, fixed: usize) -> usize {
        fixed + self.reserve + self.symmetric
    }
}

/// Returns an error text such as "1 GiB of shared memory does not fit into ...", with the limits of this process.
pub(super) fn too_small(need: &str, ranks: usize) -> String {
    let (mut limits, mut remedies) = (Vec::new(), Vec::new());
    if let Some(limit) = getrlimit(Resource::As).current {
        let used = address_space_in_use().map_or("an unknown part".to_owned(), |used| mib(used as usize));
        limits.push(format!(
            "address space is limited to {} (ulimit -v), of which {used} is in use",
            mib(limit as usize)
        ));
        remedies.push("ulimit -v unlimited");
    }
    if let Some(limit) = getrlimit(Resource::Fsize).current {
        limits.push(format!("files are limited to {} (ulimit -f)", mib(limit as usize)));
        remedies.push("ulimit -f unlimited");
    }
    let each = if ranks > 1 { format!(" for each of {ranks} ranks") } else { String::new() };
    if limits.is_empty() {
        return format!("{need}{each}: the system has no memory for it");
    }
    let (limits, remedies) = (limits.join("; "), remedies.join(", "));
    format!("{need}{each} does not fit into the limits of this process: {limits}; raise them ({remedies})")
}

fn mib(bytes: usize) -> String {
    format!("{} MiB", bytes >> 20)
}

/// Returns the bytes that this process has mapped.
fn address_space_in_use() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().next()?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Control blocks and a staging pool of 64 MiB.
    const FIXED: usize = 320 << 20;
    const GIB: u64 = 1 << 30;

    #[test]
    fn limited_process_reserves_what_fits_each_rank() {
        let full = Room { reserve: RESERVE_BYTES, symmetric: SYMMETRIC_BYTES };
        let space = |space| Limits { space: Some(space), file: None };
        assert_eq!(Room::fitting(FIXED, 128, Limits::default()), Ok(full));
        assert_eq!(Room::fitting(FIXED, 2, space(80 * GIB)), Ok(full));
        for (limits, ranks) in [
            (space(2 * GIB), 2),
            (space(34 * GIB), 2),
            (space(34 * GIB), 30),
            (Limits { space: None, file: Some(GIB / 2) }, 2),
            (Limits { space: Some(8 * GIB), file: Some(GIB / 2) }, 8),
        ] {
            let room = Room::fitting(FIXED, ranks, limits).unwrap();
            let all = room.bytes(FIXED) as u64;
            assert!(all <= limits.file.unwrap_or(u64::MAX), "{room:?}");
            assert!(all * ranks as u64 <= limits.space.unwrap_or(u64::MAX) / 2, "{room:?}");
            assert!(room.reserve >= MIN_RESERVE, "{room:?}");
        }
    }

    #[test]
    fn insufficient_limits_are_an_error_with_the_needed_size() {
        for limits in [Limits { space: Some(GIB), file: None }, Limits { space: None, file: Some(0) }] {
            let text = Room::fitting(FIXED, 2, limits).unwrap_err();
            // tests/world/test_confined.py covers the limits of a real process.
            assert!(text.contains("352 MiB of shared memory for each of 2 ranks"), "{text}");
        }
    }
}
