//! `smddp-bench simulate`: replays plans on a described cluster, without measurements.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::{ArgAction, Parser};
use serde::Serialize;
use smddp_plan::sim::{Cluster, PathSummary, Run, SearchResult};
use smddp_plan::{Algorithm, Collective};

use crate::cluster_file;
use crate::error::{Error, Result};
use crate::op::Op;
use crate::plot::{Series, chart};
use crate::simulated_call::SimulatedCall;
use crate::sizes::parse_size;

const AFTER_HELP: &str = "\
Every figure is simulated: the engine's plans are replayed on FIFO ports with a rate, a latency and a cost per message. The
time is a lower bound to compare plans; it does not include congestion, PCIe and jitter.
The plan is the engine's choice for the current settings (SMDDP_ALGO, SMDDP_TUNE, SMDDP_SEGMENT_BYTES, SMDDP_STAGING_BYTES)
and the cluster's latency and rate. --best replays all possible algorithms with several segment sizes, and shows the fastest
plan; above 256 ranks it replays hierarchical algorithms only.

Exit status: 0 success, 1 a failure, 2 an invalid command line or cluster file.";

#[derive(Debug, Parser)]
#[command(name = "smddp-bench simulate", about = "Replays a collective's plan on a described cluster",
          after_help = AFTER_HELP, args_override_self = true)]
pub(crate) struct Cli {
    /// all_gather, reduce_scatter, all_reduce, ...
    #[arg(value_name = "COLLECTIVE")]
    pub op: Op,
    /// p4d, p5, sockets, or a TOML file (docs/clusters/example.toml)
    #[arg(long, value_name = "NAME|FILE", default_value = "p4d")]
    pub cluster: String,
    /// Numbers of nodes, comma-separated (default: from the cluster file)
    #[arg(long, value_name = "N,N,..", value_delimiter = ',')]
    pub nodes: Vec<usize>,
    /// Ranks of each node (default: from the cluster)
    #[arg(long, value_name = "N")]
    pub ppn: Option<usize>,
    /// Sizes of the whole buffer, comma-separated
    #[arg(long, value_name = "SIZE,SIZE,..", value_delimiter = ',', default_value = "256M", value_parser = parse_size)]
    pub bytes: Vec<usize>,
    /// Algorithms to replay, comma-separated, one row each
    #[arg(long, value_name = "NAME,NAME,..", value_delimiter = ',', value_parser = algorithm)]
    pub algorithm: Vec<Algorithm>,
    /// Show the fastest plan instead of the engine's plan
    #[arg(long, action = ArgAction::SetTrue, conflicts_with = "algorithm")]
    pub best: bool,
    /// Segment size in bytes, as SMDDP_SEGMENT_BYTES
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub segment: Option<usize>,
    /// Root rank of a rooted collective
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    pub root: usize,
    /// Write the rows to this file as JSON in addition
    #[arg(short = 'J', long = "json", value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Draw the share of the line rate over the number of nodes
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

/// Parses the name of an algorithm. The error lists the names.
pub(crate) fn algorithm(text: &str) -> std::result::Result<Algorithm, String> {
    Algorithm::from_name(text).ok_or_else(|| {
        format!(
            "invalid algorithm '{text}': expected one of {}",
            Algorithm::ALL.map(Algorithm::name).join(", ")
        )
    })
}

#[derive(Serialize)]
struct Row {
    collective: &'static str,
    cluster: String,
    nodes: usize,
    ranks: usize,
    bytes: u64,
    algorithm: &'static str,
    segment: u64,
    depth: usize,
    time_us: f64,
    /// Share of the busiest node's line rate; null on one node.
    line_share: Option<f64>,
    /// Maximum of the bytes over a node's link in one direction.
    link_bytes: u64,
    messages: u64,
    critical_path: CriticalPath,
    simulated: bool,
}

/// Microseconds of the critical path.
#[derive(Serialize)]
struct CriticalPath {
    network_us: f64,
    network_hops: usize,
    queue_us: f64,
    local_us: f64,
    local_hops: usize,
    cells_us: f64,
    work_us: f64,
}

impl CriticalPath {
    fn new(sum: &PathSummary) -> CriticalPath {
        CriticalPath {
            network_us: sum.network * 1e6,
            network_hops: sum.network_hops,
            queue_us: sum.queue * 1e6,
            local_us: sum.local * 1e6,
            local_hops: sum.local_hops,
            cells_us: sum.credit * 1e6,
            work_us: sum.work * 1e6,
        }
    }
}

#[derive(Serialize)]
struct Document<'a> {
    smddp_version: &'static str,
    simulated: bool,
    rows: &'a [Row],
}

