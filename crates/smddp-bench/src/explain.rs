//! `smddp-bench explain`: the plan of a call, its reason, and a picture of it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Parser;
use smddp_core::Config;
use smddp_plan::sim::{Cluster, Run};
use smddp_plan::{Algorithm, Choice, Program, Reason, Step};

use crate::cluster_file;
use crate::drawing;
use crate::error::{Error, Result};
use crate::op::Op;
use crate::simulate::{
    check_writable, clusters, describe, path_text, picture, share, simulated, size, write,
};
use crate::simulated_call::SimulatedCall;
use crate::sizes::parse_size;

const AFTER_HELP: &str = "\
The plan is the engine's choice for the current settings and the cluster's latency and rate. Times are simulated, not measured.
If another candidate is faster in the simulation, select it with SMDDP_ALGO or a table of 'smddp-bench tune'.

Exit status: 0 success, 1 a failure, 2 an invalid command line or cluster file.";

#[derive(Debug, Parser)]
#[command(name = "smddp-bench explain", about = "Explains the plan of a collective, and draws it",
          after_help = AFTER_HELP, args_override_self = true)]
pub(crate) struct Cli {
    /// all_gather, reduce_scatter, all_reduce, ...
    #[arg(value_name = "COLLECTIVE")]
    pub op: Op,
    /// Size of the whole buffer
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    pub bytes: usize,
    /// Number of nodes (default: from the cluster file)
    #[arg(long, value_name = "N")]
    pub nodes: Option<usize>,
    /// Ranks of each node (default: from the cluster)
    #[arg(long, value_name = "N")]
    pub ppn: Option<usize>,
    /// p4d, p5, sockets (the engine's assumption), or a TOML file (docs/clusters/example.toml)
    #[arg(long, value_name = "NAME|FILE", default_value = "sockets")]
    pub cluster: String,
    /// Explain this algorithm instead of the chosen one
    #[arg(long, value_name = "NAME", value_parser = crate::simulate::algorithm)]
    pub algorithm: Option<Algorithm>,
    /// Use 16-bit floats, which excludes algorithms that round at every hop
    #[arg(long)]
    pub half: bool,
    /// Draw the plan
    #[arg(long, value_name = "FILE.svg")]
    pub draw: Option<PathBuf>,
}

pub(crate) fn run(cli: &Cli) -> Result<i32> {
    picture(cli.draw.as_deref())?;
    let collective = simulated(cli.op)?;
    let base = cluster_file::load(&cli.cluster)?;
    let nodes: Vec<usize> = cli.nodes.into_iter().collect();
    let all = clusters(&base, &nodes, cli.ppn)?;
    let cluster = &all[0];
    let bytes = cli.bytes as u64;
    cli.draw.as_deref().map_or(Ok(()), check_writable)?;
    let free = SimulatedCall::new(cluster, collective, cli.bytes, 0, cli.half)?;
    let found = free.alternatives();
    let job = free.algorithm(cli.algorithm)?.job();
    let Choice { algorithm, segment, .. } = job.decision.choice;
    let depth = job.decision.choice.window();
    let failed = |e: smddp_plan::sim::UnsupportedPlan| Error::Usage(e.to_string());
    let chosen = job.run(cluster, drawing::rows(cluster)).map_err(failed)?;

    println!(
        "{} of {} on {} node{}, {} ranks",
        cli.op.name(),
        size(bytes),
        cluster.nodes(),
        if cluster.nodes() == 1 { "" } else { "s" },
        cluster.size()
    );
    println!("cluster {}", describe(cluster));
    println!();
    println!("plan: {}, segments of {}, {depth} slots a channel", algorithm.name(), size(segment as u64));
    println!("  {}", reason(cli, cluster, &chosen, found.runs.first()));
    println!("  {}", meaning(algorithm));
    println!(
        "  simulated: {:.1} us, {} of line rate, {} bytes over the busiest link",
        chosen.outcome.seconds * 1e6,
        share(chosen.line_share),
        chosen.link_bytes()
    );
    println!("  critical path: {}", path_text(&chosen));
    for hop in hops(&chosen) {
        println!("    {hop}");
    }
    if let Some(program) = job.program(cluster, &cluster.topology(), 0) {
        println!("  rank 0: {}", summary(&program));
    }
    println!();
    println!("candidates (simulated time with the best segment size):");
    println!("  {:<16} {:>9} {:>12} {:>9} {:>13}", "algorithm", "segment", "time(us)", "line", "link bytes");
    let mut seen: Vec<Algorithm> = Vec::new();
    for run in &found.runs {
        if seen.contains(&run.job.decision.choice.algorithm) {
            continue;
        }
        let choice = run.job.decision.choice;
        seen.push(choice.algorithm);
        println!(
            "  {:<16} {:>9} {:>12.1} {:>9} {:>13}{}",
            choice.algorithm.name(),
            size(choice.segment as u64),
            run.outcome.seconds * 1e6,
            share(run.line_share),
            run.link_bytes(),
            if choice.algorithm == algorithm { "  <- the plan's algorithm" } else { "" }
        );
    }
    for (messages, job) in &found.left_out {
        println!(
            "  {:<16} not replayed: {:.0} million messages",
            job.decision.choice.algorithm.name(),
            *messages as f64 / 1e6
        );
    }
    if let Some(path) = &cli.draw {
        write(path, &drawing::timeline(cli.op, cluster, &chosen))?;
        println!("\ndrawn: {}", path.display());
    }
    Ok(0)
}

