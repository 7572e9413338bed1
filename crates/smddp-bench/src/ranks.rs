//! The ranks of a measurement.

use crate::calls::BenchGroup;

/// All ranks, and this rank's group.
#[derive(Clone, Copy)]
pub(crate) struct Ranks<'a> {
    /// All ranks. Times and wrong elements are aggregated over them.
    pub world: &'a BenchGroup,
    /// This rank's group, whose ranks make the calls together. Equal to `world` without groups.
    pub group: &'a BenchGroup,
    /// Size of the smallest group.
    pub smallest: usize,
    /// All ranks are on one host.
    pub one_host: bool,
}
