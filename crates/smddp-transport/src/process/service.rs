//! The one helper thread of an endpoint: answers callers and notices dead peers. It sleeps in `poll`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::bell::Bell;
use super::callers::{Callers, Host};
use crate::own::Uninherited;
use crate::{fork, lock};

struct Watched {
    fd: OwnedFd,
    gone: Weak<AtomicBool>,
}

/// What the thread looks after.
#[derive(Default)]
struct Work {
    watched: Vec<Watched>,
    callers: Vec<Callers>,
}

struct Shared {
    wake: OwnedFd,
    stop: AtomicBool,
    more: Mutex<Work>,
}

pub(crate) struct Service {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    forks: u32,
}

impl Service {
    /// `bell` rings where a peer has died.
    pub(crate) fn start(bell: Bell) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stop: AtomicBool::new(false),
            more: Mutex::default(),
        });
        let theirs = shared.clone();
        let thread = std::thread::Builder::new()
            .name("smddp-service".to_owned())
            .spawn(move || serve(&theirs, &bell))?;
        Ok(Self { shared, thread: Some(thread), forks: fork::generation() })
    }

    /// Sets `gone` and rings when the process or the connection behind `fd` ends; forgets it when nobody else
    /// holds `gone` any more.
    pub(crate) fn watch(&self, fd: OwnedFd, gone: &Arc<AtomicBool>) {
        lock(&self.shared.more).watched.push(Watched { fd, gone: Arc::downgrade(gone) });
        self.wake();
    }

    /// Answers callers at that listener, which does not block, for as long as its host is open.
    pub(crate) fn answer(&self, listener: Uninherited<OwnedFd>, host: impl Host + 'static) {
        lock(&self.shared.more).callers.push(Callers::new(listener, host));
        self.wake();
    }

    /// Something may be over.
    pub(crate) fn wake(&self) {
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

fn serve(shared: &Shared, bell: &Bell) {
    let Work { mut watched, mut callers } = Work::default();
    while !shared.stop.load(Ordering::Acquire) {
        let mut more = std::mem::take(&mut *lock(&shared.more));
        watched.append(&mut more.watched);
        callers.append(&mut more.callers);
        watched.retain(|w| w.gone.strong_count() > 0);
        callers.retain(|callers| callers.host.open());
        let now = Instant::now();
        let nap = callers.iter().filter_map(|callers| callers.nap(now)).min();
        let nap = nap.and_then(|nap| Timespec::try_from(nap).ok());
        let mut fds = vec![PollFd::new(&shared.wake, PollFlags::IN)];
        fds.extend(watched.iter().map(|w| PollFd::new(&w.fd, PollFlags::IN | PollFlags::HUP)));
        let mut counts = Vec::with_capacity(callers.len());
        for callers in &mut callers {
            let before = fds.len();
            fds.extend(callers.fds(now));
            counts.push(fds.len() - before);
        }
        if poll(&mut fds, nap.as_ref()).is_err() {
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let mut ready = ready.into_iter();
        if ready.next() == Some(true) {
            let _ = rustix::io::read(&shared.wake, &mut [0u8; 8]);
        }
        let mut died = false;
        watched.retain(|w| {
            let ended = ready.next() == Some(true);
            if ended && let Some(gone) = w.gone.upgrade() {
                gone.store(true, Ordering::Release);
                died = true;
            }
            !ended
        });
        if died {
            bell.ring();
        }
        let now = Instant::now();
        for (callers, count) in callers.iter_mut().zip(counts) {
            callers.turn(ready.by_ref().take(count), now);
        }
    }
}
