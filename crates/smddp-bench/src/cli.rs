//! The command line: the options of nccl-tests, with long forms.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Parser};
use smddp_core::{DType, RedOp};

use crate::compat_options::CompatOptions;
use crate::error::{Error, Result};
use crate::op::Op;
use crate::sizes::{Steps, parse_size, sweep};
use crate::task::{Task, Test};
use crate::types::{Selection, has, parse_dtype, parse_redop};

/// Parses `all` or a rank.
fn parse_root(text: &str) -> std::result::Result<i64, String> {
    match text {
        "all" => Ok(-1),
        _ => text.parse().map_err(|_| format!("invalid rank '{text}': expected a number or 'all'")),
    }
}

/// Bytes above which OSU's tests use fewer iterations.
const LARGE: usize = 8192;

const AFTER_HELP: &str = "\
COLLECTIVE: all_gather, reduce_scatter, all_reduce, broadcast, reduce, gather, scatter, all_to_all, barrier,
sendrecv, hypercube, alltoallv; names with hyphens and names of nccl-tests (all_gather_perf, alltoall) are accepted too.
OSU's tests: latency, bw, bibw, message_rate (osu_mbw_mr) between the first half of the ranks and the second half; iall_reduce,
iall_gather, ...: overlap of a collective with a computation.
Other commands: 'info' lists the settings. 'startup' measures the creation of a group of all ranks. 'simulate' and 'explain'
replay plans on a described cluster. 'tune' measures the fastest algorithms of this machine. 'replay' repeats the calls of a
recorded job. 'compare' compares the -J files of two runs. 'completion SHELL' prints a shell completion script, 'man' the
manual pages. Most have separate options ('smddp-bench simulate --help').

Ranks: --nproc N starts N ranks on this machine. Otherwise this process is one rank that torchrun, mpirun (Open MPI, MPICH) or
srun started, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or OMPI_COMM_WORLD_*, PMI_*, SLURM_*. Without a launcher it is
the only rank.

In the smddp-bench command of the Python package, --plot FILE.png (.svg, .pdf) draws the figures ('compare A B --plot' draws both
runs), and --torch BACKEND,BACKEND measures backends of torch.distributed alternately.

NCCL_TESTS_SPLIT=\"AND 0x7\" (OR, MOD, DIV, & | % /) or NCCL_TESTS_SPLIT_MASK=0x7 split the ranks into groups by color. The color
is the result of the operation on the rank and the value. All groups run the calls concurrently. Bandwidths are those of rank 0's
group.

Options of nccl-tests for GPUs (-p -y -G -C -R -x -D) are accepted with the values that have no effect.

A size is the size of the whole gathered, reduced or exchanged buffer; K, M, G are powers of 1024. The time is the average of the
iterations, which use the same buffers. A separate call is checked in every element.

Exit status: 0 success, 1 wrong data or a failure, 2 an invalid command line.";

