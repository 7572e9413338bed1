//! `smddp-bench replay`: makes the calls of a recorded job again, with the skew that its ranks had, without its script.

mod clock;
mod dump;
mod ending;
mod player;
mod range;
mod report;
mod script;
mod spec;
mod stand_in;

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
DUMP: what 'smddp status --dump DIR', smddp.dump(FILE) or SMDDP_DUMP_DIR wrote: a file of each rank, or one with all.
As many processes are started here as there are dumps; under torchrun, mpirun or srun each process is a rank of them.
Each rank makes each call as late after the one before as it was recorded: what it computed is a pause now. Pauses of all
ranks together are shortened to a second. The settings are those of this environment; the job's are not in a dump.

A group that ended with an error is held against what the replay ends with: the kind of the error, the call's number, the
calls that differ or the ranks that are missed. A rank that never came does not come here either; it may have no dump.

Columns: 'median' is a rank's time for a call, its waiting for late ranks included; 'last' is that of the rank that came
last, the call itself; 'predicted' is the simulator's, on --cluster.

Exit status: 0 all calls were made as recorded, 1 a group ended with an error (as recorded or not) or did not end with
the recorded one, 2 a command line or a dump that makes no sense.";

/// In which all ranks begin at once.
const MEETING: &str = "smddp-bench replay";

/// Ranks that start on a busy machine are not late calls.
const STARTS: Duration = Duration::from_secs(120);
const SLOWEST: f64 = 0.001;

#[derive(Debug, Parser)]
#[command(name = "smddp-bench replay", about = "Makes the calls of a recorded job again, without its script",
          after_help = AFTER_HELP, args_override_self = true)]
pub(crate) struct Cli {
    /// Dumps of the job's ranks
    #[arg(value_name = "DUMP", required = true)]
    pub dumps: Vec<PathBuf>,
    /// Only this group; may be given again
    #[arg(long, value_name = "NAME")]
    pub group: Vec<String>,
    /// How many times as quick as recorded
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub speed: f64,
    /// No pauses: each call as soon as the one before lets it
    #[arg(long, action = ArgAction::SetTrue, conflicts_with = "speed")]
    pub no_skew: bool,
    /// Give up when a call takes longer
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 120.0)]
    pub timeout: f64,
    /// What is predicted for: p4d, p5, sockets, or a TOML file
    #[arg(long, value_name = "NAME|FILE", default_value = "sockets")]
    pub cluster: String,
    /// Write the figures to this file as JSON, too
    #[arg(short = 'J', long = "json", value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Start all ranks here, also under torchrun, mpirun or srun
    #[arg(long, action = ArgAction::SetTrue)]
    pub here: bool,
    /// Port on which the ranks meet, where something else started them
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// Set by the parent for the ranks that it starts: its store
    #[arg(long, hide = true, value_name = "HOST:PORT")]
    pub store: Option<String>,
}

impl Cli {
    fn speed(&self) -> f64 {
        if self.no_skew { f64::INFINITY } else { self.speed }
    }

    fn timeout(&self) -> Result<Duration> {
        let time = Duration::try_from_secs_f64(self.timeout).ok().filter(|time| !time.is_zero());
        time.ok_or_else(|| Error::Usage(format!("--timeout {} is not a time in seconds", self.timeout)))
    }
}

