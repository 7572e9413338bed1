//! The one helper thread of an endpoint: answers callers and notices dead peers. It sleeps in `poll`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::card::Id;
use super::endpoint::Bell;
use super::handshake;
use crate::board::Lending;
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
    pub(crate) fn start(
        listener: UnixListener,
        me: Id,
        memory: OwnedFd,
        bell: Bell,
        lending: Arc<Lending>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stop: AtomicBool::new(false),
            incoming: Mutex::default(),
        });
        let theirs = shared.clone();
        let thread = std::thread::Builder::new()
            .name("smddp-service".to_owned())
            .spawn(move || serve(&theirs, &listener, &me, &memory, &bell, &lending))?;
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

fn serve(
    shared: &Shared,
    listener: &UnixListener,
    me: &Id,
    memory: &OwnedFd,
    bell: &Bell,
    lending: &Lending,
) {
    let mut watched: Vec<Watched> = Vec::new();
    let mut kept = Vec::new();
    while !shared.stop.load(Ordering::Acquire) {
        watched.append(&mut shared.incoming.lock().unwrap_or_else(PoisonError::into_inner));
        watched.retain(|w| w.gone.strong_count() > 0);
        let mut fds = vec![PollFd::new(&shared.wake, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        fds.extend(watched.iter().map(|w| PollFd::new(&w.fd, PollFlags::IN | PollFlags::HUP)));
        if poll(&mut fds, None).is_err() {
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[0] {
            let _ = rustix::io::read(&shared.wake, &mut [0u8; 8]);
        }
        if ready[1]
            && let Ok((stream, _)) = listener.accept()
        {
            // A caller that fails the handshake gets an error at its own end; it is no concern of this process.
            if let Ok(Some(stream)) = handshake::answer(stream, me, (memory.as_fd(), bell.event()), lending) {
                kept.push(stream);
            }
        }
        let mut index = 2;
        let mut died = false;
        watched.retain(|w| {
            let ended = ready[index];
            index += 1;
            if ended && let Some(gone) = w.gone.upgrade() {
                gone.store(true, Ordering::Release);
                died = true;
            }
            !ended
        });
        if died {
            bell.ring();
        }
    }
}
