//! Blocked waits of this process.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use smddp_base::fork::PerProcess;
use smddp_base::random;
use smddp_group::ProbeContacts;
use smddp_net::handshake::ProcessUid;

use super::view::{GroupView, WaitEdges};
use crate::config::DeadlockAction;
use crate::engine::shared::SharedState;
use crate::error::Error;
use crate::failure::deadlock::{Edge, Hop, describe};
use crate::sync::{caller_threads, lock};

/// Time without an observation of a wait after which its thread may be in user code, such as a signal handler.
const STALE: Duration = Duration::from_secs(1);
/// Time from the registration of a wait to its first probe.
const FIRST_PROBE: Duration = Duration::from_millis(90);
/// Interval between the first two probes of a wait; it doubles up to [`MAX_INTERVAL`].
const FIRST_INTERVAL: Duration = Duration::from_millis(250);
const MAX_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum number of remembered probes.
const MAX_SEEN: usize = 1024;
/// Maximum number of remembered confirmed waits.
const MAX_ROUTES: usize = 64;

/// Confirmed cycle that a wait is part of.
pub(super) struct Confirmed {
    /// Description of the cycle, beginning with this process.
    pub(super) text: String,
    pub(super) path: Vec<Hop>,
    /// Position of this process.
    pub(super) at: usize,
    /// Time of the last message about it.
    pub(super) since: Instant,
    /// Number of times that this process has repeated the message.
    pub(super) repeated: u32,
}

impl Confirmed {
    pub(super) fn new(path: &[Hop], at: usize, since: Instant) -> Self {
        Self { text: describe(path, at), path: path.to_vec(), at, since, repeated: 0 }
    }
}

/// Wait of one thread.
pub(super) struct Wait {
    pub(super) id: u64,
    thread: ThreadId,
    /// Name of the thread; `None` for the main thread.
    pub(super) thread_name: Option<String>,
    pub(super) group: Arc<SharedState>,
    /// Address of the call's completion. Only for comparisons.
    pub(super) work: usize,
    /// Its edges are part of the search: it has no time limit, and the search is not disabled.
    pub(super) has_edges: bool,
    /// The thread has been blocked since before this time.
    registered: Instant,
    observed: Instant,
    pub(super) edges: WaitEdges,
    /// "rank 3 (host h1, pid 812)".
    pub(super) rank: String,
    pub(super) contacts: Option<Arc<ProbeContacts>>,
    /// State of the group at the last observation, and its time.
    pub(super) view: Option<(Arc<GroupView>, Instant)>,
    /// Python line, once it has been read.
    pub(super) location: Option<String>,
    pub(super) next_probe: Instant,
    interval: Duration,
    pub(super) round: u64,
    /// Cycle that a probe has found, and the time.
    pub(super) candidate: Option<(Vec<Hop>, Instant)>,
    pub(super) confirmed: Option<Confirmed>,
    /// The wait has been ended, or the cycle has been logged.
    pub(super) is_ended: bool,
}

impl Wait {
    /// Returns the state of the group if it was observed at `since` or later.
    pub(super) fn view_since(&self, since: Instant) -> Option<Arc<GroupView>> {
        self.view.as_ref().filter(|(_, at)| *at >= since).map(|(view, _)| view.clone())
    }

    /// Returns the error of the confirmed cycle.
    pub(super) fn error(&self) -> Option<Error> {
        let detail = &self.confirmed.as_ref()?.text;
        Some(Error::Deadlock {
            operation: self.edges.operation.clone(),
            group: self.group.name.clone(),
            rank: self.edges.edges.first().map_or(0, |(rank, _)| *rank),
            detail: detail.clone(),
        })
    }

    fn has_edge(&self, edge: &Edge) -> bool {
        self.group.name == edge.group
            && self.group.rank == edge.from
            && self.edges.edges.iter().any(|(rank, needed)| *rank == edge.to && *needed == edge.needed)
    }
}

