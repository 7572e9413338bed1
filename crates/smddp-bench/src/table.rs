//! The table, in the format of nccl-tests.

use std::io::Write;

use crate::cli::Cli;
use crate::clock;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::format::{figure, general};
use crate::osu;
use crate::row::{Measure, Row, Summary};
use crate::sizes::Steps;
use crate::task::Task;

/// Writes each line to `out` immediately.
pub(crate) struct Table<W: Write> {
    out: W,
    task: Task,
    /// Append the time of day to each row.
    timestamps: bool,
    /// Description of the last rows' call, in tests with several calls.
    call: Option<String>,
}

impl<W: Write> Table<W> {
    pub(crate) fn new(out: W, cli: &Cli) -> Table<W> {
        Table { out, task: cli.task, timestamps: cli.timestamps == 1, call: None }
    }

    fn put(&mut self, text: &str) -> Result<()> {
        writeln!(self.out, "{text}").and_then(|()| self.out.flush()).map_err(Error::io("writing the table"))
    }

    /// Returns the corresponding program of nccl-tests or OSU.
    fn program(&self) -> String {
        match self.task {
            Task::Measure(op) => op.program(),
            task => osu::program(task),
        }
    }

    pub(crate) fn begin(&mut self, cli: &Cli, devices: &[Device]) -> Result<()> {
        self.put(&format!("# smddp-bench version {}", env!("CARGO_PKG_VERSION")))?;
        self.put(&format!("# Collective test starting: {}", self.program()))?;
        if let Task::Measure(_) = self.task {
            self.settings(cli)?;
        }
        self.put("#")?;
        self.put("# Using devices")?;
        for device in devices {
            self.put(&device.line())?;
        }
        self.put("#")?;
        match self.task {
            Task::Measure(_) => self.columns(cli),
            _ => osu::head(cli, devices.len()).iter().try_for_each(|line| self.put(line)),
        }
    }

    fn settings(&mut self, cli: &Cli) -> Result<()> {
        let Steps { min, max, factor, bytes } = cli.steps();
        let (warmup, iters) = cli.counts(min);
        let (step, kind) = if factor > 1 { (factor, "factor") } else { (bytes, "bytes") };
        self.put(&format!(
            "# nThread 1 nGpus 1 minBytes {min} maxBytes {max} step: {step}({kind}) warmup iters: {} iters: {iters} agg iters: {} \
             validation: {} graph: 0",
            warmup, cli.agg_iters, cli.check
        ))?;
        if !self.task.has_in_place() {
            let name = self.task.name();
            self.put(&format!(
                "# {name} has no in-place form: the second half repeats the first, unchecked"
            ))?;
        }
        Ok(())
    }

    fn columns(&mut self, cli: &Cli) -> Result<()> {
        let each = |names: [&str; 4]| match cli.per_iter {
            0 => String::new(),
            _ => names.map(|name| format!("  {name:>7}")).concat(),
        };
        let half = |time, alg, bus, wrong, iterations: [&str; 4]| {
            format!("  {time:>7}  {alg:>6}  {bus:>6}  {wrong:>6}{}", each(iterations))
        };
        let left = |size, count, kind, redop, root| {
            format!("# {size:>10}  {count:>12}  {kind:>8}  {redop:>6}  {root:>6}")
        };
        let names = half("time", "algbw", "busbw", "#wrong", ["i_min", "i_max", "i_p99", "i_cv%"]);
        let units = half("(us)", "(GB/s)", "(GB/s)", "", ["(us)", "(us)", "(us)", ""]);
        // nccl-tests prints the same trailing blanks.
        self.put(&format!(
            "{}           out-of-place                       in-place          ",
            left("", "", "", "", "")
        ))?;
        self.put(&format!("{}{names}{names} ", left("size", "count", "type", "redop", "root")))?;
        self.put(&format!("{}{units}{units} ", left("(B)", "(elements)", "", "", "")))
    }

    pub(crate) fn row(&mut self, row: &Row) -> Result<()> {
        let now = || if self.timestamps { format!("  {}", clock::local_time()) } else { String::new() };
        if let Some(line) = osu::line(row, self.task) {
            let line = line + &now();
            let call = osu::call(row);
            if let Some(call) = call.as_ref().filter(|call| self.call.as_ref() != Some(call)) {
                self.put(call)?;
            }
            self.call = call;
            return self.put(&line);
        }
        let Row { bytes, count, dtype, redop, root, .. } = row;
        let left = format!("{bytes:>12}  {count:>12}  {dtype:>8}  {redop:>6}  {root:>6}");
        self.put(&format!("{left}{}{}{}", half(&row.out_of_place), half(&row.in_place), now()))
    }

