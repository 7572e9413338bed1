//! The steps of each rank: the recorded calls to replay in order, and notes on omitted calls.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::clock::{Timeline, clock_offsets, end};
use super::dump::{Group, Operation, Outcome, Process};
use super::group_error::{GroupError, Kind};
use super::range::{Members, creation_calls, hang, range};
use super::spec::Spec;
use crate::calls::PlannedCall;
use crate::error::{Error, Result};

const NOT_REPLAYED: &str = "is not replayed";

/// The replay of a job.
pub(crate) struct Script {
    pub groups: Vec<GroupPlan>,
    /// The steps of each process, in the order of the dumps.
    pub steps: Vec<Vec<Step>>,
    /// Differences to the recording.
    pub notes: Vec<String>,
    /// A group is not replayed.
    pub partly: bool,
}

pub(crate) struct GroupPlan {
    pub name: String,
    pub size: usize,
    pub nodes: usize,
    /// The process of each rank.
    pub members: Vec<usize>,
    /// The number of the first replayed call.
    pub first: u64,
    /// Difference of the recording's call numbers to the replay's.
    pub offset: i64,
    pub error: Option<GroupError>,
}

#[derive(Clone, Debug)]
pub(crate) enum Action {
    Call(PlannedCall),
    Leave,
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub group: usize,
    pub action: Action,
    /// Earlier steps that were done before this step.
    pub after: Vec<usize>,
    /// Delay from the end of the last of them, or from the previous step, to this step.
    pub gap: Duration,
    /// Duration of a successful call.
    pub took: Option<Duration>,
}

/// One recorded call of one process.
struct Entry<'a> {
    group: usize,
    op: &'a Operation,
    plan: Action,
    submitted: u64,
    ended: u64,
}

impl Script {
    /// Creates the steps of the groups with the names `only`; empty: of all groups. `notes` are existing notes.
    pub(crate) fn new(processes: &[Process], only: &[String], mut notes: Vec<String>) -> Result<Script> {
        let offsets = clock_offsets(processes);
        let clock = |process: usize, time: u64| time.saturating_add_signed(-offsets[process].unwrap_or(0));
        if offsets.contains(&None) {
            notes.push(
                "hosts that share no completed call: their ranks are assumed to begin at the same time"
                    .to_owned(),
            );
        }
        let mut groups = Vec::new();
        let mut entries: Vec<Vec<Entry<'_>>> = processes.iter().map(|_| Vec::new()).collect();
        for members in members(processes, only, &mut notes)? {
            let found = range(&members, &clock, &mut notes);
            let at = groups.len();
            let hashes = hashes(&members, found.first);
            let mut substituted = BTreeMap::new();
            for (rank, (&process, group)) in members.processes.iter().zip(&members.groups).enumerate() {
                let dumped = processes[process].time_ns;
                for op in group.operations.iter().flatten().filter(|op| found.has(rank, op.seq)) {
                    let plan = match op.leaves() {
                        true => Action::Leave,
                        false => Action::Call(replayed_call(&members, rank, op, &hashes, &mut substituted)?),
                    };
                    let (submitted, ended) =
                        (clock(process, op.submitted_ns), clock(process, end(op, dumped)));
                    entries[process].push(Entry { group: at, op, plan, submitted, ended });
                }
            }
            for (reason, calls) in substituted {
                notes.push(format!("group `{}`: {} calls: {reason}", members.name, calls.len()));
            }
            let errors = members.groups.iter().filter_map(|group| group.error.as_deref());
            let error = GroupError::of(errors, 0).or_else(|| hang(&members));
            if error.as_ref().is_some_and(|error| error.kind == Kind::Lost) {
                notes.push(format!(
                    "group `{}`: no rank dies in the replay; a rank that died makes no further call",
                    members.name
                ));
            }
            groups.push(GroupPlan {
                name: members.name.clone(),
                size: members.groups.len(),
                nodes: members.groups[0].nodes,
                first: found.first,
                offset: found.first as i64 - creation_calls(members.groups.len()) as i64,
                error,
                members: members.processes,
            });
        }
        if groups.is_empty() {
            return Err(Error::Usage(format!("no group can be replayed: {}", notes.join("; "))));
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
        let partly = notes.iter().any(|note| note.contains(NOT_REPLAYED));
        Ok(Script { groups, steps, notes, partly })
    }

    /// Returns the longest duration of a successful call, including the wait for other ranks.
    pub(crate) fn longest(&self) -> Duration {
        self.steps.iter().flatten().filter_map(|step| step.took).max().unwrap_or_default()
    }

    /// Returns the duration of the complete recording.
    pub(crate) fn duration(&self) -> Duration {
        let sum = |steps: &Vec<Step>| steps.iter().map(|s| s.gap + s.took.unwrap_or_default()).sum();
        self.steps.iter().map(sum).max().unwrap_or_default()
    }
}

/// Returns the groups for which the dumps of all ranks exist.
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
        return Err(Error::Usage(format!(
            "--group {name}: the dumps contain the groups {}",
            names.join(", ")
        )));
    }
    let mut complete = Vec::new();
    for ((name, size), mut places) in found {
        if !only.is_empty() && !only.iter().any(|one| one == name) {
            continue;
        }
        let rank = |place: &(usize, usize)| processes[place.0].groups[place.1].rank;
        places.sort_by_key(rank);
        let there: Vec<usize> = places.iter().map(rank).collect();
        let reason = if there.windows(2).any(|two| two[0] == two[1]) {
            Some("several groups have this name and size: pass the dumps of one job only".to_owned())
        } else if there.len() < size {
            let absent: Vec<String> =
                (0..size).filter(|r| !there.contains(r)).map(|r| r.to_string()).collect();
            Some(format!("no dump of its ranks {} of {size}", absent.join(", ")))
        } else {
            None
        };
        if let Some(reason) = reason {
            notes.push(format!("group `{name}` {NOT_REPLAYED}: {reason}"));
            continue;
        }
        let groups = places.iter().map(|&(at, inner)| &processes[at].groups[inner]).collect();
        let dumped = places.iter().map(|place| processes[place.0].time_ns).collect();
        let processes = places.iter().map(|place| place.0).collect();
        complete.push(Members { name: name.to_owned(), processes, groups, dumped });
    }
    Ok(complete)
}

