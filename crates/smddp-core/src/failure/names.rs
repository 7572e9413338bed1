//! Names of a group and its ranks in error texts.

use std::sync::Arc;

/// Names of a group and its ranks, and the rank of this process.
#[derive(Clone)]
pub(crate) struct GroupNames {
    pub(crate) me: usize,
    pub(crate) group: Arc<str>,
    /// "rank 3 (host h1, pid 812)", by rank.
    ranks: Arc<[String]>,
}

impl GroupNames {
    pub(crate) fn new(me: usize, group: &str, ranks: impl IntoIterator<Item = String>) -> Self {
        Self { me, group: group.into(), ranks: ranks.into_iter().collect() }
    }

    pub(crate) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the name of the group for an error.
    pub(crate) fn group(&self) -> String {
        self.group.to_string()
    }

    /// Returns "rank 3 (host h1, pid 812)".
    pub(crate) fn describe(&self, rank: usize) -> String {
        self.ranks.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"))
    }
}
