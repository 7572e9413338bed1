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
const PATIENCE: Duration = Duration::from_secs(10);
/// So many are served at once; the others wait in the listener's queue.
const MOST: usize = 256;
/// Where nobody else could come in, a caller that has said nothing for so long makes room.
const SILENCE: Duration = Duration::from_secs(1);
/// Callers wait so long for a process that cannot take them in, and the reason is told this often at most.
const REST: Duration = Duration::from_millis(100);
const TOLD: Duration = Duration::from_secs(10);

/// Whom callers find at a listener, and what they get.
pub(crate) trait Host: Send {
    /// Bytes of a caller's first words.
    fn words(&self) -> usize;
    /// Checks who has connected, before anything is read; an error is the reason to reject the connection.
    fn admits(&self, _caller: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }
    /// Whether these may be the first of such words: whoever speaks something else need not say all of it.
    fn heeds(&self, _words: &[u8]) -> bool {
        true
    }
    /// The token of which whoever says these has to show that he has it; `None`: there is nothing for him here.
    fn token(&self, words: &[u8]) -> Option<Arc<Token>>;
    /// Whether whoever is admitted needs no token: what callers get here is only told, and whom to is looked at by the kernel.
    fn tells_all(&self) -> bool {
        false
    }
    /// Who has connected, as far as a log can tell.
    fn name(&self, caller: BorrowedFd<'_>) -> String;
    /// What comes of the words of a caller that has; a connection that comes back is hung up on after its last stage. `met`: what
    /// the caller was asked to show, where it was.
    fn answer(
        &self,
        caller: CloseOnFork<OwnedFd>,
        words: &[u8],
        met: Option<&Responder>,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)>;
    /// Whether anybody is still at home.
    fn open(&self) -> bool {
        true
    }
    /// What callers are in vain for while this process lacks something: "ranks of other nodes cannot be answered".
    fn lacking(&self, error: &io::Error) -> String;
}

pub(crate) enum Stage {
    /// It says who it is, whom it means and what it wants.
    Words(Vec<u8>),
    /// And shows that it may; what it has said of that.
    Proof(Box<Responder>, Vec<u8>),
    /// The rest of an answer for which its socket had no room.
    Answer(Vec<u8>),
    /// It has this process's memory and looks the process up by its pid. Then it hangs up, or says that it cannot: its
    /// connection stays then, whose end tells it of this process's end.
    Looking,
}

struct Caller {
    socket: CloseOnFork<OwnedFd>,
    since: Instant,
    stage: Stage,
}

/// All of them at one listener.
pub(crate) struct IncomingConnections {
    pub(super) host: Box<dyn Host>,
    listener: CloseOnFork<OwnedFd>,
    list: Vec<Caller>,
    /// Connections of those that asked to keep them.
    kept: Vec<CloseOnFork<OwnedFd>>,
    /// Nobody can be taken in before.
    rests: Option<Instant>,
    told: Option<Instant>,
    /// A connection was rejected, and that was logged.
    met: bool,
}

/// What a call on a socket came to; `None`: not now.
fn at_once(outcome: io::Result<usize>) -> io::Result<Option<usize>> {
    match outcome {
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        outcome => outcome.map(Some),
    }
}

/// More of what a caller says, up to `all` bytes; how many, or `None`: not now.
fn hear(socket: impl AsFd, heard: &mut Vec<u8>, all: usize) -> io::Result<Option<usize>> {
    let got = heard.len();
    heard.resize(all, 0);
    let read = at_once(rustix::io::read(socket, &mut heard[got..]).map_err(Into::into));
    heard.truncate(got + *read.as_ref().ok().and_then(Option::as_ref).unwrap_or(&0));
    read
}

impl IncomingConnections {
    pub(crate) fn new(listener: CloseOnFork<OwnedFd>, host: impl Host + 'static) -> Self {
        Self {
            host: Box::new(host),
            listener,
            list: Vec::new(),
            kept: Vec::new(),
            rests: None,
            told: None,
            met: false,
        }
    }

    /// Whether one more can be served, if need be instead of one that says nothing.
    fn room(&mut self, now: Instant) -> bool {
        if self.list.len() >= MOST {
            let unknown = |c: &Caller| matches!(c.stage, Stage::Words(_) | Stage::Proof(..));
            let silent = |c: &Caller| unknown(c) && now.duration_since(c.since) >= SILENCE;
            // They are in the order in which they came.
            if let Some(longest) = self.list.iter().position(silent) {
                self.list.remove(longest);
            }
        }
        self.list.len() < MOST
    }

