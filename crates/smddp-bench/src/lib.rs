//! Benchmark and correctness test of smddp's collectives, with the output format of nccl-tests.
//!
//! `smddp-bench all_gather --nproc 2 -b 8 -e 256M -f 8` starts two ranks on this machine. Without `--nproc` the process is
//! one rank that torchrun, mpirun or srun started. Rank 0 prints.

#![deny(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc, clippy::missing_panics_doc)]

#[allow(unsafe_code)] // The only owner of raw memory.
mod buffers;
#[allow(unsafe_code)] // The only code that passes pointers to the engine.
mod calls;
mod cases;
mod cli;
mod clock;
mod cluster_file;
mod compare;
mod compat_options;
mod device;
mod drawing;
mod error;
mod explain;
mod format;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod info;
mod json;
mod launch;
mod messages;
mod op;
mod osu;
mod overlap;
mod pages;
mod pattern;
mod periter;
mod pin;
mod plot;
mod progress;
mod ranks;
mod replay;
mod row;
mod setup;
mod simulate;
mod simulated_call;
mod sizes;
mod split;
mod startup;
mod svg;
mod sweep;
mod table;
mod task;
mod tune;
mod types;
#[cfg(feature = "lab")]
#[path = "../lab/worker.rs"]
mod worker;

use std::io::{IsTerminal, stderr, stdout};

use clap::Parser;
use smddp_rendezvous::LaunchEnvironment;

use calls::BenchGroup;
use cli::Cli;
use error::{Error, Result};
use json::Report;
use progress::Progress;
use ranks::Ranks;
use row::{Row, Summary};
use split::Split;
use table::Table;
use task::Task;

/// Call and name of the group in errors.
const NAME: (&str, &str) = ("smddp-bench", "bench");

/// Runs the program and returns the exit status: 0 success, 1 wrong data or a failure, 2 an invalid command line.
///
/// `args` are the arguments without the program's name. `spawn` is the command that starts one rank of `--nproc N`, to
/// which `args` are appended: the executable itself, or `[python, "-m", "smddp.tools.cli", "bench"]`. The calling process
/// should have the default SIGINT action (Python replaces it), since the ranks exit when their parent dies.
pub fn main_from(args: Vec<String>, spawn: &[String]) -> i32 {
    if let Some(status) = subcommand(&args, spawn) {
        return status;
    }
    let cli = match Cli::try_parse_from(std::iter::once("smddp-bench").chain(args.iter().map(String::as_str)))
    {
        Ok(cli) => cli,
        Err(error) => return usage(&error, "smddp-bench", &args),
    };
    let mut rank = None;
    match dispatch(&cli, &args, spawn, &mut rank) {
        Ok(status) => status,
        Err(error) => failed(&error, rank),
    }
}

/// Runs a subcommand with separate options: `simulate`, `explain`, `tune`, `compare`, `replay`, `completion`, `man`. Returns
/// `None` for other commands.
fn subcommand(args: &[String], spawn: &[String]) -> Option<i32> {
    let (name, rest) = args.split_first()?;
    let rest = || std::iter::once(format!("smddp-bench {name}")).chain(rest.iter().cloned());
    let parsed = match name.as_str() {
        "simulate" => simulate::Cli::try_parse_from(rest()).map(|cli| simulate::run(&cli)),
        "explain" => explain::Cli::try_parse_from(rest()).map(|cli| explain::run(&cli)),
        "tune" => tune::Cli::try_parse_from(rest()).map(|cli| tune::run(&cli, spawn)),
        "compare" => compare::Cli::try_parse_from(rest()).map(|cli| compare::run(&cli)),
        "replay" => replay::Cli::try_parse_from(rest()).map(|cli| replay::run(&cli, args, spawn)),
        "completion" => pages::Completion::try_parse_from(rest()).map(|cli| pages::complete(&cli)),
        "man" => pages::Manual::try_parse_from(rest()).map(|cli| pages::manual(&cli)),
        _ => return None,
    };
    Some(match parsed {
        Ok(Ok(status)) => status,
        Ok(Err(error)) => failed(&error, None),
        Err(error) => usage(&error, &format!("smddp-bench {name}"), args),
    })
}

/// Prints the help, or an invalid command line in one line, and returns the exit status.
fn usage(error: &clap::Error, program: &str, args: &[String]) -> i32 {
    if !error.use_stderr() {
        let _ = error.print();
        return error.exit_code();
    }
    let text = error.render().to_string();
    let text = text.split("\n\nUsage:").next().unwrap_or_default();
    let text = text.split("\n\nFor more information").next().unwrap_or_default();
    let paragraphs = text.split("\n\n").map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "));
    let text = paragraphs.collect::<Vec<_>>().join("; ");
    // clap reads mpirun's -np N as -n p, followed by N.
    let hint = if args.iter().any(|arg| arg == "-np") { "; --nproc N starts N ranks" } else { "" };
    eprintln!("{program}: {}{hint} (see {program} --help)", text.trim_start_matches("error: "));
    error.exit_code()
}

