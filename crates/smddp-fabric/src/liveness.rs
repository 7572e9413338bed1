//! Detection of lost peers: pings, failed operations, and their consequences.

use std::time::{Duration, Instant};

use smddp_net::wire::PeerState;

use super::endpoint::FabricEndpoint;
use super::header::HeaderKind;
use super::queues::MAX_PINGS;

/// Time without a successful ping, with nothing in flight, after which a contacted peer counts as lost.
const UNREACHABLE_LIMIT: Duration = Duration::from_secs(3);
/// Interval between two pings.
pub(super) const PING_INTERVAL: Duration = Duration::from_millis(200);

impl FabricEndpoint {
    /// Fails the endpoint, and with it all peers.
    pub(super) fn fail(&mut self, reason: &str) {
        if self.failure.is_none() {
            self.failure = Some(reason.to_owned());
        }
        for peer in 0..self.peers.len() {
            self.fail_peer(peer, reason);
        }
    }

    /// Marks a peer as lost. Queued messages to it are dropped and its transfers end.
    pub(super) fn fail_peer(&mut self, peer: usize, reason: &str) {
        let p = &mut self.peers[peer];
        if p.broken.is_some() {
            return;
        }
        p.broken = Some(reason.to_owned());
        p.outgoing.clear();
        p.fetched.clear();
        for offer in self.offers.drain_where(|offer| offer.peer == peer) {
            self.complete_offer(&offer);
        }
        self.drop_grants(|grant| grant.peer == peer);
        for group in self.groups.values_mut() {
            group.notify();
        }
    }

    /// Pings ranks that this process waits for. `watched`: another mechanism detects lost processes and hosts, too. A peer that
    /// accepts no messages then counts as busy or stopped, not as lost.
    pub(super) fn watch(&mut self, number: u32, ranks: &[usize], watched: bool, now: Instant) {
        for &rank in ranks {
            let member = self.groups.get(&number).and_then(|g| g.members.get(rank)?.as_ref());
            if let Some(peer) = member.map(|m| m.peer) {
                self.watch_peer(peer, watched, now);
            }
        }
    }

    fn watch_peer(&mut self, peer: usize, watched: bool, now: Instant) {
        let p = &self.peers[peer];
        // A busy peer answers late. Two pings are needed: the first one to an exited process may only reach a socket's buffer.
        if p.unanswered_pings >= MAX_PINGS
            || p.sending > 0
            || p.last_ping.is_some_and(|at| now.duration_since(at) < PING_INTERVAL)
        {
            return;
        }
        // The peer has received the first message; it answers when its process polls.
        if !p.peer_window_open && p.credits == 0 && p.contacted {
            return;
        }
        if self.ping(peer, now) {
            self.peers[peer].unreachable_since = None;
            return;
        }
        // Some providers lose a connection without an error and then return EAGAIN forever.
        let p = &mut self.peers[peer];
        if !watched
            && p.contacted
            && p.broken.is_none()
            && now.duration_since(*p.unreachable_since.get_or_insert(now)) > UNREACHABLE_LIMIT
        {
            self.fail_peer(peer, "the connection to it is lost");
        }
    }

    /// Records the lost ranks of a group in `states`, by rank.
    pub(super) fn update_states(&self, number: u32, states: &mut [PeerState]) {
        let Some(group) = self.groups.get(&number) else { return };
        for (rank, detail) in &group.corrupted {
            if let Some(state) = states.get_mut(*rank as usize) {
                state.corrupted.get_or_insert_with(|| detail.clone());
            }
        }
        for (member, state) in group.members.iter().zip(states) {
            if let Some(member) = member
                && state.broken.is_none()
            {
                state.broken.clone_from(&self.peers[member.peer].broken);
            }
        }
    }

    /// Sends a ping; returns false if it has to wait.
    fn ping(&mut self, peer: usize, now: Instant) -> bool {
        let sent = self.send_uncredited(peer, HeaderKind::Ping);
        if sent {
            let p = &mut self.peers[peer];
            p.unanswered_pings += 1;
            p.last_ping = Some(now);
        }
        sent
    }
}
