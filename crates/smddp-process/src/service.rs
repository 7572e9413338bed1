//! Threads of an endpoint: one serves incoming connections, one detects the ends of peers. Watched processes are
//! registered with epoll. There are hundreds, and passing each to `poll` again would cost a third of the startup
//! time.

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
use smddp_base::CloseOnFork;
use smddp_base::threads::spawn;
use smddp_base::warning::{info, warn};
use smddp_base::{fork, lock};

use super::doorbell::Doorbell;
use super::incoming::{IncomingConnections, IncomingHost};
use super::memory::system_call_error;

struct Watched {
    fd: OwnedFd,
    ended: Weak<AtomicBool>,
}

/// Watched processes and connections, and the eventfd of the watching thread.
struct EndWatch {
    epoll: OwnedFd,
    wake: OwnedFd,
    watched: Mutex<HashMap<u64, Watched>>,
    /// Next epoll key.
    next: AtomicU64,
}

impl EndWatch {
    /// Epoll key of the eventfd.
    const WAKE: u64 = u64::MAX;

    fn new(wake: OwnedFd) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(|reason| system_call_error("epoll_create1", reason))?;
        epoll::add(&epoll, &wake, EventData::new_u64(Self::WAKE), EventFlags::IN)?;
        Ok(Self { epoll, wake, watched: Mutex::default(), next: AtomicU64::new(0) })
    }

    fn add(&self, new: Watched) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        // Locked until it is in the map, because the thread may receive its event immediately.
        let mut watched = lock(&self.watched);
        match epoll::add(&self.epoll, &new.fd, EventData::new_u64(number), EventFlags::IN) {
            Ok(()) => drop(watched.insert(number, new)),
            Err(reason) => info(&format!(
                "the end of a process of this node will be detected only by a timeout: epoll rejected its descriptor ({reason})"
            )),
        }
    }

    /// Removes entries whose `ended` flag has no other holder.
    fn remove_unreferenced(&self) {
        lock(&self.watched).retain(|_, watched| {
            let held = watched.ended.strong_count() > 0;
            if !held {
                // Deleted explicitly: closing the descriptor would not remove it while a forked child has a copy.
                let _ = epoll::delete(&self.epoll, &watched.fd);
            }
            held
        });
    }

    /// Sleeps until a process ends or the thread is woken, and marks the ended processes. Returns true if any ended;
    /// `None` if the program has closed the descriptors of this library (`os.closerange`).
    fn wait(&self) -> Option<bool> {
        let mut events =
            [const { epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) } }; 16];
        let mut any_ended = false;
        // The next call returns further events.
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
                any_ended = true;
            }
        }
        Some(any_ended)
    }
}

struct Shared {
    /// Wakes the thread that serves connections. [`EndWatch`] has the eventfd of the watching thread.
    wake: OwnedFd,
    stop: AtomicBool,
    ends: EndWatch,
    /// Listeners that the thread has not taken yet.
    added: Mutex<Vec<IncomingConnections>>,
}

/// Two threads: one detects the ends of peers, the other serves incoming connections. A reply may take long (the main
/// thread's stack, the export of device memory) or panic in foreign code; the detection of deaths continues
/// meanwhile.
pub struct Service {
    shared: Arc<Shared>,
    threads: [Option<JoinHandle<()>>; 2],
    forks: u32,
}

