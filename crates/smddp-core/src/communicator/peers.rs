//! State of the other ranks as seen by a communicator. Unknown while another thread waits in the group.

use std::time::Instant;

use smddp_transport::Fault;

use super::Communicator;
use crate::error::Error;
use crate::failure::error_text;
use crate::failure::report;

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
        self.0.guarded_poll(&mut engine);
        let now = Instant::now();
        engine.group.watch(awaited, now);
        let faults = engine.group.faults(now);
        let named = |error: &Error| match error {
            Error::PeerLost { rank, .. } => Some(*rank),
            _ => None,
        };
        let (group, name) = (&engine.group, &self.0.name);
        let lost = faults.iter().filter_map(|fault| match fault {
            Fault::Lost { rank, .. } => Some(*rank),
            // Another rank has detected the death first.
            Fault::Aborted { rank: from, reason } => {
                named(&report::to_error(group, name, "new_group".to_owned(), *from, reason))
            }
            _ => None,
        });
        // The rank whose death ended the group: a dead group reports no more faults.
        let cause = self.0.failure.get().and_then(named);
        let description =
            |rank| engine.group.info().describe(rank) + &error_text::last_error(&engine.group, rank);
        lost.chain(cause).map(|rank| (rank, description(rank))).collect()
    }

    /// Queries the first of `ranks` for their activity: "rank 1 (host h1, pid 812) is in no call of this group, at
    /// train.py:88 in step". Takes a few seconds if one of them is stopped.
    pub(crate) fn doing(&self, ranks: &[usize]) -> Vec<String> {
        let Some(mut engine) = self.0.try_own() else { return Vec::new() };
        let ranks = &ranks[..ranks.len().min(error_text::MAX_QUERIED)];
        engine.group.straggler_query_of(ranks);
        let activity = |&rank: &usize| {
            let words = error_text::activity_of(&engine.group, &self.0.name, rank);
            format!(
                "{} {}",
                engine.group.info().describe(rank),
                words.unwrap_or("does not answer".to_owned())
            )
        };
        ranks.iter().map(activity).collect()
    }

    /// Returns the ranks known to have begun the newest collective started here, including this rank.
    pub fn arrived(&self) -> Vec<usize> {
        let Some(engine) = self.0.try_own() else { return vec![self.0.rank] };
        let next = engine.next;
        (0..self.0.size)
            .filter(|&r| next == 0 || r == self.0.rank || engine.group.arrived(r, next - 1) == Some(true))
            .collect()
    }
}
