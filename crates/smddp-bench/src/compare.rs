//! `smddp-bench compare A.json B.json`: compares two runs row by row. Reads files of smddp-bench and nccl-tests (`-J`).

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Parser;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::format::figure;

const AFTER_HELP: &str = "\
Compares rows of equal size, type, op and root. The ratio is B's time divided by A's time. A row is 'faster' or 'slower' if the
difference exceeds --tolerance and, for runs that timed each iteration (-I 1), twice the standard error of both.

Exit status: 0 no row of B is slower or wrong, 1 a row is slower or wrong, 2 the files cannot be compared.";

#[derive(Debug, Parser)]
#[command(name = "smddp-bench compare", about = "Compares the -J files of two runs", after_help = AFTER_HELP)]
pub(crate) struct Cli {
    /// Reference run
    #[arg(value_name = "A.json")]
    pub a: PathBuf,
    /// Run to compare with the reference
    #[arg(value_name = "B.json")]
    pub b: PathBuf,
    /// Relative difference up to which times are the same
    #[arg(long, value_name = "FRACTION", default_value_t = 0.05)]
    pub tolerance: f64,
}

#[derive(Debug, Deserialize)]
struct Run {
    #[serde(default)]
    collective: Option<String>,
    #[serde(default)]
    start_time: Option<String>,
    #[serde(default)]
    config: RunConfig,
    results: Vec<Line>,
}

#[derive(Debug, Deserialize)]
struct RunConfig {
    /// False if `in_place` repeats `out_of_place`. nccl-tests always measures both.
    #[serde(default = "measured")]
    has_in_place: bool,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self { has_in_place: true }
    }
}

const fn measured() -> bool {
    true
}

#[derive(Debug, Deserialize)]
struct Line {
    size: u64,
    #[serde(rename = "type")]
    dtype: String,
    #[serde(default)]
    redop: Option<String>,
    #[serde(default)]
    root: Option<i64>,
    out_of_place: Half,
    in_place: Half,
    #[serde(default)]
    out_of_place_per_iter: Option<Iterations>,
    #[serde(default)]
    in_place_per_iter: Option<Iterations>,
}

#[derive(Debug, Deserialize)]
struct Half {
    /// Microseconds.
    time: f64,
    #[serde(default)]
    nwrong: Option<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
struct Iterations {
    #[serde(default)]
    times_us: Vec<f64>,
    cv_pct: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Same,
    Faster,
    Slower,
    Wrong,
}

impl Verdict {
    const fn text(self) -> &'static str {
        match self {
            Verdict::Same => "same",
            Verdict::Faster => "faster",
            Verdict::Slower => "SLOWER",
            Verdict::Wrong => "WRONG",
        }
    }
}

impl Half {
    /// Returns true if the check found wrong elements. Unchecked rows have none.
    fn is_wrong(&self) -> bool {
        let text = self.nwrong.as_ref().map(|value| value.to_string().trim_matches('"').to_owned());
        text.and_then(|text| text.parse::<f64>().ok()).is_some_and(|wrong| wrong > 0.0)
    }
}

impl Iterations {
    /// Returns the relative standard error of the average.
    fn error(&self) -> f64 {
        self.cv_pct / 100.0 / (self.times_us.len().max(1) as f64).sqrt()
    }
}

/// Returns the time of `b` divided by the time of `a`, and the verdict.
fn compare_times(
    a: (&Half, Option<&Iterations>),
    b: (&Half, Option<&Iterations>),
    tolerance: f64,
) -> (f64, Verdict) {
    let ratio = if a.0.time > 0.0 { b.0.time / a.0.time } else { 1.0 };
    let noise = match (a.1, b.1) {
        (Some(a), Some(b)) => 2.0 * (a.error().powi(2) + b.error().powi(2)).sqrt(),
        _ => 0.0,
    };
    let apart = tolerance.max(noise);
    let verdict = match ratio {
        _ if b.0.is_wrong() => Verdict::Wrong,
        ratio if ratio > 1.0 + apart => Verdict::Slower,
        ratio if ratio < 1.0 / (1.0 + apart) => Verdict::Faster,
        _ => Verdict::Same,
    };
    (ratio, verdict)
}

