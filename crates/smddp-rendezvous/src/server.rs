//! Server of the rendezvous store: one thread, with bounds on connections and memory.
//!
//! A connection counts as a member once its first request is complete, which [`super::store::Client`] sends when it
//! connects. Connections without a request are limited in number and time. The oldest is closed to accept a new connection,
//! so a flood of silent connections cannot block a rank.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use smddp_core::log::{self, Level};
use smddp_core::system_call_error;

use crate::protocol::{DELETE, GET, GREETING, HEAD, MAX_KEY, MAX_VALUE, REQUEST_TIMEOUT, SET};

/// Maximum number of connections without a complete request.
const MAX_SILENT: usize = 256;
/// Members beyond one connection for each rank.
const SPARE_MEMBERS: usize = 64;
/// Bytes for each rank in addition to one value of maximum size: a rank's dump and its address.
const BYTES_PER_RANK: usize = 4 << 20;
const MAX_BYTES: usize = 1 << 30;
/// Bytes of an entry in addition to its value.
const ENTRY: usize = MAX_KEY + 64;
/// Pause of the listener if the process lacks descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes of the largest single read, and the number of reads of one connection before other connections are served.
const CHUNK: usize = 64 << 10;
const CHUNKS_PER_PASS: usize = 32;

const WAKE: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1;

/// A stored value. Its size is counted as long as the table or a reply refers to it.
struct Value {
    bytes: Vec<u8>,
    shared: Arc<AtomicUsize>,
}

impl Drop for Value {
    fn drop(&mut self) {
        self.shared.fetch_sub(self.bytes.len() + ENTRY, Ordering::Relaxed);
    }
}

struct Shared {
    values: Mutex<HashMap<Vec<u8>, Arc<Value>>>,
    changed: Condvar,
    closing: AtomicBool,
    wake: OwnedFd,
    /// Bytes of values and of unfinished requests, and their bound.
    used: Arc<AtomicUsize>,
    max_bytes: AtomicUsize,
    /// Connected members, and their bound.
    members: AtomicUsize,
    max_members: AtomicUsize,
}

impl Shared {
    fn new(ranks: usize) -> io::Result<Self> {
        let shared = Self {
            values: Mutex::default(),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|reason| system_call_error("eventfd2", reason))?,
            used: Arc::default(),
            max_bytes: AtomicUsize::new(0),
            members: AtomicUsize::new(0),
            max_members: AtomicUsize::new(0),
        };
        shared.expect(ranks);
        Ok(shared)
    }

    /// Locks the table. No code panics with the lock held, so the table is consistent even if the lock is poisoned.
    fn values(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Arc<Value>>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn expect(&self, ranks: usize) {
        let bytes = MAX_VALUE.saturating_add(ranks.saturating_mul(BYTES_PER_RANK)).min(MAX_BYTES);
        self.max_bytes.fetch_max(bytes, Ordering::Relaxed);
        self.max_members.fetch_max(ranks.saturating_add(SPARE_MEMBERS), Ordering::Relaxed);
    }

    /// Reserves `bytes` bytes of the memory bound.
    ///
    /// # Errors
    /// The bound would be exceeded.
    fn reserve(&self, bytes: usize) -> io::Result<()> {
        let max = self.max_bytes.load(Ordering::Relaxed);
        if self.used.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) > max {
            self.release(bytes);
            return Err(io::Error::other(format!("the store would hold more than {max} bytes")));
        }
        Ok(())
    }

    fn release(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Counts a new member.
    ///
    /// # Errors
    /// The maximum number of members is connected.
    fn join(&self) -> io::Result<()> {
        let max = self.max_members.load(Ordering::Relaxed);
        if self.members.fetch_add(1, Ordering::Relaxed) >= max {
            self.members.fetch_sub(1, Ordering::Relaxed);
            return Err(io::Error::other(format!("{max} clients are connected already")));
        }
        Ok(())
    }

    fn set(&self, key: &[u8], bytes: Vec<u8>) -> io::Result<()> {
        self.reserve(bytes.len() + ENTRY)?;
        let value = Value { bytes, shared: Arc::clone(&self.used) };
        self.values().insert(key.to_vec(), Arc::new(value));
        self.changed.notify_all();
        Ok(())
    }
}

/// The serving side. It stops when dropped.
pub struct Server {
    shared: Arc<Shared>,
    addr: SocketAddr,
}

