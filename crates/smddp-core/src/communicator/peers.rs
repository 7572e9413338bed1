//! What a communicator knows of its other ranks, and none of it while another thread waits in it.

use std::time::Instant;

use smddp_transport::Fault;

use super::Communicator;
use crate::error::Error;
use crate::failure::error_text;
use crate::failure::report;

impl Communicator {
    /// Reductions are in canonical order, whatever the setting says. Before the first call, and the same on all ranks.
    pub(crate) fn set_canonical_order(&self) {
        let _ = self.0.facts.canonical.set(true);
    }

    /// Ranks that ended without a goodbye, as far as this process knows, each as errors name it. `awaited`: looked after from
    /// now on.
    pub fn dead(&self, awaited: &[usize]) -> Vec<(usize, String)> {
        let Some(mut engine) = self.0.try_own() else { return Vec::new() };
        // Nobody may have looked since.
        self.0.guarded_poll(&mut engine);
        let now = Instant::now();
        engine.group.look_after(awaited, now);
        let faults = engine.group.faults(now);
        let named = |error: &Error| match error {
            Error::PeerLost { rank, .. } => Some(*rank),
            _ => None,
        };
        let (group, name) = (&engine.group, &self.0.name);
        let lost = faults.iter().filter_map(|fault| match fault {
            Fault::Lost { rank, .. } => Some(*rank),
            // Another rank has noticed it first.
            Fault::Poisoned { rank: from, reason } => {
                named(&report::to_error(group, name, "new_group".to_owned(), *from, reason))
            }
            _ => None,
        });
        // What ended the group, too: nobody looks at it any more.
        let cause = self.0.failure.get().and_then(named);
        let told = |rank| engine.group.describe(rank) + &error_text::last_error(&engine.group, rank);
        lost.chain(cause).map(|rank| (rank, told(rank))).collect()
    }

    /// "rank 1 (host h1, pid 812) is in no call of this group, at train.py:88 in step", for the first of `ranks`: they are
    /// asked, which takes a few seconds where one is stopped.
    pub(crate) fn doing(&self, ranks: &[usize]) -> Vec<String> {
        let Some(mut engine) = self.0.try_own() else { return Vec::new() };
        let ranks = &ranks[..ranks.len().min(error_text::MAX_QUERIED)];
        engine.group.straggler_query_of(ranks);
        let said = |&rank: &usize| {
            let words = error_text::activity_of(&engine.group, &self.0.name, rank);
            format!("{} {}", engine.group.describe(rank), words.unwrap_or("does not answer".to_owned()))
        };
        ranks.iter().map(said).collect()
    }

    /// Ranks known to have begun the newest collective that was started here; this rank at least.
    pub fn arrived(&self) -> Vec<usize> {
        let Some(engine) = self.0.try_own() else { return vec![self.0.rank] };
        let next = engine.next;
        (0..self.0.size)
            .filter(|&r| next == 0 || r == self.0.rank || engine.group.arrived(r, next - 1) == Some(true))
            .collect()
    }
}
