//! The range of a group's recorded calls to replay: from the first number that all ranks recorded to the last call that the
//! dump did not truncate.

use std::collections::BTreeSet;

use super::dump::{Group, Operation, Outcome};
use super::group_error::{GroupError, Kind};

/// Age above which an unfinished call is a hang. A younger call was truncated by the dump.
const HANGS_NS: u64 = 1_000_000_000;

/// Collectives that a rank may finish before all ranks made the call.
const ROOTED: [&str; 4] = ["broadcast", "reduce", "gather", "scatter"];

/// A group's dumps, in the order of its ranks.
pub(crate) struct Members<'a> {
    pub name: String,
    pub processes: Vec<usize>,
    pub groups: Vec<&'a Group>,
    pub dumped: Vec<u64>,
}

pub(crate) struct Range {
    pub first: u64,
    /// For each rank, the number after its last call.
    ends: Vec<u64>,
}

impl Range {
    pub(crate) fn has(&self, rank: usize, seq: u64) -> bool {
        (self.first..self.ends[rank]).contains(&seq)
    }
}

/// Returns the number of calls that the creation of a group uses: the barrier of its ranks.
pub(crate) const fn creation_calls(size: usize) -> u64 {
    if size > 1 { 1 } else { 0 }
}

/// Returns the range to replay. `clock` converts the time of a process to the common clock.
pub(crate) fn range(
    members: &Members<'_>,
    clock: &dyn Fn(usize, u64) -> u64,
    notes: &mut Vec<String>,
) -> Range {
    let mut note = |text: String| notes.push(format!("group `{}`: {text}", members.name));
    let spans: Vec<(u64, u64)> = members.groups.iter().map(|group| newest_sequence(group)).collect();
    let mut first = spans.iter().map(|span| span.0).max().unwrap_or(0);
    let mut ends: Vec<u64> = spans.iter().map(|span| span.1).collect();
    let here = creation_calls(members.groups.len());
    if first > 0 {
        note(format!(
            "begins with number {first}, the first that the dumps of all ranks contain; in the replay it is number {here}"
        ));
    } else {
        // The creation of the group in the replay is the same call.
        first = here;
    }
    let failed = members.groups.iter().any(|group| {
        group.error.is_some() || group.operations.iter().flatten().any(|op| op.outcome == Outcome::Failed)
    });
    if failed || hang(members).is_some() {
        if let Some((death, number)) = first_timeout(members, clock) {
            for (rank, group) in members.groups.iter().enumerate() {
                let process = members.processes[rank];
                let late = |op: &&Operation| op.seq >= number && clock(process, op.submitted_ns) > death;
                if let Some(op) = group.operations.iter().flatten().find(late) {
                    ends[rank] = ends[rank].min(op.seq);
                    note(format!(
                        "rank {rank} called {} only after other ranks had timed out: not replayed",
                        op.call
                    ));
                }
            }
        }
    } else {
        let (end, last) = (ends.iter().min().copied().unwrap_or(0), ends.iter().max().copied().unwrap_or(0));
        if end < last {
            note(format!(
                "ends before number {end}: {} later calls are not in the dumps of all ranks",
                last - end
            ));
        }
        ends.fill(end);
    }
    Range { first, ends }
}

/// Returns the hang of a group whose dumps contain no error: its first call that some ranks have awaited for a second or longer,
/// if other ranks did not make it. Without a missing rank the call is slow.
pub(crate) fn hang(members: &Members<'_>) -> Option<GroupError> {
    let waiting = members.groups.iter().zip(&members.dumped).flat_map(|(group, dumped)| {
        let calls = group.operations.iter().flatten();
        calls.filter_map(move |op| {
            let age = dumped.saturating_sub(op.submitted_ns);
            (op.outcome == Outcome::Running && age >= HANGS_NS).then_some((op.seq, age, op))
        })
    });
    let waiting: Vec<_> = waiting.collect();
    let number = waiting.iter().map(|(seq, ..)| *seq).min()?;
    let (_, age, call) = waiting.iter().filter(|(seq, ..)| *seq == number).max_by_key(|(_, age, _)| *age)?;
    let name = call.call.split('(').next().unwrap_or_default();
    // All ranks made the call before the first one finished it; the dump of a missing rank is older than the call.
    let finished = |op: &Operation| op.seq == number && op.outcome == Outcome::Ok;
    let mut recorded = members.groups.iter().flat_map(|group| group.operations.iter().flatten());
    if !ROOTED.contains(&name) && recorded.any(finished) {
        return None;
    }
    // A rank with a later call made this one too, which its recorder may have dropped.
    let called = |group: &Group| group.operations.iter().flatten().any(|op| op.seq >= number);
    let missing = (0..).zip(&members.groups).filter(|(_, group)| !called(group));
    let about: BTreeSet<String> = missing.map(|(rank, _): (usize, _)| format!("rank {rank}")).collect();
    if about.is_empty() {
        return None;
    }
    let ranks: Vec<&str> = about.iter().map(String::as_str).collect();
    let seconds = *age as f64 / 1e9;
    let text = format!("hanging in {name} #{number} for {seconds:.0} s, missing: {}", ranks.join(", "));
    Some(GroupError { kind: Kind::Timeout, number: Some(number), about, text })
}

