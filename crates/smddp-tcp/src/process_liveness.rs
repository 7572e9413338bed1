//! Detection of ended peer processes, by an idle connection to the process's listener. The kernel closes it with the
//! process, whatever the state of the wire's own connections.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_net::handshake::{CLOSED, is_closed};
use smddp_net::known_hosts;
use smddp_net::wire::{Broken, DRAIN_GRACE};

use super::address::{Credential, Purpose, TcpAddress};
use super::dial::{Dial, SILENT, is_host_silent};
use super::sideband::Sideband;

/// Time that this rank waits for a peer before it opens a liveness connection.
const WATCH_AFTER: Duration = Duration::from_millis(200);
/// Gap between two waits for a peer after which the second counts as a new wait.
const WAIT_GAP: Duration = Duration::from_millis(100);
/// Time between two connection attempts to a peer.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Time to wait for frames that a peer sent before it closed its end of the group. The peer itself waits for their
/// delivery, too.
const CLOSE_GRACE: Duration = Duration::from_secs(5);
/// Maximum number of arbitrary ranks to watch because this rank waits for them. As many ranks that follow this one are
/// watched in addition, so that some rank watches each awaited rank. A rank that detects an end reports it to the
/// others.
pub(super) const MAX_WATCHED: usize = 64;
/// Number of ranks to try, one after the other, to find out if connections are possible at all. The first ones may be
/// dead.
const MAX_PROBED: usize = 8;

/// State of a peer's process.
enum PeerLiveness {
    /// This rank has waited for it since `since`; `last` is the time of the last call of `watch`.
    Awaited {
        since: Instant,
        last: Instant,
    },
    /// Connected or connecting.
    Connected(LivenessConnection),
    /// A connection attempt failed at this time; another one follows.
    Unknown(Instant),
    /// Ended: the time from which it is reported, and the reason.
    Lost(Instant, String),
    Unwatched,
}

/// Process detection of one rank in one group.
pub struct ProcessLiveness {
    sideband: Arc<Sideband>,
    peers: Vec<PeerLiveness>,
    /// Number of peers in the state [`PeerLiveness::Connected`].
    connected: usize,
    /// A connection succeeded, so a refused one means that the process has ended. Some networks refuse every
    /// connection.
    reachable: bool,
    /// Number of following ranks that were tried for `reachable`.
    probed: usize,
}

/// Idle connection to the listener of a peer's process.
pub(super) struct LivenessConnection(Dial);

/// Result of a poll of a liveness connection.
pub(super) enum LivenessEvent {
    Alive,
    /// The peer closed its end of the group in good order.
    Closed,
    Ended(io::Error),
}

impl LivenessConnection {
    /// Connects to a peer. The kernel reports a lost host within `peer_timeout`.
    pub(crate) fn connect(
        credential: &Credential,
        peer: (usize, &TcpAddress),
        peer_timeout: Duration,
    ) -> io::Result<Self> {
        Dial::new(credential, peer, Purpose::Watch, peer_timeout).map(Self)
    }

    pub(super) fn poll(&mut self) -> LivenessEvent {
        match self.0.advance() {
            Ok(true) => {}
            Ok(false) => return LivenessEvent::Alive,
            Err(error) if is_closed(&error) => return LivenessEvent::Closed,
            Err(error) => return LivenessEvent::Ended(error),
        }
        let mut byte = [0];
        match (&*self.0.socket).read(&mut byte) {
            Ok(0) => LivenessEvent::Ended(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) if byte == [CLOSED] => LivenessEvent::Closed,
            Ok(_) => LivenessEvent::Alive,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                LivenessEvent::Alive
            }
            Err(error) => LivenessEvent::Ended(error),
        }
    }
}

impl ProcessLiveness {
    /// Watches no peer yet.
    pub fn new(sideband: Arc<Sideband>) -> Self {
        let peers = (0..sideband.size()).map(|_| PeerLiveness::Unwatched).collect();
        Self { sideband, peers, connected: 0, reachable: false, probed: 0 }
    }

    /// Records that this rank waits for the peer. A rank that waits calls it at short intervals.
    pub fn watch(&mut self, peer: usize, now: Instant) {
        let (me, size) = (self.sideband.me, self.peers.len());
        if !self.reachable && self.connected == 0 {
            // Finds out if connections are possible at all, at first while all processes are alive.
            let mut others =
                (1..size).map(|i| (me + i) % size).filter(|&p| self.sideband.address(p).is_some());
            if let Some(next) = others.nth(self.probed).filter(|_| self.probed < MAX_PROBED) {
                self.probed += 1;
                self.connect(next, now);
            }
        }
        match &mut self.peers[peer] {
            PeerLiveness::Unwatched => self.peers[peer] = PeerLiveness::Awaited { since: now, last: now },
            PeerLiveness::Awaited { since, last } => {
                if now.duration_since(*last) > WAIT_GAP {
                    *since = now;
                }
                *last = now;
                let long_wait = now.duration_since(*since) >= WATCH_AFTER;
                if long_wait && (is_close_successor(me, peer, size) || self.connected < MAX_WATCHED) {
                    self.connect(peer, now);
                }
            }
            PeerLiveness::Unknown(since) if now.duration_since(*since) >= RETRY_INTERVAL => {
                self.connect(peer, now)
            }
            _ => {}
        }
    }

