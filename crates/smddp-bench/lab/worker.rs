//! `smddp-bench worker`, built with the feature `lab`: one rank of a comparison of libraries, controlled by a coordinator over
//! a Unix socket.
//!
//! Commands and replies are single lines:
//!
//! | command | reply |
//! |---|---|
//! | `prep OP BYTES TYPE`: allocate and fill | `ok EFFECTIVE_BYTES` |
//! | `time ITERS`: a barrier, then ITERS calls | `ns ELAPSED` |
//! | `check`: one verified call | `wrong ELEMENTS` |
//! | `free` | `ok 0` |
//! | `quit` or an unknown command | none; the worker exits |
//!
//! The reply to a failed command is `error TEXT`. Environment: `PEERS_SOCK` is the socket, `PEERS_NAME` the name in the
//! greeting, `PEERS_PIN` pins the rank to one core, and the launcher's variables give the rank (see
//! [`LaunchEnvironment`]). `-R 2` has the usual meaning. Sizes are sizes of the whole buffer; all_reduce and broadcast run in
//! place.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use smddp_core::{DType, RedOp};

use crate::buffers::{Allocate, Buffer};
use crate::calls::{BenchGroup, BufferPair, Case};
use crate::cli::Cli;
use crate::error::{Error, Result};
use crate::op::Op;
use crate::pattern::{Run, encode};
use crate::pin::pin;
use smddp_rendezvous::LaunchEnvironment;

use crate::NAME;

/// Elements that are compared at once: a multiple of 31, the period of the coordinator's pattern.
const PERIOD: usize = 31 * 512;

pub(crate) fn run(cli: &Cli, launched: &LaunchEnvironment) -> Result<()> {
    let path = env::var("PEERS_SOCK")
        .map_err(|_| Error::Usage("PEERS_SOCK is not set: the coordinator must start the worker".into()))?;
    if env::var_os("PEERS_PIN").is_some() {
        pin(launched.rank)?;
    }
    let group =
        BenchGroup::new(smddp_rendezvous::join(NAME, launched, cli.store.as_deref(), cli.timeout())?.comm);
    group.barrier()?;
    let stream = UnixStream::connect(&path).map_err(Error::io(path.clone()))?;
    let mut replies = stream.try_clone().map_err(Error::io(path.clone()))?;
    let name = env::var("PEERS_NAME").unwrap_or_else(|_| "?".into());
    let hello = format!(
        "hello {name} {} {} {} smddp-core {}\n",
        group.rank(),
        group.size(),
        smddp_core::host_name(),
        env!("CARGO_PKG_VERSION")
    );
    replies.write_all(hello.as_bytes()).map_err(Error::io(path.clone()))?;
    let mut worker = Worker { group: &group, allocate: Buffer::allocate(cli.register), job: None };
    for line in BufReader::new(stream).lines() {
        let line = line.map_err(Error::io(path.clone()))?;
        let Some(mut reply) = worker.execute(&line) else {
            break;
        };
        reply.push('\n');
        replies.write_all(reply.as_bytes()).map_err(Error::io(path.clone()))?;
    }
    group.comm().close();
    Ok(())
}

struct Worker<'a> {
    group: &'a BenchGroup,
    allocate: Allocate,
    job: Option<Job>,
}

impl Worker<'_> {
    /// Executes one command and returns the reply; `None` ends the worker.
    fn execute(&mut self, line: &str) -> Option<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let reply = match words.as_slice() {
            ["prep", op, bytes, dtype] => self.prepare(op, bytes, dtype),
            ["time", iters] => self.time(iters),
            ["check", ..] => self.check(),
            ["free", ..] => {
                self.job = None;
                Ok("ok 0".into())
            }
            _ => return None,
        };
        Some(reply.unwrap_or_else(|e| format!("error {}", e.to_string().replace('\n', " "))))
    }

    fn prepare(&mut self, op: &str, bytes: &str, dtype: &str) -> Result<String> {
        let Ok(bytes) = bytes.parse() else {
            return Ok("invalid size".into());
        };
        let (Some(op), Some(dtype)) = (op_named(op), dtype_named(dtype)) else {
            return Ok("no such op or type".into());
        };
        self.job = None; // Frees its memory before the next allocation.
        let mut job = Job::new(op, dtype, bytes, self.group, self.allocate)?;
        job.fill();
        let reply = format!("ok {}", job.count * dtype.size());
        self.job = Some(job);
        Ok(reply)
    }

    fn job(&mut self) -> Result<&mut Job> {
        self.job.as_mut().ok_or_else(|| Error::Usage("no call is prepared: send prep first".into()))
    }

    fn time(&mut self, iters: &str) -> Result<String> {
        let iters = iters.parse().map_err(|_| Error::Usage(format!("time {iters}: not a number")))?;
        let group = self.group;
        let elapsed = self.job()?.time(group, iters)?;
        Ok(format!("ns {elapsed}"))
    }

    fn check(&mut self) -> Result<String> {
        let group = self.group;
        let job = self.job()?;
        job.fill();
        job.time(group, 1)?;
        group.barrier()?;
        let wrong = job.wrong();
        if job.in_place() {
            job.output.bytes().fill(0); // Keeps repeated in-place sums finite.
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
    /// A plain copy from input to output, which measures the memory bandwidth.
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
    sides: BufferPair,
    /// Empty for in-place calls, which use `output`.
    input: Buffer,
    output: Buffer,
}

impl Job {
    fn new(op: JobOp, dtype: DType, bytes: usize, group: &BenchGroup, allocate: Allocate) -> Result<Job> {
        let (rank, ranks) = (group.rank(), group.size());
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
            sides: BufferPair { input: input_side, output: Some((0, receive)) },
            input: allocate(send * dtype.size())?,
            output: allocate(receive * dtype.size())?,
        })
    }

    fn in_place(&self) -> bool {
        matches!(self.op, JobOp::Call(Op::AllReduce | Op::Broadcast))
    }

    /// Returns the coordinator's pattern: small whole numbers, whose sums are exact in every type for up to eight ranks.
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

    /// Runs a barrier and `iters` calls. Returns the nanoseconds of the calls.
    fn time(&mut self, group: &BenchGroup, iters: usize) -> Result<u128> {
        let JobOp::Call(op) = self.op else {
            group.barrier()?;
            let begun = std::time::Instant::now();
            for _ in 0..iters {
                self.output.bytes().copy_from_slice(self.input.bytes());
            }
            return Ok(begun.elapsed().as_nanos());
        };
        let case = Case { op, dtype: self.dtype, redop: RedOp::Sum, root: 0 };
        let mut call = match self.in_place() {
            true => group.bind_in_place(case, self.sides, &mut self.output),
            false => group.bind(case, self.sides, &mut self.input, &mut self.output),
        };
        group.barrier()?;
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
