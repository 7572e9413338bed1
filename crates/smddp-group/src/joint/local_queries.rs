//! Queries of ranks of this node in progress.

use smddp_process::activity_query::ActivityQuery;

/// Queries of the activity of ranks of this node.
#[derive(Default)]
pub(super) struct LocalQueries {
    /// Ranks without a result yet.
    pub(super) queries: Vec<(usize, ActivityQuery)>,
    /// Set until the results of the last query are filled in.
    pub(super) unfinished: bool,
}
