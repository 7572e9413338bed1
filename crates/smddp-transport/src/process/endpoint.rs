//! This process as its peers see it: its memory, its name, its bell, and whom it knows.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::bell::Bell;
use super::card::{Card, Id};
use super::control::Control;
use super::handshake::{self, Answer, Host};
use super::memory::Memory;
use super::pool::Pool;
use super::service::Service;
use crate::board::{Lending, Lent};
use crate::fork::PerProcess;
use crate::joint::Means;
use crate::net::fabric::{self, engine::Engine, ofi::Ofi, staging::Staging};
use crate::net::interface::{self, Family, Wanted};
use crate::net::tcp::TcpEndpoint;
use crate::send::send_all;
use crate::shm::layout::STAGING;

/// Another process on this node, its memory mapped.
pub(crate) struct Peer {
    pub(crate) memory: Memory,
    event: OwnedFd,
    /// Set by the service thread when the process is gone.
    pub(crate) gone: Arc<AtomicBool>,
}

pub struct Endpoint {
    pub(crate) id: Id,
    socket: Vec<u8>,
    pub(crate) memory: Arc<Memory>,
    bell: Bell,
    bytes: usize,
    pub(crate) control: Control,
    pub(crate) pool: Pool,
    service: Service,
    /// What other processes of this node may ask for.
    pub(crate) lending: Arc<Lending>,
    peers: Mutex<HashMap<Id, Weak<Peer>>>,
    /// Where other nodes reach this process; made when first needed.
    tcp: Mutex<Weak<TcpEndpoint>>,
    fabric: Mutex<Weak<Mutex<Engine>>>,
    /// What was found of a fabric and why it is used or not.
    found: Mutex<Vec<String>>,
}

static CURRENT: PerProcess<Mutex<Weak<Endpoint>>> = PerProcess::new();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// 16 bytes from the system's generator.
pub(crate) fn random() -> Id {
    let mut id = Id::default();
    let _ = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty());
    id
}

impl Peer {
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Endpoint {
    /// The process's endpoint, made on first use. `cap`: bytes of the staging pool.
    pub fn get(cap: usize) -> io::Result<Arc<Self>> {
        let mut cell = lock(CURRENT.get());
        if let Some(endpoint) = cell.upgrade() {
            return Ok(endpoint);
        }
        let endpoint = Arc::new(Self::new(cap)?);
        *cell = Arc::downgrade(&endpoint);
        Ok(endpoint)
    }

    /// The endpoint if there is one.
    pub fn existing() -> Option<Arc<Self>> {
        lock(CURRENT.get()).upgrade()
    }

    fn new(cap: usize) -> io::Result<Self> {
        let bytes = STAGING + Pool::span(cap);
        let (memory, fd) = Memory::create(bytes)?;
        let memory = Arc::new(memory);
        let id = random();
        let socket: Vec<u8> =
            [b"smddp-", format!("{}-", std::process::id()).as_bytes(), hex(&id[..8]).as_bytes()].concat();
        let listener = handshake::listen(&socket)?;
        let bell = Bell::new(memory.clone())?;
        let lending = Arc::<Lending>::default();
        let host = Host { me: id, memory: fd, bell: bell.clone(), lending: lending.clone() };
        let service = Service::start(listener, host)?;
        Ok(Self {
            id,
            socket,
            memory,
            bell,
            bytes,
            control: Control::default(),
            pool: Pool::new(cap),
            service,
            lending,
            peers: Mutex::default(),
            tcp: Mutex::default(),
            fabric: Mutex::default(),
            found: Mutex::default(),
        })
    }

    pub(crate) fn card(
        &self,
        rank: usize,
        size: usize,
        settings: Vec<(String, String)>,
        block: u64,
        nonce: u64,
    ) -> Card {
        Card::new(rank, size, settings, self.id, self.socket.clone(), self.bytes as u64, block, nonce)
    }

    /// The process of a card, its memory mapped; known ones are found again.
    pub(crate) fn reach(&self, card: &Card) -> io::Result<Arc<Peer>> {
        if let Some(peer) = lock(&self.peers).get(&card.endpoint).and_then(Weak::upgrade) {
            return Ok(peer);
        }
        let Answer { memory, event, pid, stream } = handshake::call(&card.socket, &self.id, &card.endpoint)?;
        let gone = Arc::new(AtomicBool::new(false));
        // Its pid may mean nothing here (another pid namespace): then the open stream tells of its end.
        let watch: OwnedFd = match rustix::process::Pid::from_raw(pid.cast_signed())
            .map(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()))
        {
            Some(Ok(pidfd)) => {
                drop(stream);
                pidfd
            }
            _ => {
                send_all(&stream, b"k")?;
                stream.into()
            }
        };
        let memory = Memory::open(memory.as_fd(), usize::try_from(card.memory).map_err(io::Error::other)?)?;
        self.service.watch(watch, gone.clone());
        let peer = Arc::new(Peer { memory, event, gone });
        let mut peers = lock(&self.peers);
        peers.retain(|_, known| known.strong_count() > 0);
        peers.insert(card.endpoint, Arc::downgrade(&peer));
        Ok(peer)
    }