pub(crate) fn run(cli: &Cli, args: &[String], spawn: &[String]) -> Result<i32> {
    let timeout = cli.timeout()?;
    if !(SLOWEST..).contains(&cli.speed) {
        return Err(Error::Usage(format!("--speed {} is not a factor from {SLOWEST} on", cli.speed)));
    }
    let dumps = dump::read(&cli.dumps)?;
    let messages: usize = dumps.iter().flat_map(|dump| &dump.groups).map(|group| group.messages.len()).sum();
    let mut notes = Vec::new();
    if messages > 0 {
        notes.push(format!("{messages} calls of send and recv are not replayed"));
    }
    let processes = stand_in::added(dumps, &mut notes);
    let mut script = Script::new(&processes, &cli.group, notes)?;
    let cluster = crate::cluster_file::load(&cli.cluster)?;
    if cli.store.is_some() {
        launch::follow_parent()?;
    }
    let get = |name: &str| std::env::var(name).ok();
    let launched = match cli.here && cli.store.is_none() {
        true => LaunchEnvironment::single(),
        false => LaunchEnvironment::detect(&get, cli.port, std::os::unix::process::parent_id())?,
    };
    if cli.store.is_none() && launched.address.is_none() {
        let most = |process: &Process| {
            process.groups.iter().filter_map(|g| Some(g.operations.as_ref()?.len())).max().unwrap_or(0)
        };
        // Its own recorder tells what the replay was like, and has to keep all of it.
        let kept = processes.iter().map(most).max().unwrap_or(0).max(64) + 8;
        let settings = [("SMDDP_RECORDER", kept.to_string())];
        return launch::launch_with(processes.len() as u32, spawn, args, &settings);
    }
    if launched.size != processes.len() {
        return Err(Error::Usage(format!(
            "{} ranks were started for the {} of the dumps (--here starts them on this machine)",
            launched.size,
            processes.len()
        )));
    }
    if script.longest().div_f64(cli.speed()) > timeout {
        let seconds = script.longest().as_secs_f64();
        script.notes.push(format!("a call took {seconds:.1} s when it was recorded, longer than --timeout"));
    }
    let told = play(cli, &script, &launched, timeout)?;
    let Some(told) = told else { return Ok(0) };
    let report = Report::new(&processes, &script, &told, &cluster)?;
    report.print(cli, &processes)?;
    if let Some(path) = &cli.json {
        report.write(cli, path)?;
    }
    Ok(report.status())
}

/// What the recorders of all ranks have of the replay; at rank 0 alone.
fn play(
    cli: &Cli,
    script: &Script,
    launched: &LaunchEnvironment,
    timeout: Duration,
) -> Result<Option<Vec<Process>>> {
    let (rank, size) = (launched.rank, launched.size);
    let begun = Instant::now();
    let patience = timeout.max(STARTS);
    let meeting = Rendezvous::open(launched, cli.store.as_deref(), smddp_core::after(begun, patience))?;
    let values = &meeting.values;
    let make = |which: usize, name: &str, rank: usize, size: usize| {
        let store = PrefixStore { values, prefix: which.to_string() };
        let comm = Communicator::make(&store, ("replay", name), rank, size, patience, None)?;
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
    let all = make(script.groups.len(), MEETING, rank, size)?;
    all.barrier(Options::default())?;
    all.close();
    let player = Player { comms: &comms, speed: cli.speed(), timeout };
    let played = player.play(&script.steps[rank]);
    // Who is through is still there for those who wait, until all have given up or are through.
    let lasts = script.lasts().div_f64(cli.speed().min(1.0)) + Duration::from_secs(30);
    let deadline = smddp_core::after(Instant::now(), timeout.saturating_mul(2).saturating_add(lasts));
    meet(values, "through", launched, b"", deadline)?;
    let dumped = smddp_core::dump();
    comms.values().for_each(Communicator::close);
    played?;
    let told = meet(values, "told", launched, dumped.as_bytes(), deadline)?;
    meeting.end(launched, deadline)?;
    if rank != 0 {
        return Ok(None);
    }
    let mut all = Vec::new();
    for text in told {
        let text = String::from_utf8_lossy(&text);
        all.extend(
            dump::parse(&text).map_err(|reason| Error::Rendezvous(format!("a rank's record: {reason}")))?,
        );
    }
    Ok(Some(all))
}

/// Every rank's `mine`, when all have come so far; rank 0 alone reads them.
fn meet(
    values: &StoreClient,
    what: &str,
    me: &LaunchEnvironment,
    mine: &[u8],
    deadline: Instant,
) -> Result<Vec<Vec<u8>>> {
    use smddp_core::Store;
    values.set(&format!("{what}/{}", me.rank), mine)?;
    let all = format!("{what}/all");
    let mut found = Vec::new();
    if me.rank == 0 {
        for rank in 0..me.size {
            let lost = || Error::Rendezvous(format!("rank {rank} did not come to the end of the replay"));
            found.push(values.wait(&format!("{what}/{rank}"), deadline)?.ok_or_else(lost)?);
        }
        values.set(&all, b"")?;
    } else if values.wait(&all, deadline)?.is_none() {
        return Err(Error::Rendezvous("rank 0 did not come to the end of the replay".into()));
    }
    Ok(found)
}