fn reason(cli: &Cli, cluster: &Cluster, chosen: &Run, best: Option<&Run>) -> String {
    if cli.algorithm.is_some() {
        return "requested by --algorithm".into();
    }
    let costs = if cluster.size() == 1 {
        "one rank has no peers"
    } else if cluster.nodes() == 1 {
        "all ranks share memory: one write reaches all readers, in one hop"
    } else if cli.op.reduces() {
        "lowest cost by formula: a reduction's order never depends on a measurement"
    } else {
        "lowest cost by the planner's formula, with this network's latency and rate"
    };
    let reason = match chosen.job.decision.reason {
        Reason::Setting => "requested by SMDDP_ALGO".to_owned(),
        Reason::Table => "requested by a row of SMDDP_TUNE".to_owned(),
        Reason::Unsupported(wanted) => {
            let setting =
                if Config::get().is_ok_and(|config| config.algorithm.is_some()) { "ALGO" } else { "TUNE" };
            format!("SMDDP_{setting} requests {}, which does not support this call; {costs}", wanted.name())
        }
        Reason::Cost => costs.to_owned(),
    };
    match best {
        Some(best) if best.outcome.seconds < 0.95 * chosen.outcome.seconds => format!(
            "{reason}; the fastest in the simulation is {} with segments of {}, {:.1} us",
            best.job.decision.choice.algorithm.name(),
            size(best.job.decision.choice.segment as u64),
            best.outcome.seconds * 1e6
        ),
        _ => format!("{reason}; fastest in the simulation too"),
    }
}

fn meaning(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::Publish => "every rank writes its data once, and each reader copies its part",
        Algorithm::Mesh => "every pair of ranks exchanges directly, in rotated order: one hop",
        Algorithm::HierMesh => "mesh inside nodes; between nodes every pair of nodes directly, on all rails",
        Algorithm::HierRing => "mesh inside nodes; between nodes a ring on each rail",
        Algorithm::HierLog => "mesh inside nodes; between nodes steps at distances 1, 2, 4, .. on each rail",
        Algorithm::HierRecursive => "mesh inside nodes; between nodes halving and doubling on each rail",
        Algorithm::HierTree => "mesh inside nodes; between nodes two binary trees on each rail",
        Algorithm::HierPublish => {
            "shared memory inside nodes; between nodes every node sends all its data to every other node"
        }
    }
}

/// Summarizes a program: `3 pipelines, 12 steps (4 send, 8 receive), 5 channels`.
fn summary(program: &Program) -> String {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for timed in program.pipelines.iter().flatten() {
        let kind = match timed.step {
            Step::Send { .. } => "send",
            Step::Receive { forward: None, .. } => "receive",
            Step::Receive { .. } => "receive and forward",
            Step::Reduce { .. } => "reduce",
            Step::Copy { .. } => "copy",
        };
        *kinds.entry(kind).or_default() += 1;
    }
    let steps: usize = kinds.values().sum();
    let kinds: Vec<String> = kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    let plural = |n: usize, noun: &str| format!("{n} {noun}{}", if n == 1 { "" } else { "s" });
    format!(
        "{}, {} ({}), {}",
        plural(program.pipelines.len(), "pipeline"),
        plural(steps, "step"),
        kinds.join(", "),
        plural(program.channels.len(), "channel")
    )
}

/// Returns the longest waits of the critical path, in the order of time.
fn hops(run: &Run) -> Vec<String> {
    const SHOWN: usize = 8;
    let path = &run.outcome.path;
    let mut longest: Vec<usize> = (0..path.len()).collect();
    let length = |i: usize| path[i].end - path[i].begin;
    longest.sort_by(|&a, &b| length(b).total_cmp(&length(a)));
    longest.truncate(SHOWN);
    longest.sort_unstable();
    let line = |i: usize| {
        let step = &path[i];
        let on = step.on.map_or(String::new(), |rank| format!(" from rank {rank}"));
        let queue = step.out_queue + step.in_queue;
        let queue = match queue > 0.0 {
            true => format!(", {:.1} us of it in the queue of a port", queue * 1e6),
            false => String::new(),
        };
        let (begin, end) = (step.begin * 1e6, step.end * 1e6);
        format!(
            "{begin:>9.1} to {end:>9.1} us: rank {} waits for a {}{on}{queue}",
            step.rank,
            step.wait.name()
        )
    };
    let mut lines: Vec<String> = longest.into_iter().map(line).collect();
    if path.len() > SHOWN {
        lines.push(format!("(the longest {SHOWN} of {} waits)", path.len()));
    }
    lines
}
