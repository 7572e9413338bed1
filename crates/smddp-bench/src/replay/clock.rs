//! Common timeline of several hosts, with shortened pauses of all ranks.

use std::collections::{BTreeMap, HashMap};

use super::dump::{Operation, Outcome, Process};

/// Length to which a pause of all ranks is shortened.
const PAUSE_NS: u64 = 1_000_000_000;

/// Returns the offset of each process's clock to the first host's clock. All ranks end an operation at the same time, which
/// determines the offset. `None`: the hosts share no completed operation.
pub(crate) fn clock_offsets(processes: &[Process]) -> Vec<Option<i64>> {
    type EndTimes = BTreeMap<(String, u64), u64>;
    let mut hosts: HashMap<&str, EndTimes> = HashMap::new();
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

/// Returns the end of an operation. For an unfinished operation this is the time of the dump.
pub(crate) fn end(op: &Operation, dumped: u64) -> u64 {
    op.ended_ns.unwrap_or(dumped).max(op.submitted_ns)
}

/// Maps times to times since the first submission, with shortened pauses.
pub(crate) struct Timeline {
    /// Pairs (time, nanoseconds to subtract from later times).
    cuts: Vec<(u64, u64)>,
}

impl Timeline {
    /// Creates the timeline from the spans (begin, end) of all operations.
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

    /// Returns the nanoseconds of removed pauses.
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
        // One rank waits five seconds for the other; then both pause for ten seconds.
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