    fn connect(&mut self, peer: usize, now: Instant) {
        let Some(address) = self.sideband.address(peer) else { return };
        let (credential, peer_timeout) = (self.sideband.credential(), self.sideband.peer_timeout());
        self.peers[peer] = match LivenessConnection::connect(credential, (peer, address), peer_timeout) {
            Ok(connection) => {
                self.connected += 1;
                PeerLiveness::Connected(connection)
            }
            Err(error) => self.connect_failed(peer, &error, now),
        };
    }

    /// Returns the state of a peer after a failed connection attempt.
    fn connect_failed(&self, peer: usize, error: &io::Error, now: Instant) -> PeerLiveness {
        let host_seen =
            || self.sideband.address(peer).is_some_and(|to| known_hosts::contains(to.socket.ip()));
        if error.kind() == io::ErrorKind::ConnectionRefused && (self.reachable || host_seen()) {
            return PeerLiveness::Lost(now + DRAIN_GRACE, "its process no longer listens".to_owned());
        }
        if is_host_silent(error) && host_seen() {
            return PeerLiveness::Lost(now, SILENT.to_owned());
        }
        PeerLiveness::Unknown(now)
    }

    /// Polls all liveness connections.
    pub fn check(&mut self, now: Instant) {
        if self.connected == 0 {
            return;
        }
        let was_reachable = self.reachable;
        for peer in 0..self.peers.len() {
            let PeerLiveness::Connected(connection) = &mut self.peers[peer] else { continue };
            let (event, connected, host_accepted) =
                (connection.poll(), connection.0.handshake.is_complete(), connection.0.handshake.has_sent());
            self.reachable |= host_accepted;
            let state = match event {
                LivenessEvent::Alive => continue,
                LivenessEvent::Closed => {
                    PeerLiveness::Lost(now + CLOSE_GRACE, "it closed its end of the group".to_owned())
                }
                LivenessEvent::Ended(error) if connected => {
                    PeerLiveness::Lost(now + DRAIN_GRACE, reason(&error))
                }
                // The listener closed the connection in the handshake: it has too many incoming connections, or its
                // process ended, which the next attempt shows.
                LivenessEvent::Ended(_) if host_accepted => {
                    PeerLiveness::Unknown(now.checked_sub(RETRY_INTERVAL - WAIT_GAP).unwrap_or(now))
                }
                LivenessEvent::Ended(error) => self.connect_failed(peer, &error, now),
            };
            self.peers[peer] = state;
            self.connected -= 1;
        }
        if self.reachable && !was_reachable {
            // A refused connection now means an ended process, so retry peers that refused one before.
            let long_ago = now.checked_sub(RETRY_INTERVAL).unwrap_or(now);
            let unknown = self.peers.iter_mut().filter(|peer| matches!(peer, PeerLiveness::Unknown(_)));
            unknown.for_each(|peer| *peer = PeerLiveness::Unknown(long_ago));
        }
    }

    /// Returns peers whose processes have ended and whose grace period has passed, in the order of its end.
    pub fn broken(&self, now: Instant) -> Vec<Broken> {
        let lost = |(peer, known): (usize, &PeerLiveness)| match known {
            PeerLiveness::Lost(at, reason) if *at <= now => {
                Some((*at, Broken { peer, reason: reason.clone() }))
            }
            _ => None,
        };
        let mut lost: Vec<_> = self.peers.iter().enumerate().filter_map(lost).collect();
        lost.sort_unstable_by_key(|(at, broken)| (*at, broken.peer));
        lost.into_iter().map(|(_, broken)| broken).collect()
    }

    /// Adds the descriptors whose readiness ends a sleep.
    pub fn wait_sources(&self, fds: &mut Vec<(RawFd, i16)>) {
        if self.connected > 0 {
            fds.extend(self.peers.iter().filter_map(|peer| match peer {
                PeerLiveness::Connected(LivenessConnection(dial)) => {
                    Some((dial.socket.as_raw_fd(), dial.events()))
                }
                _ => None,
            }));
        }
    }
}

/// Returns true if the peer is one of the next [`MAX_WATCHED`] ranks, which are watched in any case.
pub(super) fn is_close_successor(me: usize, peer: usize, size: usize) -> bool {
    (peer + size - me) % size <= MAX_WATCHED
}

