//! `startup`: what it takes to make a group of all ranks, and what a rank holds afterwards.
//!
//! A rank's time begins with its process where the launcher of this program started it, else when it looks for the others.

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use smddp_rendezvous::LaunchEnvironment;

use crate::NAME;
use crate::calls::Team;
use crate::cli::Cli;
use crate::error::{Error, Result};

/// Set by the launcher: nanoseconds since the epoch.
pub(crate) const BEGAN: &str = "BENCH_BEGAN";

/// Name with its unit, and digits, of each figure of a rank.
const FIGURES: [(&str, usize); 7] = [
    ("launched to all ranks' group (s)", 3),
    ("of it the group (s)", 3),
    ("first all_reduce (s)", 3),
    ("bytes to and from the store", 0),
    ("descriptors", 0),
    ("threads", 0),
    ("memory of its own (MiB)", 1),
];

pub(crate) fn since_the_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

pub(crate) fn run(cli: &Cli, launched: &LaunchEnvironment) -> Result<()> {
    let here = since_the_epoch();
    let began = std::env::var(BEGAN).ok().and_then(|text| text.parse().ok()).map(Duration::from_nanos);
    let joined = smddp_rendezvous::join(NAME, launched, cli.store.as_deref(), cli.timeout())?;
    let (team, traffic) = (Team::new(joined.comm), joined.traffic);
    let made = since_the_epoch();
    team.sum_u64(1)?;
    let used = since_the_epoch();
    // Not a number where /proc is not mounted.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(f64::NAN)
    };
    let descriptors = std::fs::read_dir("/proc/self/fd").map_or(f64::NAN, |found| found.count() as f64);
    let seconds = |from: Duration, to: Duration| to.saturating_sub(from).as_secs_f64();
    let mine = [
        seconds(began.unwrap_or(here), made),
        seconds(here, made),
        seconds(made, used),
        traffic as f64,
        // Without the one that reads the others.
        descriptors - 1.0,
        of("Threads"),
        of("RssAnon") / 1024.0,
    ];
    print(&team, &mine)?;
    team.comm().close();
    Ok(())
}

fn print(team: &Team, mine: &[f64; FIGURES.len()]) -> Result<()> {
    let mut bytes: Vec<u8> = mine.iter().flat_map(|figure| figure.to_ne_bytes()).collect();
    let all = team.gather_bytes(&mut bytes)?;
    if team.rank() != 0 {
        return Ok(());
    }
    let figures: Vec<f64> =
        all.chunks_exact(8).map(|bytes| f64::from_ne_bytes(bytes.try_into().unwrap_or_default())).collect();
    let mut out = std::io::stdout().lock();
    let written = (|| {
        writeln!(out, "# smddp-bench startup: {} ranks, {}", team.size(), team.comm().transport())?;
        writeln!(out, "# {:<34} {:>10} {:>10} {:>10}", "of each rank", "least", "median", "most")?;
        for (column, (name, digits)) in FIGURES.iter().enumerate() {
            let mut of: Vec<f64> = figures.iter().skip(column).step_by(FIGURES.len()).copied().collect();
            of.sort_by(f64::total_cmp);
            let [least, median, most] = [of[0], of[of.len() / 2], of[of.len() - 1]];
            writeln!(out, "  {name:<34} {least:>10.digits$} {median:>10.digits$} {most:>10.digits$}")?;
        }
        out.flush()
    })();
    written.map_err(Error::io("writing the table"))
}
