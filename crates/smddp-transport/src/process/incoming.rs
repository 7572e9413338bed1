//! Incoming connections of one listener, from accept to reply. A connection receives nothing until it has proved that
//! it knows the token of a group of this process. All operations are non-blocking, because one thread serves all
//! connections.

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::SocketFlags;

use crate::CloseOnFork;
use crate::socket_io::send;
use crate::token::{PROOF, Responder, Token};
use crate::warning::warn;

/// Time limit of a connection. A rank that was stopped meanwhile connects again.
const INCOMING_LIMIT: Duration = Duration::from_secs(10);
/// Maximum connections at a time; further ones wait in the listener's backlog.
const MAX_INCOMING: usize = 256;
/// Time after which an unauthenticated connection may be closed if [`MAX_INCOMING`] is reached.
const SILENCE_LIMIT: Duration = Duration::from_secs(1);
/// Pause of accept after an error such as a descriptor limit, and the minimum interval between its log texts.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Service behind a listener.
pub(crate) trait IncomingHost: Send {
    /// Bytes of a greeting.
    fn greeting_bytes(&self) -> usize;
    /// Checks the peer before anything is read. An error is the reason to reject the connection.
    fn check_allowed(&self, _socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }
    /// Returns true if the received bytes may begin a greeting. Otherwise the connection is rejected before its greeting is complete.
    fn is_greeting(&self, _greeting: &[u8]) -> bool {
        true
    }
    /// Returns the token that the sender of this greeting has to prove; `None` closes the connection.
    fn token(&self, greeting: &[u8]) -> Option<Arc<Token>>;
    /// Returns true if allowed peers need no token: the service only returns status text, and the kernel identifies
    /// the peer.
    fn is_public(&self) -> bool {
        false
    }
    /// Describes the peer for a log.
    fn name(&self, socket: BorrowedFd<'_>) -> String;
    /// Handles an authenticated greeting. Returns the connection and its next stage, or `None` if it was closed or
    /// moved. A returned connection is closed after its last stage. `proof`: the verified challenge, if a token was
    /// required.
    fn accept(
        &self,
        socket: CloseOnFork<OwnedFd>,
        greeting: &[u8],
        proof: Option<&Responder>,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)>;
    /// Returns false once the listener is no longer needed.
    fn open(&self) -> bool {
        true
    }
    /// Describes the effect of a resource error on incoming connections, for a log.
    fn resource_error(&self, error: &io::Error) -> String;
}

pub(crate) enum Stage {
    /// Receives the greeting: sender, target and request.
    Greeting(Vec<u8>),
    /// Receives the proof of the token; the received bytes.
    Proof(Box<Responder>, Vec<u8>),
    /// Sends the rest of a reply for which the socket had no room.
    Reply(Vec<u8>),
    /// The peer has this process's memory and opens a pidfd of this process. Then it closes the connection, or sends
    /// one byte if that failed: then the connection is retained, and its end reports this process's end to the peer.
    Linger,
}

struct Incoming {
    socket: CloseOnFork<OwnedFd>,
    since: Instant,
    stage: Stage,
}

/// Incoming connections of one listener.
pub(crate) struct IncomingConnections {
    pub(super) host: Box<dyn IncomingHost>,
    listener: CloseOnFork<OwnedFd>,
    active: Vec<Incoming>,
    /// Connections that their peers asked to retain.
    retained: Vec<CloseOnFork<OwnedFd>>,
    /// No connection is accepted before.
    paused_until: Option<Instant>,
    reported_at: Option<Instant>,
    /// A rejected connection was logged.
    rejection_logged: bool,
}

/// Maps a blocked or interrupted call to `None`.
fn unless_blocked(outcome: io::Result<usize>) -> io::Result<Option<usize>> {
    match outcome {
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        outcome => outcome.map(Some),
    }
}

/// Reads more of a message of `all` bytes. Returns the number of bytes read, or `None` if the socket has no data.
fn read_more(socket: impl AsFd, buffer: &mut Vec<u8>, all: usize) -> io::Result<Option<usize>> {
    let got = buffer.len();
    buffer.resize(all, 0);
    let read = unless_blocked(rustix::io::read(socket, &mut buffer[got..]).map_err(Into::into));
    buffer.truncate(got + *read.as_ref().ok().and_then(Option::as_ref).unwrap_or(&0));
    read
}

impl IncomingConnections {
    pub(crate) fn new(listener: CloseOnFork<OwnedFd>, host: impl IncomingHost + 'static) -> Self {
        Self {
            host: Box::new(host),
            listener,
            active: Vec::new(),
            retained: Vec::new(),
            paused_until: None,
            reported_at: None,
            rejection_logged: false,
        }
    }

    /// Returns true if another connection can be served, after closing an idle unauthenticated one if necessary.
    fn has_capacity(&mut self, now: Instant) -> bool {
        if self.active.len() >= MAX_INCOMING {
            let unknown = |c: &Incoming| matches!(c.stage, Stage::Greeting(_) | Stage::Proof(..));
            let silent = |c: &Incoming| unknown(c) && now.duration_since(c.since) >= SILENCE_LIMIT;
            // Ordered by arrival.
            if let Some(longest) = self.active.iter().position(silent) {
                self.active.remove(longest);
            }
        }
        self.active.len() < MAX_INCOMING
    }