impl Server {
    /// Listens at `addr` for `ranks` ranks. Port 0 selects a free port.
    ///
    /// # Errors
    /// A system call that creates a socket or the thread fails.
    pub fn bind(addr: impl ToSocketAddrs, ranks: usize) -> io::Result<Server> {
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared::new(ranks)?);
        let mut serving = Serving::new(listener, Arc::clone(&shared))?;
        thread::Builder::new().name("smddp-store".into()).spawn(move || serving.run())?;
        Ok(Server { shared, addr })
    }

    /// Returns the address of the listener.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Raises the bounds to those of a group of `ranks` ranks.
    pub(crate) fn expect(&self, ranks: usize) {
        self.shared.expect(ranks);
    }

    /// Returns access to the values within the serving process. It does not keep the server alive.
    pub(crate) fn waiting_client(&self) -> WaitingClient {
        WaitingClient(Arc::clone(&self.shared))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake, &1_u64.to_ne_bytes());
    }
}

/// Access to the server's values from its own process.
pub(crate) struct WaitingClient(Arc<Shared>);

impl WaitingClient {
    /// Waits for the value of `key` for at most `wait`.
    pub(crate) fn get(&self, key: &str, wait: Duration) -> Option<Vec<u8>> {
        let missing = |values: &mut HashMap<Vec<u8>, Arc<Value>>| !values.contains_key(key.as_bytes());
        let (values, _) = self
            .0
            .changed
            .wait_timeout_while(self.0.values(), wait, missing)
            .unwrap_or_else(PoisonError::into_inner);
        values.get(key.as_bytes()).map(|value| value.bytes.clone())
    }
}

/// One client.
struct Connection {
    stream: TcpStream,
    since: Instant,
    greeted: bool,
    /// The first request is complete.
    member: bool,
    /// Received bytes that are not processed yet.
    input: Vec<u8>,
    /// Bytes to send: the greeting, or the header of a reply. `value` follows them.
    output: Vec<u8>,
    value: Option<Arc<Value>>,
    sent: usize,
    /// Key and deadline of the pending get.
    pending: Option<(Vec<u8>, Instant)>,
}

