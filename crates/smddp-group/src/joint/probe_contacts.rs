//! Addresses to which any thread sends deadlock probes for the ranks of a group.

use std::io::{self, ErrorKind};
use std::time::Duration;

use smddp_process::ProcessAddress;
use smddp_process::send_probe::send_probe;
use smddp_tcp::deadlock_probe::ProbeSender;

use super::group::Group;

/// Addresses of a group's processes for deadlock probes. Independent of the group, so its use needs no ownership of it.
pub struct ProbeContacts {
    /// By rank: address of a process of this node.
    local: Vec<Option<ProcessAddress>>,
    /// Ranks of other nodes.
    remote: Option<ProbeSender>,
}

impl ProbeContacts {
    pub(super) fn of(group: &Group) -> Self {
        let local = |rank: usize| match &group.remote {
            Some(_) => group.routes.local_index(rank),
            None => Some(rank),
        };
        let local = |rank: usize| group.local.process(local(rank)?).cloned();
        Self {
            local: (0..group.routes.size()).map(local).collect(),
            remote: group.remote.as_ref().and_then(|remote| remote.net.probe_sender()),
        }
    }

    /// Sends a probe to the process of `rank`. Blocks for a few times `limit` at most.
    ///
    /// # Errors
    /// The process is unreachable or has ended.
    pub fn send(&self, rank: usize, content: &[u8], limit: Duration) -> io::Result<()> {
        match (self.local.get(rank).and_then(Option::as_ref), &self.remote) {
            (Some(address), _) => send_probe(address, content, limit),
            (None, Some(remote)) => remote.send(rank, content, limit),
            (None, None) => Err(ErrorKind::AddrNotAvailable.into()),
        }
    }
}
