//! Making a group of ranks that share nothing but a store: every rank's card to every rank.
//!
//! Cards travel along a tree of connections ([`RankTree`]); the store holds each rank's address in it, which ranks came, and at
//! rank 0's address what makes the group's token.
//! What a rank has to say that cannot connect to its parent goes through the store, too. Keys lie under whatever prefix the
//! store has for this group; a rank takes its own away in the end, so a later group of the same name never meets an old one.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::{Duration, Instant};

use smddp_transport::bootstrap::{Holder, PARENT_TIMEOUT, RankTree, StartupFailure, rank_label};
use smddp_transport::joint::OpenEndpoint;
use smddp_transport::process::record_error;

use super::claims;
use super::pending::{LOST_WHILE_MADE, Pending};
use super::siblings::need_canonical_order;
use super::size::check_size;
use super::store::Store;
use crate::communicator::{Communicator, Options};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::failure::report::{MAX_RANK_LIST, ranges};
use crate::log::{self, Level};
use crate::sync::completion::interrupted;
use crate::sync::deadline::after;

/// Between two looks at the store, from the first on; a large group leaves a server its breath.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);
const FOR_EACH_RANK: Duration = Duration::from_micros(200);
/// How long a rank that cannot make a group waits for the others to find out, too.
const PEER_FAILURE_WAIT: Duration = Duration::from_secs(2);

/// Between two questions whether a rank that others wait for is still there.
const PROBE_PAUSE: Duration = Duration::from_millis(20);

/// Time at the last barrier of `init` before a rank looks for another rank's reason to fail.
const FIRST_FAILURE_CHECK: Duration = Duration::from_millis(100);

/// Pause between two checks that no other process has claimed this rank, at first and at most.
const FIRST_CHECK: Duration = Duration::from_millis(20);
const LONGEST_CHECK: Duration = Duration::from_secs(1);

/// Time to find out which ranks did not join, once the deadline has passed.
const ABSENCE_SEARCH: Duration = Duration::from_secs(5);

/// So many ranks are named with host and pid where they are late.
const MAX_DESCRIBED: usize = 4;

/// Empty where that was taken back: whoever finds it there may still read it, and would wait for one that is gone.
const FAILURE_KEY: &str = "smddp/refused";

/// A rank's "card" (its information), "failed", "up" or "down".
fn key(what: &str, rank: usize) -> String {
    format!("smddp/{what}/{rank}")
}

/// Another group in which the ranks of a new one are already, each with its rank there. It knows who is dead.
#[derive(Clone, Copy)]
pub struct ParentGroup<'a> {
    pub group: &'a Communicator,
    pub ranks: &'a [usize],
    /// The ranks there of all groups of the new one's mesh dimension; empty: as a mesh in rank order has them.
    pub siblings: &'a [Vec<usize>],
}

impl ParentGroup<'_> {
    /// Of these ranks of the new group those that are dead, each with how it is known; all are looked after from now on.
    fn dead(&self, late: &[usize]) -> Vec<(usize, String)> {
        let there: Vec<usize> = late.iter().filter_map(|&rank| self.ranks.get(rank).copied()).collect();
        let dead = self.group.dead(&there).into_iter();
        let here = dead.filter_map(|(there, who)| Some((self.ranks.iter().position(|&r| r == there)?, who)));
        let how =
            |who| format!("ended before the group was made (in group `{}` it is {who})", self.group.name());
        here.map(|(rank, who)| (rank, how(who))).collect()
    }

    /// The error of the first of these ranks of the new group `name` that is dead, for who waits outside the core.
    pub fn lost(&self, (call, name): (&str, &str), late: &[usize]) -> Option<Error> {
        let (rank, how) = self.dead(late).into_iter().next()?;
        let (what, group, advice) = (call.to_owned(), name.to_owned(), LOST_WHILE_MADE);
        Some(Error::PeerLost { what, group, rank, who: rank_label(rank, &[]), how, advice })
    }
}

