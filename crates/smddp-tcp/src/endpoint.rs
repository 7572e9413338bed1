//! This process's endpoint for other nodes: one listening socket, and a listener id for each group.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use smddp_base::CloseOnFork;
use smddp_base::fork::{self, PerProcess};
use smddp_base::lock;
use smddp_base::random::bytes as random;
use smddp_base::warning::{info, warn};
use smddp_net::frame::CLASSES;
use smddp_net::handshake::ProcessUid;
use smddp_net::handshake::{ACCEPTED, CLOSED, Greeting, Listener, Purpose, REJECTED, Responder};
use smddp_net::interface::{self, AddressFamily, InterfaceFilter, SelectedInterface};
use smddp_net::token::Token;
pub use smddp_process::incoming::{IncomingHost, Stage};
pub use smddp_process::status::{StatusQuery, respond};
use smddp_process::{Doorbell, Endpoint};

use super::address::TcpAddress;
use super::deadlock_probe;
use super::dial::advice;
use super::seal::Seal;
use super::{status_query, straggler_query};

/// Rejected connection, and the reason.
type Rejected = (CloseOnFork<TcpStream>, &'static str);

/// Accepted connections of one group of this process, until the group takes them.
#[derive(Default)]
pub(super) struct PendingConnections {
    me: usize,
    size: usize,
    classes: Mutex<Classes>,
    has_new: AtomicBool,
    /// Operations that this rank has started, for straggler queries.
    pub(super) begun: AtomicU64,
    /// Subject of the status text in replies to straggler queries.
    pub(super) status_id: AtomicU64,
    watchers: Mutex<Watchers>,
    /// Number of rejected connections.
    rejected: AtomicU64,
}

/// Connection of a peer for the frames of one class.
pub(super) struct FrameConnection {
    pub(super) rank: usize,
    pub(super) class: usize,
    pub(super) stream: CloseOnFork<TcpStream>,
    pub(super) seal: Option<Box<Seal>>,
}

/// Accepted connections that carry frames.
#[derive(Default)]
struct Classes {
    /// (peer rank, class) of every connection that was accepted or is no longer needed. Each is accepted at most once,
    /// so that a repeated greeting cannot replace a connection between two ranks.
    seen: HashSet<(usize, usize)>,
    /// Connections that the group has not taken yet.
    waiting: Vec<FrameConnection>,
    /// The group takes no more connections.
    closed: bool,
}

/// Liveness connections of peers, which report when this end of the group closes.
#[derive(Default)]
struct Watchers {
    streams: Vec<CloseOnFork<TcpStream>>,
    closed: bool,
}

/// Maximum number of liveness connections per rank of the group. A connection that broke in the network may still seem
/// open here.
const WATCHERS_PER_RANK: usize = 4;
/// Maximum number of logged rejections, so that a peer that retries does not fill the log.
const MAX_LOGGED_REJECTIONS: u64 = 8;

fn send_byte(mut stream: &TcpStream, byte: u8) {
    // One byte fits in any socket buffer.
    let _ = stream.write_all(&[byte]);
}

impl Watchers {
    fn add(&mut self, stream: CloseOnFork<TcpStream>, limit: usize) -> Result<(), Rejected> {
        if self.closed {
            send_byte(&stream, CLOSED);
            return Ok(());
        }
        if self.streams.len() >= limit {
            // Peers send nothing over these connections, so a readable one has ended.
            self.streams.retain(|watcher| {
                let outcome = (&**watcher).read(&mut [0]);
                matches!(outcome, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            });
        }
        if self.streams.len() >= limit {
            return Err((stream, "it has too many liveness connections"));
        }
        send_byte(&stream, ACCEPTED);
        self.streams.push(stream);
        Ok(())
    }
}

impl PendingConnections {
    /// Returns the connections that were accepted since the last call.
    pub(super) fn take(&self) -> Vec<FrameConnection> {
        if !self.has_new.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut lock(&self.classes).waiting)
    }

    /// Records that the rank uses the connection that this rank opened for the class, and will not open one.
    pub(super) fn mark_connected(&self, rank: usize, class: usize) {
        lock(&self.classes).seen.insert((rank, class));
    }

    /// Closes the waiting connections and all later ones, because the wire is closed.
    pub(super) fn close(&self) {
        let mut classes = lock(&self.classes);
        classes.closed = true;
        classes.waiting.clear();
    }

    fn add(&self, connection: FrameConnection) -> Result<(), Rejected> {
        let mut classes = lock(&self.classes);
        if classes.closed {
            send_byte(&connection.stream, CLOSED);
            return Ok(());
        }
        if !classes.seen.insert((connection.rank, connection.class)) {
            return Err((
                connection.stream,
                "that rank is already connected, and keeps its first connection",
            ));
        }
        // The verdict comes before any frame that the group sends.
        send_byte(&connection.stream, ACCEPTED);
        classes.waiting.push(connection);
        self.has_new.store(true, Ordering::Release);
        Ok(())
    }

    /// Rejects and logs a connection, which may not be from a rank of the group.
    pub(super) fn reject(&self, rank: usize, stream: &TcpStream, reason: &str) {
        send_byte(stream, REJECTED);
        if self.rejected.fetch_add(1, Ordering::Relaxed) < MAX_LOGGED_REJECTIONS {
            let from = stream.peer_addr().map_or_else(|_| "an unknown address".to_owned(), |a| a.to_string());
            warn(&format!(
                "rejected a connection to rank {} from {from} that claims to be rank {rank}: {reason}",
                self.me
            ));
        }
    }
}

/// A group's listener at the endpoint, from the time when its rank info is written.
pub struct GroupListener {
    pub(crate) endpoint: Arc<TcpEndpoint>,
    pub(super) pending: Arc<PendingConnections>,
    token: SharedToken,
    address: TcpAddress,
}

/// Token that connections to a group's listener must have. Until it is set, the listener accepts none.
type SharedToken = Arc<Mutex<Option<Arc<Token>>>>;

impl GroupListener {
    /// Sets the group's token.
    pub fn trust(&self, token: &Arc<Token>) {
        *lock(&self.token) = Some(token.clone());
    }

    /// Returns the address for the ranks of other nodes.
    pub fn address(&self) -> &TcpAddress {
        &self.address
    }

    pub(super) fn token(&self) -> Option<Arc<Token>> {
        lock(&self.token).clone()
    }
}

impl Drop for GroupListener {
    fn drop(&mut self) {
        // In a forked child these are copies of the parent's connections, which the parent still uses.
        if self.endpoint.is_own_process() {
            let mut watchers = lock(&self.pending.watchers);
            watchers.closed = true;
            watchers.streams.drain(..).for_each(|watcher| send_byte(&watcher, CLOSED));
        }
    }
}

/// Group for the thread that accepts connections. Its token outlives the group for a while, so that a late peer
/// receives an authenticated verdict that the group is closed.
struct RegisteredGroup {
    /// The group's rank here.
    me: usize,
    pending: Weak<PendingConnections>,
    token: SharedToken,
}

/// Number of listener ids above which those of closed groups are removed.
const MAX_REMEMBERED: usize = 256;

/// Groups of this process, for the thread that accepts connections.
#[derive(Default)]
struct RegisteredGroups {
    by_id: Mutex<HashMap<ProcessUid, RegisteredGroup>>,
    closed: AtomicBool,
}

/// Host of incoming TCP connections. Their greeting has the rank and the purpose.
struct TcpHost {
    groups: Arc<RegisteredGroups>,
    doorbell: Doorbell,
    encrypts: bool,
}

impl IncomingHost for TcpHost {
    fn first_stage(&self) -> Stage {
        Stage::Handshake(Box::new(Responder::new(Listener::Groups)))
    }

    fn token(&self, greeting: &Greeting) -> Option<Arc<Token>> {
        if matches!(greeting.purpose, Purpose::Frames(class) if class >= CLASSES) {
            return None;
        }
        let groups = lock(&self.groups.by_id);
        // A peer that addresses another rank has wrong addresses, and its messages must not reach this rank.
        let group = groups.get(&greeting.to.id).filter(|group| group.me == greeting.to.rank)?;
        lock(&group.token).clone()
    }

    fn name(&self, caller: BorrowedFd<'_>) -> String {
        let address =
            rustix::net::getpeername(caller).ok().flatten().and_then(|any| SocketAddr::try_from(any).ok());
        address.map_or_else(|| "an unknown address".to_owned(), |address| address.to_string())
    }

    /// Passes the connection to its group, if the group still exists.
    fn accept(
        &self,
        caller: CloseOnFork<OwnedFd>,
        handshake: &Responder,
    ) -> Option<(CloseOnFork<OwnedFd>, Stage)> {
        let keys = handshake.keys().filter(|_| self.encrypts);
        let Greeting { purpose, from, to, .. } = handshake.greeting()?;
        let rank = from.rank;
        let stream = caller.map(TcpStream::from);
        let pending = lock(&self.groups.by_id).get(&to.id).and_then(|group| group.pending.upgrade());
        let Some(pending) = pending else {
            send_byte(&stream, CLOSED);
            return None;
        };
        if rank >= pending.size || rank == pending.me {
            pending.reject(rank, &stream, "the group has no other rank with that number");
            return None;
        }
        let outcome = match purpose {
            Purpose::Frames(class) => {
                let connection = FrameConnection { rank, class, stream, seal: keys.map(Seal::for_responder) };
                pending.add(connection).inspect(|()| self.doorbell.notify())
            }
            Purpose::Query => {
                // The reply fits in any socket buffer.
                let begun = pending.begun.load(Ordering::Acquire);
                let doing = respond(StatusQuery::Activity(pending.status_id.load(Ordering::Relaxed)));
                // One write for both: data after a single byte would wait for its acknowledgement (Nagle).
                let reply = [&[ACCEPTED], &*straggler_query::encode_reply(begun, &doing, keys)].concat();
                let _ = (&*stream).write_all(&reply);
                Ok(())
            }
            Purpose::Status => {
                let reply = status_query::encode_reply(&respond(StatusQuery::Status), keys);
                return Some((stream.map(OwnedFd::from), Stage::Reply(reply)));
            }
            Purpose::Watch => lock(&pending.watchers).add(stream, WATCHERS_PER_RANK * pending.size),
            Purpose::Probe => {
                send_byte(&stream, ACCEPTED);
                return Some((stream.map(OwnedFd::from), Stage::Message(deadlock_probe::receiver(keys))));
            }
            Purpose::Memory | Purpose::Export(_) | Purpose::Bootstrap => Ok(()),
        };
        if let Err((stream, reason)) = outcome {
            pending.reject(rank, &stream, reason);
        }
        None
    }

    fn open(&self) -> bool {
        !self.groups.closed.load(Ordering::Acquire)
    }

    fn resource_error(&self, error: &io::Error) -> String {
        format!("cannot accept connections of other nodes: {error}; their ranks wait. {}", advice(error))
    }
}

/// TCP endpoint of this process.
pub struct TcpEndpoint {
    /// Network interface of the endpoint.
    pub interface: SelectedInterface,
    /// Time without any answer after which a host counts as lost.
    pub(super) peer_timeout: Duration,
    /// Frames and query replies are encrypted.
    pub(super) encrypts: bool,
    socket: SocketAddr,
    /// Present until [`TcpEndpoint::serve`].
    listener: Mutex<Option<CloseOnFork<TcpListener>>>,
    groups: Arc<RegisteredGroups>,
    endpoint: Arc<Endpoint>,
    fork_generation: u32,
}

impl TcpEndpoint {
    /// Returns the endpoint of this process, and creates it if needed. The settings of the first group apply.
    ///
    /// # Errors
    /// No interface matches the filter, or the listener cannot be opened. The text is for users.
    pub fn get(
        endpoint: &Arc<Endpoint>,
        filter: &InterfaceFilter,
        family: AddressFamily,
        peer_timeout: Duration,
        encrypts: bool,
    ) -> Result<Arc<Self>, String> {
        static CURRENT: PerProcess<Mutex<Weak<TcpEndpoint>>> = PerProcess::new();
        let mut current = lock(CURRENT.get());
        if let Some(endpoint) = current.upgrade() {
            return Ok(endpoint);
        }
        let interface = interface::choose(filter, family).map_err(|e| e.to_string())?;
        let name = interface.to_string();
        let endpoint = Self::new(endpoint.clone(), interface, peer_timeout, encrypts)
            .map_err(|e| format!("cannot listen on {name}: {e}"))?;
        let endpoint = Arc::new(endpoint);
        *current = Arc::downgrade(&endpoint);
        Ok(endpoint)
    }

    /// Creates the listening socket. No connection is accepted before [`TcpEndpoint::serve`].
    fn new(
        endpoint: Arc<Endpoint>,
        interface: SelectedInterface,
        peer_timeout: Duration,
        encrypts: bool,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(interface.address.with_port(0))?;
        // The standard library's backlog of 128 is too small for the first collective of a large group.
        rustix::net::listen(&listener, 4096)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            socket: listener.local_addr()?,
            interface,
            peer_timeout,
            encrypts,
            listener: Mutex::new(Some(CloseOnFork::new(listener))),
            groups: Arc::default(),
            endpoint,
            fork_generation: fork::generation(),
        })
    }

    /// Returns false in a forked child, whose copy belongs to an ancestor.
    pub(super) fn is_own_process(&self) -> bool {
        self.fork_generation == fork::generation()
    }

    /// Registers a listener for rank `me` of a group of `size` ranks.
    pub fn group_listener(self: &Arc<Self>, me: usize, size: usize) -> GroupListener {
        let (listener_id, pending) =
            (random(), Arc::new(PendingConnections { me, size, ..PendingConnections::default() }));
        let token = SharedToken::default();
        let mut groups = lock(&self.groups.by_id);
        if groups.len() >= MAX_REMEMBERED {
            groups.retain(|_, group| group.pending.strong_count() > 0);
        }
        groups.insert(
            listener_id,
            RegisteredGroup { me, pending: Arc::downgrade(&pending), token: token.clone() },
        );
        let address = TcpAddress { socket: self.socket, listener_id };
        GroupListener { endpoint: self.clone(), pending, token, address }
    }

    /// Starts accepting connections, because a group spans nodes.
    pub(crate) fn serve(&self) {
        raise_descriptor_limit();
        if let Some(listener) = lock(&self.listener).take() {
            let (groups, doorbell) = (self.groups.clone(), self.endpoint.doorbell());
            let host = TcpHost { groups, doorbell, encrypts: self.encrypts };
            self.endpoint.service.serve(listener.map(OwnedFd::from), host);
        }
    }
}

impl Drop for TcpEndpoint {
    fn drop(&mut self) {
        // A forked child has no service thread, and shares the parent's eventfd.
        if self.is_own_process() {
            self.groups.closed.store(true, Ordering::Release);
            self.endpoint.service.wake();
        }
    }
}

/// Raises the soft limit on open files to the hard limit. A rank of a large group may need a connection to every other
/// rank, and many systems allow 1,024 by default. The limit is never lowered again, because other code may hold
/// descriptors above the old one.
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
