//! `smddp-bench worker`, built with the feature `lab`: one rank of a side-by-side measurement, led by a coordinator over a unix socket.
//!
//! One line a command, one line an answer:
//!
//! | command | answer |
//! |---|---|
//! | `prep OP BYTES TYPE`: allocate and fill | `ok EFFECTIVE_BYTES` |
//! | `time ITERS`: a barrier, then that many calls | `ns ELAPSED` |
//! | `check`: one verified call | `wrong ELEMENTS` |
//! | `free` | `ok 0` |
//! | `quit`, or anything else | none; the worker ends |
//!
//! A failure is answered with `error TEXT`. Environment: `PEERS_SOCK` the socket, `PEERS_NAME` the name to say
//! hello with, `PEERS_PIN` to stay on one core, and the launcher's variables (see `launched`). `-R 2` as for
//! every other use of `smddp-bench`. Sizes mean the whole buffer; all_reduce and broadcast work in place.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use smddp_core::{DType, RedOp};

use crate::buffers::{Buffer, Exporter};
use crate::calls::{Case, Sides, Team};
use crate::cli::Cli;
use crate::device::hostname;
use crate::error::{Error, Result};
use crate::op::Op;
use crate::pattern::{Run, encode};
use crate::pin::pin;
use smddp_rendezvous::LaunchEnvironment;

use crate::NAME;

/// The coordinator's own pattern repeats every 31 elements; a whole number of those is compared at once.
const PERIOD: usize = 31 * 512;

pub(crate) fn run(cli: &Cli, launched: &LaunchEnvironment) -> Result<()> {
    let path = env::var("PEERS_SOCK")
        .map_err(|_| Error::Usage("PEERS_SOCK is not set: a worker is started by its coordinator".into()))?;
    if env::var_os("PEERS_PIN").is_some() {
        pin(launched.rank)?;
    }
    let team = Team::new(smddp_rendezvous::join(NAME, launched, cli.store.as_deref(), cli.timeout())?.comm);
    team.barrier()?;
    let stream = UnixStream::connect(&path).map_err(Error::io(path.clone()))?;
    let mut answers = stream.try_clone().map_err(Error::io(path.clone()))?;
    let name = env::var("PEERS_NAME").unwrap_or_else(|_| "?".into());
    let hello = format!(
        "hello {name} {} {} {} smddp-core {}\n",
        team.rank(),
        team.size(),
        hostname(),
        env!("CARGO_PKG_VERSION")
    );
    answers.write_all(hello.as_bytes()).map_err(Error::io(path.clone()))?;
    let mut worker = Worker { team: &team, make: Buffer::maker(cli.register), job: None };
    for line in BufReader::new(stream).lines() {
        let line = line.map_err(Error::io(path.clone()))?;
        let Some(mut answer) = worker.obey(&line) else {
            break;
        };
        answer.push('\n');
        answers.write_all(answer.as_bytes()).map_err(Error::io(path.clone()))?;
    }
    team.comm().close();
    Ok(())
}

struct Worker<'a> {
    team: &'a Team,
    make: Exporter,
    job: Option<Job>,
}

impl Worker<'_> {
    /// The answer to one command; `None` ends the worker.
    fn obey(&mut self, line: &str) -> Option<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match words.as_slice() {
            ["prep", op, bytes, dtype] => self.prepare(op, bytes, dtype),
            ["time", iters] => self.time(iters),
            ["check", ..] => self.check(),
            ["free", ..] => {
                self.job = None;
                Ok("ok 0".into())
            }
            _ => return None,
        };
        Some(answer.unwrap_or_else(|e| format!("error {}", e.to_string().replace('\n', " "))))
    }

    fn prepare(&mut self, op: &str, bytes: &str, dtype: &str) -> Result<String> {
        let Ok(bytes) = bytes.parse() else {
            return Ok("no such size".into());
        };
        let (Some(op), Some(dtype)) = (op_named(op), dtype_named(dtype)) else {
            return Ok("no such op or type".into());
        };
        self.job = None; // Its memory goes back before the next is taken.
        let mut job = Job::new(op, dtype, bytes, self.team, self.make)?;
        job.fill();
        let answer = format!("ok {}", job.count * dtype.size());
        self.job = Some(job);
        Ok(answer)
    }

    fn job(&mut self) -> Result<&mut Job> {
        self.job.as_mut().ok_or_else(|| Error::Usage("nothing is prepared".into()))
    }

    fn time(&mut self, iters: &str) -> Result<String> {
        let iters = iters.parse().map_err(|_| Error::Usage(format!("time {iters}: not a number")))?;
        let team = self.team;
        let elapsed = self.job()?.time(team, iters)?;
        Ok(format!("ns {elapsed}"))
    }

    fn check(&mut self) -> Result<String> {
        let team = self.team;
        let job = self.job()?;
        job.fill();
        job.time(team, 1)?;
        team.barrier()?;
        let wrong = job.wrong();
        if job.in_place() {
            job.output.bytes().fill(0); // Repeated sums in place stay finite.
        }
        Ok(format!("wrong {wrong}"))
    }
}

