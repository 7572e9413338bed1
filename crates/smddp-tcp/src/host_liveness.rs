//! Detection of lost hosts of peers for which this rank waits, or that do not read.
//!
//! On a connection without data in flight, the kernel's keepalive detects a lost host late (`Keepalive::Slow`). On a
//! connection with data in flight, a peer that is alive may be busy and not read for a long time, with a zero receive
//! window. Its kernel answers window probes at increasing intervals, so the connection shows a lost host late or never.
//! TCP_USER_TIMEOUT would end the connection in both cases. So if a peer's host is silent for a while, this module
//! opens a second connection without data in flight. If that fails, or its keepalive probes are not answered, the host
//! is lost.

use std::time::{Duration, Instant};

use super::connection::Connection;
use super::dial::is_host_silent;
use super::process_liveness::{LivenessConnection, LivenessEvent, MAX_WATCHED, is_close_successor};
use super::sideband::Sideband;

/// Time limits of the detection.
#[derive(Clone, Copy)]
pub struct HostLivenessLimits {
    /// Time without data or acknowledgements after which a second connection probes the host.
    pub(super) silent: Duration,
    /// Time without any answer after which a host counts as lost.
    pub lost: Duration,
    /// Time between two polls.
    pub(super) interval: Duration,
}

impl HostLivenessLimits {
    /// Returns limits that detect a lost host within `peer_timeout`, including the time between two polls.
    pub(super) fn within(peer_timeout: Duration) -> Self {
        Self { silent: peer_timeout / 3, lost: peer_timeout / 2, interval: peer_timeout / 20 }
    }
}

/// State of the detection for one wire.
pub(super) struct HostLiveness {
    limits: HostLivenessLimits,
    last_poll: Option<Instant>,
    /// Second connections, each with its peer.
    probes: Vec<(usize, LivenessConnection)>,
}

impl HostLiveness {
    pub(super) fn new(limits: HostLivenessLimits) -> Self {
        Self { limits, last_poll: None, probes: Vec::new() }
    }

    /// Returns peers whose hosts were found lost. `awaited`: peers for which this rank waits.
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
        // Data or an acknowledgement over any connection shows that the host is alive.
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
            // The peer's frame connections report an ended process or a closed group. For another error a new
            // connection decides.
            LivenessEvent::Ended(_) | LivenessEvent::Closed => false,
        });
        silent_peers
    }
}
