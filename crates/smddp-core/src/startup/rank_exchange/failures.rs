//! Failures of a group's creation: missing ranks, conflicts, and their publication to the other ranks.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::{Duration, Instant};

use smddp_group::bootstrap::{Holder, RankTree, StartupFailure, rank_label};

use super::{FAILURE_KEY, FIRST_PAUSE, LONGEST_PAUSE, ParentGroup, RankExchange, key};
use crate::error::{Error, Result};
use crate::failure::report::{MAX_RANK_LIST, ranges};
use crate::startup::claims;
use crate::startup::pending::LOST_AT_STARTUP;
use crate::sync::completion::interrupted;

/// Time that a rank with a startup failure waits for the other ranks to find out.
const PEER_FAILURE_WAIT: Duration = Duration::from_secs(2);

/// Time limit of the search for ranks that did not join, after the deadline.
const ABSENCE_SEARCH: Duration = Duration::from_secs(5);

/// Maximum number of late ranks described with host and pid.
const MAX_DESCRIBED: usize = 4;

impl RankExchange<'_> {
    /// Reads this rank's own address again: another process that claims the rank has replaced it.
    pub(super) fn check_claim(&self, tree: &RankTree) -> Result<()> {
        let mine = key("card", self.rank);
        // Only a process of this rank deletes the key, when it leaves.
        let claimants = match self.contains(&mine)? {
            true => tree.rank_conflict(&self.store.get(&mine)?),
            false => Some(format!("{} and another one, which has left", tree.process())),
        };
        let text = |claimants| {
            format!("two processes claim rank {} of group '{}': {claimants}", self.rank, self.name)
        };
        claimants.map_or(Ok(()), |claimants| Err(self.conflict(text(claimants))))
    }

    /// Returns the error for a failure that reached this rank. A lost peer may be the consequence of a
    /// contradiction between ranks.
    pub(super) fn explain(&self, tree: &RankTree, failure: StartupFailure) -> Error {
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

    /// Returns true if a failure is a contradiction between ranks, which all ranks report unchanged.
    pub(super) fn is_conflict(&self, failure: &StartupFailure) -> bool {
        failure.reason.contains(&format!("group '{}'", self.name))
    }

    /// Returns the error for a contradiction between ranks, which all ranks report unchanged.
    pub(super) fn conflict(&self, reason: String) -> Error {
        let failure = StartupFailure::of(reason);
        self.conflict.replace(Some(failure.clone()));
        self.error_of(failure)
    }

    /// Returns the failure that the other ranks receive for this rank's error.
    pub(super) fn failure(&self, error: &Error) -> StartupFailure {
        match error {
            Error::Topology(_) if self.conflict.borrow().is_some() => {
                self.conflict.borrow().clone().unwrap_or_else(|| StartupFailure::of(error.to_string()))
            }
            Error::PeerLost { rank, reason, .. } => StartupFailure::lost(*rank, reason.clone()),
            other => StartupFailure::of(format!("rank {} failed: {other}", self.rank)),
        }
    }

    /// Returns the published reason why the group cannot be created. It is from another rank, or from a second
    /// process of this rank.
    pub(super) fn published_failure(&self) -> Result<Option<StartupFailure>> {
        Ok(self.published()?.map(|(_, failure)| failure))
    }

    /// Returns the published failure with the rank that published it.
    pub(super) fn published(&self) -> Result<Option<(Option<usize>, StartupFailure)>> {
        let value = if self.contains(FAILURE_KEY)? { self.store.get(FAILURE_KEY)? } else { Vec::new() };
        Ok((!value.is_empty()).then(|| StartupFailure::decode(&value)))
    }

    /// Returns the error of an expired deadline, with the ranks that did not join.
    pub(super) fn late(&self, tree: &RankTree) -> Result<Error> {
        let mut missing = Vec::new();
        let complete = self.find_absent(0..self.size, &mut missing, Instant::now() + ABSENCE_SEARCH)?;
        let mut detail = if missing.is_empty() {
            missing = tree.missing();
            format!(
                "all ranks joined, but rank {} still waits for {}{}",
                self.rank,
                self.described(&missing)?,
                self.activities(&missing)
            )
        } else {
            let joined = match complete {
                true => format!("{} of {} ranks joined", self.size - missing.len(), self.size),
                false => format!("the search among {} ranks was not complete", self.size),
            };
            format!(
                "{} did not join group '{}' within {} s ({joined}{}). Did all ranks of the group call {}, \
                 with the same arguments and in the same order?",
                named(&missing),
                self.name,
                (self.timeout.as_secs_f64() * 100.0).round() / 100.0,
                self.activities(&missing),
                if self.call.starts_with("split_group") {
                    "split_group"
                } else {
                    "init_process_group or new_group"
                },
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

    /// Describes ranks that joined by their addresses; many ranks only by their numbers.
    pub(super) fn described(&self, ranks: &[usize]) -> Result<String> {
        if ranks.len() > MAX_DESCRIBED {
            return Ok(named(ranks));
        }
        let describe = |&rank: &usize| {
            let address_key = key("card", rank);
            // The rank may have left since.
            let address =
                if self.contains(&address_key)? { self.store.get(&address_key)? } else { Vec::new() };
            Ok(rank_label(rank, &address))
        };
        Ok(ranks.iter().map(describe).collect::<Result<Vec<_>>>()?.join(", "))
    }

    /// Returns the activity of the first of these ranks, queried over the existing group.
    pub(super) fn activities(&self, late: &[usize]) -> String {
        let Some(ParentGroup { group, ranks, .. }) = self.parent_group else { return String::new() };
        let parent_ranks: Vec<usize> = late.iter().filter_map(|&rank| ranks.get(rank).copied()).collect();
        let activities = group.doing(&parent_ranks);
        if activities.is_empty() {
            return String::new();
        }
        format!("; activity in group `{}`: {}", group.name(), activities.join("; "))
    }

    pub(super) fn timeout(&self, missing: Vec<usize>, detail: String) -> Error {
        let (operation, group) = (self.call.to_owned(), self.name.to_owned());
        Error::Timeout { operation, group, after: self.timeout, missing, detail }
    }

    /// Finds ranks without an address by bisection, which needs few requests for few ranks. Returns false if the
    /// search was not complete at `until`.
    pub(super) fn find_absent(
        &self,
        ranks: Range<usize>,
        missing: &mut Vec<usize>,
        until: Instant,
    ) -> Result<bool> {
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
        Ok(self.find_absent(ranks.start..middle, missing, until)?
            && self.find_absent(middle..ranks.end, missing, until)?)
    }

    /// Returns the error for a failure that another rank found.
    pub(super) fn error_of(&self, failure: StartupFailure) -> Error {
        let group = self.name.to_owned();
        if let Some(rank) = failure.lost {
            // Reading a missing key would block.
            let address_key = key("card", rank);
            let address = if self.contains(&address_key) == Ok(true) {
                self.store.get(&address_key)
            } else {
                Ok(Vec::new())
            };
            let (operation, remedy) = (self.call.to_owned(), LOST_AT_STARTUP);
            return Error::PeerLost {
                operation,
                group,
                rank,
                peer: rank_label(rank, &address.unwrap_or_default()),
                reason: failure.reason,
                remedy,
            };
        }
        match failure.missing.is_empty() {
            true if self.is_conflict(&failure) => {
                self.conflict.replace(Some(failure.clone()));
                Error::Topology(failure.reason)
            }
            true => Error::Topology(format!("creation of group `{group}` failed: {}", failure.reason)),
            false => self.timeout(failure.missing, failure.reason),
        }
    }

    /// Publishes this rank's failure in place of its address, so that late ranks need not wait for it. An earlier
    /// failure of another rank is kept. The exception is a report that this rank was lost, since this rank knows
    /// the better reason. Returns another rank's failure if it is the cause of this one.
    pub(super) fn publish_failure(&self, error: &Error) -> Option<StartupFailure> {
        if self.size == 1 {
            return None;
        }
        let failure = self.failure(error);
        let first = match self.published_failure() {
            Ok(published) => published.is_none_or(|published| published.lost == Some(self.rank)),
            Err(_) => false,
        };
        if first {
            let _ = self.store.set(FAILURE_KEY, &failure.encode(self.rank));
        }
        // A rank that has not found out yet reads the failure when it arrives.
        let all = self.wait_for_peers(failure.lost.as_slice());
        let is_of_other_rank = |(by, cause): &(Option<usize>, StartupFailure)| {
            *by != Some(self.rank) && cause.lost != Some(self.rank)
        };
        let cause = failure
            .lost
            .and_then(|_| self.published().ok()?.filter(is_of_other_rank))
            .map(|(_, cause)| cause);
        // A conflict stays published: two processes share this rank, and the other one may not have read it.
        if all && first && cause.is_none() && self.conflict.borrow().is_none() {
            let _ = self.store.set(FAILURE_KEY, b"");
        }
        cause
    }

    /// Waits until the other ranks have failed, too. Returns true if all except `missing` have.
    ///
    /// Most startup errors affect all ranks, and each rank should report its own. The first failing rank therefore
    /// waits, because its exit often ends the process and, on rank 0, the store. The "failed" keys remain in the
    /// store: in a later group, they can only shorten a wait like this one.
    pub(super) fn wait_for_peers(&self, missing: &[usize]) -> bool {
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

/// Formats ranks: "rank 5", "ranks 5, 7-9".
fn named(ranks: &[usize]) -> String {
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", ranges(ranks, MAX_RANK_LIST))
}
