//! Tests of the failure monitor.

use super::names::GroupNames;

/// Returns the names of a group `g` of `size` ranks, as rank 0 sees them.
pub(crate) fn names(size: usize) -> GroupNames {
    GroupNames::new(0, "g", (0..size).map(|rank| format!("rank {rank} (host h, pid {})", 100 + rank)))
}
