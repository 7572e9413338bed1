//! What each rank is to do: the recorded calls that can be made again, in their order, and what is left out and why.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::clock::{Timeline, ahead, end};
use super::dump::{Group, Operation, Outcome, Process};
use super::ending::{Ending, Kind};
use super::range::{Members, made, range};
use super::spec::Spec;
use crate::calls::Planned;
use crate::error::{Error, Result};

const LEFT_OUT: &str = "is not replayed";

/// The replay of a job.
pub(crate) struct Script {
    pub groups: Vec<GroupPlan>,
    /// Of each process, in the order of the dumps.
    pub steps: Vec<Vec<Step>>,
    /// What is not as it was recorded.
    pub notes: Vec<String>,
    /// Some group is not replayed.
    pub partly: bool,
}

pub(crate) struct GroupPlan {
    pub name: String,
    pub size: usize,
    pub nodes: usize,
    /// The process of each rank.
    pub members: Vec<usize>,
    /// The number of its first call that is made again.
    pub first: u64,
    /// What the recording's numbers are ahead of those here.
    pub ahead: i64,
    pub ending: Option<Ending>,
}

#[derive(Clone, Debug)]
pub(crate) enum What {
    Call(Planned),
    Leave,
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub group: usize,
    pub what: What,
    /// Earlier steps that were over before this one.
    pub after: Vec<usize>,
    /// From the last of them, or from the step before, to this one.
    pub gap: Duration,
    /// From a call to its end, where it ended well.
    pub took: Option<Duration>,
}

/// One recorded call of one process.
struct Entry<'a> {
    group: usize,
    op: &'a Operation,
    plan: What,
    submitted: u64,
    ended: u64,
}

impl Script {
    /// `only`: of the groups of these names; empty: of all. `notes`: what is known already.
    pub(crate) fn new(processes: &[Process], only: &[String], mut notes: Vec<String>) -> Result<Script> {
        let offsets = ahead(processes);
        let clock = |process: usize, time: u64| time.saturating_add_signed(-offsets[process].unwrap_or(0));
        if offsets.contains(&None) {
            notes
                .push("hosts that share no finished call: their ranks are taken to begin at once".to_owned());
        }
        let mut groups = Vec::new();
        let mut entries: Vec<Vec<Entry<'_>>> = processes.iter().map(|_| Vec::new()).collect();
        for members in members(processes, only, &mut notes)? {
            let found = range(&members, &clock, &mut notes);
            let at = groups.len();
            let names = names(&members, found.first);
            let mut lacks = BTreeMap::new();
            for (rank, (&process, group)) in members.processes.iter().zip(&members.groups).enumerate() {
                let dumped = processes[process].time_ns;
                for op in group.operations.iter().flatten().filter(|op| found.has(rank, op.seq)) {
                    let plan = match op.leaves() {
                        true => What::Leave,
                        false => What::Call(again(&members, rank, op, &names, &mut lacks)?),
                    };
                    let (submitted, ended) =
                        (clock(process, op.submitted_ns), clock(process, end(op, dumped)));
                    entries[process].push(Entry { group: at, op, plan, submitted, ended });
                }
            }
            for (reason, calls) in lacks {
                notes.push(format!("group `{}`: {} calls: {reason}", members.name, calls.len()));
            }
            let errors = members.groups.iter().filter_map(|group| group.error.as_deref());
            let ending = Ending::of(errors, 0);
            if ending.as_ref().is_some_and(|ending| ending.kind == Kind::Lost) {
                notes.push(format!(
                    "group `{}`: nobody dies here; who died does not come any more",
                    members.name
                ));
            }
            groups.push(GroupPlan {
                name: members.name.clone(),
                size: members.groups.len(),
                nodes: members.groups[0].nodes,
                first: found.first,
                ahead: found.first as i64 - made(members.groups.len()) as i64,
                ending,
                members: members.processes,
            });
        }
        if groups.is_empty() {
            return Err(Error::Usage(format!("there is nothing to replay: {}", notes.join("; "))));
        }
        let spans = entries.iter().flatten().map(|entry| (entry.submitted, entry.ended)).collect();
        let line = Timeline::new(spans);
        if line.shortened() > 0 {
            let seconds = Duration::from_nanos(line.shortened()).as_secs_f64();
            notes.push(format!("pauses of all ranks are shortened to 1 s each, by {seconds:.1} s in all"));
        }
        let steps = entries
            .into_iter()
            .zip(&offsets)
            .map(|(entries, offset)| steps(entries, &line, offset.is_some()))
            .collect();
        let partly = notes.iter().any(|note| note.contains(LEFT_OUT));
        Ok(Script { groups, steps, notes, partly })
    }

    /// The longest that a call took that ended well, its waiting for other ranks included.
    pub(crate) fn longest(&self) -> Duration {
        self.steps.iter().flatten().filter_map(|step| step.took).max().unwrap_or_default()
    }

    /// When the last call of all was made.
    pub(crate) fn lasts(&self) -> Duration {
        let sum = |steps: &Vec<Step>| steps.iter().map(|s| s.gap + s.took.unwrap_or_default()).sum();
        self.steps.iter().map(sum).max().unwrap_or_default()
    }
}

