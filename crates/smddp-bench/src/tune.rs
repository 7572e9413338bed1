//! `smddp-bench tune`: measures every algorithm at every size and writes the table for `SMDDP_TUNE`.
//!
//! An engine reads its settings once, so a separate process measures each algorithm: this program with `SMDDP_ALGO` set.
//! Under torchrun, mpirun or srun every rank starts such a process, and they join a group as usual.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::{ArgAction, Parser};
use serde::Deserialize;
use smddp_plan::tune::{Entry, MemoryKind, Table};
use smddp_plan::{Algorithm, Collective};
use smddp_rendezvous::LaunchEnvironment;

use crate::error::{Error, Result};
use crate::op::Op;
use crate::simulate::{check_writable, size, write};
use crate::sizes::parse_size;
use crate::split;

const AFTER_HELP: &str = "\
Without --nproc this process is one rank that torchrun, mpirun or srun started, as for a measurement; rank 0 writes the table.
Set SMDDP_TUNE to load the table. Other sizes use the entry of the nearest measure size. Entries apply to host memory and to
groups with the measure number of ranks; one file may contain tables for several numbers of ranks.

A reducing collective (all_reduce, reduce_scatter, reduce) is tuned only with --reducing: its algorithm determines the order of
its additions, so results of floats may differ in bits from results without the table.

Exit status: 0 success, 1 wrong data or a failure, 2 an invalid command line.";

#[derive(Debug, Parser)]
#[command(name = "smddp-bench tune", about = "Measures the fastest algorithms of this machine and writes a tuning table",
          after_help = AFTER_HELP, args_override_self = true)]
pub(crate) struct Cli {
    /// Collectives to tune (default: all_gather, broadcast, all_to_all; with --reducing also all_reduce and reduce_scatter)
    #[arg(value_name = "COLLECTIVE")]
    pub ops: Vec<Op>,
    /// Tune reducing collectives too: their results may then differ in bits
    #[arg(long, action = ArgAction::SetTrue)]
    pub reducing: bool,
    /// Algorithms to measure, comma-separated (default: all)
    #[arg(long, value_name = "NAME,NAME,..", value_delimiter = ',', value_parser = crate::simulate::algorithm)]
    pub algorithm: Vec<Algorithm>,
    /// Smallest size
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "1K", value_parser = parse_size)]
    pub min_bytes: usize,
    /// Largest size
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    pub max_bytes: usize,
    /// Factor between the sizes of two rows
    #[arg(short = 'f', long = "stepfactor", value_name = "FACTOR", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(2..))]
    pub step_factor: u32,
    /// Timed calls per size
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 20)]
    pub iters: usize,
    /// Warmup calls per size
    #[arg(short = 'w', long = "warmup_iters", alias = "warmup-iters", value_name = "N", default_value_t = 5)]
    pub warmup_iters: usize,
    /// Start this many ranks on this machine
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub nproc: Option<u32>,
    /// Time limit of a call and of the rendezvous
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 120.0)]
    pub timeout: f64,
    /// File of the table (default: standard output)
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Factor to the best time up to which the engine's default choice is kept, so that noise does not change it.
const TIE: f64 = 1.03;

/// The used fields of a measurement's JSON.
#[derive(Deserialize)]
struct Report {
    ranks: usize,
    results: Vec<Line>,
}

#[derive(Deserialize)]
struct Line {
    size: u64,
    out_of_place: Half,
    path: Option<String>,
}

#[derive(Deserialize)]
struct Half {
    /// Microseconds.
    time: f64,
}

/// The measurements of one size.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sample {
    bytes: u64,
    /// The engine's default choice.
    default: Option<Algorithm>,
    /// Microseconds.
    times: Vec<(Algorithm, f64)>,
}

