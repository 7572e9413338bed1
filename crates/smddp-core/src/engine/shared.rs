//! State of one group, shared by its communicator, the engine and the progress thread.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use smddp_transport::bootstrap::Claim;
use smddp_transport::{SharedPage, Sleeper, fork};

use crate::bind::{Cache, GroupFacts};
use crate::config::Config;
use crate::device::SiteHandle;
use crate::engine::wait_plan::SpinPolicy;
use crate::engine::{Command, Engine};
use crate::error::{Error, Result};
use crate::observe::recorder::Tally;

/// Reason of calls after the group is closed.
pub(crate) const DESTROYED: &str = "it was destroyed";

/// Deletion of a value in the store over which a group started.
pub type Deletion = Box<dyn FnOnce() -> Result<()> + Send>;

pub(crate) struct SharedState {
    pub(crate) engine: Mutex<Engine>,
    /// Operations and bytes so far, by collective and path.
    pub(crate) counters: Arc<Tally>,
    /// Calls that were bound, for all threads: whoever starts one while another thread drives needs it, too.
    pub(crate) cache: Mutex<Cache>,
    /// What the driver has not yet seen.
    pub(crate) commands: Mutex<Vec<Command>>,
    /// The inbox is not empty.
    pub(crate) has_commands: AtomicBool,
    /// Collectives ever submitted.
    pub(crate) submitted: AtomicU64,
    pub(crate) sleeper: Sleeper,
    pub(crate) failure: OnceLock<Error>,
    /// A call has told the caller why the group is dead.
    pub(crate) abort_reported: AtomicBool,
    pub(crate) timeout: AtomicU64,
    /// Threads that wait in this group and have released the driver for a signal check.
    pub(crate) long_waits: AtomicUsize,
    pub(crate) closed: AtomicBool,
    /// Claim on this rank, until the group is closed or dead, and the deletion of its record in the store.
    pub(crate) claim: Mutex<Option<(Claim, Option<Deletion>)>>,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) facts: GroupFacts,
    pub(crate) shared_page: Option<Arc<SharedPage>>,
    /// Collectives, by bit, of which a copied input has been logged.
    pub(crate) overlaps: AtomicU16,
    /// The devices that this group has been used on.
    pub(crate) handles: Mutex<Vec<Arc<SiteHandle>>>,
    /// Held while all ranks prepare another device; `handles` is not.
    pub(crate) preparing: Mutex<()>,
    /// How other nodes are reached; empty where there are none.
    pub(crate) way: String,
    pub(crate) name: String,
    pub(crate) forks: u32,
    pub(crate) spin_policy: SpinPolicy,
    pub(crate) config: &'static Config,
}

impl SharedState {
    pub(crate) fn check_usable(&self) -> Result<()> {
        if self.forks != fork::generation() {
            return Err(Error::Forked { group: self.name.clone() });
        }
        self.failure.get().map_or(Ok(()), |error| Err(self.report(error)))
    }

    /// The caller hears why the group is dead.
    pub(crate) fn report(&self, error: &Error) -> Error {
        self.abort_reported.store(true, Ordering::Relaxed);
        error.clone()
    }
}
