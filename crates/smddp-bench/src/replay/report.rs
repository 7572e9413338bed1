//! Comparison of the replay with the recording: a table in the style of nccl-tests, and the errors of the groups.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde::Serialize;
use smddp_plan::sim::Cluster;

use super::Cli;
use super::dump::{Operation, Outcome, Process};
use super::group_error::GroupError;
use super::script::{GroupPlan, Script};
use super::spec::Spec;
use crate::error::{Error, Result};
use crate::format::figure;
use crate::simulated_call::SimulatedCall;
use crate::types::{DTYPES, REDOPS};

/// Times in microseconds; `None` without a successful call.
#[derive(Clone, Copy, Serialize)]
struct Times {
    median: Option<f64>,
    last: Option<f64>,
}

#[derive(Serialize)]
struct Row {
    group: String,
    collective: &'static str,
    size: usize,
    count: usize,
    r#type: String,
    redop: String,
    root: i64,
    calls: usize,
    recorded_us: Times,
    replayed_us: Times,
    predicted_us: Option<f64>,
}

#[derive(Serialize)]
struct End {
    group: String,
    ranks: usize,
    /// The recording's number of the first replayed call, and the difference of its numbers to the replay's.
    first: u64,
    ahead: i64,
    recorded: Option<GroupError>,
    replayed: Option<GroupError>,
    as_recorded: bool,
}

#[derive(Serialize)]
pub(crate) struct Report {
    smddp_version: &'static str,
    not_replayed: Vec<String>,
    /// A group is not replayed.
    partly: bool,
    results: Vec<Row>,
    groups: Vec<End>,
}

/// Seconds of one call, by rank.
type Call = Vec<f64>;

impl Report {
    pub(crate) fn new(
        recorded: &[Process],
        script: &Script,
        replayed: &[Process],
        cluster: &Cluster,
    ) -> Result<Self> {
        let (mut results, mut groups) = (Vec::new(), Vec::new());
        let mut not_replayed = script.notes.clone();
        for group in &script.groups {
            let replayed_operations: BTreeMap<(usize, u64), &Operation> =
                operations(replayed.iter(), group).collect();
            let mut kinds: BTreeMap<String, (Spec, BTreeMap<u64, [Call; 2]>)> = BTreeMap::new();
            for ((rank, seq), op) in operations(recorded.iter().filter(|one| !one.is_placeholder()), group) {
                let number = seq.saturating_add_signed(-group.offset);
                if seq < group.first {
                    continue;
                }
                let Some(replayed_operation) = replayed_operations.get(&(rank, number)) else { continue };
                let Ok(spec) = Spec::parse(&op.call, op.bytes) else { continue };
                // The bytes of an uneven all_to_all differ between ranks.
                let words = op.call.split(" #").next().unwrap_or_default();
                let bytes = if spec.pairs { 0 } else { op.bytes };
                let kind = kinds.entry(format!("{words} {bytes}")).or_insert((spec, BTreeMap::new()));
                let call = kind.1.entry(number).or_default();
                for (times, op) in call.iter_mut().zip([op, *replayed_operation]) {
                    if op.outcome == Outcome::Ok {
                        times.push(op.seconds);
                    }
                }
            }
            for (spec, calls) in kinds.into_values() {
                results.push(row(group, &spec, &calls, predicted(group, &spec, cluster)?));
            }
            groups.push(end(group, replayed));
            let here = replayed.iter().flat_map(|process| &process.groups);
            let here = here
                .filter(|one| one.name == group.name && one.size == group.size)
                .map(|one| one.nodes)
                .max();
            if let Some(here) = here.filter(|&here| here != group.nodes) {
                let (name, nodes) = (&group.name, group.nodes);
                not_replayed.push(format!(
                    "group `{name}` was recorded on {nodes} nodes, but has {here} in the replay"
                ));
            }
        }
        results.sort_by_key(|row| (row.group.clone(), row.collective, row.size));
        Ok(Report {
            smddp_version: env!("CARGO_PKG_VERSION"),
            not_replayed,
            partly: script.partly,
            results,
            groups,
        })
    }

