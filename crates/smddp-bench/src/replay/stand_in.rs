//! A rank that others missed may have left no dump: it hung elsewhere, or it was killed. What it did until then is known all
//! the same, as the others' calls ended: another one does that in its place, and then comes no more.

use std::collections::{BTreeMap, BTreeSet};

use super::clock::ahead;
use super::dump::{Group, Operation, Outcome, Process};
use super::ending::{Ending, Kind};

/// Adds a process for each rank that is missing in the job's largest group, where that group ended because of them.
pub(crate) fn added(mut processes: Vec<Process>, notes: &mut Vec<String>) -> Vec<Process> {
    let offsets = ahead(&processes);
    let Some((name, size)) = largest(&processes) else { return processes };
    let there = members(&processes, &name, size);
    let absent: Vec<usize> =
        (0..size).filter(|rank| !there.iter().any(|(_, group)| group.rank == *rank)).collect();
    let ending = Ending::of(there.iter().filter_map(|(_, group)| group.error.as_deref()), 0);
    let Some(ending) = ending.filter(|ending| matches!(ending.kind, Kind::Timeout | Kind::Lost)) else {
        return processes;
    };
    if absent.is_empty() || !absent.iter().all(|rank| ending.about.contains(&format!("rank {rank}"))) {
        return processes;
    }
    let clock = |process: usize, time: u64| time.saturating_add_signed(-offsets[process].unwrap_or(0));
    let mut made = Vec::new();
    for &rank in &absent {
        let mut groups = vec![stand_in(&there, rank, ending.number, &clock)];
        // In other groups, whoever is missing is the same, where one is missing in all.
        if absent.len() == 1 {
            for (other, size) in keys(&processes) {
                let there = members(&processes, &other, size);
                let ranks: BTreeSet<usize> = there.iter().map(|(_, group)| group.rank).collect();
                let mut free = (0..size).filter(|rank| !ranks.contains(rank));
                if let (true, Some(rank), None) = (other != name, free.next(), free.next()) {
                    groups.push(stand_in(&there, rank, None, &clock));
                }
            }
        }
        notes.push(format!(
            "no dump of rank {rank} of group `{name}`: here it makes the calls before number {}, when the others do, and then \
             comes no more",
            ending.number.unwrap_or(0)
        ));
        let host = processes[0].host.clone();
        let time_ns = processes.iter().map(|process| process.time_ns).max().unwrap_or(0);
        made.push(Process { host, pid: 0, rank: Some(rank), time_ns, groups });
    }
    processes.extend(made);
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

/// The calls of a rank of which there is no dump: those before `number`, or all that somebody finished.
fn stand_in(
    there: &[(usize, &Group)],
    rank: usize,
    number: Option<u64>,
    clock: &dyn Fn(usize, u64) -> u64,
) -> Group {
    let mut calls: BTreeMap<u64, Operation> = BTreeMap::new();
    for &(process, group) in there {
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
            // With the last of the others, but before any of them was through.
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
        there.first().map_or((String::new(), 0, 1), |(_, g)| (g.name.clone(), g.size, g.nodes));
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