    /// What wakes the thread: the listener, and each caller.
    pub(crate) fn fds(&mut self, now: Instant) -> impl Iterator<Item = PollFd<'_>> {
        if self.rests.is_some_and(|until| until <= now) {
            self.rests = None;
        }
        let open = self.rests.is_none() && self.room(now);
        let listens = if open { PollFlags::IN } else { PollFlags::empty() };
        let callers = self.list.iter().map(|caller| {
            let waits = matches!(caller.stage, Stage::Answer(_));
            PollFd::from_borrowed_fd(
                caller.socket.as_fd(),
                if waits { PollFlags::OUT } else { PollFlags::IN },
            )
        });
        std::iter::once(PollFd::from_borrowed_fd(self.listener.as_fd(), listens)).chain(callers)
    }

    /// At the latest after this time there is something to do without a sign.
    pub(crate) fn max_sleep(&self, now: Instant) -> Option<Duration> {
        let rest = self.rests.map(|until| until.saturating_duration_since(now));
        let wait = if self.list.len() < MOST { SILENCE } else { SILENCE / 10 };
        rest.into_iter().chain((!self.list.is_empty()).then_some(wait)).min()
    }

    /// Serves those that are ready, in the order of [`IncomingConnections::fds`], and hangs up on those whose time is up.
    pub(crate) fn turn(&mut self, mut ready: impl Iterator<Item = bool>, now: Instant) {
        let listens = ready.next() == Some(true);
        for caller in std::mem::take(&mut self.list) {
            match ready.next() == Some(true) {
                true => self.serve(caller, now),
                false => self.keep(caller, now),
            }
        }
        if listens {
            self.welcome(now);
        }
    }

    fn welcome(&mut self, now: Instant) {
        while self.room(now) {
            match rustix::net::accept_with(&*self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => self.admit(socket, now),
                Err(error) => {
                    let error = io::Error::from(error);
                    match error.kind() {
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted => continue,
                        ErrorKind::WouldBlock => {}
                        // Out of descriptors, most likely. The caller stays in the queue, which would wake this thread
                        // again and again.
                        _ => self.rest(&error, now),
                    }
                    return;
                }
            }
        }
    }

    fn rest(&mut self, error: &io::Error, now: Instant) {
        self.rests = Some(now + REST);
        if self.told.is_none_or(|at| now - at > TOLD) {
            self.told = Some(now);
            warn(&self.host.lacking(error));
        }
    }

    /// Somebody has connected, over a socket that does not block.
    pub(crate) fn admit(&mut self, socket: OwnedFd, now: Instant) {
        if let Err(error) = self.host.admits(socket.as_fd()) {
            return self.reject(socket.as_fd(), &error.to_string());
        }
        let stage = Stage::Words(Vec::new());
        self.serve(Caller { socket: CloseOnFork::new(socket), since: now, stage }, now);
    }

    /// Logs the first rejected connection: repeated ones must not fill the log.
    fn reject(&mut self, caller: BorrowedFd<'_>, reason: &str) {
        if !std::mem::replace(&mut self.met, true) {
            warn(&format!(
                "rejected a connection to process {} from {}: {reason}. The job continues; further rejected connections are not \
                 logged (docs/security.md)",
                std::process::id(),
                self.host.name(caller),
            ));
        }
    }

    fn keep(&mut self, caller: Caller, now: Instant) {
        if now.duration_since(caller.since) < PATIENCE {
            self.list.push(caller);
        }
    }

