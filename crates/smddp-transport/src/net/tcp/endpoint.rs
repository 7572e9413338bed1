//! This process as other nodes reach it: one listening socket, and the thread that tells callers apart.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use serde::{Deserialize, Serialize};

use super::hello::{HELLO, Purpose, parse};
use super::own::Own;
use crate::fork;
use crate::net::interface::Choice;
use crate::shm::{Bell, Id, random};

/// How a rank is reached: its process's address and the group's token there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TcpAddress {
    pub(crate) socket: SocketAddr,
    pub(crate) token: Id,
}

/// Connections that were accepted for one group and that its link has not taken yet.
#[derive(Default)]
pub(super) struct Inbox {
    /// (rank of the caller, lane, connection).
    sockets: Mutex<Vec<(usize, usize, Own<TcpStream>)>>,
    fresh: AtomicBool,
    /// Operations that this rank has begun, for those who ask.
    pub(super) begun: AtomicU64,
    watchers: Mutex<Watchers>,
}

/// Those who want to notice when this group's end is closed.
#[derive(Default)]
struct Watchers {
    streams: Vec<Own<TcpStream>>,
    closed: bool,
}

/// What watchers hear of a group that is closed; a process that dies says nothing.
pub(super) const CLOSED: u8 = 1;

fn tell_closed(mut watcher: &TcpStream) {
    // One byte fits any socket buffer.
    let _ = watcher.write_all(&[CLOSED]);
}

impl Inbox {
    pub(super) fn take(&self) -> Vec<(usize, usize, Own<TcpStream>)> {
        if !self.fresh.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *lock(&self.sockets))
    }
}

/// A group's place at the endpoint, from the moment its card is written.
pub(crate) struct Door {
    pub(crate) endpoint: Arc<TcpEndpoint>,
    pub(super) inbox: Arc<Inbox>,
    pub(crate) address: TcpAddress,
}

impl Drop for Door {
    fn drop(&mut self) {
        // In a forked child these are the parent's, which goes on.
        if self.endpoint.ours() {
            let mut watchers = lock(&self.inbox.watchers);
            watchers.closed = true;
            watchers.streams.drain(..).for_each(|watcher| tell_closed(&watcher));
        }
    }
}

struct Shared {
    wake: OwnedFd,
    stop: AtomicBool,
    inboxes: Mutex<HashMap<Id, Weak<Inbox>>>,
}

pub(crate) struct TcpEndpoint {
    pub(crate) interface: Choice,
    socket: SocketAddr,
    listener: Mutex<Option<Own<TcpListener>>>,
    shared: Arc<Shared>,
    bell: Bell,
    thread: OnceLock<JoinHandle<()>>,
    forks: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Callers that have not said hello after this time are hung up on. Long: a rank that shares its core with hundreds may
/// take its time between a connection and the first word.
const PATIENCE: Duration = Duration::from_secs(120);

impl TcpEndpoint {
    /// Listens on that interface. Nobody is answered before [`TcpEndpoint::serve`].
    pub(crate) fn new(interface: Choice, bell: Bell) -> io::Result<Self> {
        let listener = TcpListener::bind(interface.address.with_port(0))?;
        // The standard library's backlog of 128 is short for the first collective of a large group.
        rustix::net::listen(&listener, 4096)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            socket: listener.local_addr()?,
            interface,
            listener: Mutex::new(Some(Own::new(listener))),
            shared: Arc::new(Shared {
                wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
                stop: AtomicBool::new(false),
                inboxes: Mutex::default(),
            }),
            bell,
            thread: OnceLock::new(),
            forks: fork::generation(),
        })
    }

    /// Not an ancestor's, of which a fork has left a copy here.
    pub(super) fn ours(&self) -> bool {
        self.forks == fork::generation()
    }

    pub(crate) fn door(self: &Arc<Self>) -> Door {
        let (token, inbox) = (random(), Arc::new(Inbox::default()));
        let mut inboxes = lock(&self.shared.inboxes);
        inboxes.retain(|_, inbox| inbox.strong_count() > 0);
        inboxes.insert(token, Arc::downgrade(&inbox));
        let address = TcpAddress { socket: self.socket, token };
        Door { endpoint: self.clone(), inbox, address }
    }

    /// Answers callers from now on: a group does span nodes.
    pub(crate) fn serve(&self) -> io::Result<()> {
        raise_descriptor_limit();
        let Some(listener) = lock(&self.listener).take() else { return Ok(()) };
        let (shared, bell) = (self.shared.clone(), self.bell.clone());
        let thread = std::thread::Builder::new()
            .name("smddp-accept".to_owned())
            .spawn(move || serve(&shared, &listener, &bell))?;
        let _ = self.thread.set(thread);
        Ok(())
    }
}

impl Drop for TcpEndpoint {
    fn drop(&mut self) {
        // A forked child has no such thread, and shares the parent's eventfd.
        if !self.ours() {
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// A rank of a large group may need a connection to every other one; many systems allow 1,024 by default.
fn raise_descriptor_limit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum;
        let _ = setrlimit(Resource::Nofile, limit);
    });
}

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

fn serve(shared: &Shared, listener: &TcpListener, bell: &Bell) {
    let mut callers: Vec<Caller> = Vec::new();
    while !shared.stop.load(Ordering::Acquire) {
        let mut fds = vec![
            PollFd::new(&shared.wake, PollFlags::IN),
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
        ];
        fds.extend(callers.iter().map(|c| PollFd::new(&*c.stream, PollFlags::IN)));
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        if poll(&mut fds, (!callers.is_empty()).then_some(&second)).is_err() {
            continue;
        }
        drop(fds);
        let _ = rustix::io::read(&shared.wake, &mut [0u8; 8]);
        loop {
            match listener.accept() {
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    let stream = Own::new(stream);
                    callers.push(Caller { stream, since: Instant::now(), bytes: [0; HELLO], got: 0 });
                }
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // Out of descriptors, most likely: the caller waits until some are free again.
                    std::thread::sleep(Duration::from_millis(10));
                    break;
                }
            }
        }
        let mut i = 0;
        while i < callers.len() {
            match callers[i].listen() {
                Heard::NotYet if callers[i].since.elapsed() < PATIENCE => i += 1,
                Heard::All => admit(shared, callers.swap_remove(i), bell),
                _ => drop(callers.swap_remove(i)),
            }
        }
    }
}

/// Hands the connection to its group. Where the group is gone, hanging up says so.
fn admit(shared: &Shared, caller: Caller, bell: &Bell) {
    let Some((token, rank, purpose)) = parse(&caller.bytes) else { return };
    let inbox = lock(&shared.inboxes).get(&token).and_then(Weak::upgrade);
    let Some(inbox) = inbox else {
        if purpose == Purpose::Watch {
            tell_closed(&caller.stream);
        }
        return;
    };
    match purpose {
        Purpose::Lane(lane) => {
            lock(&inbox.sockets).push((rank, lane, caller.stream));
            inbox.fresh.store(true, Ordering::Release);
            bell.ring();
        }
        Purpose::Ask => {
            // Eight bytes fit any socket buffer.
            let begun = inbox.begun.load(Ordering::Acquire);
            let _ = (&*caller.stream).write_all(&begun.to_le_bytes());
        }
        Purpose::Watch => {
            let mut watchers = lock(&inbox.watchers);
            if watchers.closed {
                tell_closed(&caller.stream);
            } else {
                watchers.streams.push(caller.stream);
            }
        }
    }
}
