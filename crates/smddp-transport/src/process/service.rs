//! The helper threads of an endpoint: one answers callers, one reports dead peers. Watched processes are behind an epoll: there are
//! hundreds, and passing each to `poll` again would cost a third of the time that they take to meet.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::doorbell::Doorbell;
use super::incoming::{IncomingConnections, IncomingHost};
use super::memory::system_call_error;
use crate::close_on_fork::CloseOnFork;
use crate::threads::spawn;
use crate::warning::{info, warn};
use crate::{fork, lock};

struct Watched {
    fd: OwnedFd,
    ended: Weak<AtomicBool>,
}

/// Processes and connections whose ends are waited for, and the thread's own eventfd.
struct EndWatch {
    epoll: OwnedFd,
    wake: OwnedFd,
    watched: Mutex<HashMap<u64, Watched>>,
    /// Numbers given, of which epoll tells.
    next: AtomicU64,
}

impl EndWatch {
    /// The number of the eventfd.
    const WAKE: u64 = u64::MAX;

    fn new(wake: OwnedFd) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(|reason| system_call_error("epoll_create1", reason))?;
        epoll::add(&epoll, &wake, EventData::new_u64(Self::WAKE), EventFlags::IN)?;
        Ok(Self { epoll, wake, watched: Mutex::default(), next: AtomicU64::new(0) })
    }

    fn add(&self, new: Watched) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        // Locked until it is in the map, since the thread may hear of it at once.
        let mut watched = lock(&self.watched);
        match epoll::add(&self.epoll, &new.fd, EventData::new_u64(number), EventFlags::IN) {
            Ok(()) => drop(watched.insert(number, new)),
            Err(reason) => info(&format!(
                "the end of a process of this node will be known at a deadline only: epoll refuses its descriptor ({reason})"
            )),
        }
    }

    /// Nobody else holds their marks any more.
    fn forget(&self) {
        lock(&self.watched).retain(|_, watched| {
            let held = watched.ended.strong_count() > 0;
            if !held {
                // A forked child may have the descriptor, too: closing it would not take it out.
                let _ = epoll::delete(&self.epoll, &watched.fd);
            }
            held
        });
    }

    /// Sleeps until a process has ended or the thread is woken, and marks the processes that ended. Returns whether there were
    /// any; `None` if the program has closed the descriptors of this library (`os.closerange`).
    fn wait(&self) -> Option<bool> {
        let mut events =
            [const { epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) } }; 16];
        let mut died = false;
        // Of more the next turn hears.
        let count = match epoll::wait(&self.epoll, &mut events, None) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(_) => return None,
        };
        for event in &events[..count] {
            if event.data.u64() == Self::WAKE {
                let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
            }
            let Some(ended) = lock(&self.watched).remove(&event.data.u64()) else { continue };
            let _ = epoll::delete(&self.epoll, &ended.fd);
            if let Some(ended) = ended.ended.upgrade() {
                ended.store(true, Ordering::Release);
                died = true;
            }
        }
        Some(died)
    }
}

struct Shared {
    /// Wakes the answering thread. [`EndWatch`] has the eventfd of the watching thread.
    wake: OwnedFd,
    stop: AtomicBool,
    ends: EndWatch,
    /// Listeners to serve from now on.
    added: Mutex<Vec<IncomingConnections>>,
}

/// Two threads: one reports the ends of peers, the other one answers callers. An answer may take long (the main thread's frames, the
/// export of device memory) or panic in code of others; a death is reported meanwhile.
pub(crate) struct Service {
    shared: Arc<Shared>,
    threads: [Option<JoinHandle<()>>; 2],
    forks: u32,
}