impl Communicator {
    /// Makes rank `rank` of the group `name`, with `size` ranks that do the same over the same store within `timeout`, which
    /// is also the deadline of every call that has none of its own. `call`: what the user called for it, as errors name it;
    /// `parent_group`: a group in which all of them are already.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming the ranks that did not come; [`Error::PeerLost`] naming one that came and is gone;
    /// [`Error::Topology`] where ranks cannot reach each other,
    /// differ in version or settings, or one of them could not make the group at all; the store's own.
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
        let patience = config.transport_options().peer_timeout;
        let deadline = after(begun, timeout);
        let (found, is_held) = (RefCell::default(), Cell::new(false));
        let exchange = RankExchange {
            store,
            call,
            name,
            rank,
            size,
            timeout,
            parent_group,
            patience,
            begun,
            deadline,
            found,
            is_held,
        };
        let canonical = parent_group.is_some_and(|ParentGroup { group, ranks, siblings }| {
            need_canonical_order(config, name, &group.nodes(), ranks, siblings)
        });
        let made = Pending::with_order(name, rank, size, timeout, canonical);
        let pending = match made.map(|pending| pending.for_call(call)) {
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
        let mut made = exchange.run(pending, &mut tree, &mut endpoint);
        if exchange.is_held.get() {
            return made;
        }
        match &made {
            Err(Error::Timeout { missing, .. }) => {
                exchange.wait_for_peers(missing);
            }
            Err(error @ (Error::Topology(_) | Error::System { .. } | Error::PeerLost { .. })) => {
                if let Some(cause) = exchange.publish_failure(error) {
                    made = Err(exchange.error_of(cause));
                }
            }
            _ => {}
        }
        if let Ok(comm) = &made
            && exchange.has_claims()
            && let Some(tree) = tree.take()
        {
            // Not an error of the group: without the record, a duplicate fails at its deadline instead of at once.
            let deletion = claims::claim(store, rank, &tree.address()).ok().flatten();
            comm.hold(tree.into_claim(), deletion);
        }
        // Last: other ranks may still have to read the address. With a conflict it may be another process's.
        if exchange.found.borrow().is_none() {
            let _ = store.delete(&key("card", rank));
        }
        drop((tree, endpoint));
        if let Err(error) = &made {
            record_error(&format!("rank {rank} (pid {}) of group `{name}`: {error}", std::process::id()));
        }
        made
    }
}

/// One rank where a group's ranks meet.
struct RankExchange<'a> {
    store: &'a dyn Store,
    call: &'a str,
    name: &'a str,
    rank: usize,
    size: usize,
    timeout: Duration,
    parent_group: Option<ParentGroup<'a>>,
    /// How long an address that leads nowhere may be an earlier attempt's.
    patience: Duration,
    begun: Instant,
    deadline: Instant,
    /// A contradiction between ranks that this process or another one found. It is reported as it is.
    found: RefCell<Option<StartupFailure>>,
    /// Another process of this host holds the rank in the existing group. This process does not change its keys.
    is_held: Cell<bool>,
}