impl Service {
    /// Starts the threads. They notify `doorbell` when a peer ends.
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
        // If the second thread cannot be started, dropping the service joins the first.
        let thread_shared = service.shared.clone();
        service.threads[0] = Some(spawn("smddp-ends", move || watch_ends(&thread_shared, &doorbell))?);
        let thread_shared = service.shared.clone();
        service.threads[1] = Some(spawn("smddp-service", move || serve_connections(&thread_shared))?);
        Ok(service)
    }

    /// Watches `fd`: when the process or connection behind it ends, sets `ended` and notifies the doorbell. Stops
    /// when `ended` has no other holder.
    pub(crate) fn watch(&self, fd: OwnedFd, ended: &Arc<AtomicBool>) {
        self.shared.ends.add(Watched { fd, ended: Arc::downgrade(ended) });
    }

    /// Serves connections of a non-blocking listener while its host is open.
    pub fn serve(&self, listener: CloseOnFork<OwnedFd>, host: impl IncomingHost + 'static) {
        lock(&self.shared.added).push(IncomingConnections::new(listener, host));
        self.wake();
    }

    /// Wakes both threads, so that they release closed listeners and watched processes.
    pub fn wake(&self) {
        self.wake_each();
    }

    /// Wakes both threads. Returns which of them were woken: the program may have closed the descriptors.
    fn wake_each(&self) -> [bool; 2] {
        [&self.shared.ends.wake, &self.shared.wake].map(|wake| {
            // A full counter wakes the thread too.
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
            // A thread that was not woken may sleep until the process ends.
            if woken && thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

fn watch_ends(shared: &Shared, doorbell: &Doorbell) {
    while !shared.stop.load(Ordering::Acquire) {
        shared.ends.remove_unreferenced();
        match shared.ends.wait() {
            Some(true) => doorbell.notify(),
            Some(false) => {}
            None => return,
        }
    }
}

fn serve_connections(shared: &Shared) {
    let mut listeners: Vec<IncomingConnections> = Vec::new();
    while !shared.stop.load(Ordering::Acquire) {
        listeners.append(&mut lock(&shared.added));
        listeners.retain(|listener| listener.host.open());
        let now = Instant::now();
        let max_sleep = listeners.iter().filter_map(|listener| listener.max_sleep(now)).min();
        let max_sleep = max_sleep.and_then(|max_sleep| Timespec::try_from(max_sleep).ok());
        let mut fds = vec![PollFd::new(&shared.wake, PollFlags::IN)];
        let mut counts = Vec::with_capacity(listeners.len());
        for listener in &mut listeners {
            let before = fds.len();
            fds.extend(listener.fds(now));
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
        for (listener, count) in listeners.iter_mut().zip(counts) {
            let ready: Vec<bool> = ready.by_ref().take(count).collect();
            // After a panic the connections that were being served are lost; the listener continues.
            let serve = AssertUnwindSafe(|| listener.serve_ready(ready.into_iter(), now));
            if let Err(panic) = catch_unwind(serve) {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
                warn(&format!(
                    "process {} could not reply to another process: internal error: {text}; the process continues (please report this)",
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

    use smddp_net::handshake::{Listener, Responder};

    use super::super::incoming::Stage;
    use super::super::layout::PAGE;
    use super::super::memory::SharedMemory;
    use super::super::memory_request::listen;
    use super::*;

    /// Host whose connections block until they are released, and then panic.
    struct Blocked {
        begun: Sender<()>,
        go: Receiver<()>,
    }

    impl IncomingHost for Blocked {
        fn first_stage(&self) -> Stage {
            Stage::Handshake(Box::new(Responder::new(Listener::Process)))
        }
        fn check_allowed(&self, _: BorrowedFd<'_>) -> io::Result<()> {
            self.begun.send(()).unwrap();
            let _ = self.go.recv();
            panic!("a reply failed (expected by this test)");
        }
        fn name(&self, _: BorrowedFd<'_>) -> String {
            String::new()
        }
        fn resource_error(&self, error: &io::Error) -> String {
            error.to_string()
        }
    }

    /// Ends a peer and returns true if its end is detected within 20 s.
    fn end_is_detected(service: &Service) -> bool {
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
    fn ends_are_detected_while_a_reply_blocks_and_after_it_panicked() {
        let name = format!("smddp-test-blocked-{}", std::process::id());
        let service =
            Service::start(Doorbell::new(Arc::new(SharedMemory::create(PAGE).unwrap().0)).unwrap()).unwrap();
        let (begun, seen) = channel();
        let (go, wait) = channel();
        let listener = CloseOnFork::new(OwnedFd::from(listen(name.as_bytes()).unwrap()));
        service.serve(listener, Blocked { begun, go: wait });
        let address =
            <std::os::unix::net::SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(
                name.as_bytes(),
            )
            .unwrap();
        // The second connection is served after the first one panicked.
        for _ in 0..2 {
            let _connection = UnixStream::connect_addr(&address).unwrap();
            seen.recv_timeout(Duration::from_secs(20)).expect("the listener serves connections");
            assert!(end_is_detected(&service), "a blocked reply delayed the detection");
            go.send(()).unwrap();
        }
        assert!(end_is_detected(&service));
    }
}
