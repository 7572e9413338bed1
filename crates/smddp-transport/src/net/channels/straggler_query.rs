//! Who has not come, when a deadline has passed: the ranks of other nodes are asked.

use std::time::{Duration, Instant};

use super::RemoteChannels;
use crate::net::tcp::straggler_query::Heard;

/// All of it takes no longer; whoever was not heard by then is not known. Where hosts answer, thousands of ranks take a
/// fraction of it.
const PATIENCE: Duration = Duration::from_secs(10);
/// So few are all asked at once.
const FEW: usize = 128;
/// In a larger group most ranks wait for a rank that waits, too. Those leave the asking to the ranks that wait for whoever
/// is late, and hear of it from them within this time.
const HEARSAY: Duration = Duration::from_secs(3);
/// The wire is looked at so often meanwhile.
const TURN: Duration = Duration::from_millis(20);

impl RemoteChannels {
    /// Learns how far `peers` are, the ranks of other nodes. `local`: whether a rank of this node has not begun that
    /// operation.
    pub(crate) fn straggler_query(&mut self, peers: &[usize], local: impl Fn(u64) -> bool) {
        let (seq, until) = (self.state.seq, Instant::now() + PATIENCE);
        let mut peers = peers.to_vec();
        // Not everybody asks the same one first.
        let next = peers.iter().position(|&peer| peer > self.state.me).unwrap_or(0);
        peers.rotate_left(next);
        let (begun, unknown): (Vec<_>, Vec<_>) =
            peers.into_iter().partition(|&peer| self.arrived(peer, seq) == Some(true));
        if unknown.len() <= FEW {
            self.ask(&unknown, until);
        } else {
            let (first, rest): (Vec<_>, Vec<_>) =
                unknown.iter().copied().partition(|&peer| self.state.awaits(peer, seq));
            self.ask(&first, until);
            let waits_too = |&peer: &usize| self.arrived(peer, seq) == Some(true);
            if !local(seq) && first.iter().all(waits_too) && self.hear(Instant::now() + HEARSAY) {
                return;
            }
            self.ask(&rest, until);
        }
        let state = &self.state;
        let missing = local(seq) || unknown.iter().any(|&peer| self.arrived(peer, seq) == Some(false));
        // Who has begun it may be silent since: that is looked into where nothing else explains it, and where hosts are.
        if !missing || state.peers.iter().any(|peer| peer.silent) {
            self.ask(&begun, until);
        }
    }

    /// Asks all of `peers`, ranks of other nodes, what they do: something else than an operation is waited for.
    pub(crate) fn survey_each(&mut self, peers: &[usize]) {
        self.ask(peers, Instant::now() + PATIENCE);
    }

    /// Asks them, until all have answered or a rank tells why the group is dead.
    fn ask(&mut self, peers: &[usize], until: Instant) {
        let Some(mut straggler_query) =
            self.listeners.as_ref().map(|listeners| listeners.straggler_query(peers))
        else {
            return;
        };
        let mut now = Instant::now();
        while !straggler_query.over() && now < until && !self.told() {
            for (peer, heard) in straggler_query.go_on(TURN, now) {
                let state = &mut self.state.peers[peer];
                state.silent = heard == Heard::Silent;
                state.mute = heard == Heard::Mute;
                if let Heard::Said(answer) = heard {
                    state.answered = true;
                    state.begun = state.begun.max(answer.begun);
                    state.doing = answer.doing;
                } else {
                    state.answered = false;
                }
            }
            now = Instant::now();
            self.wire.poll(&mut self.state);
            self.wire.check(now);
        }
    }

    /// Waits for a rank to tell why the group is dead; whether one has.
    fn hear(&mut self, until: Instant) -> bool {
        let mut now = Instant::now();
        while !self.told() && now < until {
            if !self.wire.poll(&mut self.state) {
                self.wire.check(now);
                let mut fds = Vec::new();
                self.interest(&mut fds);
                self.state.owner.wait_briefly(&fds);
            }
            now = Instant::now();
        }
        self.told()
    }

    fn told(&self) -> bool {
        self.state.peers.iter().any(|peer| peer.abort.is_some())
    }
}