pub(crate) fn run(cli: &Cli) -> Result<i32> {
    picture(cli.plot.as_deref())?;
    cli.json.iter().chain(&cli.plot).try_for_each(|path| check_writable(path))?;
    let collective = simulated(cli.op)?;
    let base = cluster_file::load(&cli.cluster)?;
    let clusters = clusters(&base, &cli.nodes, cli.ppn)?;
    if let Some(cluster) = clusters.iter().find(|c| cli.root >= c.size()) {
        return Err(Error::Usage(format!("--root {} is not one of the {} ranks", cli.root, cluster.size())));
    }
    println!("# smddp-bench simulate: every figure is simulated, none is measured");
    println!("# cluster {}", describe(&base));
    println!(
        "# {:>14} {:>6} {:>6} {:>10}  {:<14} {:>8} {:>11} {:>7} {:>11}  critical path",
        "collective", "nodes", "ranks", "bytes", "algorithm", "segment", "time(us)", "line", "link bytes"
    );
    // One row for each selected algorithm, or for the engine's choice.
    let selected: Vec<Option<Algorithm>> = match cli.algorithm.is_empty() {
        true => vec![None],
        false => cli.algorithm.iter().copied().map(Some).collect(),
    };
    let mut rows = Vec::new();
    for &algorithm in &selected {
        for &bytes in &cli.bytes {
            for cluster in &clusters {
                let call = SimulatedCall::new(cluster, collective, bytes, cli.root, false)?;
                let call = call.segment(cli.segment).algorithm(algorithm)?;
                let run = if cli.best { fastest(cluster, &call)? } else { replayed(cluster, &call)? };
                let row = row(cli.op, cluster, bytes, &run);
                print(&row);
                rows.push(row);
            }
        }
    }
    if let Some(path) = &cli.json {
        let document = Document { smddp_version: env!("CARGO_PKG_VERSION"), simulated: true, rows: &rows };
        let text = serde_json::to_string_pretty(&document)
            .map_err(|e| Error::Io { what: "writing JSON".into(), source: e.into() })?;
        write(path, &(text + "\n"))?;
    }
    if let Some(path) = &cli.plot {
        write(path, &plot(cli.op, &base, &rows, !cli.algorithm.is_empty()))?;
        println!("# drawn: {}", path.display());
    }
    Ok(0)
}

/// Number of messages above which a warning about the duration is printed.
const MANY: u64 = 20_000_000;

fn replayed(cluster: &Cluster, call: &SimulatedCall<'_>) -> Result<Run> {
    let job = call.job();
    let messages = job.messages(cluster);
    if messages > MANY {
        let (nodes, name) = (cluster.nodes(), job.decision.choice.algorithm.name());
        eprintln!(
            "smddp-bench: {nodes} nodes: {name} has {} million messages; this takes minutes",
            messages / 1_000_000
        );
    }
    job.run(cluster, Vec::new()).map_err(|error| Error::Usage(format!("{} nodes: {error}", cluster.nodes())))
}

