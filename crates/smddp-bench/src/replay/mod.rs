//! `smddp-bench replay`: repeats the calls of a recorded job with the recorded skew of its ranks, without the job's script.

mod clock;
mod dump;
mod group_error;
mod placeholder_ranks;
mod player;
mod range;
mod report;
mod script;
mod spec;

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{ArgAction, Parser};
use smddp_core::{Communicator, Options};
use smddp_rendezvous::{LaunchEnvironment, PrefixStore, Rendezvous, StoreClient};

use self::dump::Process;
use self::player::Player;
use self::report::Report;
use self::script::Script;
use crate::error::{Error, Result};
use crate::launch;

const AFTER_HELP: &str = "\
DUMP: a file of 'smddp status --dump DIR', smddp.dump(FILE) or SMDDP_DUMP_DIR, with the dump of one rank or of all ranks, or a
folder of such files.
One process for each dump is started on this machine; under torchrun, mpirun or srun each process is one of the ranks.
Each rank makes each call with the recorded delay after the previous call: computations become pauses. Common pauses of all
ranks are shortened to one second. The settings are those of the current environment; a dump does not contain settings.

A recorded group error is compared with the error of the replay: the kind of the error, the number of the call, and the
mismatched calls or the missing ranks. A rank that never arrived does not arrive in the replay either; it may have no dump.
Dumps of a job that hangs contain no error: the replay then reproduces a call that had waited for a second or longer.

Columns: 'median' is a rank's time of a call, including the wait for late ranks; 'last' is the time of the rank that arrived
last, which is the call itself; 'predicted' is the time of the simulator on --cluster.

Exit status: 0 all calls completed as recorded, 1 a group failed (as recorded or not) or did not fail as recorded, 2 an invalid
command line or dump.";

/// Name of the group whose barrier synchronizes the start of all ranks.
const START_GROUP: &str = "smddp-bench replay";

/// Minimum time limit of the start, since ranks start slowly on a busy machine.
const MIN_START_TIMEOUT: Duration = Duration::from_secs(120);
const MIN_SPEED: f64 = 0.001;

#[derive(Debug, Parser)]
#[command(name = "smddp-bench replay", about = "Repeats the calls of a recorded job, without its script",
          after_help = AFTER_HELP, args_override_self = true)]
pub(crate) struct Cli {
    /// Dumps of the job's ranks, or their folder
    #[arg(value_name = "DUMP", required = true)]
    pub dumps: Vec<PathBuf>,
    /// Group to replay; may be repeated (default: all)
    #[arg(long, value_name = "NAME")]
    pub group: Vec<String>,
    /// Speedup of the recorded delays
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub speed: f64,
    /// Make each call as early as possible, without delays
    #[arg(long, action = ArgAction::SetTrue, conflicts_with = "speed")]
    pub no_skew: bool,
    /// Time limit of a call
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 120.0)]
    pub timeout: f64,
    /// Cluster of the predicted times: p4d, p5, sockets, or a TOML file
    #[arg(long, value_name = "NAME|FILE", default_value = "sockets")]
    pub cluster: String,
    /// Write the figures to this file as JSON in addition
    #[arg(short = 'J', long = "json", value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Start all ranks on this machine, also under torchrun, mpirun or srun
    #[arg(long, action = ArgAction::SetTrue)]
    pub here: bool,
    /// Port of the rendezvous for ranks of another launcher
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// Address of the parent's store, set by the parent of started ranks
    #[arg(long, hide = true, value_name = "HOST:PORT")]
    pub store: Option<String>,
}

impl Cli {
    fn speed(&self) -> f64 {
        if self.no_skew { f64::INFINITY } else { self.speed }
    }

    fn timeout(&self) -> Result<Duration> {
        let time = Duration::try_from_secs_f64(self.timeout).ok().filter(|time| !time.is_zero());
        time.ok_or_else(|| {
            Error::Usage(format!("--timeout {}: expected a positive number of seconds", self.timeout))
        })
    }
}