impl Service {
    /// `doorbell` rings where a peer has died.
    pub(crate) fn start(doorbell: Doorbell) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = || eventfd(0, flags).map_err(|reason| system_call_error("eventfd2", reason));
        let shared = Arc::new(Shared {
            wake: event()?,
            stop: AtomicBool::new(false),
            ends: EndWatch::new(event()?)?,
            added: Mutex::default(),
        });
        let mut service = Self { shared, threads: [None, None], forks: fork::generation() };
        // Dropping the service joins the first thread where the second one cannot be started.
        let theirs = service.shared.clone();
        service.threads[0] = Some(spawn("smddp-ends", move || watch_ends(&theirs, &doorbell))?);
        let theirs = service.shared.clone();
        service.threads[1] = Some(spawn("smddp-service", move || answer_callers(&theirs))?);
        Ok(service)
    }

    /// Sets `ended` and rings when the process or the connection behind `fd` ends; forgets it when nobody else
    /// holds `ended` any more.
    pub(crate) fn watch(&self, fd: OwnedFd, ended: &Arc<AtomicBool>) {
        self.shared.ends.add(Watched { fd, ended: Arc::downgrade(ended) });
    }

    /// Answers callers at that listener, which does not block, for as long as its host is open.
    pub(crate) fn serve(&self, listener: CloseOnFork<OwnedFd>, host: impl IncomingHost + 'static) {
        lock(&self.shared.added).push(IncomingConnections::new(listener, host));
        self.wake();
    }

    /// Wakes both threads, so that they release closed listeners and watched processes.
    pub(crate) fn wake(&self) {
        self.wake_each();
    }

    /// Wakes both threads. Returns which of them could be woken: a program may have closed the descriptors.
    fn wake_each(&self) -> [bool; 2] {
        [&self.shared.ends.wake, &self.shared.wake].map(|wake| {
            // A full counter wakes as well.
            matches!(rustix::io::write(wake, &1u64.to_ne_bytes()), Ok(_) | Err(Errno::AGAIN))
        })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // A forked child has no such threads, and shares the parent's eventfds.
        if self.forks != fork::generation() {
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        let woken = self.wake_each();
        for (thread, woken) in self.threads.iter_mut().map(Option::take).zip(woken) {
            let Some(thread) = thread else { continue };
            // A thread that cannot be woken may sleep until the process ends.
            if woken && thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

fn watch_ends(shared: &Shared, doorbell: &Doorbell) {
    while !shared.stop.load(Ordering::Acquire) {
        shared.ends.forget();
        match shared.ends.wait() {
            Some(true) => doorbell.notify(),
            Some(false) => {}
            None => return,
        }
    }
}

fn answer_callers(shared: &Shared) {
    let mut callers: Vec<IncomingConnections> = Vec::new();
    while !shared.stop.load(Ordering::Acquire) {
        callers.append(&mut lock(&shared.added));
        callers.retain(|callers| callers.host.open());
        let now = Instant::now();
        let max_sleep = callers.iter().filter_map(|callers| callers.max_sleep(now)).min();
        let max_sleep = max_sleep.and_then(|max_sleep| Timespec::try_from(max_sleep).ok());
        let mut fds = vec![PollFd::new(&shared.wake, PollFlags::IN)];
        let mut counts = Vec::with_capacity(callers.len());
        for callers in &mut callers {
            let before = fds.len();
            fds.extend(callers.fds(now));
            counts.push(fds.len() - before);
        }
        if poll(&mut fds, max_sleep.as_ref()).is_err() {
            continue;
        }
        if fds[0].revents().contains(PollFlags::NVAL) {
            // The program has closed the descriptors of this library.
            return;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let mut ready = ready.into_iter();
        if ready.next() == Some(true) {
            let _ = rustix::io::read(&shared.wake, &mut [0u8; 8]);
        }
        let now = Instant::now();
        for (callers, count) in callers.iter_mut().zip(counts) {
            let ready: Vec<bool> = ready.by_ref().take(count).collect();
            // The callers that were being served lose their connections; the listener goes on.
            let answer = AssertUnwindSafe(|| callers.serve_ready(ready.into_iter(), now));
            if let Err(panic) = catch_unwind(answer) {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
                warn(&format!(
                    "process {} could not answer another process: internal error: {text}; it goes on (please report this)",
                    std::process::id()
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::super::handshake::listen;
    use super::super::incoming::Stage;
    use super::super::layout::PAGE;
    use super::super::memory::SharedMemory;
    use super::*;
    use crate::token::{Responder, Token};

    /// A host whose answers wait until they are let go, and then panic.
    struct Stuck {
        begun: Sender<()>,
        go: Receiver<()>,
    }

    impl IncomingHost for Stuck {
        fn greeting_bytes(&self) -> usize {
            8
        }
        fn check_allowed(&self, _: BorrowedFd<'_>) -> io::Result<()> {
            self.begun.send(()).unwrap();
            let _ = self.go.recv();
            panic!("an answer failed (expected by this test)");
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

    /// A peer that ends, and whether that is known within the time that every wait of this test has.
    fn death_is_reported(service: &Service) -> bool {
        let (peer, watched) = UnixStream::pair().unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        service.watch(watched.into(), &ended);
        drop(peer);
        let until = Instant::now() + Duration::from_secs(20);
        while !ended.load(Ordering::Acquire) && Instant::now() < until {
            std::thread::yield_now();
        }
        ended.load(Ordering::Acquire)
    }

    #[test]
    fn deaths_are_reported_while_an_answer_is_stuck_and_after_it_panicked() {
        let name = format!("smddp-test-stuck-{}", std::process::id());
        let service =
            Service::start(Doorbell::new(Arc::new(SharedMemory::create(PAGE).unwrap().0)).unwrap()).unwrap();
        let (begun, seen) = channel();
        let (go, wait) = channel();
        let listener = CloseOnFork::new(OwnedFd::from(listen(name.as_bytes()).unwrap()));
        service.serve(listener, Stuck { begun, go: wait });
        let address =
            <std::os::unix::net::SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(
                name.as_bytes(),
            )
            .unwrap();
        // The second caller is served after the first one's answer panicked.
        for _ in 0..2 {
            let _caller = UnixStream::connect_addr(&address).unwrap();
            seen.recv_timeout(Duration::from_secs(20)).expect("the listener serves callers");
            assert!(death_is_reported(&service), "a stuck answer held the report of a death up");
            go.send(()).unwrap();
        }
        assert!(death_is_reported(&service));
    }
}