fn fastest(cluster: &Cluster, call: &SimulatedCall<'_>) -> Result<Run> {
    let mut found = call.alternatives();
    if found.runs.is_empty() && !found.left_out.is_empty() {
        return Err(Error::Usage(format!(
            "{} nodes: every algorithm has too many messages for --best: name one with --algorithm ({}), which takes minutes",
            cluster.nodes(),
            names(&found)
        )));
    }
    if !found.left_out.is_empty() {
        eprintln!(
            "smddp-bench: on {} nodes these algorithms have too many messages; select them with --algorithm: {}",
            cluster.nodes(),
            names(&found)
        );
    }
    if found.runs.is_empty() {
        let reason = found.failed.first().map_or("no algorithm supports it", String::as_str);
        return Err(Error::Usage(format!("{} nodes: {reason}", cluster.nodes())));
    }
    Ok(found.runs.swap_remove(0))
}

/// Returns the algorithms that were not simulated.
fn names(found: &SearchResult) -> String {
    let names: Vec<_> = found.left_out.iter().map(|(_, job)| job.decision.choice.algorithm.name()).collect();
    names.join(", ")
}

/// Returns the collective of an operation. Operations without a plan, such as sendrecv, are an error.
pub(crate) fn simulated(op: Op) -> Result<Collective> {
    op.collective().ok_or_else(|| Error::Usage(format!("{} has no plan to replay", op.name())))
}

/// Returns the cluster with each of the numbers of nodes. Overrides of existing nodes are kept.
pub(crate) fn clusters(base: &Cluster, nodes: &[usize], ppn: Option<usize>) -> Result<Vec<Cluster>> {
    let usage = |reason: String| Error::Usage(reason);
    if nodes.is_empty() && ppn.is_none() {
        return Ok(vec![base.clone()]);
    }
    let uneven = base.ranks.iter().any(|r| *r != base.ranks[0]);
    if uneven && ppn.is_none() {
        return Err(usage(
            "the nodes of this cluster have different numbers of ranks: omit --nodes, or set --ppn".into(),
        ));
    }
    let ppn = ppn.unwrap_or(base.ranks[0]);
    let counts = if nodes.is_empty() { vec![base.nodes()] } else { nodes.to_vec() };
    let one = |nodes: usize| {
        cluster_file::check_size(nodes.checked_mul(ppn))
            .map_err(|reason| usage(format!("--nodes {nodes}: {reason}")))?;
        let mut cluster = base.with_nodes(nodes, ppn);
        cluster.overrides.retain(|node, _| *node < nodes);
        cluster.check().map(|()| cluster).map_err(|reason| usage(format!("--nodes, --ppn: {reason}")))
    };
    counts.into_iter().map(one).collect()
}

pub(crate) fn describe(cluster: &Cluster) -> String {
    let rate = |bytes_per_s: f64| format!("{:.4} GB/s", bytes_per_s / 1e9);
    format!(
        "{}: {} rails of {}, {:.1} us, {:.2} us a message; inside a node {}, {:.2} us, {:.2} us a message",
        cluster.name,
        cluster.rails,
        rate(cluster.network.bytes_per_s),
        cluster.network.latency_s * 1e6,
        cluster.network.message_s * 1e6,
        rate(cluster.local.bytes_per_s),
        cluster.local.latency_s * 1e6,
        cluster.local.message_s * 1e6,
    )
}

fn row(op: Op, cluster: &Cluster, bytes: usize, run: &Run) -> Row {
    let choice = run.job.decision.choice;
    Row {
        collective: op.name(),
        cluster: cluster.name.clone(),
        nodes: cluster.nodes(),
        ranks: cluster.size(),
        bytes: bytes as u64,
        algorithm: choice.algorithm.name(),
        segment: choice.segment as u64,
        depth: choice.window(),
        time_us: run.outcome.seconds * 1e6,
        line_share: run.line_share,
        link_bytes: run.link_bytes(),
        messages: run.outcome.network_messages,
        critical_path: CriticalPath::new(&run.path_summary()),
        simulated: true,
    }
}

fn print(row: &Row) {
    println!(
        "  {:>14} {:>6} {:>6} {:>10}  {:<14} {:>8} {:>11.1} {:>7} {:>11}  {}",
        row.collective,
        row.nodes,
        row.ranks,
        size(row.bytes),
        row.algorithm,
        size(row.segment),
        row.time_us,
        share(row.line_share),
        row.link_bytes,
        path(&row.critical_path, row.time_us),
    );
}