fn reason(error: &io::Error) -> String {
    // The kernel closes the connections of an ended process, with a reset if data was unread.
    if is_host_silent(error) { SILENT.to_owned() } else { "its process ended".to_owned() }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use smddp_net::fuzzing::{accept_peer, accept_proof, known_token};
    use smddp_net::interface::{AddressFamily, InterfaceFilter};
    use smddp_process::Endpoint;

    use super::*;
    use crate::TcpEndpoint;
    use crate::fuzzing::credential;

    const DEADLINE: Duration = Duration::from_secs(10);

    fn endpoint() -> Arc<TcpEndpoint> {
        let lo = InterfaceFilter { value: Some("=lo".to_owned()), from: "a test" };
        let endpoint =
            TcpEndpoint::get(&Endpoint::get(1 << 20).unwrap(), &lo, AddressFamily::Any, DEADLINE, false)
                .unwrap();
        endpoint.serve();
        endpoint
    }

    fn address(listener: &TcpListener) -> TcpAddress {
        TcpAddress { socket: listener.local_addr().unwrap(), listener_id: smddp_base::random::bytes() }
    }

    /// Creates the detection of rank 0 in a group whose other ranks have these addresses.
    fn liveness_of(others: Vec<TcpAddress>) -> ProcessLiveness {
        let group_listener = endpoint().group_listener(0, 1 + others.len());
        group_listener.trust(&known_token());
        let addresses = std::iter::once(None).chain(others.into_iter().map(Some));
        ProcessLiveness::new(Arc::new(Sideband::new(0, group_listener, addresses).unwrap()))
    }

    /// Smallest time step.
    const MOMENT: Duration = Duration::from_nanos(1);

    /// Waits for the peer like a rank in a collective until `over` returns true. The time remains `now`.
    fn wait(
        liveness: &mut ProcessLiveness,
        peer: usize,
        now: Instant,
        over: impl Fn(&ProcessLiveness) -> bool,
    ) {
        let begun = Instant::now();
        while !over(liveness) {
            assert!(begun.elapsed() < DEADLINE, "nothing was detected");
            liveness.watch(peer, now);
            liveness.check(now);
            let mut fds = Vec::new();
            liveness.wait_sources(&mut fds);
            std::thread::yield_now();
        }
    }

    /// Waits for the peer, from that time, until it is watched. Returns the time at the end.
    fn wait_long(liveness: &mut ProcessLiveness, peer: usize, from: Instant) -> Instant {
        for waited in [Duration::ZERO, WAIT_GAP, WATCH_AFTER] {
            liveness.watch(peer, from + waited);
        }
        from + WATCH_AFTER
    }

    fn is_lost(liveness: &ProcessLiveness, peer: usize) -> bool {
        matches!(liveness.peers[peer], PeerLiveness::Lost(..))
    }

    #[test]
    fn ended_process_is_reported_exactly_after_the_drain_grace() {
        let (listener, now) = (TcpListener::bind("127.0.0.1:0").unwrap(), Instant::now());
        let mut liveness = liveness_of(vec![address(&listener)]);
        let theirs = std::thread::scope(|scope| {
            let responder = scope.spawn(|| accept_peer(listener.accept().unwrap().0));
            let connected = |w: &ProcessLiveness| match &w.peers[1] {
                PeerLiveness::Connected(LivenessConnection(dial)) => dial.handshake.is_complete(),
                _ => false,
            };
            wait(&mut liveness, 1, now, connected);
            responder.join().unwrap()
        });
        drop((theirs, listener));
        wait(&mut liveness, 1, now, |w| is_lost(w, 1));
        assert_eq!(liveness.broken(now + DRAIN_GRACE - MOMENT), vec![]);
        let broken = Broken { peer: 1, reason: "its process ended".to_owned() };
        assert_eq!(liveness.broken(now + DRAIN_GRACE), [broken]);
    }

    #[test]
    fn connection_closed_before_the_greeting_is_not_a_process_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut connection =
            LivenessConnection::connect(&credential(0), (1, &address(&listener)), DEADLINE).unwrap();
        drop(listener.accept().unwrap());
        assert!(matches!(connection.poll(), LivenessEvent::Ended(_)));
        assert!(!connection.0.handshake.is_complete());
    }

    #[test]
    fn connection_closed_after_the_proof_is_not_a_process_end() {
        let (listener, now) = (TcpListener::bind("127.0.0.1:0").unwrap(), Instant::now());
        let mut liveness = liveness_of(vec![address(&listener)]);
        std::thread::scope(|scope| {
            let responder = scope.spawn(|| drop(accept_proof(listener.accept().unwrap().0)));
            wait(&mut liveness, 1, now, |w| matches!(w.peers[1], PeerLiveness::Unknown(_)));
            responder.join().unwrap();
        });
        assert_eq!(liveness.broken(now + DEADLINE), vec![]);
    }

    /// Creates the detection for two peers, of which one has ended.
    fn two_peers_with_one_ended(lost: usize) -> (TcpListener, ProcessLiveness) {
        let mut listeners: Vec<_> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses = listeners.iter().map(address).collect();
        drop(listeners.remove(lost - 1));
        (listeners.remove(0), liveness_of(addresses))
    }

    #[test]
    fn closed_listener_means_an_ended_process_if_connections_are_possible() {
        for lost in [1, 2] {
            let (_other, mut liveness) = two_peers_with_one_ended(lost);
            let now = wait_long(&mut liveness, lost, Instant::now());
            // It is tried again at once, even if it refused before another peer was reached.
            wait(&mut liveness, lost, now, |w| is_lost(w, lost));
            assert_eq!(liveness.broken(now + DRAIN_GRACE)[0].peer, lost);
        }
    }

    #[test]
    fn without_any_connection_no_process_counts_as_ended_and_retries_follow_the_interval() {
        // A separate address, because a host that this process has reached before would count as lost.
        let (only, now) = (TcpListener::bind("127.77.0.2:0").unwrap(), Instant::now());
        let addresses = vec![address(&only)];
        drop(only);
        let mut refused = liveness_of(addresses);
        let unknown = |w: &ProcessLiveness| matches!(w.peers[1], PeerLiveness::Unknown(at) if at == now);
        wait(&mut refused, 1, now, unknown);
        refused.watch(1, now + RETRY_INTERVAL - MOMENT);
        assert!(unknown(&refused), "it retries too soon");
        refused.watch(1, now + RETRY_INTERVAL);
        assert!(!unknown(&refused), "it does not retry");
        assert_eq!(refused.broken(now + DEADLINE), vec![]);
    }

    #[test]
    fn silent_host_is_lost_only_if_it_was_reached_before() {
        let host = "127.77.0.1".parse().unwrap();
        let address = TcpAddress { socket: (host, 9).into(), listener_id: smddp_base::random::bytes() };
        let (liveness, now) = (liveness_of(vec![address]), Instant::now());
        let silence = io::Error::from(io::ErrorKind::TimedOut);
        assert!(matches!(liveness.connect_failed(1, &silence, now), PeerLiveness::Unknown(_)));
        known_hosts::record(host);
        let state = liveness.connect_failed(1, &silence, now);
        assert!(matches!(state, PeerLiveness::Lost(at, reason) if at == now && reason == SILENT));
        // A local error does not show the state of the host.
        let local = io::Error::from(io::ErrorKind::OutOfMemory);
        assert!(matches!(liveness.connect_failed(1, &local, now), PeerLiveness::Unknown(_)));
    }

    #[test]
    fn closed_group_is_reported_exactly_after_the_close_grace() {
        let (theirs, now) = (endpoint().group_listener(1, 2), Instant::now());
        theirs.trust(&known_token());
        let mut liveness = liveness_of(vec![theirs.address().clone()]);
        wait(&mut liveness, 1, now, |w| w.reachable);
        drop(theirs);
        wait(&mut liveness, 1, now, |w| is_lost(w, 1));
        assert_eq!(liveness.broken(now + CLOSE_GRACE - MOMENT), vec![]);
        let broken = Broken { peer: 1, reason: "it closed its end of the group".to_owned() };
        assert_eq!(liveness.broken(now + CLOSE_GRACE), [broken]);
    }

    fn connected(liveness: &ProcessLiveness) -> Vec<bool> {
        liveness.peers.iter().map(|peer| matches!(peer, PeerLiveness::Connected(_))).collect()
    }

    #[test]
    fn only_the_next_rank_is_watched_before_a_long_wait() {
        let listeners: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let mut liveness = liveness_of(listeners.iter().map(address).collect());
        let begun = Instant::now();
        for waited in [Duration::ZERO, WAIT_GAP, WATCH_AFTER - MOMENT] {
            liveness.watch(3, begun + waited);
            liveness.check(begun + waited);
            assert_eq!(connected(&liveness), [false, true, false, false], "{waited:?}");
        }
        liveness.watch(3, begun + WATCH_AFTER);
        assert_eq!(connected(&liveness), [false, true, false, true]);
    }

    #[test]
    fn separated_waits_do_not_add_up() {
        let listeners: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let mut liveness = liveness_of(listeners.iter().map(address).collect());
        let begun = Instant::now();
        for times in 0..9 {
            liveness.watch(3, begun + times * (WAIT_GAP + MOMENT));
        }
        assert_eq!(connected(&liveness), [false, true, false, false]);
    }
}