impl Line {
    fn same_call(&self, other: &Line) -> bool {
        (self.size, &self.dtype, &self.redop, self.root)
            == (other.size, &other.dtype, &other.redop, other.root)
    }
}

/// Prints the table and returns the exit status.
pub(crate) fn run(cli: &Cli) -> Result<i32> {
    if !(cli.tolerance >= 0.0 && cli.tolerance.is_finite()) {
        return Err(Error::Usage(format!("--tolerance {}: expected a fraction such as 0.05", cli.tolerance)));
    }
    let (a, b) = (read(&cli.a)?, read(&cli.b)?);
    if let (Some(one), Some(other)) = (&a.collective, &b.collective)
        && one != other
    {
        return Err(Error::Usage(format!("A measured {one}, but B measured {other}")));
    }
    let (text, bad) = table(cli, &a, &b)?;
    print!("{text}");
    Ok(i32::from(bad))
}

/// Largest file of a run in bytes.
const MAX_RUN: usize = 256 << 20;

fn read(path: &Path) -> Result<Run> {
    let text = smddp_core::files::read_text(path, MAX_RUN)
        .map_err(|error| Error::Usage(format!("reading {}: {error}", path.display())))?;
    serde_json::from_str(&text).map_err(|error| {
        Error::Usage(format!("{} is not a -J file of smddp-bench or nccl-tests: {error}", path.display()))
    })
}

