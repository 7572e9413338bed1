//! Noticing that a peer's process is gone: a connection to its listener over which nothing is sent. The kernel ends it
//! with the process, whatever the wire's own connections do.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::{CLOSED, Credential, Purpose, TcpAddress};
use super::dial::{Dial, SILENT, is_closed, is_host_silent};
use super::sideband::Sideband;
use crate::net::known_hosts;
use crate::net::wire::{Broken, DRAIN_GRACE};

/// A peer that keeps this rank waiting so long is watched.
const WATCH_AFTER: Duration = Duration::from_millis(200);
/// Peers that are waited for at intervals longer than this are waited for anew.
const WAIT_GAP: Duration = Duration::from_millis(100);
/// Where no connection could be made, another is tried after this time.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// What a rank sent before it closed its end of the group is on its way, and it has waited for that itself.
const CLOSE_GRACE: Duration = Duration::from_secs(5);
/// Ranks that are watched because they keep this one waiting; besides, as many that follow it are, so that everyone who
/// is waited for is watched by somebody. Who notices tells the others.
pub(super) const MAX_WATCHED: usize = 64;
/// Ranks that are asked, one after the other, whether connections can be made at all: the first of them may be the dead.
const MAX_PROBED: usize = 8;

/// What is known of a peer's process.
enum PeerLiveness {
    /// Since when this rank waits for it, and when that was last said.
    Awaited {
        since: Instant,
        last: Instant,
    },
    /// Connected, or about to be.
    Connected(LivenessConnection),
    /// Another connection is tried later.
    Unknown(Instant),
    /// Gone, from when on, and why.
    Lost(Instant, String),
    Unwatched,
}

/// All that one rank of a group watches.
pub(crate) struct ProcessLiveness {
    sideband: Arc<Sideband>,
    peers: Vec<PeerLiveness>,
    connected: usize,
    /// A connection was made: so a refused one means that nobody is there. A network may refuse all of them.
    reachable: bool,
    /// Ranks after this one that were asked for that.
    probed: usize,
}

/// One connection.
pub(super) struct LivenessConnection(Dial);

/// What a look at it found.
pub(super) enum LivenessEvent {
    Alive,
    /// The group is closed there, in good order.
    Closed,
    Ended(io::Error),
}