pub(crate) fn run(cli: &Cli, args: &[String], spawn: &[String]) -> Result<i32> {
    let timeout = cli.timeout()?;
    if !(MIN_SPEED..).contains(&cli.speed) {
        return Err(Error::Usage(format!(
            "--speed {}: expected a factor of at least {MIN_SPEED}",
            cli.speed
        )));
    }
    let get = |name: &str| std::env::var(name).ok();
    let launched = match cli.here && cli.store.is_none() {
        true => LaunchEnvironment::single(),
        false => LaunchEnvironment::detect(&get, cli.port, std::os::unix::process::parent_id())?,
    };
    if let (None, 0, Some(path)) = (&cli.store, launched.rank, &cli.json) {
        crate::simulate::check_writable(path)?;
    }
    let dumps = dump::read(&cli.dumps)?;
    let messages: usize = dumps.iter().flat_map(|dump| &dump.groups).map(|group| group.messages.len()).sum();
    let mut notes = Vec::new();
    if messages > 0 {
        notes.push(format!("{messages} calls of send and recv are not replayed"));
    }
    let processes = placeholder_ranks::add(dumps, &mut notes);
    let mut script = Script::new(&processes, &cli.group, notes)?;
    let cluster = crate::cluster_file::load(&cli.cluster)?;
    if cli.store.is_some() {
        launch::follow_parent()?;
    }
    if cli.store.is_none() && launched.address.is_none() {
        let most = |process: &Process| {
            process.groups.iter().filter_map(|g| Some(g.operations.as_ref()?.len())).max().unwrap_or(0)
        };
        // The report uses the recorder of the replay, which must keep all calls.
        let kept = processes.iter().map(most).max().unwrap_or(0).max(64) + 8;
        let settings = [("SMDDP_RECORDER", kept.to_string())];
        return launch::launch_with(processes.len() as u32, spawn, args, &settings);
    }
    if launched.size != processes.len() {
        return Err(Error::Usage(format!(
            "{} ranks were started, but the dumps contain {} (--here starts them on this machine)",
            launched.size,
            processes.len()
        )));
    }
    if script.longest().div_f64(cli.speed()) > timeout {
        let seconds = script.longest().as_secs_f64();
        script.notes.push(format!("a recorded call took {seconds:.1} s, longer than --timeout"));
    }
    let replayed = play(cli, &script, &launched, timeout)?;
    let Some(replayed) = replayed else { return Ok(0) };
    let report = Report::new(&processes, &script, &replayed, &cluster)?;
    report.print(cli, &processes)?;
    if let Some(path) = &cli.json {
        report.write(cli, path)?;
    }
    Ok(report.status())
}

/// Runs the replay on this rank. Returns the dumps of all ranks on rank 0, and `None` on other ranks.
fn play(
    cli: &Cli,
    script: &Script,
    launched: &LaunchEnvironment,
    timeout: Duration,
) -> Result<Option<Vec<Process>>> {
    let (rank, size) = (launched.rank, launched.size);
    let begun = Instant::now();
    let start_timeout = timeout.max(MIN_START_TIMEOUT);
    let rendezvous =
        Rendezvous::open(launched, cli.store.as_deref(), smddp_core::after(begun, start_timeout))?;
    let values = &rendezvous.values;
    let make = |which: usize, name: &str, rank: usize, size: usize| {
        let store = PrefixStore { values, prefix: which.to_string() };
        let comm = Communicator::make(&store, ("replay", name), rank, size, start_timeout, None)?;
        if which < script.groups.len() {
            comm.set_timeout(timeout);
        }
        Ok::<_, Error>(comm)
    };
    let mut comms = HashMap::new();
    for (at, group) in script.groups.iter().enumerate() {
        if let Some(mine) = group.members.iter().position(|&member| member == rank) {
            comms.insert(at, make(at, &group.name, mine, group.size)?);
        }
    }
    let all = make(script.groups.len(), START_GROUP, rank, size)?;
    all.barrier(Options::default())?;
    all.close();
    let player = Player { comms: &comms, speed: cli.speed(), timeout };
    let played = player.play(&script.steps[rank]);
    // A rank that is done stays in its groups until all ranks are done or have failed.
    let duration = script.duration().div_f64(cli.speed().min(1.0)) + Duration::from_secs(30);
    let deadline = smddp_core::after(Instant::now(), timeout.saturating_mul(2).saturating_add(duration));
    exchange(values, "done", launched, b"", deadline)?;
    let dumped = smddp_core::dump();
    comms.values().for_each(Communicator::close);
    played?;
    let dumps = exchange(values, "dump", launched, dumped.as_bytes(), deadline)?;
    rendezvous.end(launched, deadline)?;
    if rank != 0 {
        return Ok(None);
    }
    let mut all = Vec::new();
    for text in dumps {
        let text = String::from_utf8_lossy(&text);
        all.extend(
            dump::parse(&text)
                .map_err(|reason| Error::Rendezvous(format!("invalid dump of a rank: {reason}")))?,
        );
    }
    Ok(Some(all))
}

/// Waits until all ranks have published their value for `key`. Returns all values on rank 0.
fn exchange(
    values: &StoreClient,
    key: &str,
    me: &LaunchEnvironment,
    mine: &[u8],
    deadline: Instant,
) -> Result<Vec<Vec<u8>>> {
    use smddp_core::Store;
    values.set(&format!("{key}/{}", me.rank), mine)?;
    let all = format!("{key}/all");
    let mut found = Vec::new();
    if me.rank == 0 {
        for rank in 0..me.size {
            let lost = || Error::Rendezvous(format!("rank {rank} did not reach the end of the replay"));
            found.push(values.wait(&format!("{key}/{rank}"), deadline)?.ok_or_else(lost)?);
        }
        values.set(&all, b"")?;
    } else if values.wait(&all, deadline)?.is_none() {
        return Err(Error::Rendezvous("rank 0 did not reach the end of the replay".into()));
    }
    Ok(found)
}
