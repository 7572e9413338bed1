//! Creation of a communicator, in two halves with the exchange of rank information between them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use smddp_base::warning::Notice;
use smddp_group::RankInfo;
use smddp_group::bootstrap::{MAX_RECORD, RankTree};
use smddp_group::joint::{JoinError, Joined, OpenEndpoint, Prepared};
use smddp_shm::Unreachable;

use super::network_probe;
use super::size::check_size;
use crate::communicator::Communicator;
use crate::config::Config;
use crate::config::cores;
use crate::config::network;
use crate::error::{Error, Result};
use crate::log::{self, Level};

/// Advice in errors about a rank that was lost before the group existed.
pub(super) const LOST_AT_STARTUP: &str = "see that rank's log or the system log for the cause; create the group again without this rank or with a replacement";

/// First half of the creation of a communicator. No rank waits here.
pub struct Pending {
    call: String,
    name: String,
    timeout: Duration,
    prepared: Prepared,
    /// Reductions use the canonical order, regardless of the setting.
    canonical: bool,
    /// Times at which the creation began, and at which the rank information was complete.
    begun: Instant,
    prepared_at: Instant,
}

impl Pending {
    /// Prepares rank `rank` of a group. `timeout`: deadline of calls without their own deadline.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a group above the maximum size, or a `rank` outside of it. [`Error::Config`] for
    /// an invalid setting, or settings too long for the address record. [`Error::System`] if memory or sockets
    /// are not available.
    pub fn new(name: &str, rank: usize, size: usize, timeout: Duration) -> Result<Self> {
        Self::with_order(name, rank, size, timeout, false)
    }

    /// Like [`Pending::new`]; `canonical`: reductions use the canonical order, regardless of the setting.
    pub(super) fn with_order(
        name: &str,
        rank: usize,
        size: usize,
        timeout: Duration,
        canonical: bool,
    ) -> Result<Self> {
        check_size(name, size)?;
        if rank >= size {
            return Err(Error::Invalid(format!("rank {rank} is not in a group of {size}")));
        }
        let begun = Instant::now();
        let config = Config::get()?;
        smddp_base::warning::set_hook(|notice, text| {
            let level = if notice == Notice::Warning { Level::Warn } else { Level::Info };
            log::say(level, text);
        });
        let mut settings = config.shared();
        // Compared with the other ranks like a setting.
        settings.push(("the order of its reductions".to_owned(), order(canonical).to_owned()));
        let mut prepared =
            Prepared::new(rank, size, settings, &config.transport_options()).map_err(|error| {
                Error::System {
                    operation: format!("group `{name}`: rank {rank} cannot join"),
                    reason: error.to_string(),
                }
            })?;
        if size > 1
            && let Some(secret) = config.job_secret()?
        {
            prepared.set_secret(secret);
        }
        prepared.set_user_data(network::encode_estimate());
        if size > 1 {
            check_record_size(name, rank, prepared.rank_info(), config)?;
        }
        let (call, name) = ("create_group".to_owned(), name.to_owned());
        Ok(Self { call, name, timeout, prepared, canonical, begun, prepared_at: Instant::now() })
    }

    /// Sets the user's call, as errors name it.
    pub(crate) fn for_call(self, call: &str) -> Self {
        Self { call: call.to_owned(), ..self }
    }

    /// Returns the data that all other ranks of the group need, over any store.
    pub fn rank_info(&self) -> Vec<u8> {
        self.prepared.rank_info().to_bytes()
    }

    /// Keeps this process's endpoint open to the other ranks after [`Pending::connect`] has failed.
    pub(super) fn open_endpoint(&self) -> OpenEndpoint {
        self.prepared.open_endpoint()
    }

    /// Returns this rank's part of the tree along which rank information may travel.
    pub(crate) fn tree(&mut self) -> std::io::Result<RankTree> {
        self.prepared.tree()
    }

    /// Connects the tree to its parent. `first`, `parent`: addresses of rank 0 and of the parent. Returns whether
    /// the parent's address is a new one.
    pub(crate) fn connect_parent(
        &mut self,
        tree: &mut RankTree,
        first: &[u8],
        parent: &[u8],
        now: Instant,
    ) -> Result<bool> {
        let failed = |reason| Error::Topology(format!("creation of group `{}` failed: {reason}", self.name));
        self.prepared.connect_parent(tree, first, parent, now).map_err(failed)
    }

    /// Accepts connections authenticated by rank 0's information before all rank information is here. Needed if
    /// other calls of the ranks precede [`Pending::connect`].
    ///
    /// # Errors
    /// [`Error::Topology`] for malformed rank information.
    pub fn trust(&mut self, first: &[u8]) -> Result<()> {
        let rank_info = RankInfo::from_bytes(first).map_err(|e| {
            Error::Topology(format!("group `{}`: rank 0 sent invalid rank information: {e}", self.name))
        })?;
        self.prepared.trust_rank_info(&rank_info);
        Ok(())
    }