    /// Returns the exit status: 0 if all groups completed without error, as recorded.
    pub(crate) fn status(&self) -> i32 {
        i32::from(self.groups.iter().any(|end| end.replayed.is_some() || !end.as_recorded))
    }

    pub(crate) fn print(&self, cli: &Cli, processes: &[Process]) -> Result<()> {
        let mut out = std::io::stdout().lock();
        self.lines(cli, processes)
            .iter()
            .try_for_each(|line| writeln!(out, "{line}"))
            .and_then(|()| out.flush())
            .map_err(Error::io("writing the table"))
    }

    fn lines(&self, cli: &Cli, processes: &[Process]) -> Vec<String> {
        let mut lines = vec![
            format!("# smddp-bench version {}", self.smddp_version),
            format!("# Replay starting: {} ranks, {} groups", processes.len(), self.groups.len()),
        ];
        let pace = if cli.no_skew { "no skew".to_owned() } else { format!("speed {}", cli.speed) };
        lines.push(format!("# {pace}, timeout {} s, predicted for {}", cli.timeout, cli.cluster));
        lines.extend(self.not_replayed.iter().map(|note| format!("# Note: {note}")));
        lines.push("#".into());
        let left = "#       size         count      type   redop    root";
        let blank = " ".repeat(left.len() - 1);
        lines.push(format!("#{blank}               recorded            replayed"));
        lines.push(format!(
            "{left}   calls   median     last   median     last  predicted  collective, group"
        ));
        lines.push("#        (B)    (elements)                                 (us)     (us)     (us)     (us)       (us)".into());
        lines.extend(self.results.iter().map(Row::line));
        for end in &self.groups {
            lines.extend(end.lines());
        }
        let good = self.groups.iter().all(|end| end.as_recorded);
        let good = match (good, self.partly) {
            (true, false) => "as recorded",
            (true, true) => "as recorded, as far as it is replayed (see the notes)",
            (false, _) => "NOT as recorded",
        };
        lines.push("#".into());
        lines.push(format!("# Replay concluded: {good}"));
        lines
    }

    pub(crate) fn write(&self, cli: &Cli, path: &Path) -> Result<()> {
        #[derive(Serialize)]
        struct Document<'a> {
            dumps: &'a [std::path::PathBuf],
            speed: Option<f64>,
            timeout: f64,
            cluster: &'a str,
            #[serde(flatten)]
            report: &'a Report,
        }
        let speed = (!cli.no_skew).then_some(cli.speed);
        let (timeout, cluster) = (cli.timeout, cli.cluster.as_str());
        let document = Document { dumps: &cli.dumps, speed, timeout, cluster, report: self };
        let text = serde_json::to_string_pretty(&document)
            .map_err(|e| Error::Io { what: "writing JSON".into(), source: e.into() })?;
        crate::simulate::write(path, &(text + "\n"))
    }
}

impl Row {
    fn line(&self) -> String {
        let time = |us: Option<f64>| us.map_or(format!("{:>7}", "-"), |us| figure(us, 7));
        let both = |times: Times| format!("  {}  {}", time(times.median), time(times.last));
        format!(
            "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}  {:>6}{}{}    {}  {}, `{}`",
            self.size,
            self.count,
            self.r#type,
            self.redop,
            self.root,
            self.calls,
            both(self.recorded_us),
            both(self.replayed_us),
            time(self.predicted_us),
            self.collective,
            self.group,
        )
    }
}

