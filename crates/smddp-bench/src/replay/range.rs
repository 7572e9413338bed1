//! Which of a group's recorded calls are made again: from the first number that all ranks have to the last that tells of
//! the job and not of its dump.

use super::dump::{Group, Outcome};
use super::ending::{Ending, Kind};

/// A call that nobody finished and that is younger was cut off by the dump; an older one hangs.
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
    /// Of each rank: the number behind its last call.
    ends: Vec<u64>,
}

impl Range {
    pub(crate) fn has(&self, rank: usize, seq: u64) -> bool {
        (self.first..self.ends[rank]).contains(&seq)
    }
}

/// Calls that making a group takes: its ranks' barrier.
pub(crate) const fn made(size: usize) -> u64 {
    if size > 1 { 1 } else { 0 }
}

/// `clock`: a process's time as one of all.
pub(crate) fn range(
    members: &Members<'_>,
    clock: &dyn Fn(usize, u64) -> u64,
    notes: &mut Vec<String>,
) -> Range {
    let mut note = |text: String| notes.push(format!("group `{}`: {text}", members.name));
    let spans: Vec<(u64, u64)> = members.groups.iter().map(|group| unbroken(group)).collect();
    let mut first = spans.iter().map(|span| span.0).max().unwrap_or(0);
    let mut ends: Vec<u64> = spans.iter().map(|span| span.1).collect();
    let here = made(members.groups.len());
    if first > 0 {
        note(format!(
            "begins with number {first}, the first that all ranks' dumps have; here it is number {here}"
        ));
    } else {
        // Making the group again is that call again.
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
        if let Some((death, number)) = died_waiting(members, clock) {
            for (rank, group) in members.groups.iter().enumerate() {
                let process = members.processes[rank];
                let late = |op: &&super::dump::Operation| {
                    op.seq >= number && clock(process, op.submitted_ns) > death
                };
                if let Some(op) = group.operations.iter().flatten().find(late) {
                    ends[rank] = ends[rank].min(op.seq);
                    note(format!(
                        "rank {rank} made {} only when others had given up: not made here",
                        op.call
                    ));
                }
            }
        }
    } else {
        let (all, most) = (ends.iter().min().copied().unwrap_or(0), ends.iter().max().copied().unwrap_or(0));
        if all < most {
            note(format!("ends before number {all}: {} later calls are not in all ranks' dumps", most - all));
        }
        ends.fill(all);
    }
    Range { first, ends }
}

/// The newest numbers in a row, and the one behind them.
fn unbroken(group: &Group) -> (u64, u64) {
    let mut span: Option<(u64, u64)> = None;
    for op in group.operations.iter().flatten() {
        span = match span {
            Some((first, end)) if op.seq == end => Some((first, end + 1)),
            _ => Some((op.seq, op.seq + 1)),
        };
    }
    // Who made no call has none missing.
    span.unwrap_or((0, 0))
}

/// When the first rank gave up waiting, and for which number.
fn died_waiting(members: &Members<'_>, clock: &dyn Fn(usize, u64) -> u64) -> Option<(u64, u64)> {
    let ending = Ending::of(members.groups.iter().filter_map(|group| group.error.as_deref()), 0)?;
    if ending.kind != Kind::Timeout {
        return None;
    }
    let failed = members.groups.iter().zip(&members.processes).flat_map(|(group, &process)| {
        let failed = group.operations.iter().flatten().filter(|op| op.outcome == Outcome::Failed);
        failed.filter_map(move |op| Some((clock(process, op.ended_ns?), op.seq)))
    });
    failed.min()
}
