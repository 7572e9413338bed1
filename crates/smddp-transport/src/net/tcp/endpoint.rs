//! This process as other nodes reach it: one listening socket, and a door for each group.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::address::{self, CLOSED, HELLO, Hello, Purpose, REFUSED, TAKEN, TcpAddress, parse};
use super::dial::advice;
use super::seal::Seal;
use super::straggler_query;
use crate::close_on_fork::CloseOnFork;
use crate::fork::{self, PerProcess};
use crate::lock;
use crate::net::interface::{self, AddressFamily, InterfaceFilter, SelectedInterface};
use crate::process::incoming::{IncomingHost, Stage};
use crate::process::status::{StatusQuery, respond};
use crate::process::{Doorbell, Endpoint, ProcessUid, random};
use crate::token::{Challenge, SALT, Token};
use crate::warning::{info, warn};

/// A connection that is not wanted, and why.
type Refused = (CloseOnFork<TcpStream>, &'static str);

/// What others want of one group here.
#[derive(Default)]
pub(super) struct PendingConnections {
    me: usize,
    size: usize,
    classes: Mutex<Classes>,
    fresh: AtomicBool,
    /// Operations that this rank has begun, for those who ask.
    pub(super) begun: AtomicU64,
    /// What questions about this rank are about.
    pub(super) about: AtomicU64,
    watchers: Mutex<Watchers>,
    /// Callers that were sent away.
    refused: AtomicU64,
}

/// A peer's connection for frames of one class.
pub(super) struct CallOfClass {
    pub(super) rank: usize,
    pub(super) class: usize,
    pub(super) stream: CloseOnFork<TcpStream>,
    pub(super) seal: Option<Box<Seal>>,
}

/// Connections that carry frames.
#[derive(Default)]
struct Classes {
    /// (rank of the caller, class) of all that ever came, or that will not: each comes once at most. So whoever says the
    /// same hello again does not get between two ranks.
    known: HashSet<(usize, usize)>,
    /// With their connections, those that the group has not taken yet.
    waiting: Vec<CallOfClass>,
    /// Nobody takes any more.
    over: bool,
}

/// Those who want to notice when this group's end is closed.
#[derive(Default)]
struct Watchers {
    streams: Vec<CloseOnFork<TcpStream>>,
    closed: bool,
}

/// Watchers of one group, for each of its ranks: a connection that broke on its way may still look whole here.
const WATCHERS: usize = 4;
/// Of callers sent away, so many are told of: whoever calls again and again does not fill the log.
const TOLD: u64 = 8;

fn say(mut caller: &TcpStream, word: u8) {
    // One byte fits any socket buffer.
    let _ = caller.write_all(&[word]);
}

impl Watchers {
    fn add(&mut self, stream: CloseOnFork<TcpStream>, most: usize) -> Result<(), Refused> {
        if self.closed {
            say(&stream, CLOSED);
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
        say(&stream, TAKEN);
        self.streams.push(stream);
        Ok(())
    }
}

impl PendingConnections {
    pub(super) fn take(&self) -> Vec<CallOfClass> {
        if !self.fresh.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut lock(&self.classes).waiting)
    }

    /// That rank sends over a connection that was made here: so it never calls for that class.
    pub(super) fn close(&self, rank: usize, class: usize) {
        lock(&self.classes).known.insert((rank, class));
    }

    /// The wire is gone: those that wait, and whoever comes, are hung up on.
    pub(super) fn end(&self) {
        let mut classes = lock(&self.classes);
        classes.over = true;
        classes.waiting.clear();
    }

    fn class(&self, call: CallOfClass) -> Result<(), Refused> {
        let mut classes = lock(&self.classes);
        if classes.over {
            say(&call.stream, CLOSED);
            return Ok(());
        }
        if !classes.known.insert((call.rank, call.class)) {
            return Err((call.stream, "that rank is connected already, and its first connection goes on"));
        }
        // Before anything that the group sends over it.
        say(&call.stream, TAKEN);
        classes.waiting.push(call);
        self.fresh.store(true, Ordering::Release);
        Ok(())
    }

    /// Sends a caller away that may be no rank of the group.
    pub(super) fn refuse(&self, rank: usize, stream: &TcpStream, reason: &str) {
        say(stream, REFUSED);
        if self.refused.fetch_add(1, Ordering::Relaxed) < TOLD {
            let from = stream.peer_addr().map_or_else(|_| "an unknown address".to_owned(), |a| a.to_string());
            warn(&format!(
                "rank {}: a call from {from} in the name of rank {rank} is refused: {reason}",
                self.me
            ));
        }
    }
}

/// A group's place at the endpoint, from the moment its card is written.
pub(crate) struct GroupListener {
    pub(crate) endpoint: Arc<TcpEndpoint>,
    pub(super) inbox: Arc<PendingConnections>,
    token: SharedToken,
    pub(crate) address: TcpAddress,
}

/// What callers at a door must have; nobody is heard there before it is known.
type SharedToken = Arc<Mutex<Option<Arc<Token>>>>;

impl GroupListener {
    pub(crate) fn trust(&self, token: &Arc<Token>) {
        *lock(&self.token) = Some(token.clone());
    }

    pub(super) fn token(&self) -> Option<Arc<Token>> {
        lock(&self.token).clone()
    }
}

impl Drop for GroupListener {
    fn drop(&mut self) {
        // In a forked child these are the parent's, which goes on.
        if self.endpoint.ours() {
            let mut watchers = lock(&self.inbox.watchers);
            watchers.closed = true;
            watchers.streams.drain(..).for_each(|watcher| say(&watcher, CLOSED));
        }
    }
}

/// What the thread that answers callers knows of a door. Its token outlives the group for a while: who comes late is told that
/// the group is closed, and by nobody else.
struct RegisteredGroup {
    /// The group's rank here.
    me: usize,
    inbox: Weak<PendingConnections>,
    token: SharedToken,
}

/// Doors that are remembered, live ones apart.
const REMEMBERED: usize = 256;

/// The groups of this process, for the thread that answers callers.
#[derive(Default)]
struct RegisteredGroups {
    by_door: Mutex<HashMap<ProcessUid, RegisteredGroup>>,
    closed: AtomicBool,
}

/// Who they are and what they want is in their hello.
struct TcpHost {
    inboxes: Arc<RegisteredGroups>,
    doorbell: Doorbell,
    encrypts: bool,
}

impl IncomingHost for TcpHost {
    fn greeting_bytes(&self) -> usize {
        HELLO + SALT
    }

    fn is_greeting(&self, words: &[u8]) -> bool {
        address::heeds(words)
    }

    fn token(&self, words: &[u8]) -> Option<Arc<Token>> {
        let hello = parse(words.first_chunk()?)?;
        let inboxes = lock(&self.inboxes.by_door);
        // A caller that means another rank has wrong addresses: its messages must not reach this one.
        let entrance = inboxes.get(&hello.group_listener).filter(|entrance| entrance.me == hello.to)?;
        lock(&entrance.token).clone()
    }

    fn name(&self, caller: BorrowedFd<'_>) -> String {
        let address =
            rustix::net::getpeername(caller).ok().flatten().and_then(|any| SocketAddr::try_from(any).ok());
        address.map_or_else(|| "an unknown address".to_owned(), |address| address.to_string())
    }

    /// Hands the connection to its group, if that is still here.
    fn accept(
        &self,
        caller: CloseOnFork<OwnedFd>,
        words: &[u8],
        met: Option<&Challenge>,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)> {
        let keys = met.filter(|_| self.encrypts).map(Challenge::keys);
        let Hello { group_listener, from: rank, purpose, .. } = parse(words.first_chunk()?)?;
        let stream = caller.map(TcpStream::from);
        let inbox =
            lock(&self.inboxes.by_door).get(&group_listener).and_then(|entrance| entrance.inbox.upgrade());
        let Some(inbox) = inbox else {
            say(&stream, CLOSED);
            return None;
        };
        if rank >= inbox.size || rank == inbox.me {
            inbox.refuse(rank, &stream, "no other rank of this group has that number");
            return None;
        }
        let outcome = match purpose {
            Purpose::Class(class) => {
                let call = CallOfClass { rank, class, stream, seal: keys.map(Seal::of_listener) };
                inbox.class(call).inspect(|()| self.doorbell.notify())
            }
            Purpose::Ask => {
                // So few bytes fit any socket buffer.
                let begun = inbox.begun.load(Ordering::Acquire);
                let doing = respond(StatusQuery::Activity(inbox.about.load(Ordering::Relaxed)));
                // At once: what follows a byte alone would wait until that is acknowledged.
                let answer = [&[TAKEN], &*straggler_query::answer(begun, &doing, keys)].concat();
                let _ = (&*stream).write_all(&answer);
                Ok(())
            }
            Purpose::Watch => lock(&inbox.watchers).add(stream, WATCHERS * inbox.size),
        };
        if let Err((stream, reason)) = outcome {
            inbox.refuse(rank, &stream, reason);
        }
        None
    }

    fn open(&self) -> bool {
        !self.inboxes.closed.load(Ordering::Acquire)
    }

    fn resource_error(&self, error: &io::Error) -> String {
        format!("ranks of other nodes cannot be answered: {error}; they wait. {}", advice(error))
    }
}

pub(crate) struct TcpEndpoint {
    pub(crate) interface: SelectedInterface,
    /// A host that answers nothing for so long is gone.
    pub(super) peer_timeout: Duration,
    /// Frames and answers are sealed.
    pub(super) encrypts: bool,
    socket: SocketAddr,
    /// Until callers are answered.
    listener: Mutex<Option<CloseOnFork<TcpListener>>>,
    inboxes: Arc<RegisteredGroups>,
    endpoint: Arc<Endpoint>,
    forks: u32,
}

impl TcpEndpoint {
    /// The process's listener on that interface; the first group's settings count.
    pub(crate) fn get(
        endpoint: &Arc<Endpoint>,
        wanted: &InterfaceFilter,
        family: AddressFamily,
        peer_timeout: Duration,
        encrypts: bool,
    ) -> Result<Arc<Self>, String> {
        static CURRENT: PerProcess<Mutex<Weak<TcpEndpoint>>> = PerProcess::new();
        let mut cell = lock(CURRENT.get());
        if let Some(endpoint) = cell.upgrade() {
            return Ok(endpoint);
        }
        let interface = interface::choose(wanted, family).map_err(|e| e.to_string())?;
        let name = interface.to_string();
        let endpoint = Self::new(endpoint.clone(), interface, peer_timeout, encrypts)
            .map_err(|e| format!("cannot listen on {name}: {e}"))?;
        let endpoint = Arc::new(endpoint);
        *cell = Arc::downgrade(&endpoint);
        Ok(endpoint)
    }

    /// Nobody is answered before [`TcpEndpoint::serve`].
    fn new(
        endpoint: Arc<Endpoint>,
        interface: SelectedInterface,
        peer_timeout: Duration,
        encrypts: bool,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(interface.address.with_port(0))?;
        // The standard library's backlog of 128 is short for the first collective of a large group.
        rustix::net::listen(&listener, 4096)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            socket: listener.local_addr()?,
            interface,
            peer_timeout,
            encrypts,
            listener: Mutex::new(Some(CloseOnFork::new(listener))),
            inboxes: Arc::default(),
            endpoint,
            forks: fork::generation(),
        })
    }

    /// Not an ancestor's, of which a fork has left a copy here.
    pub(super) fn ours(&self) -> bool {
        self.forks == fork::generation()
    }

    /// For rank `me` of a group of `size`.
    pub(crate) fn group_listener(self: &Arc<Self>, me: usize, size: usize) -> GroupListener {
        let (group_listener, inbox) =
            (random(), Arc::new(PendingConnections { me, size, ..PendingConnections::default() }));
        let token = SharedToken::default();
        let mut inboxes = lock(&self.inboxes.by_door);
        if inboxes.len() >= REMEMBERED {
            inboxes.retain(|_, entrance| entrance.inbox.strong_count() > 0);
        }
        inboxes.insert(
            group_listener,
            RegisteredGroup { me, inbox: Arc::downgrade(&inbox), token: token.clone() },
        );
        let address = TcpAddress { socket: self.socket, group_listener };
        GroupListener { endpoint: self.clone(), inbox, token, address }
    }

    /// Answers callers from now on: a group does span nodes.
    pub(crate) fn serve(&self) {
        raise_descriptor_limit();
        if let Some(listener) = lock(&self.listener).take() {
            let (inboxes, doorbell) = (self.inboxes.clone(), self.endpoint.doorbell());
            let reception = TcpHost { inboxes, doorbell, encrypts: self.encrypts };
            self.endpoint.service.serve(listener.map(OwnedFd::from), reception);
        }
    }
}

impl Drop for TcpEndpoint {
    fn drop(&mut self) {
        // A forked child has no such thread, and shares the parent's eventfd.
        if self.ours() {
            self.inboxes.closed.store(true, Ordering::Release);
            self.endpoint.service.wake();
        }
    }
}

/// Raises the soft limit on open files to the hard one: a rank of a large group may need a connection to every other one, and many
/// systems allow 1,024 by default. The limit is never lowered again, since other code may hold descriptors above the old one.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    let before = limit.current;
    if before == limit.maximum {
        return;
    }
    limit.current = limit.maximum;
    if setrlimit(Resource::Nofile, limit).is_ok() {
        let number = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |n| n.to_string());
        info(&format!(
            "raised the soft limit on open files of this process from {} to {}, its hard limit; child processes inherit it",
            number(before),
            number(limit.maximum)
        ));
    }
}
