//! State of the other ranks as seen by a communicator. Unknown while another thread waits in the group.

use std::time::{Duration, Instant};

use smddp_base::fork;
use smddp_group::Facts;

use super::Communicator;
use crate::engine::Command;
use crate::error::Error;
use crate::failure::error_text;
use crate::failure::report;
use crate::observe::recorder::query_key;
use crate::sync::ownership::Submitted;

/// Time limit of a query outside of an operation.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two polls for replies.
const QUERY_POLL_INTERVAL: Duration = Duration::from_millis(1);

impl Communicator {
    /// Selects the canonical order of reductions regardless of the setting. Before the first call, and equal on all
    /// ranks.
    pub(crate) fn set_canonical_order(&self) {
        let _ = self.0.facts.canonical.set(true);
    }

    /// Returns the ranks that this process has found dead, each with its description for errors. Starts monitoring
    /// the ranks in `awaited`.
    pub fn dead(&self, awaited: &[usize]) -> Vec<(usize, String)> {
        let Some(mut engine) = self.0.try_own() else { return Vec::new() };
        // No thread may have polled for a while.
        engine.poll_once();
        let (now, mut facts) = (Instant::now(), Facts::default());
        let next = engine.next;
        let mut health = engine.group.health();
        health.watch(awaited, now);
        health.observe(now, next, &mut facts);
        let named = |error: &Error| match error {
            Error::PeerLost { rank, .. } => Some(*rank),
            _ => None,
        };
        let mut dead: Vec<usize> = facts.lost().into_iter().map(|(rank, _)| rank).collect();
        // Another rank has detected the death first.
        for (from, rank) in facts.ranks.iter().enumerate() {
            let Some(abort) = &rank.abort else { continue };
            dead.extend(named(&report::to_error(&engine.names, "new_group".to_owned(), from, &abort.report)));
        }
        // The rank whose death ended the group: a dead group reports no more faults.
        dead.extend(self.0.failure.get().and_then(named));
        let mut described = Vec::new();
        for rank in dead {
            let last_error = engine.group.health().last_error(rank);
            described
                .push((rank, engine.names.describe(rank) + &error_text::last_error(last_error.as_ref())));
        }
        described
    }

    /// Queries the first of `ranks` for their activity: "rank 1 (host h1, pid 812) is in no call of this group, at
    /// train.py:88 in step". Takes a few seconds if one of them is stopped.
    pub(crate) fn doing(&self, ranks: &[usize]) -> Vec<String> {
        if self.0.forks != fork::generation() {
            return Vec::new();
        }
        let ranks = &ranks[..ranks.len().min(error_text::MAX_QUERIED)];
        let (begun, mut facts, mut is_started) = (Instant::now(), Facts::default(), false);
        loop {
            let now = Instant::now();
            if let Some(mut engine) = self.0.try_own() {
                if !is_started && engine.facts.is_querying {
                    return Vec::new();
                }
                let mut health = engine.group.health();
                if !std::mem::replace(&mut is_started, true) {
                    health.start_query(ranks, |rank| query_key(&self.0.name, rank), now);
                }
                if health.poll_query(now, &mut facts) || now.duration_since(begun) >= QUERY_TIMEOUT {
                    health.cancel_query();
                    let activity = |&rank: &usize| {
                        let text = facts.ranks[rank]
                            .activity
                            .as_deref()
                            .unwrap_or("sent no reply to a status query");
                        format!("{} {text}", engine.names.describe(rank))
                    };
                    return ranks.iter().map(activity).collect();
                }
            } else if !is_started {
                return Vec::new();
            } else if now.duration_since(begun) >= QUERY_TIMEOUT {
                if self.0.engine.submit(|| Command::CancelQuery) == Submitted::Orphaned {
                    self.0.start_progress();
                }
                return Vec::new();
            }
            // The engine is free meanwhile.
            std::thread::sleep(QUERY_POLL_INTERVAL);
        }
    }

    /// Returns the ranks known to have begun the newest collective started here, including this rank.
    pub fn arrived(&self) -> Vec<usize> {
        if self.0.forks != fork::generation() {
            return vec![self.0.rank];
        }
        let Some(mut engine) = self.0.try_own() else { return vec![self.0.rank] };
        let Some(newest) = engine.next.checked_sub(1) else { return (0..self.0.size).collect() };
        let mut facts = Facts::default();
        engine.group.health().observe(Instant::now(), newest, &mut facts);
        let arrived = |&rank: &usize| rank == self.0.rank || facts.ranks[rank].arrived == Some(true);
        (0..self.0.size).filter(arrived).collect()
    }
}