/// Returns the table, and whether a row of the second run is slower or wrong.
fn table(cli: &Cli, a: &Run, b: &Run) -> Result<(String, bool)> {
    let mut text = String::new();
    let mut put = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    for (name, path, run) in [("A", &cli.a, a), ("B", &cli.b, b)] {
        let about = [&run.collective, &run.start_time].into_iter().flatten().map(String::as_str);
        put(format!("# {name}: {} {}", path.display(), about.collect::<Vec<_>>().join(" ")));
    }
    let halves = if a.config.has_in_place && b.config.has_in_place { 2 } else { 1 };
    let half = format!("  {:>7}  {:>7}  {:>5}  {:>7}", "A", "B", "B/A", "verdict").repeat(halves);
    put(format!("# {:>10}  {:>8}  {:>6}  {:>6}{half}", "size", "type", "redop", "root"));
    let in_place = if halves == 2 { format!("{:15}  in place (us)", "") } else { String::new() };
    put(format!("# {:>10}  {:>8}  {:>6}  {:>6}  out of place (us){in_place}", "(B)", "", "", ""));
    let (mut paired, mut counts, mut logs) = (0, [0; 4], 0.0);
    for old in &a.results {
        let Some(new) = b.results.iter().find(|new| new.same_call(old)) else { continue };
        paired += 1;
        let mut line = format!(
            "{:>12}  {:>8}  {:>6}  {:>6}",
            old.size,
            old.dtype,
            old.redop.as_deref().unwrap_or("none"),
            old.root.unwrap_or(-1)
        );
        for (old, new) in [
            (
                (&old.out_of_place, &old.out_of_place_per_iter),
                (&new.out_of_place, &new.out_of_place_per_iter),
            ),
            ((&old.in_place, &old.in_place_per_iter), (&new.in_place, &new.in_place_per_iter)),
        ]
        .into_iter()
        .take(halves)
        {
            let (ratio, verdict) =
                compare_times((old.0, old.1.as_ref()), (new.0, new.1.as_ref()), cli.tolerance);
            counts[verdict as usize] += 1;
            logs += ratio.max(1e-9).ln();
            let times = [figure(old.0.time, 7), figure(new.0.time, 7)];
            let _ = write!(line, "  {}  {}  {ratio:>5.2}  {:>7}", times[0], times[1], verdict.text());
        }
        put(line);
    }
    if paired == 0 {
        return Err(Error::Usage("the two runs have no row in common (size, type, op and root)".into()));
    }
    let unpaired = |run: &Run, other: &Run| {
        run.results.iter().filter(|line| !other.results.iter().any(|each| each.same_call(line))).count()
    };
    let [same, faster, slower, wrong] = counts;
    let (times, what) = (
        halves * paired,
        match halves * paired {
            1 => "row",
            _ if halves == 2 => "halves",
            _ => "rows",
        },
    );
    put(format!(
        "# B/A {:.3} (geometric mean of {times} {what}): {faster} faster, {same} the same, {slower} slower, {wrong} wrong; \
         rows in one run alone: {} of A, {} of B",
        (logs / times as f64).exp(),
        unpaired(a, b),
        unpaired(b, a)
    ));
    Ok((text, slower + wrong > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn half(time: f64, wrong: u64) -> Half {
        Half { time, nwrong: Some(wrong.into()) }
    }

    fn iterations(cv_pct: f64, count: usize) -> Iterations {
        Iterations { times_us: vec![1.0; count], cv_pct }
    }

    #[test]
    fn rows_beyond_the_tolerance_are_faster_or_slower() {
        for (a, b, verdict) in [
            (100.0, 104.0, Verdict::Same),
            (100.0, 96.0, Verdict::Same),
            (100.0, 106.0, Verdict::Slower),
            (100.0, 94.0, Verdict::Faster),
            (0.0, 94.0, Verdict::Same),
        ] {
            assert_eq!(compare_times((&half(a, 0), None), (&half(b, 0), None), 0.05).1, verdict, "{a} {b}");
        }
        assert_eq!(compare_times((&half(1.0, 0), None), (&half(0.5, 3), None), 0.05).1, Verdict::Wrong);
    }

    #[test]
    fn noisy_times_have_a_larger_tolerance() {
        let (a, b) = (half(100.0, 0), half(115.0, 0));
        let wide = iterations(40.0, 16);
        assert_eq!(compare_times((&a, Some(&wide)), (&b, Some(&wide)), 0.05).1, Verdict::Same);
        let narrow = iterations(2.0, 16);
        assert_eq!(compare_times((&a, Some(&narrow)), (&b, Some(&narrow)), 0.05).1, Verdict::Slower);
    }

    fn run(text: &str) -> Run {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn rows_are_paired_by_call_and_unpaired_rows_are_counted() {
        let row = |size: u64, time: f64| {
            format!(
                r#"{{"size": {size}, "type": "float", "redop": "sum", "root": -1, "out_of_place": {{"time": {time}, "nwrong": 0}},
                    "in_place": {{"time": {time}, "nwrong": "N/A"}}}}"#
            )
        };
        let a = run(&format!(r#"{{"results": [{}, {}]}}"#, row(8, 1.0), row(64, 2.0)));
        let b = run(&format!(r#"{{"results": [{}, {}]}}"#, row(64, 4.0), row(512, 2.0)));
        let cli = Cli::parse_from(["compare", "a.json", "b.json"]);
        let (text, bad) = table(&cli, &a, &b).unwrap();
        assert!(bad && text.contains("SLOWER") && text.contains(" 2.00 "), "{text}");
        assert!(text.ends_with("2 slower, 0 wrong; rows in one run alone: 1 of A, 1 of B\n"), "{text}");
        assert!(table(&cli, &a, &run(r#"{"results": []}"#)).is_err());
    }

    #[test]
    fn in_place_times_that_one_run_did_not_measure_are_not_compared() {
        let row = r#"{"size": 8, "type": "float", "out_of_place": {"time": 1}, "in_place": {"time": 1}}"#;
        let both = run(&format!(r#"{{"results": [{row}]}}"#));
        let one = run(&format!(r#"{{"config": {{"has_in_place": false}}, "results": [{row}]}}"#));
        let cli = Cli::parse_from(["compare", "a.json", "b.json"]);
        let (text, _) = table(&cli, &both, &one).unwrap();
        assert!(!text.contains("in place (us)") && text.contains("geometric mean of 1 row)"), "{text}");
        let (text, _) = table(&cli, &both, &both).unwrap();
        assert!(text.contains("in place (us)") && text.contains("geometric mean of 2 halves"), "{text}");
    }
}