/// Returns the first number of the newest contiguous sequence, and the number after its last.
fn newest_sequence(group: &Group) -> (u64, u64) {
    let mut span: Option<(u64, u64)> = None;
    for op in group.operations.iter().flatten() {
        span = match span {
            Some((first, end)) if op.seq == end => Some((first, end + 1)),
            _ => Some((op.seq, op.seq + 1)),
        };
    }
    // A rank without calls lacks none.
    span.unwrap_or((0, 0))
}

/// Returns the time of the first timeout, and the number of its call.
fn first_timeout(members: &Members<'_>, clock: &dyn Fn(usize, u64) -> u64) -> Option<(u64, u64)> {
    let error = GroupError::of(members.groups.iter().filter_map(|group| group.error.as_deref()), 0)?;
    if error.kind != Kind::Timeout {
        return None;
    }
    let failed = members.groups.iter().zip(&members.processes).flat_map(|(group, &process)| {
        let failed = group.operations.iter().flatten().filter(|op| op.outcome == Outcome::Failed);
        failed.filter_map(move |op| Some((clock(process, op.ended_ns?), op.seq)))
    });
    failed.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn operation(seq: u64, name: &str, outcome: Outcome) -> Operation {
        let ended_ns = (outcome == Outcome::Ok).then_some(2);
        let call = format!("{name}(2 elements of float32)");
        Operation { seq, call, bytes: 8, submitted_ns: 1, ended_ns, seconds: 0.0, outcome }
    }

    /// Returns the text of the hang, and the range's end on each rank. The dumps are a minute younger than the calls.
    fn found(ranks: &[&[(u64, Outcome)]], name: &str) -> (Option<String>, Vec<u64>) {
        let group = |(rank, calls): (usize, &&[(u64, Outcome)])| Group {
            name: "0".to_owned(),
            rank,
            size: ranks.len(),
            nodes: 1,
            error: None,
            operations: Some(calls.iter().map(|&(seq, outcome)| operation(seq, name, outcome)).collect()),
            messages: Vec::new(),
        };
        let groups: Vec<Group> = ranks.iter().enumerate().map(group).collect();
        let members = Members {
            name: "0".to_owned(),
            processes: (0..ranks.len()).collect(),
            groups: groups.iter().collect(),
            dumped: vec![60 * SECOND; ranks.len()],
        };
        let ends = range(&members, &|_, time| time, &mut Vec::new()).ends;
        (hang(&members).map(|error| error.text), ends)
    }

    #[test]
    fn long_call_is_a_hang_only_if_a_rank_is_missing() {
        use Outcome::{Ok, Running};
        let before = (1, Ok);
        let missing = |name: &str| Some(format!("hanging in {name} #2 for 60 s, missing: rank 1"));
        let hangs = found(&[&[before, (2, Running)], &[before], &[before, (2, Running)]], "all_reduce");
        assert_eq!(hangs, (missing("all_reduce"), vec![3, 2, 3]));
        let slow = found(&[&[before, (2, Running)], &[before, (2, Running)]], "all_reduce");
        assert_eq!(slow, (None, vec![3, 3]));
        // The dump of rank 1 is older than the call.
        let ranks: [&[_]; 3] = [&[before, (2, Running)], &[before], &[before, (2, Ok), (3, Ok)]];
        assert_eq!(found(&ranks, "all_gather"), (None, vec![2, 2, 2]));
        // The root of a broadcast finishes without the other ranks.
        assert_eq!(found(&ranks, "broadcast"), (missing("broadcast"), vec![3, 2, 4]));
        // The recorder of rank 1 has newer calls only.
        let newer =
            found(&[&[before, (2, Running), (3, Running)], &[(3, Running), (4, Running)]], "all_reduce");
        assert_eq!(newer, (None, vec![4, 4]));
    }
}
