//! Exchange of rank information between ranks that share only a store.
//!
//! The data travels along a tree of connections ([`RankTree`]). The store holds each rank's address in the tree,
//! which also marks the rank as present; rank 0's address includes the data for the group's token. A rank that
//! cannot connect to its parent uses the store instead. The caller's store prefixes the keys of this group. Each
//! rank deletes its own keys in the end, so a later group of the same name does not find old ones.

mod failures;

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use smddp_group::bootstrap::{PARENT_TIMEOUT, RankTree, StartupFailure, rank_label};
use smddp_group::joint::OpenEndpoint;
use smddp_process::record_error;

use super::claims;
use super::pending::{LOST_AT_STARTUP, Pending};
use super::siblings::need_canonical_order;
use super::size::check_size;
use super::store::Store;
use crate::communicator::{Communicator, Options};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::sync::completion::interrupted;
use crate::sync::deadline::after;

/// Pauses between two requests to the store. In a large group they are longer, to limit the load of the server.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);
const FOR_EACH_RANK: Duration = Duration::from_micros(200);

/// Pause between two liveness probes of missing ranks.
const PROBE_PAUSE: Duration = Duration::from_millis(20);

/// Time at the last barrier of `init` before a rank checks for another rank's failure.
const FIRST_FAILURE_CHECK: Duration = Duration::from_millis(100);

/// Pause between two checks that no other process has claimed this rank, at first and at most.
const FIRST_CHECK: Duration = Duration::from_millis(20);
const LONGEST_CHECK: Duration = Duration::from_secs(1);

/// Key of a published failure. A withdrawn failure is an empty value. A rank that has seen the key may still read
/// it, and would block on a deleted key.
const FAILURE_KEY: &str = "smddp/refused";

/// Returns the store key of a rank: "card" (its address), "failed", "up" or "down".
fn key(kind: &str, rank: usize) -> String {
    format!("smddp/{kind}/{rank}")
}

/// An existing group that contains all ranks of the new one. Supplies the deaths that it has detected.
#[derive(Clone, Copy)]
pub struct ParentGroup<'a> {
    /// The existing group.
    pub group: &'a Communicator,
    /// Ranks of the new group, in the existing one.
    pub ranks: &'a [usize],
    /// Ranks, in that group, of all groups of the new one's mesh dimension. If empty: those of a mesh in rank
    /// order.
    pub siblings: &'a [Vec<usize>],
}

impl ParentGroup<'_> {
    /// Returns the dead ranks among these ranks of the new group, each with a description. Starts monitoring all of
    /// them.
    fn dead(&self, late: &[usize]) -> Vec<(usize, String)> {
        let parent_ranks: Vec<usize> =
            late.iter().filter_map(|&rank| self.ranks.get(rank).copied()).collect();
        let new_rank = |parent_rank| self.ranks.iter().position(|&rank| rank == parent_rank);
        let reason = |peer| {
            format!("ended before the group was created (in group `{}` it is {peer})", self.group.name())
        };
        let dead = self.group.dead(&parent_ranks).into_iter();
        dead.filter_map(|(rank, peer)| Some((new_rank(rank)?, reason(peer)))).collect()
    }

    /// Returns the error for the first dead rank among these ranks of the new group `name`, for callers that wait
    /// outside the core.
    pub fn lost(&self, (call, name): (&str, &str), late: &[usize]) -> Option<Error> {
        let (rank, reason) = self.dead(late).into_iter().next()?;
        let (operation, group, remedy) = (call.to_owned(), name.to_owned(), LOST_AT_STARTUP);
        Some(Error::PeerLost { operation, group, rank, peer: rank_label(rank, &[]), reason, remedy })
    }
}