    /// What the process of a card lends under that number.
    pub(crate) fn borrow(&self, card: &Card, token: u64) -> io::Result<Lent> {
        handshake::borrow(&card.socket, &self.id, &card.endpoint, token)
    }

    /// The process's listener on that interface; the first group's settings count.
    pub(crate) fn tcp(&self, wanted: &Wanted, family: Family) -> Result<Arc<TcpEndpoint>, String> {
        let mut cell = lock(&self.tcp);
        if let Some(endpoint) = cell.upgrade() {
            return Ok(endpoint);
        }
        let interface = interface::choose(wanted, family).map_err(|e| e.to_string())?;
        let name = interface.to_string();
        let endpoint =
            TcpEndpoint::new(interface, self.bell()).map_err(|e| format!("cannot listen on {name}: {e}"))?;
        let endpoint = Arc::new(endpoint);
        *cell = Arc::downgrade(&endpoint);
        Ok(endpoint)
    }

    /// What the last look for a fabric found, in lines.
    pub(crate) fn found(&self) -> Vec<String> {
        lock(&self.found).clone()
    }

    /// All memory that cells may lie in, for devices.
    pub(crate) fn whole(&self) -> Staging {
        self.memory.pin();
        Staging::new(self.memory.at(0, self.bytes), self.bytes, self.memory.clone())
    }

    /// The process's ends on the fabric; the first group's settings count.
    pub(crate) fn fabric(&self, means: &Means, size: usize) -> Result<fabric::wire::Shared, String> {
        let mut cell = lock(&self.fabric);
        if let Some(engine) = cell.upgrade() {
            return Ok(engine);
        }
        let named = means.interface.value.is_some() || means.family != Family::Any;
        let address = named
            .then(|| interface::choose(&means.interface, means.family).map_err(|e| e.to_string()))
            .transpose()?
            .map(|choice| choice.address.ip);
        let settings = fabric::choose::Settings {
            library: means.library.clone(),
            provider: means.provider.clone(),
            address,
            local: means.local,
        };
        let (choice, lines) = fabric::choose::choose_provider(&settings);
        *lock(&self.found) = lines;
        let provider = Ofi::open(&choice.map_err(|e| e.to_string())?)?;
        // A quarter of the staging, as for any operation.
        let engine = Engine::new(Box::new(provider), self.whole(), size - 1, means.staging / 4)?;
        let engine = Arc::new(Mutex::new(engine));
        *cell = Arc::downgrade(&engine);
        Ok(engine)
    }

    /// The largest piece of staging memory that an operation can ever have where the cap is `cap`.
    pub fn most_at_once(cap: usize) -> usize {
        Pool::most_at_once(cap)
    }

    /// (cap, resident, reserve in use) of the staging pool, bytes.
    pub fn staging(&self) -> (usize, usize, usize) {
        self.pool.usage()
    }

    pub(crate) fn bell(&self) -> Bell {
        self.bell.clone()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Numbers that differ between any two control blocks of any process.
pub(crate) fn nonce() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = random();
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&id[..8]);
    (u64::from_le_bytes(bytes) ^ NEXT.fetch_add(1, Ordering::Relaxed)) | 1
}
