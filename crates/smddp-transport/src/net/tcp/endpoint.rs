//! This process as other nodes reach it: one listening socket, and a door for each group.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use serde::{Deserialize, Serialize};

use super::callers::serve;
use super::hello::Purpose;
use super::own::Own;
use crate::fork;
use crate::net::interface::Choice;
use crate::process::{Bell, Id, random};
use crate::warn::warn;

/// How a rank is reached: its process's address and the group's token there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TcpAddress {
    pub(crate) socket: SocketAddr,
    pub(crate) token: Id,
}

/// A connection that is not wanted, and why.
type Refused = (Own<TcpStream>, &'static str);

/// What others want of one group here.
pub(super) struct Inbox {
    me: usize,
    size: usize,
    lanes: Mutex<Lanes>,
    fresh: AtomicBool,
    /// Operations that this rank has begun, for those who ask.
    pub(super) begun: AtomicU64,
    watchers: Mutex<Watchers>,
    /// Callers that were sent away.
    refused: AtomicU64,
}

/// Connections that carry frames.
#[derive(Default)]
struct Lanes {
    /// (rank of the caller, lane) of all that ever came, or that will not: each comes once at most. So whoever says the
    /// same hello again does not get between two ranks.
    known: HashSet<(usize, usize)>,
    /// With their connections, those that the group's link has not taken yet.
    waiting: Vec<(usize, usize, Own<TcpStream>)>,
}

/// Those who want to notice when this group's end is closed.
#[derive(Default)]
struct Watchers {
    streams: Vec<Own<TcpStream>>,
    closed: bool,
}

/// What watchers hear of a group that is closed; a process that dies says nothing.
pub(super) const CLOSED: u8 = 1;
/// Watchers of one group, for each of its ranks: a connection that broke on its way may still look whole here.
const WATCHERS: usize = 4;
/// Of callers sent away, so many are told of: whoever calls again and again does not fill the log.
const TOLD: u64 = 8;

fn tell_closed(mut watcher: &TcpStream) {
    // One byte fits any socket buffer.
    let _ = watcher.write_all(&[CLOSED]);
}

impl Watchers {
    fn add(&mut self, stream: Own<TcpStream>, most: usize) -> Result<(), Refused> {
        if self.closed {
            tell_closed(&stream);
            return Ok(());
        }
        if self.streams.len() >= most {
            // They say nothing: what can be read is their end.
            self.streams.retain(|watcher| {
                let outcome = (&**watcher).read(&mut [0]);
                matches!(outcome, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            });
        }
        if self.streams.len() >= most {
            return Err((stream, "it watches too often"));
        }
        self.streams.push(stream);
        Ok(())
    }
}

impl Inbox {
    fn new(me: usize, size: usize) -> Self {
        Self {
            me,
            size,
            lanes: Mutex::default(),
            fresh: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            watchers: Mutex::default(),
            refused: AtomicU64::new(0),
        }
    }

    pub(super) fn take(&self) -> Vec<(usize, usize, Own<TcpStream>)> {
        if !self.fresh.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut lock(&self.lanes).waiting)
    }

    /// That rank sends over a connection that was made here: so it never calls for that lane.
    pub(super) fn close(&self, rank: usize, lane: usize) {
        lock(&self.lanes).known.insert((rank, lane));
    }

    fn lane(&self, rank: usize, lane: usize, stream: Own<TcpStream>) -> Result<(), Refused> {
        let mut lanes = lock(&self.lanes);
        if !lanes.known.insert((rank, lane)) {
            return Err((stream, "that rank is connected already, and its first connection goes on"));
        }
        lanes.waiting.push((rank, lane, stream));
        self.fresh.store(true, Ordering::Release);
        Ok(())
    }

    /// Sends a caller away that may be no rank of the group.
    pub(super) fn refuse(&self, rank: usize, stream: &TcpStream, why: &str) {
        if self.refused.fetch_add(1, Ordering::Relaxed) < TOLD {
            let from = stream.peer_addr().map_or_else(|_| "an unknown address".to_owned(), |a| a.to_string());
            warn(&format!(
                "rank {}: a call from {from} in the name of rank {rank} is refused: {why}",
                self.me
            ));
        }
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

/// What the answering thread works with.
pub(super) struct Shared {
    pub(super) wake: OwnedFd,
    pub(super) stop: AtomicBool,
    inboxes: Mutex<HashMap<Id, Weak<Inbox>>>,
}

impl Shared {
    /// Hands the connection to its group. Where the group is gone, hanging up says so.
    pub(super) fn admit(
        &self,
        token: &Id,
        rank: usize,
        purpose: Purpose,
        stream: Own<TcpStream>,
        bell: &Bell,
    ) {
        let inbox = lock(&self.inboxes).get(token).and_then(Weak::upgrade);
        let Some(inbox) = inbox else {
            if purpose == Purpose::Watch {
                tell_closed(&stream);
            }
            return;
        };
        if rank >= inbox.size || rank == inbox.me {
            return inbox.refuse(rank, &stream, "no other rank of this group has that number");
        }
        match purpose {
            Purpose::Lane(lane) => match inbox.lane(rank, lane, stream) {
                Ok(()) => bell.ring(),
                Err((stream, why)) => inbox.refuse(rank, &stream, why),
            },
            Purpose::Ask => {
                // Eight bytes fit any socket buffer.
                let begun = inbox.begun.load(Ordering::Acquire);
                let _ = (&*stream).write_all(&begun.to_le_bytes());
            }
            Purpose::Watch => {
                let most = WATCHERS * inbox.size;
                let outcome = lock(&inbox.watchers).add(stream, most);
                if let Err((stream, why)) = outcome {
                    inbox.refuse(rank, &stream, why);
                }
            }
        }
    }
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

    /// For rank `me` of a group of `size`.
    pub(crate) fn door(self: &Arc<Self>, me: usize, size: usize) -> Door {
        let (token, inbox) = (random(), Arc::new(Inbox::new(me, size)));
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