/// Outgoing edges of this process while it is blocked.
pub(super) struct Outgoing {
    pub(super) wait: u64,
    pub(super) contacts: Arc<ProbeContacts>,
    pub(super) edges: Vec<Edge>,
    /// All threads have been blocked since before this time.
    pub(super) since: Instant,
    process: ProcessUid,
    rank: String,
    operation: String,
}

impl Outgoing {
    /// Returns the hop along an edge of this process.
    pub(super) fn hop(&self, edge: Edge, location: String) -> Hop {
        let (rank, operation) = (self.rank.clone(), self.operation.clone());
        Hop { process: self.process, wait: self.wait, edge, rank, operation, location }
    }
}

/// Groups and waits of this process. Its lock is held for short times only; the holder owns no engine and performs no
/// I/O.
#[derive(Default)]
pub(super) struct Registry {
    /// Id of this process in probes; set by the first use.
    process: Option<ProcessUid>,
    /// With name and rank: only a matching group is upgraded, since the last reference to a group closes it.
    groups: Vec<(Weak<SharedState>, String, usize)>,
    /// Waits in the order of their registration, so that the last one of a thread is its innermost one.
    waits: Vec<Wait>,
    last_wait: u64,
    /// First process, wait and round of the probes that were forwarded most recently.
    seen: VecDeque<(ProcessUid, u64, u64)>,
    /// Waits of the cycles that were confirmed most recently, with the addresses of their groups. Messages about a cycle also pass
    /// a process whose wait has ended.
    routes: VecDeque<(u64, Arc<ProbeContacts>)>,
}

static REGISTRY: PerProcess<Mutex<Registry>> = PerProcess::new();

pub(super) fn registry() -> MutexGuard<'static, Registry> {
    lock(REGISTRY.get())
}

/// Returns the error of a confirmed cycle that a wait in this group is part of.
pub(crate) fn stored_error(group: &Arc<SharedState>) -> Option<Error> {
    if group.config.deadlock != DeadlockAction::Error {
        return None;
    }
    registry().waits.iter().filter(|wait| Arc::ptr_eq(&wait.group, group)).find_map(Wait::error)
}

impl Registry {
    pub(super) fn process(&mut self) -> ProcessUid {
        *self.process.get_or_insert_with(random::bytes)
    }

    pub(super) fn add_group(&mut self, group: &Arc<SharedState>) {
        self.groups.retain(|(known, ..)| known.strong_count() > 0);
        self.groups.push((Arc::downgrade(group), group.name.clone(), group.rank));
    }

