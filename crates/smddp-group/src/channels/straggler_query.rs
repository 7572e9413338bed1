//! Queries of the progress and activity of ranks of other nodes.

use std::time::{Duration, Instant};

use smddp_tcp::deadlock_probe::ProbeSender;
pub(super) use smddp_tcp::straggler_query::QueryResult;

use super::RemoteChannels;

impl RemoteChannels {
    /// Starts a query of `peers`, ranks of other nodes, in that order. It replaces a query in progress.
    pub(crate) fn start_query(&mut self, peers: &[usize]) {
        let sideband = self.sideband.as_ref().filter(|_| !peers.is_empty());
        self.query = sideband.map(|sideband| sideband.straggler_query(peers));
    }

    /// Returns the sender of deadlock probes to ranks of other nodes.
    pub(crate) fn probe_sender(&self) -> Option<ProbeSender> {
        Some(self.sideband.as_ref()?.probe_sender())
    }

    /// Ends a query in progress, and removes the results of the last query.
    pub(crate) fn cancel_query(&mut self) {
        self.query = None;
        for peer in &mut self.state.peers {
            (peer.replied, peer.silent, peer.unresponsive) = (false, false, false);
            peer.activity.clear();
        }
    }

    /// Records the replies that have arrived. Returns true once the query is complete, or if there is none.
    pub(crate) fn poll_query(&mut self, now: Instant) -> bool {
        let Some(query) = &mut self.query else { return true };
        for (peer, reply) in query.poll(Duration::ZERO, now) {
            let state = &mut self.state.peers[peer];
            state.silent = reply == QueryResult::HostSilent;
            state.unresponsive = reply == QueryResult::ProcessUnresponsive;
            if let QueryResult::Replied(answer) = reply {
                state.replied = true;
                if answer.begun > state.begun {
                    (state.begun, state.newest) = (answer.begun, None);
                }
                state.activity = answer.doing;
            } else {
                state.replied = false;
            }
        }
        if query.is_finished() {
            self.query = None;
        }
        self.query.is_none()
    }
}