#[derive(Clone, Debug, Parser)]
#[command(
    name = "smddp-bench",
    version,
    about = "Measures and checks smddp's collectives, with the output format of nccl-tests",
    after_help = AFTER_HELP,
    args_override_self = true
)]
pub(crate) struct Cli {
    /// Collective or test to measure; or 'startup', 'info', 'simulate', 'explain', 'tune', 'compare', 'replay', 'completion', 'man'
    #[arg(value_name = "COLLECTIVE")]
    pub task: Task,
    /// Smallest size
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = parse_size)]
    min_bytes: Option<usize>,
    /// Largest size [default: both 32M; OSU's tests: 1 to 4M for messages, one float to 1M for collectives]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = parse_size)]
    max_bytes: Option<usize>,
    /// Factor between the sizes of two rows [default: 1, which uses --stepbytes; 2 in OSU's tests]
    #[arg(short = 'f', long = "stepfactor", value_name = "FACTOR")]
    step_factor: Option<usize>,
    /// Difference between the sizes of two rows
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", default_value = "1M", value_parser = parse_size)]
    step_bytes: usize,
    /// Timed calls per row [default: 20; in OSU's tests OSU's default, which is lower above 8K]
    #[arg(short = 'n', long = "iters", value_name = "N")]
    iters: Option<usize>,
    /// Warmup calls per row, at least one [default: 5; a tenth of --iters in OSU's tests]
    #[arg(short = 'w', long = "warmup_iters", alias = "warmup-iters", value_name = "N")]
    warmup_iters: Option<usize>,
    /// Number of concurrent messages in bw, bibw and message_rate
    #[arg(short = 'W', long = "window", alias = "window-size", value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub window: u32,
    /// Calls of each iteration, which are started together before the first wait; times are those of one call
    #[arg(short = 'm', long = "agg_iters", alias = "agg-iters", value_name = "N", default_value_t = 1)]
    pub agg_iters: usize,
    /// Number of measurements of all rows; 0: until the program is stopped
    #[arg(short = 'N', long = "run_cycles", alias = "run-cycles", value_name = "N", default_value_t = 1)]
    pub cycles: usize,
    /// int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16, f8e4m3, f8e5m2 (the last two without
    /// reductions), or all
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", default_value = "float", value_parser = parse_dtype)]
    pub dtype: Selection<DType>,
    /// sum, prod, max, min, avg, mulsum, band, bor, bxor (the last three for integers), or all
    #[arg(short = 'o', long = "op", value_name = "OP", default_value = "sum", value_parser = parse_redop)]
    pub redop: Selection<RedOp>,
    /// Root rank; all (or -1) measures each rank as root
    #[arg(
        short = 'r',
        long = "root",
        value_name = "RANK",
        default_value = "0",
        allow_negative_numbers = true,
        value_parser = parse_root
    )]
    pub root: i64,
    /// Checked calls per row; 0: no checks
    #[arg(short = 'c', long = "check", value_name = "N", default_value_t = 1)]
    pub check: usize,
    /// Reported time of the ranks: 0 rank 0, 1 average, 2 minimum, 3 maximum
    #[arg(short = 'a', long = "average", value_name = "0..3", default_value_t = 1,
          value_parser = clap::value_parser!(u8).range(0..=3))]
    pub average: u8,
    /// Include a barrier after each call in the time (1); 0 and 2: no barrier
    #[arg(short = 'z', long = "blocking", value_name = "0..2", default_value_t = 0,
          value_parser = clap::value_parser!(u8).range(0..=2))]
    pub blocking: u8,
    /// Offset of the buffers from an aligned address, in elements
    #[arg(short = 'u', long = "unalign", value_name = "ELEMENTS", default_value_t = 0)]
    pub unalign: usize,
    /// Allocate the buffers in symmetric memory (2), which the ranks of a node read in place; 0 and 1: in ordinary memory
    #[arg(short = 'R', long = "local_register", alias = "local-register", value_name = "0..2", default_value_t = 0,
          value_parser = clap::value_parser!(u8).range(0..=2))]
    pub register: u8,
    /// Time each iteration: columns i_min, i_max, i_p99, i_cv%, and all times in the JSON file
    #[arg(short = 'I', long = "per_iter_timing", alias = "per-iter-timing", value_name = "0/1", default_value_t = 0,
          value_parser = clap::value_parser!(u8).range(0..=1))]
    pub per_iter: u8,
    /// Number of first iterations that these columns exclude
    #[arg(
        short = 'K',
        long = "per_iter_skip",
        alias = "per-iter-skip",
        value_name = "N",
        default_value_t = 0
    )]
    pub per_iter_skip: usize,
    /// Append the time of day to each row
    #[arg(short = 'S', long = "report_timestamps", alias = "report-timestamps", value_name = "0/1", default_value_t = 0,
          value_parser = clap::value_parser!(u8).range(0..=1))]
    pub timestamps: u8,
    /// Report the memory of the ranks at the end
    #[arg(short = 'M', long = "memory_report", alias = "memory-report", alias = "memory", value_name = "0/1",
          default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub memory: u8,
    /// Write the figures to this file as JSON in addition
    #[arg(short = 'J', long = "json", alias = "output_file", alias = "output-file", value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Start this many ranks on this machine
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub nproc: Option<u32>,
    /// Time limit of a call and of the rendezvous
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 120.0)]
    pub timeout: f64,
    /// Pin local rank r to the r-th of the allowed cores
    #[arg(long, action = ArgAction::SetTrue)]
    pub pin: bool,
    /// Port of the rendezvous (default: MASTER_PORT, the next port under torchrun)
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// Threads per process: must be 1
    #[arg(short = 't', long = "nthreads", hide = true, default_value_t = 1)]
    pub threads: usize,
    /// Devices per thread: must be 1
    #[arg(short = 'g', long = "ngpus", hide = true, default_value_t = 1)]
    pub devices: usize,
    #[command(flatten)]
    pub compat: CompatOptions,
    /// Address of the parent's store, set by the parent of started ranks
    #[arg(long, hide = true, value_name = "HOST:PORT")]
    pub store: Option<String>,
}

