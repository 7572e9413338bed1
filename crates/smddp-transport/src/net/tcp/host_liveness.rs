//! Whether the host of a peer that is waited for, or that takes nothing more, still answers.
//!
//! Where nothing is under way nothing would be missed: the kernel's own probes of such a connection come late (`Probes::Late`).
//! A peer that does something else takes no bytes, and its window stays shut for as long as that takes: no loss. The kernel
//! acknowledges for it, at ever longer intervals, so the connection itself shows late or never that the host is gone; and
//! a limit of the kernel's (TCP_USER_TIMEOUT) ends both alike. So a second connection, over which nothing is under way, is
//! made where nothing is heard for a while: if it cannot be made, or its probes are not answered, nobody is there.

use std::time::{Duration, Instant};

use super::connection::Connection;
use super::dial::is_host_silent;
use super::process_liveness::{LivenessConnection, LivenessEvent, MAX_WATCHED, is_close_successor};
use super::sideband::Sideband;

#[derive(Clone, Copy)]
pub(super) struct HostLivenessLimits {
    /// A peer from whose host nothing is heard for so long is looked after.
    pub(super) silent: Duration,
    /// A host that answers nothing for so long is gone.
    pub(super) lost: Duration,
    /// Looks are this far apart.
    pub(super) interval: Duration,
}

impl HostLivenessLimits {
    /// Such that a host is found gone within `peer_timeout`, the pauses between two looks included.
    pub(super) fn within(peer_timeout: Duration) -> Self {
        Self { silent: peer_timeout / 3, lost: peer_timeout / 2, interval: peer_timeout / 20 }
    }
}

pub(super) struct HostLiveness {
    limits: HostLivenessLimits,
    last_poll: Option<Instant>,
    /// By peer.
    probes: Vec<(usize, LivenessConnection)>,
}

impl HostLiveness {
    pub(super) fn new(limits: HostLivenessLimits) -> Self {
        Self { limits, last_poll: None, probes: Vec::new() }
    }

    /// Peers whose hosts have been found gone. `awaited`: those for which this rank waits.
    pub(super) fn poll<'a>(
        &mut self,
        sideband: &Sideband,
        conns: impl Iterator<Item = &'a Connection> + Clone,
        awaited: impl Iterator<Item = usize>,
        now: Instant,
    ) -> Vec<usize> {
        let HostLivenessLimits { silent, lost, interval } = self.limits;
        if self.last_poll.is_some_and(|at| now.duration_since(at) < interval) {
            return Vec::new();
        }
        self.last_poll = Some(now);
        let mut peers: Vec<usize> = conns
            .clone()
            .filter(|conn| conn.silent_time().is_some_and(|time| time >= silent))
            .map(|conn| conn.peer)
            .chain(awaited)
            .collect();
        peers.sort_unstable();
        peers.dedup();
        // A word over any connection is a sign of life.
        let since_last_receive = |peer: usize| {
            conns.clone().filter(|conn| conn.peer == peer).filter_map(Connection::since_last_receive).min()
        };
        peers.retain(|&peer| since_last_receive(peer).is_some_and(|time| time >= silent));
        self.probes.retain(|(peer, _)| peers.contains(peer));
        for &peer in &peers {
            let allowed =
                self.probes.len() < MAX_WATCHED || is_close_successor(sideband.me, peer, sideband.size());
            if allowed
                && !self.probes.iter().any(|(other, _)| *other == peer)
                && let Some(address) = sideband.address(peer)
                && let Ok(probe) = LivenessConnection::connect(sideband.credential(), (peer, address), lost)
            {
                self.probes.push((peer, probe));
            }
        }
        let mut silent_peers = Vec::new();
        self.probes.retain_mut(|(peer, probe)| match probe.poll() {
            LivenessEvent::Alive => true,
            LivenessEvent::Ended(error)
                if is_host_silent(&error) && since_last_receive(*peer).is_some_and(|time| time >= lost) =>
            {
                silent_peers.push(*peer);
                false
            }
            // A process that is gone or a group that is closed shows on its own connections. What else it is, another
            // connection tells.
            LivenessEvent::Ended(_) | LivenessEvent::Closed => false,
        });
        silent_peers
    }
}
