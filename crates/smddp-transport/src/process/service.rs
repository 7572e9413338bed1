//! The one helper thread of an endpoint: answers callers and notices dead peers. It sleeps in `poll`. Whoever is only watched is
//! behind an epoll of its own: hundreds are, and looking at each in every turn would cost a third of the time that they take to
//! meet.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::bell::Bell;
use super::callers::{Callers, Host};
use crate::own::Uninherited;
use crate::warn::note;
use crate::{fork, lock};

struct Watched {
    fd: OwnedFd,
    gone: Weak<AtomicBool>,
}

/// Processes and connections whose ends are waited for, and the thread's own eventfd.
struct Ends {
    epoll: OwnedFd,
    watched: Mutex<HashMap<u64, Watched>>,
    /// Numbers given, of which epoll tells.
    next: AtomicU64,
}

impl Ends {
    /// The number of the eventfd.
    const WAKE: u64 = u64::MAX;

    fn new(wake: &OwnedFd) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, wake, EventData::new_u64(Self::WAKE), EventFlags::IN)?;
        Ok(Self { epoll, watched: Mutex::default(), next: AtomicU64::new(0) })
    }

    fn add(&self, new: Watched) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        // Locked until it is in the map, since the thread may hear of it at once.
        let mut watched = lock(&self.watched);
        match epoll::add(&self.epoll, &new.fd, EventData::new_u64(number), EventFlags::IN) {
            Ok(()) => drop(watched.insert(number, new)),
            Err(why) => note(&format!(
                "the end of a process of this node will be known at a deadline only: epoll refuses its descriptor ({why})"
            )),
        }
    }

    /// Nobody else holds their marks any more.
    fn forget(&self) {
        lock(&self.watched).retain(|_, watched| {
            let held = watched.gone.strong_count() > 0;
            if !held {
                // A forked child may have the descriptor, too: closing it would not take it out.
                let _ = epoll::delete(&self.epoll, &watched.fd);
            }
            held
        });
    }

    /// Marks those that have ended; whether there were any. What woke the thread is read off.
    fn mark(&self, wake: &OwnedFd) -> bool {
        let mut events =
            [const { epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) } }; 16];
        let mut died = false;
        // Of more the next turn hears.
        let count = epoll::wait(&self.epoll, &mut events, Some(&Timespec::default())).unwrap_or(0);
        for event in &events[..count] {
            if event.data.u64() == Self::WAKE {
                let _ = rustix::io::read(wake, &mut [0u8; 8]);
            }
            let Some(ended) = lock(&self.watched).remove(&event.data.u64()) else { continue };
            let _ = epoll::delete(&self.epoll, &ended.fd);
            if let Some(gone) = ended.gone.upgrade() {
                gone.store(true, Ordering::Release);
                died = true;
            }
        }
        died
    }
}

struct Shared {
    wake: OwnedFd,
    stop: AtomicBool,
    ends: Ends,
    /// Callers to be heard from now on.
    more: Mutex<Vec<Callers>>,
}

pub(crate) struct Service {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    forks: u32,
}

impl Service {
    /// `bell` rings where a peer has died.
    pub(crate) fn start(bell: Bell) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let ends = Ends::new(&wake)?;
        let shared = Arc::new(Shared { wake, stop: AtomicBool::new(false), ends, more: Mutex::default() });
        let theirs = shared.clone();
        let thread = crate::threads::spawn("smddp-service", move || serve(&theirs, &bell))?;
        Ok(Self { shared, thread: Some(thread), forks: fork::generation() })
    }

    /// Sets `gone` and rings when the process or the connection behind `fd` ends; forgets it when nobody else
    /// holds `gone` any more.
    pub(crate) fn watch(&self, fd: OwnedFd, gone: &Arc<AtomicBool>) {
        self.shared.ends.add(Watched { fd, gone: Arc::downgrade(gone) });
    }

    /// Answers callers at that listener, which does not block, for as long as its host is open.
    pub(crate) fn answer(&self, listener: Uninherited<OwnedFd>, host: impl Host + 'static) {
        lock(&self.shared.more).push(Callers::new(listener, host));
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
    let mut callers: Vec<Callers> = Vec::new();
    while !shared.stop.load(Ordering::Acquire) {
        callers.append(&mut lock(&shared.more));
        shared.ends.forget();
        callers.retain(|callers| callers.host.open());
        let now = Instant::now();
        let nap = callers.iter().filter_map(|callers| callers.nap(now)).min();
        let nap = nap.and_then(|nap| Timespec::try_from(nap).ok());
        let mut fds = vec![PollFd::new(&shared.ends.epoll, PollFlags::IN)];
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
        if ready.next() == Some(true) && shared.ends.mark(&shared.wake) {
            bell.ring();
        }
        let now = Instant::now();
        for (callers, count) in callers.iter_mut().zip(counts) {
            callers.turn(ready.by_ref().take(count), now);
        }
    }
}
