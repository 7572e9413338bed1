//! Communicators: the ranks of one group, with their own sequence numbers.

mod calls;
mod close;
mod device_setup;
mod estimate;
mod internal_calls;
mod peers;
mod shutdown;
mod work;

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use smddp_base::fork;
use smddp_group::Group;
use smddp_group::bootstrap::Claim;
use smddp_plan::{Collective, Counts, Memory, Network, Topology};

use self::close::OPEN_GROUPS;
pub use self::close::shutdown;
pub use self::work::Work;
use crate::bind::{self, GroupFacts};
use crate::call::key::Key;
use crate::call::types::DType;
use crate::config::Config;
use crate::config::network::{NetworkEstimate, Origin};
use crate::device::DeviceStream;
use crate::engine::Engine;
use crate::engine::deadlock;
use crate::engine::shared::{Deletion, SharedState};
use crate::engine::wait_plan::SpinPolicy;
use crate::error::Error;
use crate::observe::recorder::{self, Counters, Members, PathCounters, Recorder};
use crate::sync::completion::KeepAlive;
use crate::sync::lock;
use crate::sync::ownership::Ownership;

/// Options of one call.
#[derive(Default)]
pub struct Options {
    /// Deadline of this call; `None`: the deadline of the group.
    pub timeout: Option<Duration>,
    /// Object kept alive until the call is over.
    pub keep: Option<KeepAlive>,
    /// Device that holds the buffers. The call runs after the earlier work of its stream and does not wait for the
    /// device: it is done when the device has completed it.
    pub on: Option<DeviceStream>,
}

/// A group's ranks. Clones share the group; any thread may call.
#[derive(Clone)]
pub struct Communicator(Arc<SharedState>);

impl Communicator {
    /// Creates a communicator over a group; `nodes[r]` is the node of rank `r`.
    pub fn from_group(group: Group, nodes: &[usize], name: &str, timeout: Duration) -> Self {
        let config = Config::get().unwrap_or_else(|_| {
            static FALLBACK: OnceLock<Config> = OnceLock::new();
            FALLBACK.get_or_init(Config::default)
        });
        Self::with_config(group, nodes, name, timeout, config)
    }

    /// Creates a communicator with these settings.
    pub(crate) fn with_config(
        mut group: Group,
        nodes: &[usize],
        name: &str,
        timeout: Duration,
        config: &'static Config,
    ) -> Self {
        let info = group.info().clone();
        let (rank, size, network_path) = (info.rank, info.size, info.network_path.clone());
        crate::log::set_group_rank(rank);
        let topology = Topology::from_labels(nodes);
        let (inline_bytes, assumed) = (info.inline_bytes, GroupFacts::assumed(&network_path));
        let routes = info.routes.clone();
        let (network, canonical) = (OnceLock::new(), OnceLock::new());
        let facts = GroupFacts { rank, topology, inline_bytes, routes, assumed, network, canonical };
        let (sleeper, shared_page) = (info.doorbell.clone(), info.shared_page.clone());
        let counters = Arc::new(PathCounters::default());
        let peers = group.health().status_peers();
        let members = Members { id: info.id, names: info.names.clone(), peers };
        let path = if network_path.is_empty() { "shm" } else { network_path.as_str() };
        let recorder =
            Recorder::new((name, path, members), rank, &facts.topology, counters.clone(), config.recorder);
        group.health().set_status_id(recorder::query_key(name, rank));
        let comm = Self(Arc::new(SharedState {
            engine: Ownership::new(Engine::new(group, name.to_owned(), counters.clone(), recorder.clone())),
            counters,
            recorder,
            cache: Mutex::default(),
            submitted: AtomicU64::new(0),
            sleeper,
            failure: OnceLock::new(),
            abort_reported: AtomicBool::new(false),
            timeout: AtomicU64::new(0),
            long_waits: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            claim: Mutex::default(),
            rank,
            size,
            facts,
            shared_page,
            overlaps: AtomicU16::new(0),
            handles: Mutex::default(),
            preparing: Mutex::default(),
            name: name.to_owned(),
            forks: fork::generation(),
            spin_policy: SpinPolicy::new(config.spin, !network_path.is_empty()),
            network_path,
            config,
            audit_plan: OnceLock::new(),
        }));
        comm.set_timeout(timeout);
        deadlock::register_group(&comm.0);
        let mut open = lock(OPEN_GROUPS.get());
        open.retain(|group| group.strong_count() > 0);
        open.push(Arc::downgrade(&comm.0));
        comm
    }