/// The groups of which every rank's dump is there.
fn members<'a>(
    processes: &'a [Process],
    only: &[String],
    notes: &mut Vec<String>,
) -> Result<Vec<Members<'a>>> {
    let mut found: BTreeMap<(&str, usize), Vec<(usize, usize)>> = BTreeMap::new();
    for (at, process) in processes.iter().enumerate() {
        for (inner, group) in process.groups.iter().enumerate() {
            found.entry((&group.name, group.size)).or_default().push((at, inner));
        }
    }
    let known: BTreeSet<&str> = found.keys().map(|key| key.0).collect();
    if let Some(name) = only.iter().find(|name| !known.contains(name.as_str())) {
        let names: Vec<&str> = known.into_iter().collect();
        return Err(Error::Usage(format!("--group {name}: the dumps have {}", names.join(", "))));
    }
    let mut whole = Vec::new();
    for ((name, size), mut places) in found {
        if !only.is_empty() && !only.iter().any(|one| one == name) {
            continue;
        }
        let rank = |place: &(usize, usize)| processes[place.0].groups[place.1].rank;
        places.sort_by_key(rank);
        let there: Vec<usize> = places.iter().map(rank).collect();
        let left_out = if there.windows(2).any(|two| two[0] == two[1]) {
            Some("several groups have this name and size: give the dumps of one job".to_owned())
        } else if there.len() < size {
            let absent: Vec<String> =
                (0..size).filter(|r| !there.contains(r)).map(|r| r.to_string()).collect();
            Some(format!("no dump of its ranks {} of {size}", absent.join(", ")))
        } else {
            None
        };
        if let Some(reason) = left_out {
            notes.push(format!("group `{name}` {LEFT_OUT}: {reason}"));
            continue;
        }
        let groups = places.iter().map(|&(at, inner)| &processes[at].groups[inner]).collect();
        let dumped = places.iter().map(|place| processes[place.0].time_ns).collect();
        let processes = places.iter().map(|place| place.0).collect();
        whole.push(Members { name: name.to_owned(), processes, groups, dumped });
    }
    Ok(whole)
}

/// By number: the names that its ranks' calls have of what is not recorded.
fn names(members: &Members<'_>, first: u64) -> BTreeMap<u64, BTreeSet<String>> {
    let mut names: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
    for op in members.groups.iter().flat_map(|group| group.operations.iter().flatten()) {
        if let Some(name) = Spec::parse(&op.call, op.bytes).ok().and_then(|spec| spec.name)
            && op.seq >= first
        {
            names.entry(op.seq).or_default().insert(name);
        }
    }
    names
}

/// The call of rank `rank` again. `lacks`: the numbers of calls by what is made up of them.
fn again(
    members: &Members<'_>,
    rank: usize,
    op: &Operation,
    names: &BTreeMap<u64, BTreeSet<String>>,
    lacks: &mut BTreeMap<String, BTreeSet<u64>>,
) -> Result<Planned> {
    let mut spec = Spec::parse(&op.call, op.bytes).map_err(Error::Usage)?;
    let sent: Vec<usize> = match spec.may_be_pairs() {
        true => members.groups.iter().map(|group| sent(group, op.seq)).collect(),
        false => Vec::new(),
    };
    spec.pairs = sent.iter().any(|&bytes| bytes > 0);
    let mut lack = |reason: &str| {
        lacks.entry(reason.to_owned()).or_default().insert(op.seq);
    };
    if let Some(reason) = spec.lacks() {
        lack(reason);
    }
    if spec.on_device {
        lack("on CUDA: replayed in host memory");
    }
    let which = names.get(&op.seq).zip(spec.name.as_ref());
    let which = which.and_then(|(names, name)| names.iter().position(|known| known == name)).unwrap_or(0);
    Ok(spec.plan(rank, members.groups.len(), &sent, which))
}

/// Bytes that a rank sends in its all_to_all of this number.
fn sent(group: &Group, seq: u64) -> usize {
    let operations = group.operations.as_deref().unwrap_or_default();
    let at = operations.binary_search_by_key(&seq, |op| op.seq);
    let spec = at.ok().and_then(|at| Spec::parse(&operations[at].call, operations[at].bytes).ok());
    spec.filter(Spec::may_be_pairs).map_or(0, |spec| spec.bytes)
}

/// In the order in which they were made. `synced`: the first one's time is the same as on other hosts.
fn steps(mut entries: Vec<Entry<'_>>, line: &Timeline, synced: bool) -> Vec<Step> {
    entries.sort_by_key(|entry| (entry.submitted, entry.op.seq));
    let mut steps = Vec::with_capacity(entries.len());
    let mut open: Vec<(usize, u64)> = Vec::new();
    let mut reached = 0;
    for (at, entry) in entries.into_iter().enumerate() {
        let (submitted, ended) = (line.at(entry.submitted), line.at(entry.ended));
        let (over, still): (Vec<_>, Vec<_>) =
            open.into_iter().partition(|&(_, ended)| ended <= entry.submitted);
        open = still;
        let from = over.iter().map(|&(_, ended)| line.at(ended)).max().unwrap_or(0).max(reached);
        let gap = if at == 0 && !synced { 0 } else { submitted.saturating_sub(from) };
        reached = submitted;
        open.push((at, entry.ended));
        let took = Duration::from_nanos(ended - submitted);
        steps.push(Step {
            group: entry.group,
            what: entry.plan,
            after: over.into_iter().map(|(step, _)| step).collect(),
            gap: Duration::from_nanos(gap),
            took: (entry.op.outcome == Outcome::Ok).then_some(took),
        });
    }
    steps
}