pub(crate) fn run(cli: &Cli, spawn: &[String]) -> Result<i32> {
    let ops = ops(cli)?;
    let algorithms = if cli.algorithm.is_empty() { Algorithm::ALL.to_vec() } else { cli.algorithm.clone() };
    if cli.min_bytes > cli.max_bytes {
        let Cli { min_bytes, max_bytes, .. } = cli;
        return Err(Error::Usage(format!("--minbytes {min_bytes} is above --maxbytes {max_bytes}")));
    }
    if let Some(path) = &cli.output
        && writes_output(cli)?
    {
        check_writable(path)?;
    }
    let (mut table, mut notes, mut ranks) = (Table::default(), String::new(), 0);
    for (op, collective) in ops {
        // Only rank 0 gets figures; the other ranks run the same measurements.
        let Some(default) = measure(cli, spawn, op, None)? else {
            for algorithm in &algorithms {
                measure(cli, spawn, op, Some(*algorithm))?;
            }
            continue;
        };
        ranks = default.ranks;
        let mut samples = samples(&default);
        for &algorithm in &algorithms {
            if let Some(report) = measure(cli, spawn, op, Some(algorithm))? {
                add(&mut samples, algorithm, &report);
            }
        }
        for sample in &samples {
            let times: Vec<String> =
                sample.times.iter().map(|(a, us)| format!("{} {us:.1}", a.name())).collect();
            let _ = writeln!(notes, "# {} {}: {} us", op.name(), size(sample.bytes), times.join(", "));
        }
        table.entries.extend(entries(collective, ranks, &samples));
    }
    if ranks == 0 {
        return Ok(0);
    }
    let mut text = format!("# smddp-bench tune, {ranks} ranks. Load it with SMDDP_TUNE.\n");
    if table.entries.iter().any(|entry| entry.collective.reduces()) {
        let warning = "reducing collectives: results may differ in bits from results without this table";
        let _ = writeln!(text, "# {warning}");
        eprintln!("smddp-bench: {warning}");
    }
    text += &notes;
    for entry in &table.entries {
        let _ = writeln!(text, "{entry}");
    }
    match &cli.output {
        Some(path) => write(path, &text)?,
        None => print!("{text}"),
    }
    Ok(0)
}

/// Returns true if this process writes the table: rank 0 of a launcher, or a process that starts the ranks.
fn writes_output(cli: &Cli) -> Result<bool> {
    if cli.nproc.is_some() {
        return Ok(true);
    }
    let get = |name: &str| std::env::var(name).ok();
    Ok(LaunchEnvironment::detect(&get, None, std::os::unix::process::parent_id())?.rank == 0)
}

fn ops(cli: &Cli) -> Result<Vec<(Op, Collective)>> {
    let mut ops = cli.ops.clone();
    if ops.is_empty() {
        ops = vec![Op::AllGather, Op::Broadcast, Op::AllToAll];
        if cli.reducing {
            ops.extend([Op::AllReduce, Op::ReduceScatter]);
        }
    }
    let one = |op: Op| {
        let collective = op
            .collective()
            .filter(|c| *c != Collective::Barrier)
            .ok_or_else(|| Error::Usage(format!("{} has no sizes to tune", op.name())))?;
        if op.reduces() && !cli.reducing {
            return Err(Error::Usage(format!(
                "{} reduces: another algorithm may change the bits of its results; add --reducing to tune it",
                op.name()
            )));
        }
        Ok((op, collective))
    };
    ops.into_iter().map(one).collect()
}

/// Measures `op` with `algorithm` (or the engine's choice) in separate processes. Returns `None` on ranks that do not print.
fn measure(cli: &Cli, spawn: &[String], op: Op, algorithm: Option<Algorithm>) -> Result<Option<Report>> {
    let Some((program, first)) = spawn.split_first() else {
        return Err(Error::Usage("the command that starts a rank is empty".into()));
    };
    let name = algorithm.map_or("default", Algorithm::name);
    let file =
        std::env::temp_dir().join(format!("smddp-tune-{}-{}-{name}.json", std::process::id(), op.name()));
    let mut command = Command::new(program);
    command.args(first).arg(op.name());
    for (option, value) in [
        ("-b", cli.min_bytes.to_string()),
        ("-e", cli.max_bytes.to_string()),
        ("-f", cli.step_factor.to_string()),
        ("-n", cli.iters.to_string()),
        ("-w", cli.warmup_iters.to_string()),
        ("-T", cli.timeout.to_string()),
    ] {
        command.args([option, &value]);
    }
    command.arg("-J").arg(&file);
    if let Some(nproc) = cli.nproc {
        command.args(["--nproc", &nproc.to_string()]);
    }
    // Removes the caller's table, algorithm and split into groups.
    ["SMDDP_TUNE", "SMDDP_ALGO"].iter().chain(&split::VARIABLES).for_each(|name| {
        command.env_remove(name);
    });
    if let Some(algorithm) = algorithm {
        command.env("SMDDP_ALGO", algorithm.name());
    }
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    let status = status.map_err(Error::io(format!("starting {program}")))?;
    let report = read(&file);
    let _ = std::fs::remove_file(&file);
    if !status.success() {
        return Err(Error::Rendezvous(format!("measuring {} with {name} failed ({status})", op.name())));
    }
    report
}

