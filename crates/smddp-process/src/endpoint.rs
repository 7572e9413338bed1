//! Endpoint of this process: shared memory, address, doorbell, exports and known peers.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use rustix::process::{PidfdFlags, pidfd_open};
use smddp_base::CloseOnFork;
use smddp_base::fork::PerProcess;
use smddp_base::lock;
use smddp_base::random::bytes as random;
use smddp_base::warning::{info, warn};
use smddp_net::handshake::ProcessUid;
use smddp_net::socket_io::send_all;
use smddp_net::token::Token;

use super::control_blocks::ControlBlocks;
use super::credentials::pid_namespace;
use super::death_watch::DeathWatch;
use super::doorbell::Doorbell;
use super::exports::{Exports, MemoryExport};
use super::layout::{RESERVE_BYTES, SELF_ADDRESS, STAGING};
use super::memory::SharedMemory;
use super::memory_request::{self, MemoryReply, ProcessAddress, ProcessHost};
use super::peer::PeerProcess;
use super::pool::Pool;
use super::room::{Limits, Room};
use super::service::Service;
use super::status;
use super::symmetric::Symmetric;
use super::token_registry::TokenRegistry;

/// State of this process that all its groups share: shared memory, address, doorbell, exports and known peers.
pub struct Endpoint {
    address: ProcessAddress,
    /// Shared memory of this process.
    pub memory: Arc<SharedMemory>,
    doorbell: Doorbell,
    /// Allocation of control blocks.
    pub control: ControlBlocks,
    /// Allocation of staging memory.
    pub pool: Pool,
    /// Tensors in shared memory.
    pub symmetric: Symmetric,
    /// Number of messages that peers read from private memory.
    single_copies: AtomicU64,
    /// Service thread.
    pub service: Service,
    deaths: DeathWatch,
    /// Exports that other processes of this node may request.
    pub exports: Arc<Exports>,
    tokens: Arc<TokenRegistry>,
    peers: Mutex<HashMap<ProcessUid, Weak<PeerProcess>>>,
    /// Other processes can map `memory`.
    shared: bool,
}

static CURRENT: PerProcess<Mutex<Weak<Endpoint>>> = PerProcess::new();

/// Assumed ranks per host if the launcher does not set their number.
const RANKS: usize = 8;

/// Allocates memory that other processes can map, as large as the limits of this process allow. If the limits or a
/// forbidden system call prevent that, allocates private memory.
fn allocate(cap: usize, ranks: usize) -> io::Result<(SharedMemory, Option<OwnedFd>, Room)> {
    let (fixed, limits) = (STAGING + Pool::span(cap, 0), Limits::of_this_process());
    let shared = Room::fitting(fixed, ranks, limits).map_err(io::Error::other).and_then(|room| {
        let (memory, fd) = SharedMemory::create(room.bytes(fixed))?;
        Ok((memory, Some(fd), room))
    });
    shared.or_else(|reason| {
        let room = Room::private(fixed, limits);
        let memory = SharedMemory::private(room.bytes(fixed))?;
        warn(&format!(
            "this process shares no memory with the other ranks of its host and reaches them over the network, which is slower: {reason}"
        ));
        Ok((memory, None, room))
    })
}

impl Endpoint {
    /// Returns the process's endpoint, created on first use. `cap`: bytes of the staging pool.
    ///
    /// # Errors
    /// See [`Endpoint::with_local_ranks`].
    pub fn get(cap: usize) -> io::Result<Arc<Self>> {
        Self::with_local_ranks(cap, RANKS)
    }

    /// Returns the endpoint of a process whose host has `ranks` ranks. An address-space limit must fit the memory of
    /// all of them.
    ///
    /// # Errors
    /// The kernel provides no memory, socket, descriptor or thread for the endpoint.
    pub fn with_local_ranks(cap: usize, ranks: usize) -> io::Result<Arc<Self>> {
        let mut cell = lock(CURRENT.get());
        if let Some(endpoint) = cell.upgrade() {
            return Ok(endpoint);
        }
        let endpoint = Arc::new(Self::new(cap, ranks)?);
        *cell = Arc::downgrade(&endpoint);
        Ok(endpoint)
    }

    /// Returns the address for other processes of this host.
    pub fn address(&self) -> &ProcessAddress {
        &self.address
    }

    /// Accepts connections authenticated by that token while it has other holders.
    pub fn trust(&self, token: &Arc<Token>) {
        self.tokens.add(token);
    }

    /// Starts the detection of deaths of the peers opened since the last call. One call suffices for several peers.
    pub fn watch_peers(&self) {
        self.deaths.refresh();
    }

    /// Returns true if other processes of this host can map its memory. Otherwise they communicate over the network.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Returns the endpoint if it exists.
    pub fn existing() -> Option<Arc<Self>> {
        lock(CURRENT.get()).upgrade()
    }