    /// Second half: connects the ranks. `rank_infos`: the information of all ranks in rank order, including this
    /// one.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another number of ranks. [`Error::Topology`] if ranks differ in version, size or
    /// settings, or cannot reach each other. [`Error::PeerLost`] if a rank has ended. Errors of
    /// [`Communicator::run`] for the measurement of the network between nodes.
    pub fn connect(self, rank_infos: &[Vec<u8>]) -> Result<Communicator> {
        let exchanged_at = Instant::now();
        let rank_infos = self.checked(rank_infos)?;
        let known =
            network::combine_estimates(rank_infos.iter().map(|rank_info| rank_info.user_data.as_slice()));
        let me = self.prepared.rank_info().name();
        let Joined { group, nodes, local_ranks, log_lines } = self
            .prepared
            .connect(rank_infos)
            .map_err(|error| connect_error(&self.call, &self.name, &me, error))?;
        cores::record_group_size(local_ranks);
        log_once(&log_lines);
        let comm = Communicator::from_group(group, &nodes, &self.name, self.timeout);
        if self.canonical {
            comm.set_canonical_order();
        }
        let count = nodes.iter().max().map_or(0, |last| last + 1);
        log::say(
            Level::Info,
            &format!(
                "group `{}`: rank {} of {} on {count} node(s), over {}{}{}; memory and listener {:.1?}, exchange of rank information {:.1?}, \
                 links {:.1?}",
                self.name,
                comm.rank(),
                comm.size(),
                comm.transport(),
                if self.canonical { CANONICAL } else { "" },
                comm.config().audit.note(),
                self.prepared_at - self.begun,
                exchanged_at - self.prepared_at,
                exchanged_at.elapsed(),
            ),
        );
        if count > 1 {
            network_probe::set_network_estimate(&comm, known, self.timeout)?;
        }
        Ok(comm)
    }

    fn checked(&self, rank_infos: &[Vec<u8>]) -> Result<Vec<RankInfo>> {
        let (name, mine) = (&self.name, self.prepared.rank_info());
        let (me, size) = (mine.address.rank, mine.address.size as usize);
        if rank_infos.len() != size {
            return Err(Error::Invalid(format!(
                "group `{name}`: expected rank information of {size} ranks, got {}",
                rank_infos.len(),
            )));
        }
        let mut checked = Vec::with_capacity(rank_infos.len());
        for (rank, bytes) in rank_infos.iter().enumerate() {
            let rank_info = RankInfo::from_bytes(bytes).map_err(|e| {
                Error::Topology(format!("group `{name}`: rank {rank} sent invalid rank information: {e}"))
            })?;
            let differ = |property: &str, here: &str, there: &str| {
                Err(Error::Topology(format!(
                    "group `{name}`: {property} differs: {here} on rank {me}, {there} on rank {rank} (host {}, pid {})",
                    rank_info.address.host, rank_info.address.pid
                )))
            };
            if (rank_info.protocol, &rank_info.version) != (mine.protocol, &mine.version) {
                return differ("the version of smddp", &mine.version, &rank_info.version);
            }
            let named = (rank_info.address.rank as usize, rank_info.address.size as usize);
            if named != (rank, size) {
                return differ(
                    "rank and size",
                    &format!("{rank} of {size}"),
                    &format!("{} of {}", named.0, named.1),
                );
            }
            for ((setting, here), (_, there)) in mine.settings.iter().zip(&rank_info.settings) {
                if here != there {
                    return differ(setting, &format!("{here:?}"), &format!("{there:?}"));
                }
            }
            checked.push(rank_info);
        }
        Ok(checked)
    }
}

/// Reason for the canonical order in the log.
const CANONICAL: &str = "; reductions in canonical order, because nodes divide sibling groups differently (SMDDP_CANONICAL_ORDER=auto)";

fn order(canonical: bool) -> &'static str {
    if canonical { "canonical" } else { "default" }
}

/// Checks the size of the rank information.
///
/// # Errors
/// [`Error::Config`] naming the longest setting, if other ranks would reject the address record.
fn check_record_size(name: &str, rank: usize, rank_info: &RankInfo, config: &Config) -> Result<()> {
    let bytes = rank_info.to_bytes().len();
    if bytes <= MAX_RECORD {
        return Ok(());
    }
    let node = ("SMDDP_NODE", config.node.as_ref().map_or(0, String::len));
    let shared = rank_info.settings.iter().map(|(setting, value)| (setting.as_str(), value.len()));
    let (setting, length) = shared.chain([node]).max_by_key(|(_, length)| *length).unwrap_or(node);
    Err(Error::Config(format!(
        "{setting} has {length} bytes on rank {rank} of group '{name}', which makes the address record that each rank sends to \
         the others {bytes} bytes long: expected at most {MAX_RECORD}"
    )))
}

/// Failure of `call` at the connections between ranks that have exchanged their address records.
fn connect_error(call: &str, name: &str, me: &str, error: JoinError) -> Error {
    match error {
        JoinError::Unreachable(Unreachable { rank, host, pid, ended: true, reason }) => Error::PeerLost {
            operation: call.to_owned(),
            group: name.to_owned(),
            rank,
            peer: format!("rank {rank} (host {host}, pid {pid})"),
            reason: format!("ended before the group was created: {reason}"),
            remedy: LOST_AT_STARTUP,
        },
        error => Error::Topology(format!("{call} of group '{name}' failed on {me}: {error}")),
    }
}

/// Logs the transports between nodes once, since all groups of a process share them.
fn log_once(lines: &[String]) {
    // No `Once`: a fork while another thread writes the lines would leave it locked in the child.
    static LOGGED: AtomicBool = AtomicBool::new(false);
    if !lines.is_empty() && !LOGGED.swap(true, Ordering::Relaxed) {
        lines.iter().for_each(|line| log::say(Level::Info, line));
    }
}