    /// Keeps the claim of this process on its rank until the group is closed or dead.
    pub(crate) fn keep_claim(&self, claim: Claim, deletion: Option<Deletion>) {
        let mut held = lock(&self.0.claim);
        // `fail_group` sets the reason before it releases the claim, so a group that fails meanwhile keeps none.
        if self.0.failure.get().is_none() {
            *held = Some((claim, deletion));
        }
    }

    /// Returns this process's rank in the group.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Describes a rank: "rank 3 (host h1, pid 812)".
    pub(crate) fn describe(&self, rank: usize) -> String {
        self.0.recorder.describe(rank)
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Returns the name of the group.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Sets the deadline of calls without their own deadline.
    pub fn set_timeout(&self, timeout: Duration) {
        let nanos = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.0.timeout.store(nanos, Ordering::Relaxed);
    }

    pub(crate) fn timeout(&self, options: &Options) -> Duration {
        options.timeout.unwrap_or_else(|| Duration::from_nanos(self.0.timeout.load(Ordering::Relaxed)))
    }

    /// Returns the number of collectives started.
    pub fn sequence(&self) -> u64 {
        self.0.submitted.load(Ordering::Relaxed)
    }

    /// Returns the error that ended the group.
    pub fn error(&self) -> Option<Error> {
        self.0.failure.get().cloned()
    }

    /// Describes the transport and algorithm of a collective on a whole buffer of `bytes`.
    pub fn path(&self, collective: Collective, dtype: DType, bytes: usize) -> String {
        if self.0.size == 1 {
            return "one rank: a copy at most".to_owned();
        }
        let counts = Counts::of_buffer(collective, bytes / dtype.size(), self.0.size);
        let key = Key {
            collective,
            dtype,
            redop: 0,
            factor: 0,
            root: 0,
            counts,
            memory: Memory::Host,
            site: 0,
            lossless: false,
        };
        bind::describe_decision(&self.transport(), &bind::plan_decision(&key, &self.0.facts, self.0.config))
    }

    /// Returns the transports of this group: "shm", "tcp eth0 10.0.0.1", or both.
    pub fn transport(&self) -> String {
        let inside = self.0.facts.topology.node_sizes().1 > 1;
        match (inside, self.0.network_path.as_str()) {
            (_, "") => "shm".to_owned(),
            (true, network) => format!("shm + {network}"),
            (false, network) => network.to_owned(),
        }
    }

    /// Returns the network estimate by which segments and algorithms are chosen between nodes, and its origin.
    /// `None` in a group of one node.
    pub fn network(&self) -> Option<NetworkEstimate> {
        let assumed = NetworkEstimate { network: Network::ASSUMED, origin: Origin::Default };
        (self.0.facts.topology.nodes() > 1).then(|| self.0.facts.network.get().copied().unwrap_or(assumed))
    }

    /// Sets the network estimate of a communicator that was created by [`Communicator::from_group`]: before its
    /// first call, and equal on all ranks. Returns false if it was set already.
    pub fn set_network(&self, known: NetworkEstimate) -> bool {
        let first = self.0.facts.network.set(known).is_ok();
        if first {
            self.0.own().set_network(known);
        }
        first
    }

    /// Returns the shortest round trip to `rank` that the kernel has measured, if any.
    pub(crate) fn round_trip(&self, rank: usize) -> Option<Duration> {
        self.0.own().group.health().round_trip(rank)
    }

    pub(crate) fn config(&self) -> &'static Config {
        self.0.config
    }

    pub(crate) fn topology(&self) -> &Topology {
        &self.0.facts.topology
    }

    /// Returns the node of each rank, numbered by first appearance.
    pub fn nodes(&self) -> Vec<usize> {
        (0..self.0.size).map(|rank| self.0.facts.topology.node_of(rank)).collect()
    }

    /// Returns completed operations and bytes, by collective and path.
    pub fn path_counters(&self) -> Vec<Counters> {
        self.0.counters.nonzero().collect()
    }
}

#[cfg(test)]
impl Communicator {
    /// Runs `action` while the engine is owned.
    pub(crate) fn while_owned(&self, action: impl FnOnce()) {
        let _engine = self.0.own();
        action();
    }

    pub(crate) fn state(&self) -> &Arc<SharedState> {
        &self.0
    }

    pub(crate) fn cache(&self) -> &Mutex<bind::Cache> {
        &self.0.cache
    }

    /// Starts a barrier in the background.
    pub(crate) fn start_barrier(&self, options: Options) -> crate::Result<Work> {
        // SAFETY: a barrier has no buffers.
        unsafe { self.start(&calls::BARRIER, options) }
    }
}
