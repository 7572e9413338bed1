//! Callers at one of this process's listeners, from the connection until each has what it wants: nothing before it has shown
//! that it has the token of a group of this process. Nobody is waited for: the thread that serves them also notices deaths.

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::SocketFlags;

use crate::close_on_fork::CloseOnFork;
use crate::socket_io::send;
use crate::token::{PROOF, Responder, Token};
use crate::warning::warn;

/// Whoever has not got on after this time is hung up on. A rank that was stopped meanwhile calls again.
const STAGE_LIMIT: Duration = Duration::from_secs(10);
/// So many are served at once; the others wait in the listener's queue.
const MAX_INCOMING: usize = 256;
/// Where nobody else could come in, a caller that has said nothing for so long makes room.
const SILENCE_LIMIT: Duration = Duration::from_secs(1);
/// Callers wait so long for a process that cannot take them in, and the reason is told this often at most.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Whom callers find at a listener, and what they get.
pub(crate) trait IncomingHost: Send {
    /// Bytes of a caller's first words.
    fn greeting_bytes(&self) -> usize;
    /// Checks who has connected, before anything is read; an error is the reason to reject the connection.
    fn check_allowed(&self, _caller: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }
    /// Whether these may be the first of such words: whoever speaks something else need not say all of it.
    fn is_greeting(&self, _words: &[u8]) -> bool {
        true
    }
    /// The token of which whoever says these has to show that he has it; `None`: there is nothing for him here.
    fn token(&self, words: &[u8]) -> Option<Arc<Token>>;
    /// Whether whoever is admitted needs no token: what callers get here is only told, and whom to is looked at by the kernel.
    fn is_public(&self) -> bool {
        false
    }
    /// Who has connected, as far as a log can tell.
    fn name(&self, caller: BorrowedFd<'_>) -> String;
    /// What comes of the words of a caller that has; a connection that comes back is hung up on after its last stage. `rejection_logged`: what
    /// the caller was asked to show, where it was.
    fn accept(
        &self,
        caller: CloseOnFork<OwnedFd>,
        words: &[u8],
        rejection_logged: Option<&Responder>,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)>;
    /// Whether anybody is still at home.
    fn open(&self) -> bool {
        true
    }
    /// What callers are in vain for while this process lacks something: "ranks of other nodes cannot be answered".
    fn resource_error(&self, error: &io::Error) -> String;
}

pub(crate) enum Stage {
    /// It says who it is, whom it means and what it wants.
    Greeting(Vec<u8>),
    /// And shows that it may; what it has said of that.
    Proof(Box<Responder>, Vec<u8>),
    /// The rest of an answer for which its socket had no room.
    Reply(Vec<u8>),
    /// It has this process's memory and looks the process up by its pid. Then it hangs up, or says that it cannot: its
    /// connection stays then, whose end tells it of this process's end.
    Linger,
}

struct Incoming {
    socket: CloseOnFork<OwnedFd>,
    since: Instant,
    stage: Stage,
}

/// All of them at one listener.
pub(crate) struct IncomingConnections {
    pub(super) host: Box<dyn IncomingHost>,
    listener: CloseOnFork<OwnedFd>,
    active: Vec<Incoming>,
    /// Connections of those that asked to keep them.
    retained: Vec<CloseOnFork<OwnedFd>>,
    /// Nobody can be taken in before.
    paused_until: Option<Instant>,
    reported_at: Option<Instant>,
    /// A connection was rejected, and that was logged.
    rejection_logged: bool,
}

/// What a call on a socket came to; `None`: not now.
fn unless_blocked(outcome: io::Result<usize>) -> io::Result<Option<usize>> {
    match outcome {
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        outcome => outcome.map(Some),
    }
}

/// More of what a caller says, up to `all` bytes; how many, or `None`: not now.
fn read_more(socket: impl AsFd, heard: &mut Vec<u8>, all: usize) -> io::Result<Option<usize>> {
    let got = heard.len();
    heard.resize(all, 0);
    let read = unless_blocked(rustix::io::read(socket, &mut heard[got..]).map_err(Into::into));
    heard.truncate(got + *read.as_ref().ok().and_then(Option::as_ref).unwrap_or(&0));
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

    /// Whether one more can be served, if need be instead of one that says nothing.
    fn has_capacity(&mut self, now: Instant) -> bool {
        if self.active.len() >= MAX_INCOMING {
            let unknown = |c: &Incoming| matches!(c.stage, Stage::Greeting(_) | Stage::Proof(..));
            let silent = |c: &Incoming| unknown(c) && now.duration_since(c.since) >= SILENCE_LIMIT;
            // They are in the order in which they came.
            if let Some(longest) = self.active.iter().position(silent) {
                self.active.remove(longest);
            }
        }
        self.active.len() < MAX_INCOMING
    }

    /// What wakes the thread: the listener, and each caller.
    pub(crate) fn fds(&mut self, now: Instant) -> impl Iterator<Item = PollFd<'_>> {
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
        }
        let open = self.paused_until.is_none() && self.has_capacity(now);
        let listens = if open { PollFlags::IN } else { PollFlags::empty() };
        let callers = self.active.iter().map(|caller| {
            let waits = matches!(caller.stage, Stage::Reply(_));
            PollFd::from_borrowed_fd(
                caller.socket.as_fd(),
                if waits { PollFlags::OUT } else { PollFlags::IN },
            )
        });
        std::iter::once(PollFd::from_borrowed_fd(self.listener.as_fd(), listens)).chain(callers)
    }

    /// At the latest after this time there is something to do without a sign.
    pub(crate) fn max_sleep(&self, now: Instant) -> Option<Duration> {
        let pause = self.paused_until.map(|until| until.saturating_duration_since(now));
        let wait = if self.active.len() < MAX_INCOMING { SILENCE_LIMIT } else { SILENCE_LIMIT / 10 };
        pause.into_iter().chain((!self.active.is_empty()).then_some(wait)).min()
    }

    /// Serves those that are ready, in the order of [`IncomingConnections::fds`], and hangs up on those whose time is up.
    pub(crate) fn serve_ready(&mut self, mut ready: impl Iterator<Item = bool>, now: Instant) {
        let listens = ready.next() == Some(true);
        for caller in std::mem::take(&mut self.active) {
            match ready.next() == Some(true) {
                true => self.serve(caller, now),
                false => self.keep(caller, now),
            }
        }
        if listens {
            self.accept_all(now);
        }
    }

    fn accept_all(&mut self, now: Instant) {
        while self.has_capacity(now) {
            match rustix::net::accept_with(&*self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => self.admit(socket, now),
                Err(error) => {
                    let error = io::Error::from(error);
                    match error.kind() {
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted => continue,
                        ErrorKind::WouldBlock => {}
                        // Out of descriptors, most likely. The caller stays in the queue, which would wake this thread
                        // again and again.
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

    /// Somebody has connected, over a socket that does not block.
    pub(crate) fn admit(&mut self, socket: OwnedFd, now: Instant) {
        if let Err(error) = self.host.check_allowed(socket.as_fd()) {
            return self.log_rejection(socket.as_fd(), &error.to_string());
        }
        let stage = Stage::Greeting(Vec::new());
        self.serve(Incoming { socket: CloseOnFork::new(socket), since: now, stage }, now);
    }

    /// Logs the first rejected connection: repeated ones must not fill the log.
    fn log_rejection(&mut self, caller: BorrowedFd<'_>, reason: &str) {
        if !std::mem::replace(&mut self.rejection_logged, true) {
            warn(&format!(
                "rejected a connection to process {} from {}: {reason}. The job continues; further rejected connections are not \
                 logged (docs/security.md)",
                std::process::id(),
                self.host.name(caller),
            ));
        }
    }

    fn keep(&mut self, caller: Incoming, now: Instant) {
        if now.duration_since(caller.since) < STAGE_LIMIT {
            self.active.push(caller);
        }
    }

    /// Goes on with one as far as it goes without waiting. A caller that fails gets an error at its own end; it is no concern
    /// of this process.
    fn serve(&mut self, mut caller: Incoming, now: Instant) {
        loop {
            match &mut caller.stage {
                Stage::Greeting(words) => {
                    let all = self.host.greeting_bytes();
                    match read_more(&*caller.socket, words, all) {
                        Ok(None) => return self.keep(caller, now),
                        Ok(Some(1..)) if self.host.is_greeting(words) => {}
                        Ok(Some(1..)) => {
                            return self.log_rejection(
                                caller.socket.as_fd(),
                                "it speaks another protocol or another version of smddp",
                            );
                        }
                        _ => return,
                    }
                    if words.len() == all {
                        let words = std::mem::take(words);
                        if self.host.is_public() {
                            let Some((socket, stage)) = self.host.accept(caller.socket, &words, None) else {
                                return;
                            };
                            (caller.socket, caller.stage) = (socket, stage);
                            continue;
                        }
                        let challenge = self.host.token(&words).map(|token| Responder::new(token, words));
                        let Some(Ok((challenge, reply))) = challenge else { return };
                        // An empty socket has room for it.
                        if !matches!(send(&*caller.socket, &[IoSlice::new(&reply)]), Ok(sent) if sent == reply.len())
                        {
                            return;
                        }
                        caller.stage = Stage::Proof(Box::new(challenge), Vec::new());
                    }
                }
                Stage::Proof(challenge, proof) => {
                    match read_more(&*caller.socket, proof, PROOF) {
                        Ok(None) => return self.keep(caller, now),
                        Ok(Some(1..)) => {}
                        _ => return,
                    }
                    if proof.len() < PROOF {
                        continue;
                    }
                    if !challenge.verifies_proof(proof) {
                        return self.log_rejection(
                            caller.socket.as_fd(),
                            "it does not know the token of this group",
                        );
                    }
                    let answer = self.host.accept(caller.socket, challenge.greeting(), Some(challenge));
                    let Some((socket, stage)) = answer else { return };
                    (caller.socket, caller.stage) = (socket, stage);
                }
                Stage::Reply(bytes) if bytes.is_empty() => return,
                Stage::Reply(bytes) => match unless_blocked(send(&*caller.socket, &[IoSlice::new(bytes)])) {
                    Ok(Some(sent)) => drop(bytes.drain(..sent)),
                    Ok(None) => return self.keep(caller, now),
                    Err(_) => return,
                },
                Stage::Linger => {
                    match unless_blocked(rustix::io::read(&*caller.socket, &mut [0]).map_err(Into::into)) {
                        Ok(None) => self.keep(caller, now),
                        Ok(Some(1)) => self.retained.push(caller.socket),
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

    /// The shortest time there is.
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

    /// At something that takes nobody in.
    fn callers() -> IncomingConnections {
        IncomingConnections::new(CloseOnFork::new(File::open("/dev/null").unwrap().into()), RejectAll)
    }

    /// One that says nothing.
    fn call(callers: &mut IncomingConnections, now: Instant) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        callers.admit(ours.into(), now);
        theirs
    }

    fn is_hung_up_on(mut caller: &UnixStream) -> bool {
        matches!(caller.read(&mut [0]), Ok(0))
    }

    #[test]
    fn whoever_does_not_get_on_is_hung_up_on_once_his_time_is_up_and_no_moment_earlier() {
        let (mut callers, now) = (callers(), Instant::now());
        let (caller, later) = (call(&mut callers, now), call(&mut callers, now + TICK));
        callers.serve_ready([false; 3].into_iter(), now + STAGE_LIMIT - TICK);
        assert!(!is_hung_up_on(&caller));
        callers.serve_ready([false; 3].into_iter(), now + STAGE_LIMIT);
        assert_eq!([&caller, &later].map(is_hung_up_on), [true, false]);
    }

    #[test]
    fn where_nobody_else_could_come_in_the_first_to_be_silent_for_so_long_makes_room_and_no_moment_earlier() {
        let (mut callers, now) = (callers(), Instant::now());
        let first = call(&mut callers, now);
        let others: Vec<_> = (1..MAX_INCOMING).map(|_| call(&mut callers, now + TICK)).collect();
        assert_eq!(callers.fds(now + SILENCE_LIMIT - TICK).count(), 1 + MAX_INCOMING);
        assert!(!is_hung_up_on(&first));
        // One of them is enough.
        for _ in 0..2 {
            assert_eq!(callers.fds(now + 2 * SILENCE_LIMIT).count(), MAX_INCOMING);
        }
        assert!(is_hung_up_on(&first) && !others.iter().any(is_hung_up_on));
    }

    #[test]
    fn a_process_that_can_take_nobody_in_rests_and_tells_of_it_now_and_then() {
        let (mut callers, begun) = (callers(), Instant::now());
        let mut reported_after = |waited: Duration| {
            let now = begun + waited;
            callers.serve_ready([true].into_iter(), now);
            assert_eq!(callers.max_sleep(now), Some(ACCEPT_PAUSE));
            // Whoever is in the queue wakes nobody before that.
            let _ = callers.fds(now + ACCEPT_PAUSE - TICK);
            assert_eq!(callers.max_sleep(now + ACCEPT_PAUSE - TICK), Some(TICK));
            let _ = callers.fds(now + ACCEPT_PAUSE);
            assert_eq!(callers.max_sleep(now + ACCEPT_PAUSE), None);
            callers.reported_at
        };
        assert_eq!(reported_after(Duration::ZERO), Some(begun));
        assert_eq!(reported_after(REPORT_INTERVAL), Some(begun));
        assert_eq!(reported_after(REPORT_INTERVAL + TICK), Some(begun + REPORT_INTERVAL + TICK));
    }
}