fn read(file: &Path) -> Result<Option<Report>> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::Io { what: format!("reading {}", file.display()), source }),
    };
    let report = serde_json::from_str(&text);
    report.map(Some).map_err(|e| Error::Io { what: format!("reading {}", file.display()), source: e.into() })
}

/// Returns the algorithm in the text of a path: `shm mesh, segments of ..`.
fn algorithm_of(path: &str) -> Option<Algorithm> {
    path.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).find_map(Algorithm::from_name)
}

fn samples(default: &Report) -> Vec<Sample> {
    let sample = |line: &Line| {
        let default = line.path.as_deref().and_then(algorithm_of);
        let times = default.map(|algorithm| (algorithm, line.out_of_place.time));
        Sample { bytes: line.size, default, times: times.into_iter().collect() }
    };
    default.results.iter().map(sample).collect()
}

/// Adds the rows of a report that ran with `algorithm`. It may not support the collective or the group.
fn add(samples: &mut [Sample], algorithm: Algorithm, report: &Report) {
    for (sample, line) in samples.iter_mut().zip(&report.results) {
        if line.path.as_deref().and_then(algorithm_of) != Some(algorithm) {
            continue;
        }
        let time = line.out_of_place.time;
        match sample.times.iter_mut().find(|(known, _)| *known == algorithm) {
            Some((_, known)) => *known = known.min(time),
            None => sample.times.push((algorithm, time)),
        }
    }
}

/// Returns the fastest algorithm, or the engine's default choice in a tie.
fn best(sample: &Sample) -> Option<Algorithm> {
    let (fastest, time) = *sample.times.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
    let tied = |(algorithm, us): &&(Algorithm, f64)| Some(*algorithm) == sample.default && *us <= TIE * time;
    Some(sample.times.iter().find(tied).map_or(fastest, |(algorithm, _)| *algorithm))
}

/// Returns one entry for adjacent sizes with the same algorithm. Borders are geometric means.
fn entries(collective: Collective, ranks: usize, samples: &[Sample]) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut before = None;
    for (sample, algorithm) in samples.iter().filter_map(|s| Some((s, best(s)?))) {
        let from = before.map_or(0, |before| border(before, sample.bytes));
        before = Some(sample.bytes);
        match entries.last_mut() {
            Some(last) if last.algorithm == algorithm => continue,
            Some(last) => last.to = from,
            None => {}
        }
        let (to, memory, ranks) = (u64::MAX, Some(MemoryKind::Host), ranks..=ranks);
        entries.push(Entry { collective, from, to, memory, ranks, algorithm });
    }
    entries
}

fn border(a: u64, b: u64) -> u64 {
    let middle = ((a as f64) * (b as f64)).sqrt().round() as u64;
    let rounded = if middle > 16 << 10 { middle.next_multiple_of(1 << 10) } else { middle };
    rounded.clamp(a + 1, b.max(a + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(bytes: u64, default: Algorithm, times: &[(Algorithm, f64)]) -> Sample {
        Sample { bytes, default: Some(default), times: times.to_vec() }
    }

    #[test]
    fn adjacent_sizes_share_an_entry_and_ties_keep_the_default() {
        use Algorithm::*;
        let samples = [
            sample(1 << 10, Publish, &[(Publish, 1.0), (Mesh, 2.0)]),
            sample(4 << 10, Publish, &[(Publish, 1.02), (Mesh, 1.0)]),
            sample(64 << 10, Mesh, &[(Mesh, 9.0), (HierRing, 7.0)]),
            sample(256 << 10, Mesh, &[(Mesh, 30.0), (HierRing, 20.0)]),
            sample(1 << 20, Mesh, &[(Mesh, 90.0), (HierRing, 91.0)]),
        ];
        let table = Table { entries: entries(Collective::AllGather, 4, &samples) };
        assert_eq!(
            table.to_string(),
            "all_gather:0-16k:host:[4]:@publish#all_gather:16k-512k:host:[4]:@hier-ring\
             #all_gather:512k-inf:host:[4]:@mesh"
        );
        assert_eq!(Table::parse(&table.to_string()).unwrap(), table);
    }

    #[test]
    fn algorithm_is_read_from_the_path() {
        for (path, algorithm) in [
            ("shm publish, one message", Some(Algorithm::Publish)),
            ("shm mesh, segments of 128 KiB, 4 slots", Some(Algorithm::Mesh)),
            ("tcp+shm hier-log, segments of 1 KiB, 4 slots", Some(Algorithm::HierLog)),
            ("one rank: a copy at most", None),
        ] {
            assert_eq!(algorithm_of(path), algorithm, "{path}");
        }
    }
}
