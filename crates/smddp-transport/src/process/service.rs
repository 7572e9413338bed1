//! The one helper thread of an endpoint: answers callers and notices dead peers. It sleeps in `poll`.

use std::io::{self, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::callers::Callers;
use super::handshake::Host;
use crate::fork;

struct Watched {
    fd: OwnedFd,
    gone: Weak<AtomicBool>,
}

struct Shared {
    wake: OwnedFd,
    stop: AtomicBool,
    incoming: Mutex<Vec<Watched>>,
}

pub(crate) struct Service {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    forks: u32,
}

impl Service {
    pub(crate) fn start(listener: UnixListener, host: Host) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stop: AtomicBool::new(false),
            incoming: Mutex::default(),
        });
        let theirs = shared.clone();
        let thread = std::thread::Builder::new()
            .name("smddp-service".to_owned())
            .spawn(move || serve(&theirs, listener, &host))?;
        Ok(Self { shared, thread: Some(thread), forks: fork::generation() })
    }

    /// Sets `gone` and rings when the process or the connection behind `fd` ends; forgets it when nobody else
    /// holds `gone` any more.
    pub(crate) fn watch(&self, fd: OwnedFd, gone: Arc<AtomicBool>) {
        let mut incoming = self.shared.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        incoming.push(Watched { fd, gone: Arc::downgrade(&gone) });
        drop(incoming);
        self.wake();
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // A forked child has no such thread, and shares the parent's eventfd.
        if self.forks != fork::generation() {
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Callers wait so long for a listener that cannot take them in.
const REST: Duration = Duration::from_millis(100);

/// Where strangers come in.
struct Door {
    listener: UnixListener,
    callers: Callers,
    /// Nobody can be taken in before.
    closed: Option<Instant>,
    told: bool,
}

impl Door {
    /// Whether anybody who waits at the listener can be taken in.
    fn open(&mut self) -> bool {
        if self.closed.is_some_and(|until| until <= Instant::now()) {
            self.closed = None;
        }
        self.closed.is_none() && self.callers.room()
    }

    fn welcome(&mut self) {
        while self.callers.room() {
            match self.listener.accept() {
                Ok((stream, _)) => self.callers.admit(stream),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    // Out of descriptors, most likely. The caller stays in the queue, which would wake this thread again
                    // and again.
                    self.closed = Some(Instant::now() + REST);
                    if !std::mem::replace(&mut self.told, true) {
                        // Nobody is left to tell if this fails.
                        let _ = writeln!(
                            io::stderr(),
                            "smddp: process {} cannot answer other ranks of this host: {error}; trying again every {REST:?} \
                             (raise the limit on open files, `ulimit -n`, if that is what it lacks)",
                            std::process::id()
                        );
                    }
                    return;
                }
            }
        }
    }

    /// How long the thread may sleep.
    fn nap(&self) -> Option<Timespec> {
        let rest = self.closed.map(|until| until.saturating_duration_since(Instant::now()));
        let nap = rest.into_iter().chain(self.callers.nap()).min()?;
        Timespec::try_from(nap).ok()
    }
}

fn serve(shared: &Shared, listener: UnixListener, host: &Host) {
    let mut watched: Vec<Watched> = Vec::new();
    let mut door = Door { listener, callers: Callers::default(), closed: None, told: false };
    while !shared.stop.load(Ordering::Acquire) {
        watched.append(&mut shared.incoming.lock().unwrap_or_else(PoisonError::into_inner));
        watched.retain(|w| w.gone.strong_count() > 0);
        let open = door.open();
        let listens = if open { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(&shared.wake, PollFlags::IN), PollFd::new(&door.listener, listens)];
        fds.extend(watched.iter().map(|w| PollFd::new(&w.fd, PollFlags::IN | PollFlags::HUP)));
        fds.extend(door.callers.fds().map(|(fd, events)| PollFd::from_borrowed_fd(fd, events)));
        if poll(&mut fds, door.nap().as_ref()).is_err() {
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[0] {
            let _ = rustix::io::read(&shared.wake, &mut [0u8; 8]);
        }
        let (ended, callers) = ready[2..].split_at(watched.len());
        let mut ended = ended.iter();
        let mut died = false;
        watched.retain(|w| {
            let ended = ended.next().is_some_and(|ended| *ended);
            if ended && let Some(gone) = w.gone.upgrade() {
                gone.store(true, Ordering::Release);
                died = true;
            }
            !ended
        });
        if died {
            host.bell.ring();
        }
        door.callers.turn(callers, host);
        if open && ready[1] {
            door.welcome();
        }
    }
}
