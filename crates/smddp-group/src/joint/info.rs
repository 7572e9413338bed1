//! Facts about a group that do not change.

use std::sync::Arc;

use smddp_process::{Endpoint, Sleeper};
use smddp_shm::SharedPage;

use super::routes::Routes;

/// Facts about a group that do not change while it exists.
pub struct GroupInfo {
    /// Rank of this process in the group.
    pub rank: usize,
    /// Number of ranks in the group.
    pub size: usize,
    /// Identity of the group, equal on all of its ranks and on no other group's; `None` for a group of one rank.
    pub id: Option<[u8; 16]>,
    /// "rank 3 (host h1, pid 812)", by rank.
    pub names: Arc<[String]>,
    /// Location of the group's ranks, which determines the routes of channels.
    pub routes: Arc<Routes>,
    /// Payload bytes that travel with the header of an operation; 0 if the group spans nodes, because headers reach ranks of one
    /// node only.
    pub inline_bytes: usize,
    /// True if the group has ranks on other nodes.
    pub spans_nodes: bool,
    /// Transport between nodes, for example "tcp eth0 10.77.0.1"; empty for a single node.
    pub network_path: String,
    /// Handle with which any thread waits for incoming data.
    pub doorbell: Sleeper,
    /// Shared pages and exports of the ranks of this node; `None` for a group of one rank.
    pub shared_page: Option<Arc<SharedPage>>,
    /// Endpoint of this process; `None` for a group of one rank.
    pub(super) endpoint: Option<Arc<Endpoint>>,
}

impl GroupInfo {
    /// Returns "rank 3 (host h1, pid 812)".
    pub fn describe(&self, rank: usize) -> String {
        self.names.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"))
    }

    /// Returns true if `rank` is on this node.
    pub fn is_local(&self, rank: usize) -> bool {
        !self.spans_nodes || self.routes.local_index(rank).is_some()
    }

    /// Returns true if this process has symmetric memory, which zero-copy sources may use.
    #[inline]
    pub fn has_symmetric(&self) -> bool {
        self.endpoint.as_ref().is_some_and(|endpoint| endpoint.symmetric.in_use())
    }
}