    /// Goes on with one as far as it goes without waiting. A caller that fails gets an error at its own end; it is no concern
    /// of this process.
    fn serve(&mut self, mut caller: Caller, now: Instant) {
        loop {
            match &mut caller.stage {
                Stage::Words(words) => {
                    let all = self.host.words();
                    match hear(&*caller.socket, words, all) {
                        Ok(None) => return self.keep(caller, now),
                        Ok(Some(1..)) if self.host.heeds(words) => {}
                        Ok(Some(1..)) => {
                            return self.reject(
                                caller.socket.as_fd(),
                                "it speaks another protocol or another version of smddp",
                            );
                        }
                        _ => return,
                    }
                    if words.len() == all {
                        let words = std::mem::take(words);
                        if self.host.tells_all() {
                            let Some((socket, stage)) = self.host.answer(caller.socket, &words, None) else {
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
                    match hear(&*caller.socket, proof, PROOF) {
                        Ok(None) => return self.keep(caller, now),
                        Ok(Some(1..)) => {}
                        _ => return,
                    }
                    if proof.len() < PROOF {
                        continue;
                    }
                    if !challenge.verifies_proof(proof) {
                        return self
                            .reject(caller.socket.as_fd(), "it does not know the token of this group");
                    }
                    let answer = self.host.answer(caller.socket, challenge.greeting(), Some(challenge));
                    let Some((socket, stage)) = answer else { return };
                    (caller.socket, caller.stage) = (socket, stage);
                }
                Stage::Answer(bytes) if bytes.is_empty() => return,
                Stage::Answer(bytes) => match at_once(send(&*caller.socket, &[IoSlice::new(bytes)])) {
                    Ok(Some(sent)) => drop(bytes.drain(..sent)),
                    Ok(None) => return self.keep(caller, now),
                    Err(_) => return,
                },
                Stage::Looking => {
                    match at_once(rustix::io::read(&*caller.socket, &mut [0]).map_err(Into::into)) {
                        Ok(None) => self.keep(caller, now),
                        Ok(Some(1)) => self.kept.push(caller.socket),
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
    const MOMENT: Duration = Duration::from_nanos(1);

    struct Nobody;

    impl Host for Nobody {
        fn words(&self) -> usize {
            8
        }
        fn token(&self, _: &[u8]) -> Option<Arc<Token>> {
            None
        }
        fn name(&self, _: BorrowedFd<'_>) -> String {
            String::new()
        }
        fn answer(
            &self,
            _: CloseOnFork<OwnedFd>,
            _: &[u8],
            _: Option<&Responder>,
        ) -> Option<(CloseOnFork<OwnedFd>, Stage)> {
            None
        }
        fn lacking(&self, error: &io::Error) -> String {
            error.to_string()
        }
    }

    /// At something that takes nobody in.
    fn callers() -> IncomingConnections {
        IncomingConnections::new(CloseOnFork::new(File::open("/dev/null").unwrap().into()), Nobody)
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
        let (caller, later) = (call(&mut callers, now), call(&mut callers, now + MOMENT));
        callers.turn([false; 3].into_iter(), now + PATIENCE - MOMENT);
        assert!(!is_hung_up_on(&caller));
        callers.turn([false; 3].into_iter(), now + PATIENCE);
        assert_eq!([&caller, &later].map(is_hung_up_on), [true, false]);
    }

    #[test]
    fn where_nobody_else_could_come_in_the_first_to_be_silent_for_so_long_makes_room_and_no_moment_earlier() {
        let (mut callers, now) = (callers(), Instant::now());
        let first = call(&mut callers, now);
        let others: Vec<_> = (1..MOST).map(|_| call(&mut callers, now + MOMENT)).collect();
        assert_eq!(callers.fds(now + SILENCE - MOMENT).count(), 1 + MOST);
        assert!(!is_hung_up_on(&first));
        // One of them is enough.
        for _ in 0..2 {
            assert_eq!(callers.fds(now + 2 * SILENCE).count(), MOST);
        }
        assert!(is_hung_up_on(&first) && !others.iter().any(is_hung_up_on));
    }

    #[test]
    fn a_process_that_can_take_nobody_in_rests_and_tells_of_it_now_and_then() {
        let (mut callers, begun) = (callers(), Instant::now());
        let mut told_at = |waited: Duration| {
            let now = begun + waited;
            callers.turn([true].into_iter(), now);
            assert_eq!(callers.max_sleep(now), Some(REST));
            // Whoever is in the queue wakes nobody before that.
            let _ = callers.fds(now + REST - MOMENT);
            assert_eq!(callers.max_sleep(now + REST - MOMENT), Some(MOMENT));
            let _ = callers.fds(now + REST);
            assert_eq!(callers.max_sleep(now + REST), None);
            callers.told
        };
        assert_eq!(told_at(Duration::ZERO), Some(begun));
        assert_eq!(told_at(TOLD), Some(begun));
        assert_eq!(told_at(TOLD + MOMENT), Some(begun + TOLD + MOMENT));
    }
}
