//! Incoming connections of one listener, from accept to reply. A connection receives nothing until it has proved that
//! it has the token of a group of this process. All operations are non-blocking, because one thread serves all
//! connections.

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::SocketFlags;
use smddp_base::CloseOnFork;
use smddp_base::warning::warn;
use smddp_net::handshake::{Greeting, HandshakeEnd, Responder, is_unauthenticated};
use smddp_net::socket_io::{exchange, send, would_block};
use smddp_net::token::Token;

use super::deferred_answer::send_answer;

/// Time limit of a connection. A rank that was stopped meanwhile connects again.
const INCOMING_LIMIT: Duration = Duration::from_secs(10);
/// Maximum connections at a time; further ones wait in the listener's backlog.
const MAX_INCOMING: usize = 256;
/// Time after which an unauthenticated connection may be closed if [`MAX_INCOMING`] is reached.
const SILENCE_LIMIT: Duration = Duration::from_secs(1);
/// Maximum bytes of a query without a service's own limit.
const MAX_QUERY_BYTES: usize = 64;
/// Bytes of a query that one read receives.
const QUERY_PART: usize = 4096;
/// Pause of accept after an error such as a descriptor limit, and the minimum interval between its log texts.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Service behind a listener.
pub trait IncomingHost: Send {
    /// Returns the first stage of a connection.
    fn first_stage(&self) -> Stage;
    /// Checks the peer before anything is read. An error is the reason to reject the connection.
    ///
    /// # Errors
    /// Reason to reject the connection.
    fn check_allowed(&self, _socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }
    /// Returns the token that the sender of this greeting has to prove; `None` closes the connection.
    fn token(&self, _greeting: &Greeting) -> Option<Arc<Token>> {
        None
    }
    /// Describes the peer for a log.
    fn name(&self, socket: BorrowedFd<'_>) -> String;
    /// Handles an authenticated connection. Returns it with its next stage, or `None` if it was closed or moved. A
    /// returned connection is closed after its last stage.
    fn accept(
        &self,
        _socket: CloseOnFork<OwnedFd>,
        _handshake: &Responder,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)> {
        None
    }
    /// Answers a query that needs no token. Returns `None` while the query is incomplete.
    ///
    /// # Errors
    /// The query is invalid; the connection is closed.
    fn answer(&self, _query: &[u8]) -> io::Result<Option<String>> {
        Ok(None)
    }
    /// Returns the function that computes the answer to a complete query, on a short-lived thread. `None`: the query is
    /// incomplete, or [`IncomingHost::answer`] answers it.
    fn deferred_answer(&self, _query: &[u8]) -> Option<fn() -> String> {
        None
    }
    /// Returns the maximum bytes of a query that needs no token.
    fn max_query_bytes(&self) -> usize {
        MAX_QUERY_BYTES
    }
    /// Returns false once the listener is no longer needed.
    fn open(&self) -> bool {
        true
    }
    /// Describes the effect of a resource error on incoming connections, for a log.
    fn resource_error(&self, error: &io::Error) -> String;
}

/// Function that takes received bytes of a message, and returns the reply once the message is complete.
pub type MessageReceiver = Box<dyn FnMut(&[u8]) -> io::Result<Option<Vec<u8>>> + Send>;

/// Stage of an incoming connection.
pub enum Stage {
    /// The peer proves that it has a token.
    Handshake(Box<Responder>),
    /// Receives a query that needs no token, because the service only returns status text, and the kernel identifies the
    /// peer.
    Query(Vec<u8>),
    /// Receives a message of an authenticated peer. The function takes the received bytes and returns the reply once the
    /// message is complete; an error closes the connection.
    Message(MessageReceiver),
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

/// Maps a blocked call to `None`.
fn unless_blocked(outcome: io::Result<usize>) -> io::Result<Option<usize>> {
    match outcome {
        Err(error) if would_block(&error) => Ok(None),
        outcome => outcome.map(Some),
    }
}

fn read(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<Option<usize>> {
    unless_blocked(rustix::io::read(socket, bytes).map_err(Into::into))
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
            let unknown = |c: &Incoming| matches!(c.stage, Stage::Handshake(_) | Stage::Query(_));
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
            let sends = match &connection.stage {
                Stage::Handshake(handshake) => !handshake.output().is_empty(),
                stage => matches!(stage, Stage::Reply(_)),
            };
            PollFd::from_borrowed_fd(
                connection.socket.as_fd(),
                if sends { PollFlags::OUT } else { PollFlags::IN },
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
        let stage = self.host.first_stage();
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
                Stage::Handshake(handshake) => {
                    match exchange(&*connection.socket, &mut **handshake) {
                        Ok(true) => {}
                        Ok(false) => return self.keep(connection, now),
                        Err(error) if is_unauthenticated(&error) => {
                            return self.log_rejection(connection.socket.as_fd(), &error.to_string());
                        }
                        Err(_) => return,
                    }
                    if handshake.is_authenticated() {
                        let accepted = self.host.accept(connection.socket, handshake);
                        let Some((socket, stage)) = accepted else { return };
                        (connection.socket, connection.stage) = (socket, stage);
                        continue;
                    }
                    let token = handshake.greeting().and_then(|greeting| self.host.token(&greeting));
                    if token.is_none_or(|token| handshake.answer(token).is_err()) {
                        return;
                    }
                }
                Stage::Query(query) => {
                    let mut more = [0; QUERY_PART];
                    let room = self.host.max_query_bytes().saturating_sub(query.len()).min(QUERY_PART);
                    match read(&*connection.socket, &mut more[..room]) {
                        Ok(None) => return self.keep(connection, now),
                        Ok(Some(bytes @ 1..)) => query.extend(&more[..bytes]),
                        _ => return,
                    }
                    if let Some(answer) = self.host.deferred_answer(query) {
                        return send_answer(connection.socket, answer);
                    }
                    match self.host.answer(query) {
                        Ok(None) => {}
                        Ok(Some(text)) => connection.stage = Stage::Reply(text.into_bytes()),
                        Err(error) => {
                            return self.log_rejection(connection.socket.as_fd(), &error.to_string());
                        }
                    }
                }
                Stage::Message(receive) => {
                    let mut more = [0; QUERY_PART];
                    let outcome = match read(&*connection.socket, &mut more) {
                        Ok(None) => return self.keep(connection, now),
                        Ok(Some(bytes @ 1..)) => receive(&more[..bytes]),
                        _ => return,
                    };
                    match outcome {
                        Ok(None) => {}
                        Ok(Some(reply)) => connection.stage = Stage::Reply(reply),
                        Err(_) => return,
                    }
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
                    match read(&*connection.socket, &mut [0]) {
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
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use smddp_net::handshake::Listener;

    use super::*;

    /// Smallest time difference.
    const TICK: Duration = Duration::from_nanos(1);

    struct RejectAll;

    impl IncomingHost for RejectAll {
        fn first_stage(&self) -> Stage {
            Stage::Handshake(Box::new(Responder::new(Listener::Process)))
        }
        fn name(&self, _: BorrowedFd<'_>) -> String {
            String::new()
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

    /// Answers queries of three bytes with their numbers.
    struct Numbers;

    impl IncomingHost for Numbers {
        fn first_stage(&self) -> Stage {
            Stage::Query(Vec::new())
        }
        fn name(&self, _: BorrowedFd<'_>) -> String {
            String::new()
        }
        fn answer(&self, query: &[u8]) -> io::Result<Option<String>> {
            Ok((query.len() == 3).then(|| format!("{query:?}")))
        }
        fn resource_error(&self, error: &io::Error) -> String {
            error.to_string()
        }
    }

    #[test]
    fn query_that_arrives_in_parts_is_answered() {
        let listener = CloseOnFork::new(File::open("/dev/null").unwrap().into());
        let (mut connections, now) = (IncomingConnections::new(listener, Numbers), Instant::now());
        let mut peer = connect(&mut connections, now);
        for byte in [7, 8, 9] {
            peer.write_all(&[byte]).unwrap();
            connections.serve_ready([false, true].into_iter(), now);
        }
        let mut reply = String::new();
        peer.read_to_string(&mut reply).unwrap();
        assert_eq!(reply, "[7, 8, 9]");
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