impl Cli {
    /// Checks the values that clap does not check.
    pub(crate) fn validate(&self) -> Result<()> {
        let usage = |text: String| Err(Error::Usage(text));
        let Steps { min, max, .. } = self.steps();
        if min > max {
            return usage(format!("--minbytes {min} is above --maxbytes {max}"));
        }
        if self.iters == Some(0) {
            return usage("--iters is 0: expected 1 or more".into());
        }
        if self.threads != 1 || self.devices != 1 {
            return usage("-t and -g must be 1: start several ranks with --nproc N".into());
        }
        if self.agg_iters == 0 {
            return usage("--agg_iters is 0: expected 1 or more".into());
        }
        let (_, fewest) = self.counts(max);
        if self.per_iter == 1 && self.per_iter_skip >= fewest {
            return usage(format!("-K {} excludes all of the {fewest} iterations", self.per_iter_skip));
        }
        if let Some(option) = self.nccl_only_option() {
            let name = self.task.name();
            return usage(format!("{name} is a test of OSU, which does not support {option}: omit it"));
        }
        if let Some(reason) = self.compat.unsupported() {
            return usage(reason);
        }
        if let Task::Measure(op) | Task::Overlap(op) = self.task {
            self.validate_call(op)?;
        }
        if Duration::try_from_secs_f64(self.timeout).is_err() || self.timeout <= 0.0 {
            return usage(format!("--timeout {}: expected a positive number of seconds", self.timeout));
        }
        Ok(())
    }