pub(crate) fn share(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.1} %", share * 100.0))
}

pub(crate) fn path_text(run: &Run) -> String {
    path(&CriticalPath::new(&run.path_summary()), run.outcome.seconds * 1e6)
}

/// Formats a critical path: `network 62 % in 5 hops, queue 30 %, node 8 % in 3 hops`. Omits parts below 0.5 %.
fn path(path: &CriticalPath, total: f64) -> String {
    let parts = [
        ("network", path.network_us, Some(path.network_hops)),
        ("queue", path.queue_us, None),
        ("node", path.local_us, Some(path.local_hops)),
        ("slots", path.cells_us, None),
        ("work", path.work_us, None),
    ];
    let text = |(name, us, hops): (&str, f64, Option<usize>)| {
        let percent = us / total.max(1e-9) * 100.0;
        let hops = hops.map_or(String::new(), |n| format!(" in {n} hop{}", if n == 1 { "" } else { "s" }));
        (percent >= 0.5).then(|| format!("{name} {percent:.0} %{hops}"))
    };
    parts.into_iter().filter_map(text).collect::<Vec<_>>().join(", ")
}

/// Formats a size: `256M`, `1000`.
pub(crate) fn size(bytes: u64) -> String {
    for (unit, shift) in [("G", 30), ("M", 20), ("K", 10)] {
        if bytes > 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// Checks the name of a picture before the computation.
pub(crate) fn picture(path: Option<&Path>) -> Result<()> {
    match path.map(|path| (path, path.extension().and_then(|e| e.to_str()))) {
        Some((path, extension)) if extension != Some("svg") => {
            Err(Error::Usage(format!("{}: expected a file name that ends in .svg", path.display())))
        }
        _ => Ok(()),
    }
}

/// Checks that a file can be written, before the computation of its content. An existing file keeps its content.
pub(crate) fn check_writable(path: &Path) -> Result<()> {
    let existing = fs::metadata(path).ok();
    // Opening a FIFO waits for its reader, and closing it ends the reader's input.
    if existing.as_ref().is_some_and(|found| found.file_type().is_fifo()) {
        return Ok(());
    }
    let opened = fs::OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(Error::io(format!("writing {}", path.display())))?;
    if existing.is_none() {
        // Another rank may have removed it.
        let _ = fs::remove_file(path);
    }
    Ok(())
}

pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::io(format!("writing {}", path.display())))
}

fn plot(op: Op, cluster: &Cluster, rows: &[Row], by_algorithm: bool) -> String {
    let mut series: Vec<Series> = Vec::new();
    for row in rows {
        let Some(share) = row.line_share else { continue };
        let name = match by_algorithm {
            true => format!("{} {}", size(row.bytes), row.algorithm),
            false => size(row.bytes),
        };
        match series.iter_mut().find(|s| s.name == name) {
            Some(line) => line.points.push((row.nodes, share)),
            None => series.push(Series { name, points: vec![(row.nodes, share)] }),
        }
    }
    for line in &mut series {
        line.points.sort_by_key(|point| point.0);
    }
    let title = format!("{} on {}: share of the nodes' line rate (simulated)", op.name(), cluster.name);
    let rate = cluster.line_rate(0) / 1e9;
    let note = format!("{} ranks a node, {rate:.1} GB/s a node in each direction", cluster.ranks[0]);
    chart(&title, &note, &series)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn fifo_without_a_reader_does_not_block_the_check() {
        let path = std::env::temp_dir().join(format!("smddp-bench-fifo-{}", std::process::id()));
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let (sender, receiver) = mpsc::channel();
        let checked = path.clone();
        std::thread::spawn(move || sender.send(check_writable(&checked).is_ok()));
        let found = receiver.recv_timeout(Duration::from_secs(10));
        let exists = path.exists();
        fs::remove_file(&path).unwrap();
        assert_eq!((found, exists), (Ok(true), true));
    }
}