impl Communicator {
    /// Creates rank `rank` of the group `name` of `size` ranks, which all make this call over the same store within
    /// `timeout`. `timeout` is also the deadline of calls without their own deadline. `call`: the user's call, as
    /// errors name it; `parent_group`: a group that contains all ranks.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming the ranks that did not join; [`Error::PeerLost`] naming a rank that joined and was
    /// lost; [`Error::Topology`] if ranks cannot reach each other, differ in version or settings, or one of them
    /// could not create the group; errors of the store.
    pub fn make(
        store: &dyn Store,
        (call, name): (&str, &str),
        rank: usize,
        size: usize,
        timeout: Duration,
        parent_group: Option<ParentGroup<'_>>,
    ) -> Result<Communicator> {
        check_size(name, size)?;
        let (begun, config) = (Instant::now(), Config::get()?);
        let stale_address_limit = config.transport_options().peer_timeout;
        let deadline = after(begun, timeout);
        let (conflict, is_held) = (RefCell::default(), Cell::new(false));
        let exchange = RankExchange {
            store,
            call,
            name,
            rank,
            size,
            timeout,
            parent_group,
            stale_address_limit,
            begun,
            deadline,
            conflict,
            is_held,
        };
        let canonical = parent_group.is_some_and(|ParentGroup { group, ranks, siblings }| {
            need_canonical_order(config, name, &group.nodes(), ranks, siblings)
        });
        let outcome = Pending::with_order(name, rank, size, timeout, canonical);
        let pending = match outcome.map(|pending| pending.for_call(call)) {
            Ok(pending) if size == 1 => {
                let rank_info = pending.rank_info();
                return pending.connect(&[rank_info]);
            }
            Ok(pending) => pending,
            Err(error) => {
                let _ = exchange.publish_failure(&error);
                return Err(error);
            }
        };
        let (mut tree, mut endpoint) = (None, None);
        let mut outcome = exchange.run(pending, &mut tree, &mut endpoint);
        if exchange.is_held.get() {
            return outcome;
        }
        match &outcome {
            Err(Error::Timeout { missing, .. }) => {
                exchange.wait_for_peers(missing);
            }
            Err(error @ (Error::Topology(_) | Error::System { .. } | Error::PeerLost { .. })) => {
                if let Some(cause) = exchange.publish_failure(error) {
                    outcome = Err(exchange.error_of(cause));
                }
            }
            _ => {}
        }
        if let Ok(comm) = &outcome
            && exchange.has_claims()
            && let Some(tree) = tree.take()
        {
            // Not an error of the group: without the record, a duplicate process fails at its deadline instead of
            // immediately.
            let deletion = claims::claim(store, rank, &tree.address()).ok().flatten();
            comm.keep_claim(tree.into_claim(), deletion);
        }
        // Deleted last, because other ranks may still have to read the address. After a conflict it may be another
        // process's.
        if exchange.conflict.borrow().is_none() {
            let _ = store.delete(&key("card", rank));
        }
        drop((tree, endpoint));
        if let Err(error) = &outcome {
            record_error(&format!("rank {rank} (pid {}) of group `{name}`: {error}", std::process::id()));
        }
        outcome
    }
}

/// State of this rank during the exchange.
struct RankExchange<'a> {
    store: &'a dyn Store,
    call: &'a str,
    name: &'a str,
    rank: usize,
    size: usize,
    timeout: Duration,
    parent_group: Option<ParentGroup<'a>>,
    /// Time during which an unreachable address may be that of an earlier attempt.
    stale_address_limit: Duration,
    begun: Instant,
    deadline: Instant,
    /// A contradiction between ranks that this or another process found. All ranks report it unchanged.
    conflict: RefCell<Option<StartupFailure>>,
    /// Another process of this host holds the rank in the existing group. This process does not change its keys.
    is_held: Cell<bool>,
}