/// Prints the error and returns its exit status.
fn failed(error: &Error, rank: Option<usize>) -> i32 {
    match rank {
        Some(rank) => eprintln!("smddp-bench: rank {rank}: {error}"),
        None => eprintln!("smddp-bench: {error}"),
    }
    if matches!(error, Error::Usage(_)) { 2 } else { 1 }
}

/// Runs the task. Sets `rank` once it is known.
fn dispatch(cli: &Cli, args: &[String], spawn: &[String], rank: &mut Option<usize>) -> Result<i32> {
    cli.validate()?;
    if cli.task == Task::Info {
        return info::print().map(|()| 0);
    }
    let get = |name: &str| std::env::var(name).ok();
    let split = match cli.task {
        Task::Measure(_) | Task::Overlap(_) => Split::from_env(&get)?,
        _ => None,
    };
    if let (Some(count), None) = (cli.nproc, &cli.store) {
        cli.validate_groups(&groups(split, count as usize))?;
        return launch::launch(count, spawn, args);
    }
    if cli.store.is_some() {
        launch::follow_parent()?;
    }
    let launched = LaunchEnvironment::detect(&get, cli.port, std::os::unix::process::parent_id())?;
    *rank = Some(launched.rank);
    match cli.task {
        Task::Info => Ok(0),
        #[cfg(feature = "lab")]
        Task::Worker => worker::run(cli, &launched).map(|()| 0),
        Task::Startup => startup::run(cli, &launched).map(|()| 0),
        Task::Measure(_) | Task::Messages(_) | Task::Overlap(_) => {
            measure(cli, args, split, &launched).map(|()| 0)
        }
    }
}

/// Returns the sizes of the groups.
fn groups(split: Option<Split>, ranks: usize) -> Vec<usize> {
    split.map_or_else(|| vec![ranks], |split| split.sizes(ranks))
}

/// Returns the number of rows of one cycle.
fn rows(ranks: Ranks<'_>, cli: &Cli) -> usize {
    match cli.task {
        Task::Measure(op) | Task::Overlap(op) => cases::count(ranks, op, cli),
        _ => cli.sizes(1).len(),
    }
}

fn measure(cli: &Cli, args: &[String], split: Option<Split>, launched: &LaunchEnvironment) -> Result<()> {
    let groups = groups(split, launched.size);
    cli.validate_groups(&groups)?;
    // The rank, like the local rank, differs between the ranks of a host.
    let local_rank = launched.local_rank.unwrap_or(launched.rank);
    if cli.pin {
        pin::pin(local_rank)?;
    }
    let joined = smddp_rendezvous::join(NAME, launched, cli.store.as_deref(), cli.timeout())?;
    let world = BenchGroup::new(joined.comm);
    let color = split.map(|split| split.color(world.rank()));
    let part = color.map(|color| world.split(color)).transpose()?;
    let (devices, one_host) = device::gather(&world, local_rank, color.unwrap_or(0))?;
    let prints = world.rank() == 0;
    let mut table = Table::new(stdout(), cli);
    let mut report = match &cli.json {
        Some(path) if prints => Some(Report::create(path, cli, args, &devices)?),
        _ => None,
    };
    if prints {
        table.begin(cli, &devices)?;
    }
    let ranks = Ranks {
        world: &world,
        group: part.as_ref().unwrap_or(&world),
        smallest: groups.into_iter().min().unwrap_or(1),
        one_host,
    };
    let mut progress = Progress::new(
        (prints && stderr().is_terminal()).then(stderr),
        (cli.cycles > 0).then(|| cli.cycles * rows(ranks, cli)),
    );
    let mut report_row = |row: &Row| {
        if let Some(report) = &mut report {
            report.row(row);
        }
        progress.clear();
        if prints {
            table.row(row)?;
        }
        progress.next();
        Ok(())
    };
    let summary = match cli.task {
        Task::Measure(op) => sweep::measure(ranks, op, cli, &mut report_row)?,
        Task::Messages(test) => messages::measure(&world, test, cli, &mut report_row)?,
        Task::Overlap(op) => overlap::measure(ranks, op, cli, &mut report_row)?,
        _ => Summary::default(),
    };
    drop(progress);
    if cli.memory == 1 {
        let memory = world.gather_bytes(&mut device::peak_memory().to_ne_bytes())?;
        if prints {
            let each: Vec<u64> =
                memory.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
            table.memory(&each)?;
        }
    }
    if prints {
        table.end(&summary)?;
    }
    if let Some(report) = report {
        report.end(&summary)?;
    }
    if let Some(part) = part {
        part.comm().close();
    }
    world.comm().close();
    if summary.failed == 0 { Ok(()) } else { Err(Error::WrongData(summary.failed)) }
}
