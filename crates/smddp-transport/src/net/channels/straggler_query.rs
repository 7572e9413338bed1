//! Straggler query: after an expired deadline, asks the ranks of other nodes for their progress.

use std::time::{Duration, Instant};

use super::RemoteChannels;
use crate::net::tcp::straggler_query::QueryResult;

/// Time limit of a whole query; ranks without a reply by then are reported as unknown. With responsive hosts, thousands of ranks
/// reply in a fraction of it.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest number of ranks that are all queried at once.
const QUERY_ALL_LIMIT: usize = 128;
/// In a larger group, most ranks wait for a rank that waits itself. Only ranks that wait for a straggler directly query it; they
/// abort the group, and the other ranks wait this long for the abort report.
const FORWARD_TIMEOUT: Duration = Duration::from_secs(3);
/// Poll interval of the wire during a query.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl RemoteChannels {
    /// Queries the progress of `peers`, ranks of other nodes. `local`: returns whether a rank of this node has not begun that
    /// operation.
    pub(crate) fn query_stragglers(&mut self, peers: &[usize], local: impl Fn(u64) -> bool) {
        let (seq, until) = (self.state.seq, Instant::now() + QUERY_TIMEOUT);
        let mut peers = peers.to_vec();
        // Rotated by rank, so that the ranks do not all query the same peer first.
        let next = peers.iter().position(|&peer| peer > self.state.me).unwrap_or(0);
        peers.rotate_left(next);
        let (begun, unknown): (Vec<_>, Vec<_>) =
            peers.into_iter().partition(|&peer| self.arrived(peer, seq) == Some(true));
        if unknown.len() <= QUERY_ALL_LIMIT {
            self.query(&unknown, until);
        } else {
            let (first, rest): (Vec<_>, Vec<_>) =
                unknown.iter().copied().partition(|&peer| self.state.waits_for(peer, seq));
            self.query(&first, until);
            let is_waiting = |&peer: &usize| self.arrived(peer, seq) == Some(true);
            if !local(seq)
                && first.iter().all(is_waiting)
                && self.wait_for_abort(Instant::now() + FORWARD_TIMEOUT)
            {
                return;
            }
            self.query(&rest, until);
        }
        let state = &self.state;
        let missing = local(seq) || unknown.iter().any(|&peer| self.arrived(peer, seq) == Some(false));
        // Peers that have begun the operation may be silent since then. Query them if nothing else explains the delay, and to
        // complete the list of silent hosts.
        if !missing || state.peers.iter().any(|peer| peer.silent) {
            self.query(&begun, until);
        }
    }

    /// Queries the activity of all `peers`, ranks of other nodes, when this rank waits outside an operation.
    pub(crate) fn query_ranks(&mut self, peers: &[usize]) {
        self.query(peers, Instant::now() + QUERY_TIMEOUT);
    }

    /// Queries `peers` until all have replied or a rank sends an abort report.
    fn query(&mut self, peers: &[usize], until: Instant) {
        let Some(mut straggler_query) =
            self.sideband.as_ref().map(|sideband| sideband.straggler_query(peers))
        else {
            return;
        };
        let mut now = Instant::now();
        while !straggler_query.is_finished() && now < until && !self.abort_received() {
            for (peer, reply) in straggler_query.poll(POLL_INTERVAL, now) {
                let state = &mut self.state.peers[peer];
                state.silent = reply == QueryResult::HostSilent;
                state.unresponsive = reply == QueryResult::ProcessUnresponsive;
                if let QueryResult::Replied(answer) = reply {
                    state.replied = true;
                    state.begun = state.begun.max(answer.begun);
                    state.activity = answer.doing;
                } else {
                    state.replied = false;
                }
            }
            now = Instant::now();
            self.wire.poll(&mut self.state);
            self.wire.check(now, &[]);
        }
    }

    /// Waits for an abort report; returns whether one has arrived.
    fn wait_for_abort(&mut self, until: Instant) -> bool {
        let mut now = Instant::now();
        while !self.abort_received() && now < until {
            if !self.wire.poll(&mut self.state) {
                self.wire.check(now, &[]);
                let mut fds = Vec::new();
                self.interest(&mut fds);
                self.state.staging.wait_briefly(&fds);
            }
            now = Instant::now();
        }
        self.abort_received()
    }

    fn abort_received(&self) -> bool {
        self.state.peers.iter().any(|peer| peer.abort.is_some())
    }
}
