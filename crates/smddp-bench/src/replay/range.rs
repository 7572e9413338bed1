//! The range of a group's recorded calls to replay: from the first number that all ranks recorded to the last call that the
//! dump did not truncate.

use std::collections::BTreeSet;

use super::dump::{Group, Outcome};
use super::group_error::{GroupError, Kind};

/// Age above which an unfinished call is a hang. A younger call was truncated by the dump.
const HANGS_NS: u64 = 1_000_000_000;

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
    let hangs = members.groups.iter().zip(&members.dumped).any(|(group, dumped)| {
        group.error.is_some()
            || group.operations.iter().flatten().any(|op| match op.outcome {
                Outcome::Ok => false,
                Outcome::Failed => true,
                Outcome::Running => dumped.saturating_sub(op.submitted_ns) >= HANGS_NS,
            })
    });
    if hangs {
        if let Some((death, number)) = first_timeout(members, clock) {
            for (rank, group) in members.groups.iter().enumerate() {
                let process = members.processes[rank];
                let late = |op: &&super::dump::Operation| {
                    op.seq >= number && clock(process, op.submitted_ns) > death
                };
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

/// Returns the hang of a group whose dumps contain no error: its first call that some ranks have awaited for a second or longer.
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
    let called = |group: &Group| group.operations.iter().flatten().any(|op| op.seq == number);
    let missing = (0..).zip(&members.groups).filter(|(_, group)| !called(group));
    let about: BTreeSet<String> = missing.map(|(rank, _): (usize, _)| format!("rank {rank}")).collect();
    let name = call.call.split('(').next().unwrap_or_default();
    let mut text = format!("hanging in {name} #{number} for {:.0} s", *age as f64 / 1e9);
    if !about.is_empty() {
        let ranks: Vec<&str> = about.iter().map(String::as_str).collect();
        text += &format!(", missing: {}", ranks.join(", "));
    }
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