fn op_named(name: &str) -> Option<JobOp> {
    Some(match name {
        "all_gather" => JobOp::Call(Op::AllGather),
        "reduce_scatter" => JobOp::Call(Op::ReduceScatter),
        "all_reduce" => JobOp::Call(Op::AllReduce),
        "broadcast" => JobOp::Call(Op::Broadcast),
        "all_to_all" => JobOp::Call(Op::AllToAll),
        "copy" => JobOp::Copy,
        _ => return None,
    })
}

fn dtype_named(name: &str) -> Option<DType> {
    Some(match name {
        "f32" => DType::F32,
        "f64" => DType::F64,
        "i8" => DType::I8,
        "bf16" => DType::BF16,
        "f16" => DType::F16,
        _ => return None,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobOp {
    Call(Op),
    /// A plain copy from input to output: how fast memory is.
    Copy,
}

struct Job {
    op: JobOp,
    dtype: DType,
    rank: usize,
    ranks: usize,
    /// Elements of the whole buffer, and of one rank's part.
    count: usize,
    part: usize,
    sides: Sides,
    /// Empty where the work is in place, in `output`.
    input: Buffer,
    output: Buffer,
}

impl Job {
    fn new(op: JobOp, dtype: DType, bytes: usize, team: &Team, make: Exporter) -> Result<Job> {
        let (rank, ranks) = (team.rank(), team.size());
        let part = (bytes / dtype.size() / ranks).max(1);
        let count = part * ranks;
        let (send, receive) = match op {
            JobOp::Call(Op::AllGather) => (part, count),
            JobOp::Call(Op::ReduceScatter) => (count, part),
            JobOp::Call(Op::AllToAll) | JobOp::Copy => (count, count),
            JobOp::Call(_) => (0, count),
        };
        let input_side = match op {
            JobOp::Call(op) if send == 0 => op.sends(rank, 0).then_some((0, count)),
            _ => Some((0, send)),
        };
        Ok(Job {
            op,
            dtype,
            rank,
            ranks,
            count,
            part,
            sides: Sides { input: input_side, output: Some((0, receive)) },
            input: make(send * dtype.size())?,
            output: make(receive * dtype.size())?,
        })
    }

    fn in_place(&self) -> bool {
        matches!(self.op, JobOp::Call(Op::AllReduce | Op::Broadcast))
    }

    /// The coordinator's pattern: small whole numbers, whose sums are exact in every type up to eight ranks.
    fn of(&self, start: usize, elements: usize, ranks: std::ops::Range<usize>) -> Run {
        let value = |i: usize, rank: usize| ((start + i) * 7 + rank * 13) % 31;
        Run::new(self.dtype, elements, PERIOD, |i| {
            encode(self.dtype, ranks.clone().map(|r| value(i, r)).sum())
        })
    }

    fn fill(&mut self) {
        let own = self.rank..self.rank + 1;
        if self.in_place() {
            let run = self.of(0, self.count, own);
            run.fill(self.output.bytes());
        } else {
            let elements = self.input.bytes().len() / self.dtype.size();
            let run = self.of(0, elements, own);
            run.fill(self.input.bytes());
            self.output.bytes().fill(0);
        }
    }

    /// A barrier, then `iters` calls; nanoseconds of the calls.
    fn time(&mut self, team: &Team, iters: usize) -> Result<u128> {
        let JobOp::Call(op) = self.op else {
            team.barrier()?;
            let begun = std::time::Instant::now();
            for _ in 0..iters {
                self.output.bytes().copy_from_slice(self.input.bytes());
            }
            return Ok(begun.elapsed().as_nanos());
        };
        let case = Case { op, dtype: self.dtype, redop: RedOp::Sum, root: 0 };
        let mut call = match self.in_place() {
            true => team.bind_in_place(case, self.sides, &mut self.output),
            false => team.bind(case, self.sides, &mut self.input, &mut self.output),
        };
        team.barrier()?;
        Ok(call.time(iters)?.as_nanos())
    }

    fn wrong(&mut self) -> u64 {
        let (rank, ranks, part) = (self.rank, self.ranks, self.part);
        let wanted: Vec<Run> = match self.op {
            JobOp::Copy => return 0,
            JobOp::Call(Op::AllGather) => (0..ranks).map(|r| self.of(0, part, r..r + 1)).collect(),
            JobOp::Call(Op::AllToAll) => (0..ranks).map(|r| self.of(rank * part, part, r..r + 1)).collect(),
            JobOp::Call(Op::Broadcast) => vec![self.of(0, self.count, 0..1)],
            JobOp::Call(Op::AllReduce) => vec![self.of(0, self.count, 0..ranks)],
            JobOp::Call(_) => vec![self.of(rank * part, part, 0..ranks)],
        };
        let mut found = &*self.output.bytes();
        let mut wrong = 0;
        for run in wanted {
            let (block, rest) = found.split_at(run.len());
            wrong += run.wrong(block);
            found = rest;
        }
        wrong
    }
}
