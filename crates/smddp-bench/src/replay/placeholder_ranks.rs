//! Placeholders for missing ranks without a dump, which hung outside of a call or were killed. Their calls are known from the
//! calls that the other ranks completed. A placeholder repeats these calls, and makes no further call.

use std::collections::{BTreeMap, BTreeSet};

use super::clock::clock_offsets;
use super::dump::{Group, Operation, Outcome, Process};
use super::group_error::{GroupError, Kind};

/// Adds a placeholder process for each missing rank of the largest group, if that group failed because of these ranks.
pub(crate) fn add(mut processes: Vec<Process>, notes: &mut Vec<String>) -> Vec<Process> {
    let offsets = clock_offsets(&processes);
    let Some((name, size)) = largest(&processes) else { return processes };
    let members_present = members(&processes, &name, size);
    let absent: Vec<usize> =
        (0..size).filter(|rank| !members_present.iter().any(|(_, group)| group.rank == *rank)).collect();
    let error = GroupError::of(members_present.iter().filter_map(|(_, group)| group.error.as_deref()), 0);
    let Some(error) = error.filter(|error| matches!(error.kind, Kind::Timeout | Kind::Lost)) else {
        return processes;
    };
    if absent.is_empty() || !absent.iter().all(|rank| error.about.contains(&format!("rank {rank}"))) {
        return processes;
    }
    let clock = |process: usize, time: u64| time.saturating_add_signed(-offsets[process].unwrap_or(0));
    let mut placeholders = Vec::new();
    for &rank in &absent {
        let mut groups = vec![placeholder(&members_present, rank, error.number, &clock)];
        // If one process is missing, it is also the missing rank of other groups.
        if absent.len() == 1 {
            for (other, size) in keys(&processes) {
                let members_present = members(&processes, &other, size);
                let ranks: BTreeSet<usize> = members_present.iter().map(|(_, group)| group.rank).collect();
                let mut free = (0..size).filter(|rank| !ranks.contains(rank));
                if let (true, Some(rank), None) = (other != name, free.next(), free.next()) {
                    groups.push(placeholder(&members_present, rank, None, &clock));
                }
            }
        }
        notes.push(format!(
            "no dump of rank {rank} of group `{name}`: it makes the calls before number {}, when the other ranks do, and then \
             no further call",
            error.number.unwrap_or(0)
        ));
        let host = processes[0].host.clone();
        let time_ns = processes.iter().map(|process| process.time_ns).max().unwrap_or(0);
        placeholders.push(Process { host, pid: 0, rank: Some(rank), time_ns, groups });
    }
    processes.extend(placeholders);
    processes.sort_by_key(|process| (process.rank.is_none(), process.rank));
    processes
}

fn keys(processes: &[Process]) -> BTreeSet<(String, usize)> {
    processes
        .iter()
        .flat_map(|process| &process.groups)
        .map(|group| (group.name.clone(), group.size))
        .collect()
}

fn largest(processes: &[Process]) -> Option<(String, usize)> {
    keys(processes).into_iter().max_by_key(|key| key.1)
}

fn members<'a>(processes: &'a [Process], name: &str, size: usize) -> Vec<(usize, &'a Group)> {
    let groups =
        processes.iter().enumerate().flat_map(|(at, process)| process.groups.iter().map(move |g| (at, g)));
    groups.filter(|(_, group)| group.name == name && group.size == size).collect()
}

/// Returns the calls of a rank without a dump: the calls before `number`, or all calls that a rank completed.
fn placeholder(
    members_present: &[(usize, &Group)],
    rank: usize,
    number: Option<u64>,
    clock: &dyn Fn(usize, u64) -> u64,
) -> Group {
    let mut calls: BTreeMap<u64, Operation> = BTreeMap::new();
    for &(process, group) in members_present {
        for op in group.operations.iter().flatten().filter(|op| op.outcome == Outcome::Ok) {
            let Some(ended) = op.ended_ns.map(|ended| clock(process, ended)) else { continue };
            if number.is_some_and(|number| op.seq >= number) {
                continue;
            }
            let begun = clock(process, op.submitted_ns);
            let call = calls.entry(op.seq).or_insert_with(|| Operation {
                submitted_ns: begun,
                ended_ns: Some(ended),
                ..op.clone()
            });
            // Submitted with the last of the other ranks, but before the first of them completed.
            call.submitted_ns = call.submitted_ns.max(begun);
            call.ended_ns = call.ended_ns.min(Some(ended));
        }
    }
    for call in calls.values_mut() {
        let ended = call.ended_ns.unwrap_or(call.submitted_ns);
        call.submitted_ns = call.submitted_ns.min(ended);
        call.seconds = (ended - call.submitted_ns) as f64 / 1e9;
    }
    let (name, size, nodes) =
        members_present.first().map_or((String::new(), 0, 1), |(_, g)| (g.name.clone(), g.size, g.nodes));
    Group {
        name,
        rank,
        size,
        nodes,
        error: None,
        operations: Some(calls.into_values().collect()),
        messages: Vec::new(),
    }
}
