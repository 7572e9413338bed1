//! State of one group, shared by its communicator, the engine and the progress thread.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use smddp_base::fork;
use smddp_group::bootstrap::Claim;
use smddp_process::Sleeper;
use smddp_shm::SharedPage;

use crate::bind::{Cache, GroupFacts};
use crate::config::Config;
use crate::device::DeviceSiteHandle;
use crate::engine::audit::AuditPlan;
use crate::engine::wait_plan::SpinPolicy;
use crate::engine::{Command, Engine};
use crate::error::{Error, Result};
use crate::observe::recorder::{PathCounters, Recorder};
use crate::sync::caller_threads::note_caller;
use crate::sync::ownership::Ownership;

/// Reason of calls after the group is closed.
pub(crate) const DESTROYED: &str = "it was destroyed";

/// Deletion of a value in the store over which a group started.
pub type Deletion = Box<dyn FnOnce() -> Result<()> + Send>;

/// State shared by the handles of one group.
pub(crate) struct SharedState {
    pub(crate) engine: Ownership<Engine, Command>,
    /// Completed operations and bytes, by collective and path.
    pub(crate) counters: Arc<PathCounters>,
    pub(crate) recorder: Arc<Recorder>,
    /// Bindings of earlier calls. Outside `engine`, because a thread may bind a call while another thread owns the
    /// engine.
    pub(crate) cache: Mutex<Cache>,
    /// Number of submitted collectives.
    pub(crate) submitted: AtomicU64,
    pub(crate) sleeper: Sleeper,
    /// Error that ended the group.
    pub(crate) failure: OnceLock<Error>,
    /// Set once a call has returned the abort reason.
    pub(crate) abort_reported: AtomicBool,
    /// Default deadline of calls, in nanoseconds.
    pub(crate) timeout: AtomicU64,
    /// Waiting threads that have released the engine for a signal check.
    pub(crate) long_waits: AtomicUsize,
    pub(crate) closed: AtomicBool,
    /// Claim on this rank, held until the group is closed or dead, with the deletion of its record in the store.
    pub(crate) claim: Mutex<Option<(Claim, Option<Deletion>)>>,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) facts: GroupFacts,
    pub(crate) shared_page: Option<Arc<SharedPage>>,
    /// Bit set of collectives, by number, whose copied input has been logged.
    pub(crate) overlaps: AtomicU16,
    /// Handles of the devices that this group has been used on.
    pub(crate) handles: Mutex<Vec<Arc<DeviceSiteHandle>>>,
    /// Lock held while all ranks prepare another device; `handles` stays unlocked meanwhile.
    pub(crate) preparing: Mutex<()>,
    /// Transport between nodes, for example `tcp`; empty for a single node.
    pub(crate) network_path: String,
    pub(crate) name: String,
    /// Fork generation of the process that created the group.
    pub(crate) forks: u32,
    pub(crate) spin_policy: SpinPolicy,
    pub(crate) config: &'static Config,
    /// Comparison of results, once a result is to be compared.
    pub(crate) audit_plan: OnceLock<Arc<AuditPlan>>,
}

impl SharedState {
    /// Returns an error in a forked child and after the group has failed or was closed.
    pub(crate) fn check_usable(&self) -> Result<()> {
        note_caller();
        if self.forks != fork::generation() {
            return Err(Error::Forked { group: self.name.clone() });
        }
        self.failure.get().map_or(Ok(()), |error| Err(self.report(error)))
    }

    /// Returns `error` for the caller and records that the abort reason has been reported.
    pub(crate) fn report(&self, error: &Error) -> Error {
        self.abort_reported.store(true, Ordering::Relaxed);
        error.clone()
    }
}
