//! This process as its peers see it: its memory, its name, its bell, and whom it knows.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, Weak};

use rustix::process::{PidfdFlags, pidfd_open};

use super::bell::Bell;
use super::control::Control;
use super::credentials::pid_namespace;
use super::deaths::Deaths;
use super::handshake::{self, Answer, Host, Id, UnixAddress};
use super::layout::{OWN_ADDRESS, STAGING, SYMMETRIC_BYTES};
use super::lending::{Lending, Lent};
use super::memory::Memory;
use super::peer::PeerProcess;
use super::pool::Pool;
use super::questions;
use super::service::Service;
use super::symmetric::Symmetric;
use super::trusted::Trusted;
use crate::fork::PerProcess;
use crate::lock;
use crate::own::Uninherited;
use crate::send::send_all;
use crate::token::Token;
use crate::warn::note;

pub struct Endpoint {
    pub(crate) address: UnixAddress,
    pub(crate) memory: Arc<Memory>,
    bell: Bell,
    pub(crate) control: Control,
    pub(crate) pool: Pool,
    pub(crate) symmetric: Symmetric,
    pub(crate) single_copies: AtomicU64,
    pub(crate) service: Service,
    pub(crate) deaths: Deaths,
    /// What other processes of this node may ask for.
    pub(crate) lending: Arc<Lending>,
    pub(crate) trusted: Arc<Trusted>,
    peers: Mutex<HashMap<Id, Weak<PeerProcess>>>,
}

static CURRENT: PerProcess<Mutex<Weak<Endpoint>>> = PerProcess::new();

/// Bytes from the system's generator.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes
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
        let symmetric = Symmetric::new(STAGING + Pool::span(cap));
        let bytes = STAGING + Pool::span(cap) + SYMMETRIC_BYTES;
        let (memory, fd) = Memory::create(bytes)?;
        let memory = Arc::new(memory);
        let own = memory.word64(OWN_ADDRESS);
        own.store(own.as_ptr() as u64, Ordering::Release);
        let id: Id = random();
        let digits: String = id[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let socket = format!("smddp-{}-{}-{digits}", std::process::id(), pid_namespace()).into_bytes();
        let listener = handshake::listen(&socket)?;
        let bell = Bell::new(memory.clone())?;
        let (lending, trusted) = (Arc::<Lending>::default(), Arc::<Trusted>::default());
        let service = Service::start(bell.clone())?;
        let deaths = Deaths::start(memory.clone(), bell.clone());
        service.answer(
            Uninherited::new(listener.into()),
            Host {
                me: id,
                memory: fd,
                bell: bell.clone(),
                lending: lending.clone(),
                trusted: trusted.clone(),
            },
        );
        let address = UnixAddress { id, socket, memory: bytes as u64 };
        if let Some((listener, host)) = questions::open(&address) {
            service.answer(listener, host);
        }
        Ok(Self {
            address,
            memory,
            bell,
            control: Control::default(),
            pool: Pool::new(cap),
            symmetric,
            single_copies: AtomicU64::new(0),
            service,
            deaths,
            lending,
            trusted,
            peers: Mutex::default(),
        })
    }

    /// The process at an address, its memory mapped; known ones are found again, whichever token they were reached under. Its
    /// death is known early from the next look of `deaths` on.
    pub(crate) fn reach(&self, address: &UnixAddress, token: &Arc<Token>) -> io::Result<Arc<PeerProcess>> {
        if let Some(peer) = lock(&self.peers).get(&address.id).and_then(Weak::upgrade) {
            return Ok(peer);
        }
        let Answer { memory, event, pid, stream } = handshake::call(address, &self.address.id, token)?;
        let gone = Arc::new(AtomicBool::new(false));
        let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if pid.is_none() {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                note(
                    "ranks of this node are in other PID namespaces: memory is shared with them, but large messages from them \
                     take two copies, and their ends are detected by their connections",
                );
            });
        }
        let watch: OwnedFd = match pidfd {
            Some(pidfd) => {
                drop(stream);
                pidfd
            }
            None => {
                send_all(&stream, b"k")?;
                stream.into()
            }
        };
        let memory =
            Memory::open(memory.as_fd(), usize::try_from(address.memory).map_err(io::Error::other)?)?;
        self.service.watch(watch, &gone);
        let peer = Arc::new(PeerProcess::new(memory, event, gone, pid));
        self.deaths.watch(&peer);
        let mut peers = lock(&self.peers);
        peers.retain(|_, known| known.strong_count() > 0);
        peers.insert(address.id, Arc::downgrade(&peer));
        Ok(peer)
    }

    /// What the process at an address lends under that number.
    pub(crate) fn borrow(&self, address: &UnixAddress, token: &Arc<Token>, number: u64) -> io::Result<Lent> {
        handshake::borrow(address, &self.address.id, token, number)
    }

    /// The largest piece of staging memory that an operation can ever have where the cap is `cap`.
    pub fn most_at_once(cap: usize) -> usize {
        Pool::most_at_once(cap)
    }

    /// (cap, resident, reserve in use) of the staging pool, bytes.
    pub fn staging(&self) -> (usize, usize, usize) {
        self.pool.usage()
    }

    /// Messages of this process that others read in memory that it does not share.
    pub fn single_copies(&self) -> u64 {
        self.single_copies.load(Ordering::Relaxed)
    }

    pub(crate) fn bell(&self) -> Bell {
        self.bell.clone()
    }
}