impl RankExchange<'_> {
    /// True if the group is the first of its ranks, so that they may have duplicates.
    fn has_claims(&self) -> bool {
        self.parent_group.is_none() && self.call.starts_with("init")
    }

    /// `tree` and `endpoint`: sockets through which the other ranks reach this one. They outlive an error until it is in the
    /// store.
    fn run(
        &self,
        mut pending: Pending,
        tree: &mut Option<RankTree>,
        endpoint: &mut Option<OpenEndpoint>,
    ) -> Result<Communicator> {
        let new = pending.tree().map_err(|error| Error::System {
            what: format!("group `{}`: no sockets to exchange cards", self.name),
            reason: error.to_string(),
        })?;
        let tree = tree.insert(new);
        if self.has_claims()
            && let Some(holder) = claims::running(self.store, self.rank, self.size, tree)?
        {
            self.is_held.set(true);
            return Err(claims::refused((self.call, self.name), self.rank, &holder, tree));
        }
        // An earlier attempt of this rank may have left it. From now on a refusal is of this attempt.
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
                // Not all may have heard of it.
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
            // The store may have taken its time.
            let now = Instant::now();
            if let Some(outcome) = tree.poll(now) {
                let outcome = outcome.clone();
                self.relay_result(tree)?;
                return outcome.map_err(|failure| self.explained(tree, failure));
            }
            tree.wait(next.saturating_duration_since(now), now);
        }
    }

    /// What the store has for this rank; whether there was anything.
    fn poll_store(&self, pending: &mut Pending, tree: &mut RankTree, now: Instant) -> Result<bool> {
        let mut moved = false;
        if let Some(parent) = tree.parent().filter(|_| tree.needs_addresses(now)) {
            // One question for both.
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
                "rank {rank} cannot connect to rank {parent} ({reason}); its cards go through the store"
            );
            log::say(Level::Info, &format!("group `{name}`: {path}"));
            self.store.set(&key("up", self.rank), &words)?;
            moved = true;
        }
        if tree.is_unreached() && self.contains(&key("down", self.rank))? {
            tree.accept_result(&self.take(&key("down", self.rank))?);
            moved = true;
        }
        // Who has no connection says so here, but not at once.
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

    /// Reads this rank's own address again: another process that claims the rank has replaced it.
    fn check_claim(&self, tree: &RankTree) -> Result<()> {
        let mine = key("card", self.rank);
        // Only a process of this rank deletes it, when it leaves.
        let both = match self.contains(&mine)? {
            true => tree.rank_conflict(&self.store.get(&mine)?),
            false => Some(format!("{} and another one, which has left", tree.process())),
        };
        let text = |both| format!("two processes claim rank {} of group '{}': {both}", self.rank, self.name);
        both.map_or(Ok(()), |both| Err(self.conflict(text(both))))
    }

    /// The error of a failure that reached this rank. A lost peer may be the consequence of a contradiction between ranks.
    fn explained(&self, tree: &RankTree, failure: StartupFailure) -> Error {
        if failure.lost.is_some() {
            if let Err(conflict @ Error::Topology(_)) = self.check_claim(tree) {
                return conflict;
            }
            if let Ok(Some(published_failure)) = self.published_failure()
                && self.is_conflict(&published_failure)
            {
                return self.error_of(published_failure);
            }
        }
        self.error_of(failure)
    }

    /// True if a failure is a contradiction between ranks, which all ranks report in the same words.
    fn is_conflict(&self, failure: &StartupFailure) -> bool {
        failure.reason.contains(&format!("group '{}'", self.name))
    }

    /// The error of ranks that contradict each other, which all ranks raise in these words.
    fn conflict(&self, reason: String) -> Error {
        let failure = StartupFailure::of(reason);
        self.found.replace(Some(failure.clone()));
        self.error_of(failure)
    }

    /// Whether those of whom nothing is heard are still there. Who gave up and said so may come again.
    fn probe(&self, tree: &mut RankTree, now: Instant) -> Result<()> {
        for (rank, how) in self.parent_group.map_or_else(Vec::new, |parent| parent.dead(&tree.missing())) {
            tree.fail(StartupFailure::lost(rank, how));
        }
        for rank in tree.suspects() {
            let rank_info = key("card", rank);
            if self.contains(&rank_info)? && !self.contains(&key("failed", rank))? {
                let wrong = |reason| {
                    Error::Topology(format!("making group `{}`: rank {rank} has {reason}", self.name))
                };
                tree.probe(rank, &self.store.get(&rank_info)?, self.patience, now).map_err(wrong)?;
            }
        }
        Ok(())
    }

    /// What others hear of this rank's error.
    fn failure(&self, error: &Error) -> StartupFailure {
        match error {
            Error::Topology(_) if self.found.borrow().is_some() => {
                self.found.borrow().clone().unwrap_or_else(|| StartupFailure::of(error.to_string()))
            }
            Error::PeerLost { rank, how, .. } => StartupFailure::lost(*rank, how.clone()),
            other => StartupFailure::of(format!("rank {} could not: {other}", self.rank)),
        }
    }

    /// Reason why the group cannot be made, as another process has stored it: another rank, or a second process of this rank.
    fn published_failure(&self) -> Result<Option<StartupFailure>> {
        Ok(self.published()?.map(|(_, failure)| failure))
    }

    /// Who said that there will be no group, and why.
    fn published(&self) -> Result<Option<(Option<usize>, StartupFailure)>> {
        let said = if self.contains(FAILURE_KEY)? { self.store.get(FAILURE_KEY)? } else { Vec::new() };
        Ok((!said.is_empty()).then(|| StartupFailure::decode(&said)))
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

    /// The deadline has passed: who did not come.
    fn late(&self, tree: &RankTree) -> Result<Error> {
        let mut missing = Vec::new();
        let complete = self.absent(0..self.size, &mut missing, Instant::now() + ABSENCE_SEARCH)?;
        let mut detail = if missing.is_empty() {
            missing = tree.missing();
            format!(
                "all ranks joined, but rank {} still waits for {}{}",
                self.rank,
                self.described(&missing)?,
                self.doing(&missing)
            )
        } else {
            let joined = match complete {
                true => format!("{} of {} ranks joined", self.size - missing.len(), self.size),
                false => format!("the search among {} ranks was not complete", self.size),
            };
            format!(
                "{} did not join group '{}' within {} s ({joined}{}). Did all ranks of the group call \
                 init_process_group or new_group, with the same arguments and in the same order?",
                named(&missing),
                self.name,
                (self.timeout.as_secs_f64() * 100.0).round() / 100.0,
                self.doing(&missing)
            )
        };
        if self.has_claims()
            && let Some(Holder::Open(holder) | Holder::Unknown(holder)) =
                claims::holder(self.store, self.rank, tree)?
        {
            detail += &claims::joined_before(self.rank, &holder);
        }
        let few = if self.has_claims() { MAX_DESCRIBED } else { 0 };
        for &rank in missing.iter().filter(|&&rank| rank != self.rank).take(few) {
            if let Some(Holder::Open(holder)) = claims::holder(self.store, rank, tree)? {
                detail += &claims::still_held(rank, &holder);
            }
        }
        Ok(self.timeout(missing, detail))
    }

    /// Ranks that came, by what they said where they are; of many only their numbers.
    fn described(&self, ranks: &[usize]) -> Result<String> {
        if ranks.len() > MAX_DESCRIBED {
            return Ok(named(ranks));
        }
        let error_of = |&rank: &usize| {
            let rank_info = key("card", rank);
            // It may have gone since.
            let address = if self.contains(&rank_info)? { self.store.get(&rank_info)? } else { Vec::new() };
            Ok(rank_label(rank, &address))
        };
        Ok(ranks.iter().map(error_of).collect::<Result<Vec<_>>>()?.join(", "))
    }

    /// What the first of these ranks do: they are asked where there is a group in which they can be.
    fn doing(&self, late: &[usize]) -> String {
        let Some(ParentGroup { group, ranks, .. }) = self.parent_group else { return String::new() };
        let there: Vec<usize> = late.iter().filter_map(|&rank| ranks.get(rank).copied()).collect();
        let said = group.doing(&there);
        let as_there = || format!("; as group `{}` knows them: {}", group.name(), said.join("; "));
        if said.is_empty() { String::new() } else { as_there() }
    }

    fn timeout(&self, missing: Vec<usize>, detail: String) -> Error {
        let (what, group) = (self.call.to_owned(), self.name.to_owned());
        Error::Timeout { what, group, after: self.timeout, missing, detail }
    }

    /// Finds ranks without an address, by halves: few requests find few ranks. `false`: it was still looking at `until`.
    fn absent(&self, ranks: Range<usize>, missing: &mut Vec<usize>, until: Instant) -> Result<bool> {
        if !missing.is_empty() && Instant::now() >= until {
            return Ok(false);
        }
        let keys: Vec<String> = ranks.clone().map(|rank| key("card", rank)).collect();
        if self.store.has(&keys)? {
            return Ok(true);
        }
        if ranks.len() == 1 {
            missing.push(ranks.start);
            return Ok(true);
        }
        let middle = ranks.start + ranks.len() / 2;
        Ok(self.absent(ranks.start..middle, missing, until)?
            && self.absent(middle..ranks.end, missing, until)?)
    }

    /// Another rank found out why there will be no group.
    fn error_of(&self, failure: StartupFailure) -> Error {
        let group = self.name.to_owned();
        if let Some(rank) = failure.lost {
            // A store would wait for what is not there.
            let rank_info = key("card", rank);
            let address = if self.contains(&rank_info) == Ok(true) {
                self.store.get(&rank_info)
            } else {
                Ok(Vec::new())
            };
            let (what, advice) = (self.call.to_owned(), LOST_WHILE_MADE);
            return Error::PeerLost {
                what,
                group,
                rank,
                who: rank_label(rank, &address.unwrap_or_default()),
                how: failure.reason,
                advice,
            };
        }
        match failure.missing.is_empty() {
            true if self.is_conflict(&failure) => {
                self.found.replace(Some(failure.clone()));
                Error::Topology(failure.reason)
            }
            true => Error::Topology(format!("making group `{group}`: {}", failure.reason)),
            false => self.timeout(failure.missing, failure.reason),
        }
    }

    /// In place of a card, so that the others need not wait for one, however late they come. The first cause stays; but a rank
    /// that others take for lost, and that only gave up, knows a better one. Another rank's, if that is why this one failed, too.
    fn publish_failure(&self, error: &Error) -> Option<StartupFailure> {
        if self.size == 1 {
            return None;
        }
        let failure = self.failure(error);
        let first = match self.published_failure() {
            Ok(said) => said.is_none_or(|said| said.lost == Some(self.rank)),
            Err(_) => false,
        };
        if first {
            let _ = self.store.set(FAILURE_KEY, &failure.encode(self.rank));
        }
        // Who has not found out yet reads it whenever it comes.
        let all = self.wait_for_peers(failure.lost.as_slice());
        let others = |(by, cause): &(Option<usize>, StartupFailure)| {
            *by != Some(self.rank) && cause.lost != Some(self.rank)
        };
        let cause = failure.lost.and_then(|_| self.published().ok()?.filter(others)).map(|(_, cause)| cause);
        // A conflict stays: two processes share this rank, and the other one may not have read it.
        if all && first && cause.is_none() && self.found.borrow().is_none() {
            let _ = self.store.set(FAILURE_KEY, b"");
        }
        cause
    }

    /// Most reasons to fail hold for all ranks, and each is to raise its own error. So the first leaves only when the others
    /// have found out, too: what follows is often the end of its process, and, with rank 0, of the store. The keys stay: all
    /// that one could do to a later group is to end a wait like this one. Who is `missing` finds out nothing.
    /// Whether all others have.
    fn wait_for_peers(&self, missing: &[usize]) -> bool {
        let begun = Instant::now();
        let _ = self.store.set(&key("failed", self.rank), b"");
        let missing: BTreeSet<usize> = missing.iter().copied().collect();
        let all: Vec<String> =
            (0..self.size).filter(|rank| !missing.contains(rank)).map(|rank| key("failed", rank)).collect();
        let mut pause = FIRST_PAUSE;
        while begun.elapsed() < PEER_FAILURE_WAIT && !interrupted() {
            match self.store.has(&all) {
                Ok(false) => {}
                outcome => return outcome.is_ok(),
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
        false
    }
}

/// "rank 5", "ranks 5, 7-9".
fn named(ranks: &[usize]) -> String {
    let s = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{s} {}", ranges(ranks, MAX_RANK_LIST))
}
