//! The serving thread: an epoll loop over the listener and the connections.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use smddp_core::log::{self, Level};
use smddp_core::system_call_error;

use super::connection::{CHUNK, Connection, advance};
use super::values::{Shared, Value};
use crate::protocol::REQUEST_TIMEOUT;

/// Maximum number of connections without a complete request.
pub(super) const MAX_SILENT: usize = 256;
/// Pause of the listener if the process lacks descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const WAKE: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1;

/// State of the serving thread.
pub(super) struct Serving {
    listener: TcpListener,
    epoll: OwnedFd,
    shared: Arc<Shared>,
    /// Connections in order of arrival.
    pub(super) connections: BTreeMap<u64, Connection>,
    pub(super) silent: BTreeSet<u64>,
    max_silent: usize,
    pending: BTreeSet<u64>,
    pub(super) next: u64,
    /// End of a pause of the listener.
    paused: Option<Instant>,
    warned: bool,
}

impl Serving {
    pub(super) fn new(listener: TcpListener, shared: Arc<Shared>) -> io::Result<Self> {
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

    pub(super) fn run(&mut self) {
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
    pub(super) fn until(&self) -> Option<Instant> {
        let silent = self.silent.first().and_then(|id| self.connections.get(id));
        let silent = silent.map(|connection| connection.since + REQUEST_TIMEOUT);
        let pending = self.pending.iter().filter_map(|id| self.connections.get(id)?.pending.as_ref());
        pending.map(|(_, until)| *until).chain(silent).chain(self.paused).min()
    }

    pub(super) fn expire(&mut self, now: Instant) {
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

    pub(super) fn accept(&mut self) {
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
    pub(super) fn serve(&mut self, id: u64, chunk: &mut [u8]) {
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