    fn new(cap: usize, ranks: usize) -> io::Result<Self> {
        let (memory, fd, room) = allocate(cap, ranks)?;
        let (bytes, shared) = (memory.len(), fd.is_some());
        let memory = Arc::new(memory);
        let symmetric = Symmetric::new(STAGING + Pool::span(cap, room.reserve), room.symmetric);
        let own = memory.flag64(SELF_ADDRESS);
        own.store(own.as_ptr() as u64, Ordering::Release);
        let id: ProcessUid = random();
        let digits: String = id[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let socket = format!("smddp-{}-{}-{digits}", std::process::id(), pid_namespace()).into_bytes();
        let listener = memory_request::listen(&socket)?;
        let doorbell = Doorbell::new(memory.clone())?;
        let (exports, tokens) = (Arc::<Exports>::default(), Arc::<TokenRegistry>::default());
        let service = Service::start(doorbell.clone())?;
        let deaths = DeathWatch::start(memory.clone(), doorbell.clone());
        let address = ProcessAddress { id, socket, memory: bytes as u64 };
        if let Some(fd) = fd {
            service.serve(
                CloseOnFork::new(listener.into()),
                ProcessHost {
                    me: id,
                    memory: fd,
                    doorbell: doorbell.clone(),
                    exports: exports.clone(),
                    tokens: tokens.clone(),
                },
            );
        }
        if let Some((listener, host)) = status::open(&address) {
            service.serve(listener, host);
        }
        Ok(Self {
            address,
            memory,
            doorbell,
            control: ControlBlocks::default(),
            pool: Pool::new(cap, room.reserve),
            symmetric,
            single_copies: AtomicU64::new(0),
            service,
            deaths,
            exports,
            tokens,
            peers: Mutex::default(),
            shared,
        })
    }

    /// Returns the process at an address, with its memory mapped. A known process is reused, even if it was opened
    /// under another token. Early death detection starts with the next [`Self::watch_peers`].
    ///
    /// # Errors
    /// The process is unreachable, does not accept the token, or this process has no address space for its memory.
    pub fn open_peer(&self, address: &ProcessAddress, token: &Arc<Token>) -> io::Result<Arc<PeerProcess>> {
        if let Some(peer) = lock(&self.peers).get(&address.id).and_then(Weak::upgrade) {
            return Ok(peer);
        }
        let MemoryReply { memory, event, pid, stream } =
            memory_request::request_memory(address, &self.address.id, token)?;
        let ended = Arc::new(AtomicBool::new(false));
        let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if pid.is_none() {
            static REPORTED: AtomicBool = AtomicBool::new(false);
            if !REPORTED.swap(true, Ordering::Relaxed) {
                info(
                    "ranks of this node are in other PID namespaces: memory is shared with them, but large messages from them \
                     need two copies, and the ends of these ranks are detected by their connections",
                );
            }
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
            SharedMemory::open(memory.as_fd(), usize::try_from(address.memory).map_err(io::Error::other)?)?;
        self.service.watch(watch, &ended);
        let peer = Arc::new(PeerProcess::new(memory, event, ended, pid));
        self.deaths.watch(&peer);
        let mut peers = lock(&self.peers);
        peers.retain(|_, known| known.strong_count() > 0);
        peers.insert(address.id, Arc::downgrade(&peer));
        Ok(peer)
    }

    /// Requests the export `number` from the process at an address.
    ///
    /// # Errors
    /// The process is unreachable, does not accept the token, or has no such export.
    pub fn import(
        &self,
        address: &ProcessAddress,
        token: &Arc<Token>,
        number: u64,
    ) -> io::Result<MemoryExport> {
        memory_request::request_export(address, &self.address.id, token, number)
    }

    /// Returns the largest staging region in bytes that an operation can get if the cap is `cap`.
    pub fn max_region(cap: usize) -> usize {
        Self::existing().map_or_else(|| cap.max(RESERVE_BYTES), |endpoint| endpoint.pool.max_region())
    }

    /// Returns (cap, resident, reserve in use) of the staging pool in bytes.
    pub fn staging(&self) -> (usize, usize, usize) {
        self.pool.usage()
    }

    /// Counts messages of this process that peers read from private memory.
    pub fn count_single_copies(&self, messages: u64) {
        self.single_copies.fetch_add(messages, Ordering::Relaxed);
    }

    /// Returns the number of messages of this process that peers read from private memory (`process_vm_readv`).
    pub fn single_copies(&self) -> u64 {
        self.single_copies.load(Ordering::Relaxed)
    }

    /// Returns the doorbell of this process.
    pub fn doorbell(&self) -> Doorbell {
        self.doorbell.clone()
    }
}
