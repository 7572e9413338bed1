//! All ranks, and those that make calls together.

use crate::calls::Team;

/// Who measures.
#[derive(Clone, Copy)]
pub(crate) struct Ranks<'a> {
    /// All of them: times and wrong elements are over all.
    pub world: &'a Team,
    /// Those that make the calls together, or all.
    pub team: &'a Team,
    /// Ranks of the smallest such group.
    pub fewest: usize,
    /// All ranks are on one host.
    pub one_host: bool,
}