    /// Returns an option that only the tests of nccl-tests support, if it is set for a test of OSU.
    fn nccl_only_option(&self) -> Option<&'static str> {
        let messages = match self.task {
            Task::Messages(_) => true,
            Task::Overlap(_) => false,
            _ => return None,
        };
        let given =
            [("-m", self.agg_iters != 1), ("-z", self.blocking != 0), ("-u", messages && self.unalign != 0)];
        given.into_iter().find_map(|(option, given)| given.then_some(option))
    }

    /// Checks the combination of collective, type and reduction.
    fn validate_call(&self, op: Op) -> Result<()> {
        let usage = |text: String| Err(Error::Usage(text));
        if !op.reduces() {
            return Ok(());
        }
        if let Selection::One(name, DType::Opaque1) = self.dtype {
            return usage(format!(
                "{name} does not support reductions: choose another type for {}",
                op.name()
            ));
        }
        if let (Selection::One(name, dtype), Selection::One(redop, op)) = (self.dtype, self.redop)
            && !has(dtype, op)
        {
            return usage(format!("{redop} supports integers only, not {name}"));
        }
        Ok(())
    }

    /// Checks the sizes of the groups.
    pub(crate) fn validate_groups(&self, groups: &[usize]) -> Result<()> {
        let smallest = groups.iter().copied().min().unwrap_or(1);
        let op = match self.task {
            Task::Measure(op) | Task::Overlap(op) => op,
            Task::Messages(test) if !smallest.is_multiple_of(2) => {
                return Err(Error::Usage(format!(
                    "{} needs an even number of ranks (--nproc N), not {smallest}",
                    test.name()
                )));
            }
            _ => return Ok(()),
        };
        if op.has_root() && (self.root < -1 || self.root >= smallest as i64) {
            let of = if groups.len() > 1 { " of the smallest group" } else { "" };
            return Err(Error::Usage(format!("--root {} is not one of the {smallest} ranks{of}", self.root)));
        }
        let needs = match op {
            Op::SendRecv if smallest < 2 => "two ranks or more",
            Op::Hypercube if !groups.iter().all(|ranks| ranks.is_power_of_two()) => {
                "a number of ranks that is a power of two"
            }
            _ => return Ok(()),
        };
        let groups: Vec<String> = groups.iter().map(usize::to_string).collect();
        let (name, found) = (op.name(), groups.join(", "));
        Err(Error::Usage(format!("{name} needs {needs} in a group (--nproc N), not {found}")))
    }

    pub(crate) fn steps(&self) -> Steps {
        let (min, max, factor) = match self.task {
            Task::Messages(_) => (1, 4 << 20, 2),
            Task::Overlap(_) => (4, 1 << 20, 2),
            _ => (32 << 20, 32 << 20, 1),
        };
        Steps {
            min: self.min_bytes.unwrap_or(min),
            max: self.max_bytes.unwrap_or(max),
            factor: self.step_factor.unwrap_or(factor),
            bytes: self.step_bytes,
        }
    }

    /// Returns the sizes in bytes. `element` is the size of one element, which follows size 0.
    pub(crate) fn sizes(&self, element: usize) -> Vec<usize> {
        sweep(self.steps(), element)
    }

    /// Returns the numbers of warmup calls (at least one) and of timed calls.
    pub(crate) fn counts(&self, bytes: usize) -> (usize, usize) {
        let small = bytes <= LARGE;
        let (warmup, iters) = match self.task {
            Task::Messages(Test::Latency) => (None, if small { 10_000 } else { 1_000 }),
            Task::Messages(_) => (None, if small { 100 } else { 20 }),
            Task::Overlap(_) => (None, if small { 1_000 } else { 100 }),
            _ => (Some(5), 20),
        };
        let iters = self.iters.unwrap_or(iters);
        (self.warmup_iters.or(warmup).unwrap_or(iters / 10).max(1), iters)
    }

    /// Returns the cycles of all rows.
    pub(crate) fn cycles(&self) -> impl Iterator<Item = usize> + use<> {
        let last = if self.cycles == 0 { usize::MAX } else { self.cycles };
        0..last
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::try_from_secs_f64(self.timeout).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> std::result::Result<Cli, String> {
        let cli = Cli::try_parse_from(line.split_whitespace()).map_err(|e| e.to_string())?;
        cli.validate().map_err(|e| e.to_string())?;
        Ok(cli)
    }

    #[test]
    fn short_options_match_nccl_tests() {
        let cli = parse(
            "smddp-bench all_gather_perf -b 8 -e 256M -f 8 -i 4K -n 7 -w 3 -d half -o max -r -1 -c 0 -J x.json -g 1",
        )
        .unwrap();
        assert_eq!(cli.task, Task::Measure(Op::AllGather));
        assert_eq!(cli.steps(), Steps { min: 8, max: 256 << 20, factor: 8, bytes: 4096 });
        assert_eq!((cli.counts(8), cli.root, cli.check), ((3, 7), -1, 0));
        assert_eq!(
            (cli.dtype, cli.redop),
            (Selection::One("half", DType::F16), Selection::One("max", RedOp::Max))
        );
        assert_eq!(cli.json, Some("x.json".into()));
    }

    #[test]
    fn long_options_match_nccl_tests() {
        let cli = parse(
            "smddp-bench sendrecv --minbytes 1 --maxbytes=2 --stepfactor 2 --stepbytes 1 --iters 1 --warmup_iters 0 \
             --datatype all --op all --root 2 --check 1 --json j --nproc 4 --timeout 2.5",
        )
        .unwrap();
        assert_eq!((cli.dtype, cli.redop, cli.nproc), (Selection::All, Selection::All, Some(4)));
        assert_eq!(cli.timeout(), Duration::from_millis(2500));
    }

    #[test]
    fn defaults_match_nccl_tests() {
        let cli = parse("smddp-bench barrier").unwrap();
        assert_eq!(cli.steps(), Steps { min: 32 << 20, max: 32 << 20, factor: 1, bytes: 1 << 20 });
        assert_eq!((cli.counts(8), cli.check, cli.root, cli.average), ((5, 20), 1, 0, 1));
    }

    #[test]
    fn names_sizes_and_counts_match_osu() {
        for (name, task) in [
            ("latency", Task::Messages(Test::Latency)),
            ("osu_multi_lat", Task::Messages(Test::Latency)),
            ("osu_bw", Task::Messages(Test::Bandwidth)),
            ("bibw", Task::Messages(Test::Bidirectional)),
            ("message_rate", Task::Messages(Test::Rate)),
            ("osu_mbw_mr", Task::Messages(Test::Rate)),
            ("osu_iallreduce", Task::Overlap(Op::AllReduce)),
            ("iall_gather", Task::Overlap(Op::AllGather)),
            ("osu_ibcast", Task::Overlap(Op::Broadcast)),
            ("ibarrier", Task::Overlap(Op::Barrier)),
        ] {
            assert_eq!(parse(&format!("smddp-bench {name}")).unwrap().task, task, "{name}");
        }
        let cli = parse("smddp-bench latency").unwrap();
        assert_eq!(cli.steps(), Steps { min: 1, max: 4 << 20, factor: 2, bytes: 1 << 20 });
        assert_eq!((cli.counts(8192), cli.counts(8193)), ((1000, 10_000), (100, 1000)));
        assert_eq!((cli.window, parse("smddp-bench bw -W 3 -n 50").unwrap().counts(1)), (64, (5, 50)));
        assert!(parse("smddp-bench bw -m 2").unwrap_err().contains("does not support -m"));
        assert!(parse("smddp-bench iall_gather -u 2").is_ok());
        for name in ["isendrecv", "ihypercube", "osu_put_latency"] {
            assert!(parse(&format!("smddp-bench {name}")).unwrap_err().contains("message_rate"), "{name}");
        }
    }

    #[test]
    fn every_option_of_nccl_tests_is_accepted_or_rejected_with_the_reason() {
        let accepted = "-t 1 -g 1 -b 8 -e 64 -i 8 -f 2 -n 5 -m 1 -w 1 -N 1 -p 0 -c 1 -o sum -d float -r 0 -z 0 -y 0 -T 9 -G 0 \
                       -C 0 -S 0 -a 1 -R 0 -x 0 -D 0 -M 0 -u 0 -I 0 -K 0";
        assert!(parse(&format!("smddp-bench all_reduce {accepted}")).is_ok());
        let long = "--nthreads 1 --ngpus 1 --agg_iters 2 --run_cycles 3 --parallel_init 1 --blocking 1 --stream_null 0 --cudagraph 0 \
                    --report_cputime 1 --report_timestamps 1 --output_file x.json --average 3 --local_register 0 --cta_policy 0 \
                    --device_implementation 0 --device_cta_count 8 --memory_report 1 --unalign 3 --per_iter_timing 1 \
                    --per_iter_skip 2 --root all";
        let cli = parse(&format!("smddp-bench broadcast {long}")).unwrap();
        assert_eq!((cli.agg_iters, cli.cycles, cli.blocking, cli.unalign, cli.root), (2, 3, 1, 3, -1));
        assert_eq!(parse("smddp-bench all_gather -R 2").unwrap().register, 2);
        assert_eq!((cli.per_iter, cli.per_iter_skip, cli.timestamps, cli.memory), (1, 2, 1, 1));
        for (option, expected) in [
            ("-y 1", "without streams"),
            ("-G 5", "CUDA graph"),
            ("-R 3", "0..=2"),
            ("-x 1", "thread blocks"),
            ("-D 1", "device implementation"),
            ("-z 3", "0..=2"),
            ("-m 0", "--agg_iters"),
            ("-n 5 -I 1 -K 5", "excludes all"),
            ("-o mean", "mulsum"),
            ("-d fp8", "f8e4m3"),
            ("-d f8e4m3", "does not support reductions"),
            ("-o band -d half", "band supports integers only, not half"),
        ] {
            let error = parse(&format!("smddp-bench all_reduce {option}")).unwrap_err();
            assert!(error.contains(expected), "{option}: {error}");
        }
    }

    #[test]
    fn too_small_groups_are_rejected_with_their_sizes() {
        for (line, groups, expected) in [
            ("broadcast -r 2", &[2][..], "--root 2 is not one of the 2 ranks"),
            ("reduce -r -2", &[2], "--root -2 is not one of the 2 ranks"),
            ("gather -r 2", &[3, 2], "--root 2 is not one of the 2 ranks of the smallest group"),
            ("sendrecv", &[2, 1], "sendrecv needs two ranks or more in a group (--nproc N), not 2, 1"),
            ("bw", &[3], "bw needs an even number of ranks (--nproc N), not 3"),
            (
                "hypercube",
                &[4, 3],
                "hypercube needs a number of ranks that is a power of two in a group (--nproc N), not 4, 3",
            ),
        ] {
            let cli = parse(&format!("smddp-bench {line}")).unwrap();
            assert_eq!(cli.validate_groups(groups).unwrap_err().to_string(), expected);
            assert_eq!(cli.validate_groups(&[8, 4]).is_ok(), cli.root >= 0, "{line}");
        }
    }

    #[test]
    fn last_of_repeated_options_is_used() {
        assert_eq!(parse("smddp-bench reduce -n 3 -n 4").unwrap().counts(8).1, 4);
    }

    #[test]
    fn invalid_values_are_rejected_with_the_choices() {
        for (line, expected) in [
            ("smddp-bench all_gathers", "reduce_scatter"),
            ("smddp-bench all_gather -d float16", "bfloat16"),
            ("smddp-bench all_gather -o mean", "avg"),
            ("smddp-bench all_gather -b 8T", "64K"),
            ("smddp-bench all_gather -b 9 -e 8", "--minbytes 9"),
            ("smddp-bench all_gather -n 0", "--iters"),
            ("smddp-bench all_gather -g 2", "--nproc"),
            ("smddp-bench all_gather -T nan", "--timeout"),
            ("smddp-bench all_gather --nproc 0", "nproc"),
            ("smddp-bench", "COLLECTIVE"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
