//! The thread that answers callers: who they are and what they want is in their hello. Nobody is waited for.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::endpoint::Shared;
use super::hello::{HELLO, parse};
use super::own::Own;
use crate::process::Bell;
use crate::warn::warn;

/// Callers that have not said hello after this time are hung up on. A rank that was stopped meanwhile calls again.
const PATIENCE: Duration = Duration::from_secs(10);
/// So many may have said nothing yet; of more, the oldest is hung up on. Whoever has its hello ready is none of them.
pub(super) const MOST: usize = 256;
/// After a caller could not be taken up: it waits in the listener's queue.
const PAUSE: Duration = Duration::from_millis(10);
/// The reason is told this often at most.
const TOLD: Duration = Duration::from_secs(10);

/// Somebody who has connected and not yet said all of the hello.
struct Caller {
    stream: Own<TcpStream>,
    since: Instant,
    bytes: [u8; HELLO],
    got: usize,
}

enum Heard {
    All,
    NotYet,
    Nothing,
}

impl Caller {
    fn new(stream: TcpStream) -> Self {
        Self { stream: Own::new(stream), since: Instant::now(), bytes: [0; HELLO], got: 0 }
    }

    fn listen(&mut self) -> Heard {
        loop {
            match (&*self.stream).read(&mut self.bytes[self.got..]) {
                Ok(0) => return Heard::Nothing,
                Ok(n) => self.got += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Heard::NotYet,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Heard::Nothing,
            }
            if self.got == HELLO {
                return Heard::All;
            }
        }
    }
}

/// Those who have said nothing yet, the oldest first.
struct Callers<'a> {
    shared: &'a Shared,
    bell: &'a Bell,
    silent: VecDeque<Caller>,
}

impl Callers<'_> {
    /// Listens to one; keeps it while it may still say something.
    fn hear(&mut self, mut caller: Caller) {
        match caller.listen() {
            Heard::NotYet if caller.since.elapsed() < PATIENCE => self.silent.push_back(caller),
            Heard::All => {
                if let Some((token, rank, purpose)) = parse(&caller.bytes) {
                    self.shared.admit(&token, rank, purpose, caller.stream, self.bell);
                }
            }
            _ => {}
        }
    }

    fn hear_all(&mut self) {
        for caller in std::mem::take(&mut self.silent) {
            self.hear(caller);
        }
    }
}

/// Answers until the endpoint is gone.
pub(super) fn serve(shared: &Shared, listener: &TcpListener, bell: &Bell) {
    let mut callers = Callers { shared, bell, silent: VecDeque::new() };
    let mut told: Option<Instant> = None;
    while !shared.stop.load(Ordering::Acquire) {
        let mut fds = vec![
            PollFd::new(&shared.wake, PollFlags::IN),
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
        ];
        fds.extend(callers.silent.iter().map(|c| PollFd::new(&*c.stream, PollFlags::IN)));
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        if poll(&mut fds, (!callers.silent.is_empty()).then_some(&second)).is_err() {
            continue;
        }
        drop(fds);
        let _ = rustix::io::read(&shared.wake, &mut [0u8; 8]);
        callers.hear_all();
        loop {
            match listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    callers.hear(Caller::new(stream));
                    if callers.silent.len() > MOST {
                        callers.silent.pop_front();
                    }
                }
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e)
                    if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    // Out of descriptors, most likely: the caller waits until some are free again.
                    if told.is_none_or(|at| at.elapsed() > TOLD) {
                        told = Some(Instant::now());
                        warn(&format!(
                            "ranks of other nodes cannot be answered: {error}; they wait. {}",
                            super::call::advice(&error)
                        ));
                    }
                    std::thread::sleep(PAUSE);
                    break;
                }
            }
        }
    }
}