    /// Adds a wait of the current thread, and returns its number.
    pub(super) fn add(
        &mut self,
        group: &Arc<SharedState>,
        work: usize,
        has_edges: bool,
        now: Instant,
    ) -> u64 {
        self.last_wait += 1;
        let thread = std::thread::current();
        let is_main = rustix::thread::gettid() == rustix::process::getpid();
        self.waits.push(Wait {
            id: self.last_wait,
            thread: thread.id(),
            thread_name: (!is_main).then(|| thread.name().unwrap_or("without a name").to_owned()),
            group: group.clone(),
            work,
            has_edges,
            registered: now,
            observed: now,
            edges: WaitEdges::default(),
            rank: String::new(),
            contacts: None,
            view: None,
            location: None,
            next_probe: now + FIRST_PROBE,
            interval: FIRST_INTERVAL,
            round: 0,
            candidate: None,
            confirmed: None,
            is_ended: false,
        });
        self.last_wait
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Wait> {
        let at = self.waits.iter().position(|wait| wait.id == id)?;
        Some(self.waits.remove(at))
    }

    pub(super) fn wait(&mut self, id: u64) -> Option<&mut Wait> {
        self.waits.iter_mut().find(|wait| wait.id == id)
    }

    /// Returns the waits in a group.
    pub(super) fn waits_of<'a>(
        &'a mut self,
        group: &'a Arc<SharedState>,
    ) -> impl Iterator<Item = &'a mut Wait> {
        self.waits.iter_mut().filter(move |wait| Arc::ptr_eq(&wait.group, group))
    }

    /// Returns the groups with this name in which this process has that rank.
    pub(super) fn groups(&self, name: &str, rank: usize) -> Vec<Arc<SharedState>> {
        let found = self.groups.iter().filter(|(_, known, at)| known == name && *at == rank);
        found.filter_map(|(group, ..)| group.upgrade()).collect()
    }

    /// Records that a wait is still blocked. Returns true if a probe is due.
    pub(super) fn observe(&mut self, id: u64, now: Instant) -> bool {
        let Some(wait) = self.wait(id) else { return false };
        wait.observed = now;
        let is_due = now >= wait.next_probe && !wait.edges.edges.is_empty() && wait.confirmed.is_none();
        if is_due {
            wait.next_probe = now + wait.interval;
            wait.interval = (2 * wait.interval).min(MAX_INTERVAL);
        }
        is_due
    }

    /// Returns the edges that all threads of this process wait for. `None` while a thread is in user code.
    pub(super) fn outgoing(&mut self, now: Instant) -> Option<Outgoing> {
        let process = self.process();
        let innermost = |thread: &ThreadId| {
            let wait = self.waits.iter().rev().find(|wait| wait.thread == *thread)?;
            // A wait of a confirmed cycle ends soon.
            let is_blocked = wait.confirmed.is_none() || wait.group.config.deadlock == DeadlockAction::Report;
            (is_blocked && now.saturating_duration_since(wait.observed) < STALE).then_some(wait)
        };
        let waits: Option<Vec<&Wait>> = caller_threads::live().iter().map(innermost).collect();
        let waits = waits?;
        let first = waits.first()?;
        let edges = first.edges.edges.iter().map(|(to, needed)| Edge {
            group: first.group.name.clone(),
            from: first.group.rank,
            to: *to,
            needed: needed.clone(),
        });
        let edges: Vec<Edge> =
            edges.filter(|edge| waits[1..].iter().all(|wait| wait.has_edge(edge))).collect();
        let contacts = first.contacts.clone().filter(|_| !edges.is_empty())?;
        let (rank, operation) = (first.rank.clone(), first.edges.operation.clone());
        let since = waits.iter().map(|wait| wait.registered).max()?;
        Some(Outgoing { wait: first.id, contacts, edges, since, process, rank, operation })
    }

    /// Returns a wait if it is part of a cycle with this hop of this process.
    pub(super) fn wait_of(&mut self, hop: &Hop) -> Option<&mut Wait> {
        if hop.process != self.process() {
            return None;
        }
        self.wait(hop.wait).filter(|wait| wait.has_edge(&hop.edge))
    }

    /// Stores that a wait of this process is part of a confirmed cycle. Returns false if the wait has ended.
    pub(super) fn confirm(&mut self, path: &[Hop], at: usize) -> bool {
        let Some(wait) = self.wait_of(&path[at]) else { return false };
        if wait.confirmed.is_none() {
            wait.confirmed = Some(Confirmed::new(path, at, Instant::now()));
            let route = wait.contacts.clone().map(|contacts| (wait.id, contacts));
            if self.routes.len() == MAX_ROUTES {
                self.routes.pop_front();
            }
            self.routes.extend(route);
        }
        true
    }

    /// Returns the addresses of the group of a confirmed wait of this process, which may have ended.
    pub(super) fn route(&mut self, hop: &Hop) -> Option<Arc<ProbeContacts>> {
        let is_own = hop.process == self.process();
        let (_, contacts) = self.routes.iter().find(|(wait, _)| is_own && *wait == hop.wait)?;
        Some(contacts.clone())
    }

    /// Remembers a probe. Returns false if it was forwarded before.
    pub(super) fn remember(&mut self, first: &Hop, round: u64) -> bool {
        let key = (first.process, first.wait, round);
        if self.seen.contains(&key) {
            return false;
        }
        if self.seen.len() == MAX_SEEN {
            self.seen.pop_front();
        }
        self.seen.push_back(key);
        true
    }
}
