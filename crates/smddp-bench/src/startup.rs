//! `startup`: time of creating a group of all ranks, and resources of a rank afterwards.
//!
//! A rank's time begins with its process if this program's launcher started it, otherwise with the rendezvous.

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use smddp_rendezvous::LaunchEnvironment;

use crate::NAME;
use crate::calls::BenchGroup;
use crate::cli::Cli;
use crate::error::{Error, Result};

/// Start time in nanoseconds since the epoch, set by the launcher.
pub(crate) const BEGAN: &str = "BENCH_BEGAN";

/// Name with unit, and number of decimals, of each figure of a rank.
const FIGURES: [(&str, usize); 7] = [
    ("launch to group of all ranks (s)", 3),
    ("part of the group (s)", 3),
    ("first all_reduce (s)", 3),
    ("bytes to and from the store", 0),
    ("descriptors", 0),
    ("threads", 0),
    ("private memory (MiB)", 1),
];

pub(crate) fn since_the_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

pub(crate) fn run(cli: &Cli, launched: &LaunchEnvironment) -> Result<()> {
    let here = since_the_epoch();
    let began = std::env::var(BEGAN).ok().and_then(|text| text.parse().ok()).map(Duration::from_nanos);
    let joined = smddp_rendezvous::join(NAME, launched, cli.store.as_deref(), cli.timeout())?;
    let (group, traffic) = (BenchGroup::new(joined.comm), joined.traffic);
    let made = since_the_epoch();
    group.sum_u64(1)?;
    let used = since_the_epoch();
    // Figures are NaN if /proc is not mounted.
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
        // Without the descriptor that reads the directory.
        descriptors - 1.0,
        of("Threads"),
        of("RssAnon") / 1024.0,
    ];
    print(&group, &mine)?;
    group.comm().close();
    Ok(())
}

fn print(group: &BenchGroup, mine: &[f64; FIGURES.len()]) -> Result<()> {
    let mut bytes: Vec<u8> = mine.iter().flat_map(|figure| figure.to_ne_bytes()).collect();
    let all = group.gather_bytes(&mut bytes)?;
    if group.rank() != 0 {
        return Ok(());
    }
    let figures: Vec<f64> =
        all.chunks_exact(8).map(|bytes| f64::from_ne_bytes(bytes.try_into().unwrap_or_default())).collect();
    let mut out = std::io::stdout().lock();
    let written = (|| {
        writeln!(out, "# smddp-bench startup: {} ranks, {}", group.size(), group.comm().transport())?;
        writeln!(out, "# {:<34} {:>10} {:>10} {:>10}", "per rank", "minimum", "median", "maximum")?;
        for (column, (name, digits)) in FIGURES.iter().enumerate() {
            let mut of: Vec<f64> = figures.iter().skip(column).step_by(FIGURES.len()).copied().collect();
            of.sort_unstable_by(f64::total_cmp);
            let [minimum, median, maximum] = [of[0], of[of.len() / 2], of[of.len() - 1]];
            writeln!(out, "  {name:<34} {minimum:>10.digits$} {median:>10.digits$} {maximum:>10.digits$}")?;
        }
        out.flush()
    })();
    written.map_err(Error::io("writing the table"))
}