    /// Returns the descriptors to poll: the listener, then each connection.
    pub(crate) fn fds(&mut self, now: Instant) -> impl Iterator<Item = PollFd<'_>> {
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
        }
        let open = self.paused_until.is_none() && self.has_capacity(now);
        let listens = if open { PollFlags::IN } else { PollFlags::empty() };
        let connections = self.active.iter().map(|connection| {
            let waits = matches!(connection.stage, Stage::Reply(_));
            PollFd::from_borrowed_fd(
                connection.socket.as_fd(),
                if waits { PollFlags::OUT } else { PollFlags::IN },
            )
        });
        std::iter::once(PollFd::from_borrowed_fd(self.listener.as_fd(), listens)).chain(connections)
    }

    /// Returns the time after which `serve_ready` has to be called even if no descriptor is ready.
    pub(crate) fn max_sleep(&self, now: Instant) -> Option<Duration> {
        let pause = self.paused_until.map(|until| until.saturating_duration_since(now));
        let wait = if self.active.len() < MAX_INCOMING { SILENCE_LIMIT } else { SILENCE_LIMIT / 10 };
        pause.into_iter().chain((!self.active.is_empty()).then_some(wait)).min()
    }

    /// Serves the ready connections, in the order of [`IncomingConnections::fds`], and closes the expired ones.
    pub(crate) fn serve_ready(&mut self, mut ready: impl Iterator<Item = bool>, now: Instant) {
        let listens = ready.next() == Some(true);
        for connection in std::mem::take(&mut self.active) {
            match ready.next() == Some(true) {
                true => self.serve(connection, now),
                false => self.keep(connection, now),
            }
        }
        if listens {
            self.accept_all(now);
        }
    }

    fn accept_all(&mut self, now: Instant) {
        while self.has_capacity(now) {
            match rustix::net::accept_with(&*self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => self.add(socket, now),
                Err(error) => {
                    let error = io::Error::from(error);
                    match error.kind() {
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted => continue,
                        ErrorKind::WouldBlock => {}
                        // Most likely the descriptor limit. The connection remains in the backlog, which would wake
                        // this thread again and again.
                        _ => self.pause(&error, now),
                    }
                    return;
                }
            }
        }
    }

    fn pause(&mut self, error: &io::Error, now: Instant) {
        self.paused_until = Some(now + ACCEPT_PAUSE);
        if self.reported_at.is_none_or(|at| now - at > REPORT_INTERVAL) {
            self.reported_at = Some(now);
            warn(&self.host.resource_error(error));
        }
    }

    /// Adds a connection with a non-blocking socket.
    pub(crate) fn add(&mut self, socket: OwnedFd, now: Instant) {
        if let Err(error) = self.host.check_allowed(socket.as_fd()) {
            return self.log_rejection(socket.as_fd(), &error.to_string());
        }
        let stage = Stage::Greeting(Vec::new());
        self.serve(Incoming { socket: CloseOnFork::new(socket), since: now, stage }, now);
    }

    /// Logs the first rejected connection: repeated ones must not fill the log.
    fn log_rejection(&mut self, socket: BorrowedFd<'_>, reason: &str) {
        if !std::mem::replace(&mut self.rejection_logged, true) {
            warn(&format!(
                "rejected a connection to process {} from {}: {reason}. The job continues; further rejected connections are not \
                 logged (docs/security.md)",
                std::process::id(),
                self.host.name(socket),
            ));
        }
    }

    fn keep(&mut self, connection: Incoming, now: Instant) {
        if now.duration_since(connection.since) < INCOMING_LIMIT {
            self.active.push(connection);
        }
    }

    /// Advances a connection until it would block. Errors close the connection; the peer reports them.
    fn serve(&mut self, mut connection: Incoming, now: Instant) {
        loop {
            match &mut connection.stage {
                Stage::Greeting(greeting) => {
                    let all = self.host.greeting_bytes();
                    match read_more(&*connection.socket, greeting, all) {
                        Ok(None) => return self.keep(connection, now),
                        Ok(Some(1..)) if self.host.is_greeting(greeting) => {}
                        Ok(Some(1..)) => {
                            return self.log_rejection(
                                connection.socket.as_fd(),
                                "it uses another protocol or another version of smddp",
                            );
                        }
                        _ => return,
                    }
                    if greeting.len() == all {
                        let greeting = std::mem::take(greeting);
                        if self.host.is_public() {
                            let Some((socket, stage)) = self.host.accept(connection.socket, &greeting, None)
                            else {
                                return;
                            };
                            (connection.socket, connection.stage) = (socket, stage);
                            continue;
                        }
                        let challenge =
                            self.host.token(&greeting).map(|token| Responder::new(token, greeting));
                        let Some(Ok((challenge, reply))) = challenge else { return };
                        // The reply fits in the empty send buffer.
                        if !matches!(send(&*connection.socket, &[IoSlice::new(&reply)]), Ok(sent) if sent == reply.len())
                        {
                            return;
                        }
                        connection.stage = Stage::Proof(Box::new(challenge), Vec::new());
                    }
                }
                Stage::Proof(challenge, proof) => {
                    match read_more(&*connection.socket, proof, PROOF) {
                        Ok(None) => return self.keep(connection, now),
                        Ok(Some(1..)) => {}
                        _ => return,
                    }
                    if proof.len() < PROOF {
                        continue;
                    }
                    if !challenge.verifies_proof(proof) {
                        return self.log_rejection(
                            connection.socket.as_fd(),
                            "it does not know the token of this group",
                        );
                    }
                    let accepted = self.host.accept(connection.socket, challenge.greeting(), Some(challenge));
                    let Some((socket, stage)) = accepted else { return };
                    (connection.socket, connection.stage) = (socket, stage);
                }
                Stage::Reply(bytes) if bytes.is_empty() => return,
                Stage::Reply(bytes) => {
                    match unless_blocked(send(&*connection.socket, &[IoSlice::new(bytes)])) {
                        Ok(Some(sent)) => drop(bytes.drain(..sent)),
                        Ok(None) => return self.keep(connection, now),
                        Err(_) => return,
                    }
                }
                Stage::Linger => {
                    match unless_blocked(rustix::io::read(&*connection.socket, &mut [0]).map_err(Into::into))
                    {
                        Ok(None) => self.keep(connection, now),
                        Ok(Some(1)) => self.retained.push(connection.socket),
                        _ => {}
                    }
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Smallest time difference.
    const TICK: Duration = Duration::from_nanos(1);

    struct RejectAll;

    impl IncomingHost for RejectAll {
        fn greeting_bytes(&self) -> usize {
            8
        }
        fn token(&self, _: &[u8]) -> Option<Arc<Token>> {
            None
        }
        fn name(&self, _: BorrowedFd<'_>) -> String {
            String::new()
        }
        fn accept(
            &self,
            _: CloseOnFork<OwnedFd>,
            _: &[u8],
            _: Option<&Responder>,
        ) -> Option<(CloseOnFork<OwnedFd>, Stage)> {
            None
        }
        fn resource_error(&self, error: &io::Error) -> String {
            error.to_string()
        }
    }

    /// Incoming connections of a listener that rejects all.
    fn connections() -> IncomingConnections {
        IncomingConnections::new(CloseOnFork::new(File::open("/dev/null").unwrap().into()), RejectAll)
    }

    /// Adds a connection that sends nothing.
    fn connect(connections: &mut IncomingConnections, now: Instant) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        connections.add(ours.into(), now);
        theirs
    }

    fn is_closed(mut peer: &UnixStream) -> bool {
        matches!(peer.read(&mut [0]), Ok(0))
    }

    #[test]
    fn idle_connection_is_closed_exactly_at_its_time_limit() {
        let (mut connections, now) = (connections(), Instant::now());
        let (first, later) = (connect(&mut connections, now), connect(&mut connections, now + TICK));
        connections.serve_ready([false; 3].into_iter(), now + INCOMING_LIMIT - TICK);
        assert!(!is_closed(&first));
        connections.serve_ready([false; 3].into_iter(), now + INCOMING_LIMIT);
        assert_eq!([&first, &later].map(is_closed), [true, false]);
    }

    #[test]
    fn full_list_closes_one_silent_connection_exactly_at_the_silence_limit() {
        let (mut connections, now) = (connections(), Instant::now());
        let first = connect(&mut connections, now);
        let others: Vec<_> = (1..MAX_INCOMING).map(|_| connect(&mut connections, now + TICK)).collect();
        assert_eq!(connections.fds(now + SILENCE_LIMIT - TICK).count(), 1 + MAX_INCOMING);
        assert!(!is_closed(&first));
        // A second call closes no further connection.
        for _ in 0..2 {
            assert_eq!(connections.fds(now + 2 * SILENCE_LIMIT).count(), MAX_INCOMING);
        }
        assert!(is_closed(&first) && !others.iter().any(is_closed));
    }

    #[test]
    fn accept_errors_pause_the_listener_and_are_logged_at_intervals() {
        let (mut connections, begun) = (connections(), Instant::now());
        let mut reported_after = |waited: Duration| {
            let now = begun + waited;
            connections.serve_ready([true].into_iter(), now);
            assert_eq!(connections.max_sleep(now), Some(ACCEPT_PAUSE));
            // A connection in the backlog does not wake the thread before the pause ends.
            let _ = connections.fds(now + ACCEPT_PAUSE - TICK);
            assert_eq!(connections.max_sleep(now + ACCEPT_PAUSE - TICK), Some(TICK));
            let _ = connections.fds(now + ACCEPT_PAUSE);
            assert_eq!(connections.max_sleep(now + ACCEPT_PAUSE), None);
            connections.reported_at
        };
        assert_eq!(reported_after(Duration::ZERO), Some(begun));
        assert_eq!(reported_after(REPORT_INTERVAL), Some(begun));
        assert_eq!(reported_after(REPORT_INTERVAL + TICK), Some(begun + REPORT_INTERVAL + TICK));
    }
}