impl RankExchange<'_> {
    /// True if the group is the first of its ranks, so that they may have duplicates.
    fn has_claims(&self) -> bool {
        self.parent_group.is_none() && self.call.starts_with("init")
    }

    /// Joins the group. `tree` and `endpoint`: sockets through which the other ranks reach this one. They remain open
    /// until an error is in the store.
    fn run(
        &self,
        mut pending: Pending,
        tree: &mut Option<RankTree>,
        endpoint: &mut Option<OpenEndpoint>,
    ) -> Result<Communicator> {
        let new = pending.tree().map_err(|error| Error::System {
            operation: format!(
                "group `{}`: cannot open sockets for the exchange of rank information",
                self.name
            ),
            reason: error.to_string(),
        })?;
        let tree = tree.insert(new);
        if self.has_claims()
            && let Some(holder) = claims::running(self.store, self.rank, self.size, tree)?
        {
            self.is_held.set(true);
            return Err(claims::refused((self.call, self.name), self.rank, &holder, tree));
        }
        // An earlier attempt of this rank may have left its failure. From now on, a published failure belongs to
        // this attempt.
        if matches!(self.published()?, Some((Some(by), _)) if by == self.rank) {
            self.store.set(FAILURE_KEY, b"")?;
        }
        self.store.set(&key("card", self.rank), &tree.address())?;
        let outcome = self.exchange(&mut pending, tree);
        if let Err(error) = &outcome {
            tree.fail(match error {
                Error::Timeout { missing, detail, .. } => {
                    StartupFailure { missing: missing.clone(), lost: None, reason: detail.clone() }
                }
                other => self.failure(other),
            });
        }
        let rank_infos = outcome?;
        *endpoint = Some(pending.open_endpoint());
        let comm = pending.connect(&rank_infos)?;
        // All ranks have read all address records before one of them returns. A rank that failed to connect stores its reason.
        let left = self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let options = Options { timeout: Some(left), ..Options::default() };
        let pause = FIRST_FAILURE_CHECK.max(FOR_EACH_RANK * self.size as u32);
        comm.checked_barrier(options, pause, || {
            self.published_failure()?.map_or(Ok(()), |failure| Err(self.error_of(failure)))
        })?;
        Ok(comm)
    }

    fn exchange(&self, pending: &mut Pending, tree: &mut RankTree) -> Result<Vec<Vec<u8>>> {
        let longest = LONGEST_PAUSE.max(FOR_EACH_RANK * self.size as u32);
        let (mut pause, mut next) = (FIRST_PAUSE, Instant::now());
        let mut next_probe = self.begun + PROBE_PAUSE;
        let mut check_pause = FIRST_CHECK;
        let mut next_check = self.begun + check_pause;
        loop {
            let now = Instant::now();
            if now >= self.deadline {
                // Other ranks may not have received the failure.
                let failure = tree.failure().cloned();
                return Err(failure.map_or_else(|| self.late(tree), |failure| Ok(self.error_of(failure)))?);
            }
            if now >= next {
                if self.poll_store(pending, tree, now)? {
                    pause = FIRST_PAUSE;
                }
                next = Instant::now() + pause;
                pause = (2 * pause).min(longest);
            }
            if now >= next_probe {
                self.probe(tree, now)?;
                next_probe = Instant::now() + PROBE_PAUSE.max(FOR_EACH_RANK * self.size as u32);
            }
            if now >= next_check {
                self.check_claim(tree)?;
                check_pause = (2 * check_pause).min(LONGEST_CHECK).max(FOR_EACH_RANK * self.size as u32);
                next_check = Instant::now() + check_pause;
            }
            if interrupted() {
                return Err(Error::Interrupted);
            }
            // The store may have taken time.
            let now = Instant::now();
            if let Some(outcome) = tree.poll(now) {
                let outcome = outcome.clone();
                self.relay_result(tree)?;
                return outcome.map_err(|failure| self.explain(tree, failure));
            }
            tree.wait(next.saturating_duration_since(now), now);
        }
    }

    /// Reads this rank's data from the store. Returns true if there was any.
    fn poll_store(&self, pending: &mut Pending, tree: &mut RankTree, now: Instant) -> Result<bool> {
        let mut moved = false;
        if let Some(parent) = tree.parent().filter(|_| tree.needs_addresses(now)) {
            // A single request for both keys.
            let mut keys = vec![key("card", 0), key("card", parent)];
            keys.dedup();
            if self.store.has(&keys)? {
                let addresses = keys.iter().map(|key| self.store.get(key)).collect::<Result<Vec<_>>>()?;
                let (first, last) = (&addresses[0], &addresses[addresses.len() - 1]);
                if let Some(reason) =
                    tree.size_conflict(0, first).or_else(|| tree.size_conflict(parent, last))
                {
                    return Err(self.conflict(format!("group '{}' {reason}", self.name)));
                }
                moved = pending.connect_parent(tree, first, last, now)?;
            }
        }
        if let Some((words, reason)) = tree.take_relay() {
            let (name, rank, parent) = (self.name, self.rank, tree.parent().unwrap_or(0));
            let path = format!(
                "rank {rank} cannot connect to rank {parent} ({reason}); its rank information goes through the store"
            );
            log::say(Level::Info, &format!("group `{name}`: {path}"));
            self.store.set(&key("up", self.rank), &words)?;
            moved = true;
        }
        if tree.is_unreached() && self.contains(&key("down", self.rank))? {
            tree.accept_result(&self.take(&key("down", self.rank))?);
            moved = true;
        }
        // Unconnected children use these keys, but only after `PARENT_TIMEOUT`.
        for child in if now - self.begun >= PARENT_TIMEOUT { tree.unconnected() } else { Vec::new() } {
            if self.contains(&key("up", child))? {
                tree.accept_relayed(child, &self.take(&key("up", child))?);
                moved = true;
            }
        }
        if !moved && let Some(failure) = self.published_failure()? {
            return Err(self.error_of(failure));
        }
        Ok(moved)
    }

    /// Probes the ranks that have not answered. A rank that has published its failure is not probed, since a new
    /// attempt may follow.
    fn probe(&self, tree: &mut RankTree, now: Instant) -> Result<()> {
        for (rank, reason) in self.parent_group.map_or_else(Vec::new, |parent| parent.dead(&tree.missing())) {
            tree.fail(StartupFailure::lost(rank, reason));
        }
        for rank in tree.suspects() {
            let address_key = key("card", rank);
            if self.contains(&address_key)? && !self.contains(&key("failed", rank))? {
                let wrong = |reason| {
                    Error::Topology(format!(
                        "creation of group `{}` failed: rank {rank} has {reason}",
                        self.name
                    ))
                };
                tree.probe(rank, &self.store.get(&address_key)?, self.stale_address_limit, now)
                    .map_err(wrong)?;
            }
        }
        Ok(())
    }

    fn relay_result(&self, tree: &RankTree) -> Result<()> {
        let carried = tree.result_to_relay();
        carried.into_iter().try_for_each(|(child, words)| self.store.set(&key("down", child), &words))
    }

    fn contains(&self, key: &str) -> Result<bool> {
        self.store.has(&[key.to_owned()])
    }

    fn take(&self, key: &str) -> Result<Vec<u8>> {
        let value = self.store.get(key)?;
        self.store.delete(key)?;
        Ok(value)
    }
}
