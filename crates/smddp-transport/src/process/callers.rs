//! Callers at this process's unix socket, from the connection until each has what it wants. Nobody is waited for: the
//! thread that serves them also notices deaths.

use std::io::{self, ErrorKind, IoSlice, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::handshake::{self, HELLO, Host, WORDS};
use crate::send::send;

/// Whoever has not got on after this time is hung up on.
const PATIENCE: Duration = Duration::from_secs(5);
/// So many are served at once; the others wait in the socket's queue. More than ranks of a node.
const MOST: usize = 256;
/// Where nobody else could come in, a caller that has said nothing for so long makes room.
const SILENCE: Duration = Duration::from_secs(1);

enum Stage {
    /// It says who it is, whom it means and what it wants.
    Words { bytes: [u8; WORDS], got: usize },
    /// The rest of an answer for which its socket had no room.
    Answer { bytes: Vec<u8>, sent: usize },
    /// It has this process's memory and looks the process up by its pid. Then it hangs up, or says that it cannot.
    Looking,
}

struct Caller {
    stream: UnixStream,
    since: Instant,
    stage: Stage,
}

/// What comes of a look at a caller.
enum Next {
    Wait,
    Over,
    /// The connection stays: its end tells the caller of this process's end.
    Keep,
}

impl Caller {
    fn events(&self) -> PollFlags {
        match self.stage {
            Stage::Answer { .. } => PollFlags::OUT,
            _ => PollFlags::IN,
        }
    }

    /// Goes as far as it goes without waiting. Errors concern this caller only.
    fn go_on(&mut self, host: &Host) -> io::Result<Next> {
        loop {
            match &mut self.stage {
                Stage::Words { bytes, got } => {
                    let Some(more) = at_once((&self.stream).read(&mut bytes[*got..]))? else {
                        return Ok(Next::Wait);
                    };
                    *got += more;
                    if more == 0 {
                        return Ok(Next::Over);
                    }
                    // Whoever speaks something else need not say all of it.
                    if *got >= HELLO {
                        handshake::heed(bytes, host)?;
                    }
                    if *got == WORDS {
                        self.stage = match handshake::answer(&self.stream, bytes, host)? {
                            Some(bytes) => Stage::Answer { bytes, sent: 0 },
                            None => Stage::Looking,
                        };
                    }
                }
                Stage::Answer { bytes, sent } => {
                    while *sent < bytes.len() {
                        let Some(more) = at_once(send(&self.stream, &[IoSlice::new(&bytes[*sent..])]))?
                        else {
                            return Ok(Next::Wait);
                        };
                        *sent += more;
                    }
                    return Ok(Next::Over);
                }
                Stage::Looking => {
                    let said = at_once((&self.stream).read(&mut [0]))?;
                    return Ok(
                        said.map_or(Next::Wait, |said| if said == 1 { Next::Keep } else { Next::Over })
                    );
                }
            }
        }
    }
}

/// What a call on a socket came to; `None`: not now.
fn at_once(outcome: io::Result<usize>) -> io::Result<Option<usize>> {
    match outcome {
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        outcome => outcome.map(Some),
    }
}

/// All of them.
#[derive(Default)]
pub(crate) struct Callers {
    list: Vec<Caller>,
    /// Connections of those that asked to keep them.
    kept: Vec<UnixStream>,
}

impl Callers {
    /// Somebody has connected. Other users are hung up on.
    pub(crate) fn admit(&mut self, stream: UnixStream) {
        if handshake::same_user(&stream).is_ok() && stream.set_nonblocking(true).is_ok() {
            let stage = Stage::Words { bytes: [0; WORDS], got: 0 };
            self.list.push(Caller { stream, since: Instant::now(), stage });
        }
    }

    /// Whether one more can be served, if need be instead of one that says nothing.
    pub(crate) fn room(&mut self) -> bool {
        if self.list.len() >= MOST {
            let silent = |c: &Caller| matches!(c.stage, Stage::Words { .. }) && c.since.elapsed() >= SILENCE;
            // They are in the order in which they came.
            if let Some(longest) = self.list.iter().position(silent) {
                self.list.remove(longest);
            }
        }
        self.list.len() < MOST
    }

    /// What wakes the thread, one for each.
    pub(crate) fn fds(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        self.list.iter().map(|caller| (caller.stream.as_fd(), caller.events()))
    }

    /// At the latest after this time there is something to do without a sign.
    pub(crate) fn nap(&self) -> Option<Duration> {
        let wait = if self.list.len() < MOST { SILENCE } else { SILENCE / 10 };
        (!self.list.is_empty()).then_some(wait)
    }

    /// Serves those that are ready, in the order of [`Callers::fds`], and hangs up on those whose time is up.
    pub(crate) fn turn(&mut self, ready: &[bool], host: &Host) {
        let mut ready = ready.iter();
        for mut caller in std::mem::take(&mut self.list) {
            let ready = ready.next().is_some_and(|ready| *ready);
            match if ready { caller.go_on(host) } else { Ok(Next::Wait) } {
                Ok(Next::Wait) if caller.since.elapsed() < PATIENCE => self.list.push(caller),
                Ok(Next::Keep) => self.kept.push(caller.stream),
                // A caller that fails gets an error at its own end; it is no concern of this process.
                _ => {}
            }
        }
    }
}