impl Connection {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            since: Instant::now(),
            greeted: false,
            member: false,
            input: Vec::new(),
            output: Vec::new(),
            value: None,
            sent: 0,
            pending: None,
        }
    }

    fn events(&self) -> EventFlags {
        let wanted = match (&self.pending, self.is_sending()) {
            (_, true) => EventFlags::OUT,
            (Some(_), _) => EventFlags::empty(),
            (None, _) => EventFlags::IN,
        };
        wanted | EventFlags::RDHUP
    }

    fn is_sending(&self) -> bool {
        !self.output.is_empty()
    }

    fn reply(&mut self, value: Option<Arc<Value>>) {
        let bytes = value.as_ref().map_or(0, |value| value.bytes.len());
        self.output.push(u8::from(value.is_some()));
        self.output.extend_from_slice(&(bytes as u32).to_le_bytes());
        self.value = value;
    }

    fn send(&mut self) -> io::Result<()> {
        while self.is_sending() {
            let value = self.value.as_ref().map_or(&[][..], |value| &value.bytes);
            let rest = match self.sent.checked_sub(self.output.len()) {
                None => &self.output[self.sent..],
                Some(at) => &value[at..],
            };
            if rest.is_empty() {
                (self.output, self.value, self.sent) = (Vec::new(), None, 0);
                return Ok(());
            }
            match self.stream.write(rest) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Receives one chunk. Returns false if no bytes are available.
    fn receive(&mut self, shared: &Shared, chunk: &mut [u8]) -> io::Result<bool> {
        match self.stream.read(chunk) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => {
                shared.reserve(bytes)?;
                self.input.extend_from_slice(&chunk[..bytes]);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Processes the next complete request or greeting. Returns `Ok(None)` if it is incomplete, and the key of a set request.
    fn process(&mut self, shared: &Shared) -> io::Result<Option<Option<Vec<u8>>>> {
        let system_call_error = || io::Error::from(io::ErrorKind::InvalidData);
        if !self.greeted {
            let both = self.input.len().min(GREETING.len());
            if self.input[..both] != GREETING[..both] {
                return Err(system_call_error());
            }
            if both < GREETING.len() {
                return Ok(None);
            }
            self.greeted = true;
            self.input.drain(..GREETING.len());
            shared.release(GREETING.len());
            self.output.extend_from_slice(GREETING);
            return Ok(Some(None));
        }
        let Some(head) = self.input.first_chunk::<HEAD>() else { return Ok(None) };
        let (operation, key) = (head[0], usize::from(u16::from_le_bytes([head[1], head[2]])));
        let number = u32::from_le_bytes([head[3], head[4], head[5], head[6]]);
        let value = if operation == SET { number as usize } else { 0 };
        // The first request is a get: silent connections hold no large values.
        let allowed = self.member || operation == GET;
        if key > MAX_KEY || value > MAX_VALUE || !allowed {
            return Err(system_call_error());
        }
        let end = HEAD + key + value;
        if self.input.len() < end {
            return Ok(None);
        }
        if !self.member {
            shared.join()?;
            self.member = true;
        }
        let rest = self.input.split_off(end);
        let mut request = std::mem::replace(&mut self.input, rest);
        shared.release(end);
        let key = request[HEAD..HEAD + key].to_vec();
        let mut stored = None;
        match operation {
            SET => {
                request.drain(..HEAD + key.len());
                request.shrink_to_fit();
                shared.set(&key, request)?;
                stored = Some(key);
            }
            GET => match shared.values().get(&key).cloned() {
                None if number > 0 => {
                    let until = Instant::now() + Duration::from_millis(number.into());
                    self.pending = Some((key, until));
                }
                found => self.reply(found),
            },
            DELETE => drop(shared.values().remove(&key)),
            _ => return Err(system_call_error()),
        }
        Ok(Some(stored))
    }
}

/// State of the serving thread.
struct Serving {
    listener: TcpListener,
    epoll: OwnedFd,
    shared: Arc<Shared>,
    /// Connections in order of arrival.
    connections: BTreeMap<u64, Connection>,
    silent: BTreeSet<u64>,
    max_silent: usize,
    pending: BTreeSet<u64>,
    next: u64,
    /// End of a pause of the listener.
    paused: Option<Instant>,
    warned: bool,
}

impl Serving {
    fn new(listener: TcpListener, shared: Arc<Shared>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(|reason| system_call_error("epoll_create1", reason))?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, &shared.wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Self {
            listener,
            epoll,
            shared,
            connections: BTreeMap::new(),
            silent: BTreeSet::new(),
            max_silent: max_silent(),
            pending: BTreeSet::new(),
            next: 0,
            paused: None,
            warned: false,
        })
    }

    fn run(&mut self) {
        let mut events = [const { Event { flags: EventFlags::empty(), data: EventData::new_u64(0) } }; 64];
        let mut chunk = vec![0; CHUNK];
        while !self.shared.closing.load(Ordering::Acquire) {
            let wait = self.until().map(|until| until.saturating_duration_since(Instant::now()));
            // The kernel may round down to whole milliseconds.
            let wait = wait.map(|wait| wait.min(Duration::from_secs(60)) + Duration::from_millis(1));
            let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
            let count = epoll::wait(&self.epoll, &mut events, wait.as_ref()).unwrap_or(0);
            for event in &events[..count] {
                let data = event.data;
                match data.u64() {
                    WAKE => {}
                    LISTENER => self.accept(),
                    id => self.serve(id, &mut chunk),
                }
            }
            self.expire(Instant::now());
        }
    }

    /// Returns the time of the next timer.
    fn until(&self) -> Option<Instant> {
        let silent = self.silent.first().and_then(|id| self.connections.get(id));
        let silent = silent.map(|connection| connection.since + REQUEST_TIMEOUT);
        let pending = self.pending.iter().filter_map(|id| self.connections.get(id)?.pending.as_ref());
        pending.map(|(_, until)| *until).chain(silent).chain(self.paused).min()
    }

    fn expire(&mut self, now: Instant) {
        if self.paused.is_some_and(|until| now >= until) {
            self.paused = None;
            let _ = epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), EventFlags::IN);
        }
        while let Some(&id) = self.silent.first()
            && self.connections.get(&id).is_none_or(|silent| now >= silent.since + REQUEST_TIMEOUT)
        {
            self.close(id);
        }
        let late = |id: &u64| self.connections.get(id)?.pending.as_ref().filter(|(_, until)| now >= *until);
        let late: Vec<u64> = self.pending.iter().copied().filter(|id| late(id).is_some()).collect();
        for id in late {
            self.resume(id, None);
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
                    ) => {}
                // The process lacks descriptors or memory: close a silent connection, or pause the listener.
                Err(_) => match self.silent.first().copied() {
                    Some(oldest) => self.close(oldest),
                    None => {
                        self.paused = Some(Instant::now() + ACCEPT_PAUSE);
                        let none = EventFlags::empty();
                        let _ =
                            epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), none);
                        return;
                    }
                },
            }
        }
    }

    fn admit(&mut self, stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        let connection = Connection::new(stream);
        let (id, data) = (self.next, EventData::new_u64(self.next));
        self.next += 1;
        if epoll::add(&self.epoll, &connection.stream, data, connection.events()).is_err() {
            return;
        }
        self.connections.insert(id, connection);
        self.silent.insert(id);
        if self.silent.len() > self.max_silent
            && let Some(oldest) = self.silent.first().copied()
        {
            self.close(oldest);
        }
    }

    fn close(&mut self, id: u64) {
        self.silent.remove(&id);
        self.pending.remove(&id);
        if let Some(connection) = self.connections.remove(&id) {
            self.shared.release(connection.input.len());
            self.shared.members.fetch_sub(usize::from(connection.member), Ordering::Relaxed);
        }
    }

    /// Makes progress on one connection without blocking.
    fn serve(&mut self, id: u64, chunk: &mut [u8]) {
        let Some(mut connection) = self.connections.remove(&id) else { return };
        let mut stored = Vec::new();
        let outcome = advance(&mut connection, &self.shared, chunk, &mut stored);
        self.put_back(id, connection, outcome);
        for key in stored {
            let waits =
                |id: &u64| self.connections.get(id)?.pending.as_ref().filter(|(wanted, _)| *wanted == key);
            let waiting: Vec<u64> = self.pending.iter().copied().filter(|id| waits(id).is_some()).collect();
            let value = self.shared.values().get(&key).cloned();
            for id in waiting {
                self.resume(id, value.clone());
            }
        }
    }

    /// Replies to the pending get of a connection.
    fn resume(&mut self, id: u64, value: Option<Arc<Value>>) {
        let Some(mut connection) = self.connections.remove(&id) else { return };
        self.pending.remove(&id);
        connection.pending = None;
        connection.reply(value);
        let outcome = connection.send();
        self.put_back(id, connection, outcome);
    }

    fn put_back(&mut self, id: u64, connection: Connection, outcome: io::Result<()>) {
        if connection.member {
            self.silent.remove(&id);
        }
        if let Err(error) = &outcome
            && error.kind() == io::ErrorKind::Other
            && !std::mem::replace(&mut self.warned, true)
        {
            let peer =
                connection.stream.peer_addr().map_or_else(|_| "a client".into(), |peer| peer.to_string());
            let text = format!(
                "the rendezvous store closed the connection of {peer}: {error}; further ones are not logged"
            );
            log::say(Level::Warn, &text);
        }
        let data = EventData::new_u64(id);
        let kept = outcome.is_ok()
            && epoll::modify(&self.epoll, &connection.stream, data, connection.events()).is_ok();
        if connection.pending.is_some() {
            self.pending.insert(id);
        }
        self.connections.insert(id, connection);
        if !kept {
            self.close(id);
        }
    }
}

/// Returns the bound on silent connections: at most a quarter of the process's descriptor limit.
fn max_silent() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(MAX_SILENT, |limit| MAX_SILENT.min(limit as usize / 4).max(1))
}

/// Receives and processes requests and sends replies. Appends the keys that were set to `stored`.
fn advance(
    connection: &mut Connection,
    shared: &Shared,
    chunk: &mut [u8],
    stored: &mut Vec<Vec<u8>>,
) -> io::Result<()> {
    let mut chunks = 0..CHUNKS_PER_PASS;
    loop {
        connection.send()?;
        if connection.is_sending() {
            return Ok(());
        }
        if connection.pending.is_some() {
            // The client sends nothing before it has the reply, so a byte or the end of the stream is an error.
            return if connection.receive(shared, &mut chunk[..1])? {
                Err(io::ErrorKind::InvalidData.into())
            } else {
                Ok(())
            };
        }
        match connection.process(shared)? {
            Some(key) => stored.extend(key),
            // The socket stays readable, so the next pass continues.
            None if chunks.next().is_some() && connection.receive(shared, chunk)? => {}
            None => return Ok(()),
        }
    }
}

#[cfg(any(test, fuzzing))]
pub mod fuzzing;
#[cfg(test)]
mod tests;