    /// Prints the peak memory of the ranks' processes, in bytes.
    pub(crate) fn memory(&mut self, bytes: &[u64]) -> Result<()> {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let (most, sum) = (bytes.iter().max().copied().unwrap_or(0), bytes.iter().sum::<u64>());
        let average = mib(sum) / bytes.len().max(1) as f64;
        self.put(&format!("# Memory of a rank, MiB   : {:.1} at most, {average:.1} on average", mib(most)))
    }

    pub(crate) fn end(&mut self, summary: &Summary) -> Result<()> {
        let verdict = if summary.failed == 0 { "OK" } else { "FAILED" };
        self.put(&format!("# Out of bounds values : {} {verdict}", summary.failed))?;
        if let Task::Measure(_) = self.task {
            self.put(&format!("# Avg bus bandwidth    : {} ", general(summary.busbw)))?;
        }
        self.put("#")?;
        self.put(&format!("# Collective test concluded: {}", self.program()))
    }
}

fn half(m: &Measure) -> String {
    let wrong = m.wrong.map_or("N/A".into(), |n| general(n as f64));
    let each = m.per_iter.as_ref().map_or(String::new(), |each| {
        [each.min_us, each.max_us, each.p99_us, each.cv_pct]
            .map(|value| format!("  {}", figure(value, 7)))
            .concat()
    });
    format!(
        "  {}  {}  {}  {wrong:>6}{each}",
        figure(m.seconds * 1e6, 7),
        figure(m.algbw, 6),
        figure(m.busbw, 6)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn cli(line: &str) -> Cli {
        Cli::try_parse_from(line.split(' ')).unwrap()
    }

    fn text(cli: &Cli, f: impl FnOnce(&mut Table<&mut Vec<u8>>) -> Result<()>) -> String {
        let mut out = Vec::new();
        f(&mut Table::new(&mut out, cli)).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn row(
        bytes: usize,
        count: usize,
        dtype: &'static str,
        halves: [(f64, f64, f64, Option<u64>); 2],
    ) -> Row {
        let [out_of_place, in_place] = halves.map(|(us, algbw, busbw, wrong)| Measure {
            seconds: us / 1e6,
            algbw,
            busbw,
            wrong,
            per_iter: None,
        });
        Row { bytes, count, dtype, redop: "none", root: -1, out_of_place, in_place, path: None, osu: None }
    }

    #[test]
    fn rows_match_nccl_tests_exactly() {
        // Figures of lines that nccl-tests printed on other machines.
        let cases = [
            (
                row(
                    134217728,
                    2097152,
                    "float",
                    [(1877.8, 71.48, 67.01, Some(0)), (1628.0, 82.44, 77.29, Some(0))],
                ),
                "   134217728       2097152     float    none      -1  1877.80   71.48   67.01       0  1628.00   82.44   77.29       0\n",
            ),
            (
                row(
                    134217728,
                    2097152,
                    "float",
                    [(87119.5, 1.54, 1.44, Some(0)), (100641.0, 1.33, 1.25, None)],
                ),
                "   134217728       2097152     float    none      -1  87119.5    1.54    1.44       0   100641    1.33    1.25     N/A\n",
            ),
            (
                row(0, 0, "bfloat16", [(0.066, 0.0, 0.0, Some(0)), (12345678.0, 0.0, 0.0, Some(1234567))]),
                "           0             0  bfloat16    none      -1     0.07    0.00    0.00       0  1.2e+07    0.00    0.00  1.23457e+06\n",
            ),
        ];
        for (row, want) in cases {
            assert_eq!(text(&cli("x all_gather"), |t| t.row(&row)), want);
        }
    }

    #[test]
    fn header_matches_nccl_tests_exactly() {
        let cli = cli("x all_reduce -b 8 -e 8G -f 2");
        let head = text(&cli, |t| t.begin(&cli, &[]));
        let want = [
            concat!("# smddp-bench version ", env!("CARGO_PKG_VERSION")),
            "# Collective test starting: all_reduce_perf",
            "# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0",
            "#",
            "# Using devices",
            "#",
            "#                                                              out-of-place                       in-place          ",
            "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ",
            "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         ",
        ];
        assert_eq!(head.lines().collect::<Vec<_>>(), want);
    }

    #[test]
    fn footer_matches_nccl_tests_exactly() {
        let end = |failed| text(&cli("x alltoall"), |t| t.end(&Summary { failed, busbw: 9.04853 }));
        let want = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 9.04853 \n#\n\
                    # Collective test concluded: alltoall_perf\n";
        assert_eq!(end(0), want);
        assert!(end(3).starts_with("# Out of bounds values : 3 FAILED\n"));
    }

    #[test]
    fn device_line_matches_nccl_tests() {
        let device = serde_json::from_str::<Device>(
            r#"{"rank":1,"group":0,"pid":6899,"hostname":"h","device":1,"device_hex":"0000:00:00","device_info":"Some CPU"}"#,
        );
        assert_eq!(
            device.unwrap().line(),
            "#  Rank  1 Group  0 Pid   6899 on          h device  1 [0000:00:00] Some CPU"
        );
    }
}