/// Returns the hashes of unrecorded values in the ranks' calls, by call number.
fn hashes(members: &Members<'_>, first: u64) -> BTreeMap<u64, BTreeSet<String>> {
    let mut hashes: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
    for op in members.groups.iter().flat_map(|group| group.operations.iter().flatten()) {
        if let Some(hash) = Spec::parse(&op.call, op.bytes).ok().and_then(|spec| spec.hash)
            && op.seq >= first
        {
            hashes.entry(op.seq).or_default().insert(hash);
        }
    }
    hashes
}

/// Returns the replayed call of rank `rank`. Adds the call's number to `substituted` for each substituted value.
fn replayed_call(
    members: &Members<'_>,
    rank: usize,
    op: &Operation,
    hashes: &BTreeMap<u64, BTreeSet<String>>,
    substituted: &mut BTreeMap<String, BTreeSet<u64>>,
) -> Result<PlannedCall> {
    let mut spec = Spec::parse(&op.call, op.bytes).map_err(Error::Usage)?;
    let sent: Vec<usize> = match spec.may_be_pairs() {
        true => members.groups.iter().map(|group| sent(group, op.seq)).collect(),
        false => Vec::new(),
    };
    spec.pairs = sent.iter().any(|&bytes| bytes > 0);
    let mut note = |reason: &str| {
        substituted.entry(reason.to_owned()).or_default().insert(op.seq);
    };
    if let Some(reason) = spec.substituted() {
        note(reason);
    }
    if spec.on_device {
        note("on CUDA: replayed in host memory");
    }
    let which = hashes.get(&op.seq).zip(spec.hash.as_ref());
    let which = which.and_then(|(hashes, hash)| hashes.iter().position(|known| known == hash)).unwrap_or(0);
    Ok(spec.plan(rank, members.groups.len(), &sent, which))
}

/// Returns the bytes that a rank sends in the all_to_all with this number.
fn sent(group: &Group, seq: u64) -> usize {
    let operations = group.operations.as_deref().unwrap_or_default();
    let at = operations.binary_search_by_key(&seq, |op| op.seq);
    let spec = at.ok().and_then(|at| Spec::parse(&operations[at].call, operations[at].bytes).ok());
    spec.filter(Spec::may_be_pairs).map_or(0, |spec| spec.bytes)
}

/// Returns the steps in submission order. `synced`: the clock offset is known, so that the first step has a delay.
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
            action: entry.plan,
            after: over.into_iter().map(|(step, _)| step).collect(),
            gap: Duration::from_nanos(gap),
            took: (entry.op.outcome == Outcome::Ok).then_some(took),
        });
    }
    steps
}
