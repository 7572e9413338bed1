//! Times of several hosts as those of one, without the pauses in which no rank did anything.

use std::collections::{BTreeMap, HashMap};

use super::dump::{Operation, Outcome, Process};

/// A pause of all ranks is shortened to this.
const PAUSE_NS: u64 = 1_000_000_000;

/// By how much the clock of each process's host is ahead of the first one's: all ranks leave an operation together. `None`:
/// nothing tells.
pub(crate) fn ahead(processes: &[Process]) -> Vec<Option<i64>> {
    type LocalTransports = BTreeMap<(String, u64), u64>;
    let mut hosts: HashMap<&str, LocalTransports> = HashMap::new();
    for process in processes {
        let ends = hosts.entry(&process.host).or_default();
        for group in &process.groups {
            for op in group.operations.iter().flatten().filter(|op| op.outcome == Outcome::Ok) {
                let Some(ended) = op.ended_ns else { continue };
                let end = ends.entry((group.name.clone(), op.seq)).or_insert(ended);
                *end = (*end).min(ended);
            }
        }
    }
    let Some(first) = processes.first() else { return Vec::new() };
    let of = |host: &str| {
        if host == first.host {
            return Some(0);
        }
        let reference = &hosts[first.host.as_str()];
        let mut differences: Vec<i64> = hosts[host]
            .iter()
            .filter_map(|(which, end)| Some(*end as i64 - *reference.get(which)? as i64))
            .collect();
        differences.sort_unstable();
        differences.get(differences.len() / 2).copied()
    };
    processes.iter().map(|process| of(&process.host)).collect()
}

/// When an operation was over: the time of the dump where it was not.
pub(crate) fn end(op: &Operation, dumped: u64) -> u64 {
    op.ended_ns.unwrap_or(dumped).max(op.submitted_ns)
}

/// Times from the first submission of all, with the pauses shortened.
pub(crate) struct Timeline {
    /// What is taken away from any time after this one.
    cuts: Vec<(u64, u64)>,
}

impl Timeline {
    /// Of what was under way from when to when.
    pub(crate) fn new(mut spans: Vec<(u64, u64)>) -> Timeline {
        spans.sort_unstable();
        let begun = spans.first().map_or(0, |span| span.0);
        let (mut cuts, mut removed, mut reached) = (vec![(0, begun)], begun, begun);
        for (from, to) in spans {
            if from > reached + PAUSE_NS {
                removed += from - reached - PAUSE_NS;
                cuts.push((from, removed));
            }
            reached = reached.max(to);
        }
        Timeline { cuts }
    }

    pub(crate) fn at(&self, time: u64) -> u64 {
        let after = self.cuts.partition_point(|cut| cut.0 <= time);
        time.saturating_sub(self.cuts[after.max(1) - 1].1)
    }

    /// Nanoseconds of pauses that were taken away.
    pub(crate) fn shortened(&self) -> u64 {
        self.cuts.last().map_or(0, |cut| cut.1) - self.cuts[0].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pauses_of_all_ranks_are_shortened() {
        let second = 1_000_000_000;
        // One rank waits for the other for five seconds; then both pause for ten.
        let line = Timeline::new(vec![
            (100 * second, 105 * second),
            (105 * second, 105 * second),
            (115 * second, 116 * second),
        ]);
        assert_eq!(line.at(100 * second), 0);
        assert_eq!(line.at(105 * second), 5 * second);
        assert_eq!(line.at(115 * second), 6 * second);
        assert_eq!(line.shortened(), 9 * second);
    }
}
