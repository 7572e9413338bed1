//! Whether the host of a peer that is waited for, or that takes nothing more, still answers.
//!
//! Where nothing is under way nothing would be missed: the kernel's own probes of such a connection come late (`Probes::Late`).
//! A peer that does something else takes no bytes, and its window stays shut for as long as that takes: no loss. The kernel
//! acknowledges for it, at ever longer intervals, so the connection itself shows late or never that the host is gone; and
//! a limit of the kernel's (TCP_USER_TIMEOUT) ends both alike. So a second connection, over which nothing is under way, is
//! made where nothing is heard for a while: if it cannot be made, or its probes are not answered, nobody is there.

use std::time::{Duration, Instant};

use super::connection::Connection;
use super::dial::silent;
use super::process_liveness::{Found, MOST, Watch, local};
use super::sideband::Sideband;

#[derive(Clone, Copy)]
pub(super) struct HostLivenessLimits {
    /// A peer from whose host nothing is heard for so long is looked after.
    pub(super) quiet: Duration,
    /// A host that answers nothing for so long is gone.
    pub(super) gone: Duration,
    /// Looks are this far apart.
    pub(super) pause: Duration,
}

impl HostLivenessLimits {
    /// Such that a host is found gone within `peer_timeout`, the pauses between two looks included.
    pub(super) fn within(peer_timeout: Duration) -> Self {
        Self { quiet: peer_timeout / 3, gone: peer_timeout / 2, pause: peer_timeout / 20 }
    }
}

pub(super) struct HostLiveness {
    limits: HostLivenessLimits,
    looked: Option<Instant>,
    /// By peer.
    watches: Vec<(usize, Watch)>,
}

impl HostLiveness {
    pub(super) fn new(limits: HostLivenessLimits) -> Self {
        Self { limits, looked: None, watches: Vec::new() }
    }

    /// Peers whose hosts have been found gone. `awaited`: those for which this rank waits.
    pub(super) fn look<'a>(
        &mut self,
        listeners: &Sideband,
        conns: impl Iterator<Item = &'a Connection> + Clone,
        awaited: impl Iterator<Item = usize>,
        now: Instant,
    ) -> Vec<usize> {
        let HostLivenessLimits { quiet, gone, pause } = self.limits;
        if self.looked.is_some_and(|at| now.duration_since(at) < pause) {
            return Vec::new();
        }
        self.looked = Some(now);
        let mut peers: Vec<usize> = conns
            .clone()
            .filter(|conn| conn.quiet().is_some_and(|time| time >= quiet))
            .map(|conn| conn.peer)
            .chain(awaited)
            .collect();
        peers.sort_unstable();
        peers.dedup();
        // A word over any connection is a sign of life.
        let unheard = |peer: usize| {
            conns.clone().filter(|conn| conn.peer == peer).filter_map(Connection::unheard).min()
        };
        peers.retain(|&peer| unheard(peer).is_some_and(|time| time >= quiet));
        self.watches.retain(|(peer, _)| peers.contains(peer));
        for &peer in &peers {
            let room = self.watches.len() < MOST || local(listeners.me, peer, listeners.size());
            if room
                && !self.watches.iter().any(|(other, _)| *other == peer)
                && let Some(address) = listeners.address(peer)
                && let Ok(watch) = Watch::call(listeners.credential(), (peer, address), gone)
            {
                self.watches.push((peer, watch));
            }
        }
        let mut found = Vec::new();
        self.watches.retain_mut(|(peer, watch)| match watch.look() {
            Found::Well => true,
            Found::Ended(error) if silent(&error) && unheard(*peer).is_some_and(|time| time >= gone) => {
                found.push(*peer);
                false
            }
            // A process that is gone or a group that is closed shows on its own connections. What else it is, another
            // connection tells.
            Found::Ended(_) | Found::Closed => false,
        });
        found
    }
}