impl End {
    fn lines(&self) -> Vec<String> {
        let name = &self.group;
        let (recorded, replayed) = match (&self.recorded, &self.replayed) {
            (None, None) => return Vec::new(),
            (recorded, replayed) => (text(recorded.as_ref()), text(replayed.as_ref())),
        };
        let verdict = if self.as_recorded { "as recorded" } else { "NOT as recorded" };
        let mut lines = vec!["#".to_owned(), format!("# Group `{name}` ended {verdict}")];
        if let (true, Some(hang)) = (self.as_recorded, self.recorded.as_ref().and_then(GroupError::hang)) {
            lines.push(format!("# reproduced: {hang}"));
        }
        lines.push(format!("# recorded: {recorded}"));
        lines.push(format!("# replayed: {replayed}"));
        if self.ahead != 0 && self.replayed.is_some() {
            lines.push(format!("# (number n of the replay is number n + {} of the recording)", self.ahead));
        }
        lines
    }
}

fn text(error: Option<&GroupError>) -> &str {
    error.map_or("no error", |error| error.text.as_str())
}

/// Returns a group's operations in the dumps, by rank and call number.
fn operations<'p>(
    processes: impl Iterator<Item = &'p Process>,
    plan: &'p GroupPlan,
) -> impl Iterator<Item = ((usize, u64), &'p Operation)> {
    let groups = processes.flat_map(|process| &process.groups);
    let groups = groups.filter(|group| group.name == plan.name && group.size == plan.size);
    groups.flat_map(|group| group.operations.iter().flatten().map(|op| ((group.rank, op.seq), op)))
}

fn end(group: &GroupPlan, replayed: &[Process]) -> End {
    let groups = replayed.iter().flat_map(|process| &process.groups);
    let errors =
        groups.filter(|g| g.name == group.name && g.size == group.size).filter_map(|g| g.error.as_deref());
    let error = GroupError::of(errors, group.offset);
    End {
        group: group.name.clone(),
        ranks: group.size,
        first: group.first,
        ahead: group.offset,
        as_recorded: match (&error, &group.error) {
            (Some(replayed), Some(recorded)) => replayed.matches(recorded),
            (replayed, recorded) => replayed.is_none() && recorded.is_none(),
        },
        recorded: group.error.clone(),
        replayed: error,
    }
}

fn row(group: &GroupPlan, spec: &Spec, calls: &BTreeMap<u64, [Call; 2]>, predicted_us: Option<f64>) -> Row {
    let times = |side: usize| {
        let all = calls.values().flat_map(|call| call[side].iter().copied()).collect();
        let last =
            calls.values().filter_map(|call| call[side].iter().copied().min_by(f64::total_cmp)).collect();
        Times { median: median(all), last: median(last) }
    };
    let kind = DTYPES.iter().find(|known| known.1 == spec.dtype).map_or(spec.dtype.name(), |known| known.0);
    let redop = REDOPS.iter().find(|known| known.1 == spec.redop).map_or(spec.redop.name(), |known| known.0);
    let reduces = spec.collective.reduces();
    Row {
        group: group.name.clone(),
        collective: smddp_core::name_of(spec.collective),
        size: spec.bytes,
        count: spec.elements,
        r#type: if spec.bytes == 0 { "none".into() } else { kind.into() },
        redop: if reduces { redop.into() } else { "none".into() },
        root: if spec.collective.has_root() { spec.root as i64 } else { -1 },
        calls: calls.len(),
        recorded_us: times(0),
        replayed_us: times(1),
        predicted_us,
    }
}

fn median(mut seconds: Vec<f64>) -> Option<f64> {
    seconds.sort_unstable_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).map(|seconds| seconds * 1e6)
}

/// Returns the simulator's time. `None` for unknown block sizes, or for nodes with different numbers of ranks.
fn predicted(group: &GroupPlan, spec: &Spec, cluster: &Cluster) -> Result<Option<f64>> {
    let nodes = group.nodes.max(1);
    if spec.substituted().is_some() || !group.size.is_multiple_of(nodes) {
        return Ok(None);
    }
    let cluster = cluster.with_nodes(nodes, group.size / nodes);
    let call = SimulatedCall::new(&cluster, spec.collective, spec.bytes, spec.root, spec.dtype.is_half())?;
    Ok(call.job().run(&cluster, Vec::new()).ok().map(|run| run.outcome.seconds * 1e6))
}
