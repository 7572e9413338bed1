//! The figures as JSON, with the keys of nccl-tests.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::cli::Cli;
use crate::clock;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::periter::PerIter;
use crate::row::{Measure, Osu, Row, Summary};
use crate::sizes::Steps;

#[derive(Serialize)]
struct Document {
    version: u32,
    start_time: String,
    args: Vec<String>,
    smddp_version: &'static str,
    collective: &'static str,
    ranks: usize,
    config: Config,
    results: Vec<Line>,
    out_of_bounds: OutOfBounds,
    average_bus_bandwidth: Bandwidth,
    end_time: String,
}

#[derive(Serialize)]
struct Config {
    nthreads: usize,
    ngpus: usize,
    minimum_bytes: usize,
    maximum_bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_factor: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_bytes: Option<usize>,
    warmup_iters: usize,
    iterations: usize,
    aggregated_iterations: usize,
    per_iter_skip: usize,
    unalign: usize,
    blocking: u8,
    validation: usize,
    graph: usize,
    average: u8,
    /// True if `in_place` was measured in place, false if it repeats `out_of_place`.
    has_in_place: bool,
    devices: Vec<Device>,
}

#[derive(Serialize)]
struct Line {
    size: usize,
    count: usize,
    #[serde(rename = "type")]
    dtype: &'static str,
    redop: &'static str,
    root: i64,
    out_of_place: Half,
    in_place: Half,
    #[serde(skip_serializing_if = "Option::is_none")]
    out_of_place_per_iter: Option<PerIter>,
    #[serde(skip_serializing_if = "Option::is_none")]
    in_place_per_iter: Option<PerIter>,
    path: Option<String>,
    #[serde(flatten)]
    osu: Option<Osu>,
}

#[derive(Serialize)]
struct Half {
    /// Microseconds.
    time: f64,
    /// GB/s.
    alg_bw: f64,
    bus_bw: f64,
    nwrong: Option<u64>,
}

#[derive(Serialize)]
struct OutOfBounds {
    count: u64,
    okay: bool,
}

#[derive(Serialize)]
struct Bandwidth {
    bandwidth: f64,
}

/// The JSON file. It is created before the measurement, so that an invalid path fails early.
pub(crate) struct Report {
    path: PathBuf,
    file: File,
    document: Document,
}

impl Report {
    pub(crate) fn create(path: &Path, cli: &Cli, args: &[String], devices: &[Device]) -> Result<Report> {
        let file = File::create(path).map_err(Error::io(format!("creating {}", path.display())))?;
        let Steps { min, max, factor, bytes } = cli.steps();
        let (warmup_iters, iterations) = cli.counts(min);
        let by_factor = factor > 1;
        let config = Config {
            nthreads: 1,
            ngpus: 1,
            minimum_bytes: min,
            maximum_bytes: max,
            step_factor: by_factor.then_some(factor),
            step_bytes: (!by_factor).then_some(bytes),
            warmup_iters,
            iterations,
            aggregated_iterations: cli.agg_iters,
            per_iter_skip: cli.per_iter_skip,
            unalign: cli.unalign,
            blocking: cli.blocking,
            validation: cli.check,
            graph: 0,
            average: cli.average,
            has_in_place: cli.task.has_in_place(),
            devices: devices.to_vec(),
        };
        let document = Document {
            version: 2,
            start_time: clock::utc(),
            args: args.to_vec(),
            smddp_version: env!("CARGO_PKG_VERSION"),
            collective: cli.task.name(),
            ranks: devices.len(),
            config,
            results: Vec::new(),
            out_of_bounds: OutOfBounds { count: 0, okay: true },
            average_bus_bandwidth: Bandwidth { bandwidth: 0.0 },
            end_time: String::new(),
        };
        Ok(Report { path: path.into(), file, document })
    }

    pub(crate) fn row(&mut self, row: &Row) {
        self.document.results.push(Line {
            size: row.bytes,
            count: row.count,
            dtype: row.dtype,
            redop: row.redop,
            root: row.root,
            out_of_place: half(&row.out_of_place),
            in_place: half(&row.in_place),
            out_of_place_per_iter: row.out_of_place.per_iter.clone(),
            in_place_per_iter: row.in_place.per_iter.clone(),
            path: row.path.clone(),
            osu: row.osu,
        });
    }

    pub(crate) fn end(mut self, summary: &Summary) -> Result<()> {
        self.document.out_of_bounds = OutOfBounds { count: summary.failed, okay: summary.failed == 0 };
        self.document.average_bus_bandwidth = Bandwidth { bandwidth: summary.busbw };
        self.document.end_time = clock::utc();
        let mut text = serde_json::to_string_pretty(&self.document)
            .map_err(|e| Error::Io { what: "writing JSON".into(), source: e.into() })?;
        text.push('\n');
        self.file.write_all(text.as_bytes()).map_err(Error::io(format!("writing {}", self.path.display())))
    }
}

fn half(m: &Measure) -> Half {
    Half { time: m.seconds * 1e6, alg_bw: m.algbw, bus_bw: m.busbw, nwrong: m.wrong }
}