impl LivenessConnection {
    /// Nobody being there is found within `peer_timeout`.
    pub(super) fn connect(
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
    pub(crate) fn new(sideband: Arc<Sideband>) -> Self {
        let peers = (0..sideband.size()).map(|_| PeerLiveness::Unwatched).collect();
        Self { sideband, peers, connected: 0, reachable: false, probed: 0 }
    }

    /// This rank waits for that peer.
    pub(crate) fn watch(&mut self, peer: usize, now: Instant) {
        let (me, size) = (self.sideband.me, self.peers.len());
        if !self.reachable && self.connected == 0 {
            // Shows whether connections can be made here at all, at first while all is well.
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
            Ok(watch) => {
                self.connected += 1;
                PeerLiveness::Connected(watch)
            }
            Err(error) => self.connect_failed(peer, &error, now),
        };
    }

    /// No connection came about.
    fn connect_failed(&self, peer: usize, error: &io::Error, now: Instant) -> PeerLiveness {
        let host_seen =
            || self.sideband.address(peer).is_some_and(|to| known_hosts::contains(to.socket.ip()));
        if error.kind() == io::ErrorKind::ConnectionRefused && (self.reachable || host_seen()) {
            return PeerLiveness::Lost(now + DRAIN_GRACE, "its process listens no more".to_owned());
        }
        if is_host_silent(error) && host_seen() {
            return PeerLiveness::Lost(now, SILENT.to_owned());
        }
        PeerLiveness::Unknown(now)
    }

    /// Looks at all connections.
    pub(crate) fn check(&mut self, now: Instant) {
        if self.connected == 0 {
            return;
        }
        let was_reachable = self.reachable;
        for peer in 0..self.peers.len() {
            let PeerLiveness::Connected(watch) = &mut self.peers[peer] else { continue };
            let (found, connected, host_accepted) =
                (watch.poll(), watch.0.connected(), watch.0.host_accepted());
            self.reachable |= host_accepted;
            let state = match found {
                LivenessEvent::Alive => continue,
                LivenessEvent::Closed => {
                    PeerLiveness::Lost(now + CLOSE_GRACE, "it closed its end of the group".to_owned())
                }
                LivenessEvent::Ended(error) if connected => {
                    PeerLiveness::Lost(now + DRAIN_GRACE, reason(&error))
                }
                // It hung up in the handshake: too many strangers, or its end, which the next call shows.
                LivenessEvent::Ended(_) if host_accepted => {
                    PeerLiveness::Unknown(now.checked_sub(RETRY_INTERVAL - WAIT_GAP).unwrap_or(now))
                }
                LivenessEvent::Ended(error) => self.connect_failed(peer, &error, now),
            };
            self.peers[peer] = state;
            self.connected -= 1;
        }
        if self.reachable && !was_reachable {
            // Who refused a connection before that means more now: it is called again at once.
            let long_ago = now.checked_sub(RETRY_INTERVAL).unwrap_or(now);
            let unknown = self.peers.iter_mut().filter(|peer| matches!(peer, PeerLiveness::Unknown(_)));
            unknown.for_each(|peer| *peer = PeerLiveness::Unknown(long_ago));
        }
    }

    /// Peers whose processes are gone, and all that they sent has had its time; the first to go first.
    pub(crate) fn broken(&self, now: Instant) -> Vec<Broken> {
        let lost = |(peer, known): (usize, &PeerLiveness)| match known {
            PeerLiveness::Lost(at, reason) if *at <= now => {
                Some((*at, Broken { peer, reason: reason.clone() }))
            }
            _ => None,
        };
        let mut lost: Vec<_> = self.peers.iter().enumerate().filter_map(lost).collect();
        lost.sort_by_key(|(at, _)| *at);
        lost.into_iter().map(|(_, broken)| broken).collect()
    }

    /// Descriptors that end a sleep.
    pub(crate) fn interest(&self, fds: &mut Vec<(RawFd, i16)>) {
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

/// Whether that peer follows this rank so closely that it is watched however many are.
pub(super) fn is_close_successor(me: usize, peer: usize, size: usize) -> bool {
    (peer + size - me) % size <= MAX_WATCHED
}

fn reason(error: &io::Error) -> String {
    // With the process, the kernel closes its connections: in order, or not if something was left unread.
    if is_host_silent(error) { SILENT.to_owned() } else { "its process ended".to_owned() }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::fuzzing::feed::{accept_peer, accept_proof, credential, known_token};
    use crate::interface::{AddressFamily, InterfaceFilter};
    use crate::net::tcp::TcpEndpoint;
    use crate::process::Endpoint;

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
        TcpAddress { socket: listener.local_addr().unwrap(), group_listener: crate::process::random() }
    }

    /// Rank 0 of a group whose others are at these addresses.
    fn watches(others: Vec<TcpAddress>) -> ProcessLiveness {
        let group_listener = endpoint().group_listener(0, 1 + others.len());
        group_listener.trust(&known_token());
        let addresses = std::iter::once(None).chain(others.into_iter().map(Some));
        ProcessLiveness::new(Arc::new(Sideband::new(0, group_listener, addresses).unwrap()))
    }

    /// The shortest time there is.
    const MOMENT: Duration = Duration::from_nanos(1);

    /// Waits for that peer, as a rank in a collective does, and at that time goes on to, until `over`.
    fn wait(
        watches: &mut ProcessLiveness,
        peer: usize,
        now: Instant,
        over: impl Fn(&ProcessLiveness) -> bool,
    ) {
        let begun = Instant::now();
        while !over(watches) {
            assert!(begun.elapsed() < DEADLINE, "nothing was noticed");
            watches.watch(peer, now);
            watches.check(now);
            let mut fds = Vec::new();
            watches.interest(&mut fds);
            std::thread::yield_now();
        }
    }

    /// Waits for that peer for so long from that time on that it is watched; the time that it is then.
    fn wait_long(watches: &mut ProcessLiveness, peer: usize, from: Instant) -> Instant {
        for waited in [Duration::ZERO, WAIT_GAP, WATCH_AFTER] {
            watches.watch(peer, from + waited);
        }
        from + WATCH_AFTER
    }

    fn is_dead(watches: &ProcessLiveness, peer: usize) -> bool {
        matches!(watches.peers[peer], PeerLiveness::Lost(..))
    }

    #[test]
    fn a_process_that_ends_without_a_word_is_told_once_what_it_sent_has_had_its_time_and_no_moment_earlier() {
        let (listener, now) = (TcpListener::bind("127.0.0.1:0").unwrap(), Instant::now());
        let mut watches = watches(vec![address(&listener)]);
        let theirs = std::thread::scope(|scope| {
            let answering = scope.spawn(|| accept_peer(listener.accept().unwrap().0));
            let connected = |w: &ProcessLiveness| matches!(&w.peers[1], PeerLiveness::Connected(LivenessConnection(dial)) if dial.connected());
            wait(&mut watches, 1, now, connected);
            answering.join().unwrap()
        });
        drop((theirs, listener));
        wait(&mut watches, 1, now, |w| is_dead(w, 1));
        assert_eq!(watches.broken(now + DRAIN_GRACE - MOMENT), vec![]);
        let broken = Broken { peer: 1, reason: "its process ended".to_owned() };
        assert_eq!(watches.broken(now + DRAIN_GRACE), [broken]);
    }

    #[test]
    fn who_was_hung_up_on_before_its_first_word_has_seen_no_death() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut watch =
            LivenessConnection::connect(&credential(0), (1, &address(&listener)), DEADLINE).unwrap();
        drop(listener.accept().unwrap());
        assert!(matches!(watch.poll(), LivenessEvent::Ended(_)));
        assert!(!watch.0.connected());
    }

    #[test]
    fn who_was_hung_up_on_after_its_last_word_has_seen_no_death() {
        let (listener, now) = (TcpListener::bind("127.0.0.1:0").unwrap(), Instant::now());
        let mut watches = watches(vec![address(&listener)]);
        std::thread::scope(|scope| {
            let answering = scope.spawn(|| drop(accept_proof(listener.accept().unwrap().0)));
            wait(&mut watches, 1, now, |w| matches!(w.peers[1], PeerLiveness::Unknown(_)));
            answering.join().unwrap();
        });
        assert_eq!(watches.broken(now + DEADLINE), vec![]);
    }

    /// Two ranks, of which the first or the second is gone.
    fn two_of_whom_one_is_gone(lost: usize) -> (TcpListener, ProcessLiveness) {
        let mut listeners: Vec<_> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses = listeners.iter().map(address).collect();
        drop(listeners.remove(lost - 1));
        (listeners.remove(0), watches(addresses))
    }

    #[test]
    fn a_listener_that_is_gone_means_a_process_that_is_gone_where_connections_can_be_made_whichever_it_is() {
        for lost in [1, 2] {
            let (_other, mut watches) = two_of_whom_one_is_gone(lost);
            let now = wait_long(&mut watches, lost, Instant::now());
            // It is not left alone for a while, though it was perhaps called before anybody else was reached.
            wait(&mut watches, lost, now, |w| is_dead(w, lost));
            assert_eq!(watches.broken(now + DRAIN_GRACE)[0].peer, lost);
        }
    }

    #[test]
    fn where_no_connection_can_be_made_nobody_is_gone_and_another_is_tried_after_its_time_and_no_moment_earlier()
     {
        // A host of its own: one that has answered this process before would be gone.
        let (only, now) = (TcpListener::bind("127.77.0.2:0").unwrap(), Instant::now());
        let addresses = vec![address(&only)];
        drop(only);
        let mut refused = watches(addresses);
        let unknown = |w: &ProcessLiveness| matches!(w.peers[1], PeerLiveness::Unknown(at) if at == now);
        wait(&mut refused, 1, now, unknown);
        refused.watch(1, now + RETRY_INTERVAL - MOMENT);
        assert!(unknown(&refused), "it is called too soon");
        refused.watch(1, now + RETRY_INTERVAL);
        assert!(!unknown(&refused), "it is not called again");
        assert_eq!(refused.broken(now + DEADLINE), vec![]);
    }

    #[test]
    fn a_host_that_answers_no_call_is_gone_where_it_has_answered_one_before_and_perhaps_out_of_reach_else() {
        let host = "127.77.0.1".parse().unwrap();
        let address = TcpAddress { socket: (host, 9).into(), group_listener: crate::process::random() };
        let (watches, now) = (watches(vec![address]), Instant::now());
        let silence = io::Error::from(io::ErrorKind::TimedOut);
        assert!(matches!(watches.connect_failed(1, &silence, now), PeerLiveness::Unknown(_)));
        known_hosts::record(host);
        assert!(
            matches!(watches.connect_failed(1, &silence, now), PeerLiveness::Lost(at, reason) if at == now && reason == SILENT)
        );
        // What this process lacks says nothing of the host.
        let lacks = io::Error::from(io::ErrorKind::OutOfMemory);
        assert!(matches!(watches.connect_failed(1, &lacks, now), PeerLiveness::Unknown(_)));
    }

    #[test]
    fn an_end_that_is_closed_in_good_order_is_no_death_before_its_last_words_have_had_their_time() {
        let (theirs, now) = (endpoint().group_listener(1, 2), Instant::now());
        theirs.trust(&known_token());
        let mut watches = watches(vec![theirs.address.clone()]);
        wait(&mut watches, 1, now, |w| w.reachable);
        drop(theirs);
        wait(&mut watches, 1, now, |w| is_dead(w, 1));
        assert_eq!(watches.broken(now + CLOSE_GRACE - MOMENT), vec![]);
        let broken = Broken { peer: 1, reason: "it closed its end of the group".to_owned() };
        assert_eq!(watches.broken(now + CLOSE_GRACE), [broken]);
    }

    fn connected(watches: &ProcessLiveness) -> Vec<bool> {
        watches.peers.iter().map(|peer| matches!(peer, PeerLiveness::Connected(_))).collect()
    }

    #[test]
    fn nobody_is_watched_who_keeps_nobody_waiting_so_long_except_the_next_rank() {
        let listeners: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let mut watches = watches(listeners.iter().map(address).collect());
        let begun = Instant::now();
        for waited in [Duration::ZERO, WAIT_GAP, WATCH_AFTER - MOMENT] {
            watches.watch(3, begun + waited);
            watches.check(begun + waited);
            assert_eq!(connected(&watches), [false, true, false, false], "{waited:?}");
        }
        watches.watch(3, begun + WATCH_AFTER);
        assert_eq!(connected(&watches), [false, true, false, true]);
    }

    #[test]
    fn who_is_waited_for_now_and_then_is_waited_for_anew_each_time() {
        let listeners: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let mut watches = watches(listeners.iter().map(address).collect());
        let begun = Instant::now();
        for times in 0..9 {
            watches.watch(3, begun + times * (WAIT_GAP + MOMENT));
        }
        assert_eq!(connected(&watches), [false, true, false, false]);
    }
}
