//! Preparation, run and check of one case in its buffers.

use std::time::Duration;

use smddp_core::{Config, DType, Format};

use crate::buffers::Buffer;
use crate::calls::{BenchGroup, Bound, BufferPair, Case, Iteration};
use crate::error::Result;
use crate::op::{Elements, Op, uneven};
use crate::pattern::{Pattern, UNWRITTEN};
use crate::ranks::Ranks;

/// The layout of one case in the buffers. Out of place: input in `a`, output in `b`. In place: both in `b`.
pub(crate) struct Setup {
    case: Case,
    shape: Elements,
    rank: usize,
    pattern: Pattern,
    in_place: bool,
    /// Bytes before the data of each buffer.
    before: usize,
    sides: BufferPair,
}

impl Setup {
    pub(crate) fn new(
        case: Case,
        shape: Elements,
        group: &BenchGroup,
        in_place: bool,
        unalign: usize,
    ) -> Setup {
        let (rank, ranks, element) = (group.rank(), group.size(), case.dtype.size());
        let mine = rank * shape.count * element;
        let before = unalign * element;
        let (input_at, output_at) = match case.op {
            Op::AllGather | Op::Gather | Op::Hypercube if in_place => (mine, 0),
            Op::ReduceScatter | Op::Scatter if in_place => (0, mine),
            _ => (0, 0),
        };
        let sides = BufferPair {
            input: case.op.sends(rank, case.root).then_some((before + input_at, shape.send)),
            output: case.op.receives(rank, case.root).then_some((before + output_at, shape.receive)),
        };
        let redop = case.op.reduces().then_some(case.redop);
        let format = format(case);
        let pattern = Pattern { dtype: case.dtype, redop, ranks, format, seed: 0 };
        Setup { case, shape, rank, pattern, in_place, before, sides }
    }

    fn element(&self) -> usize {
        self.case.dtype.size()
    }

    /// Writes this rank's input, and fills all other bytes with [`UNWRITTEN`].
    pub(crate) fn prepare(&mut self, seed: u64, a: &mut Buffer, b: &mut Buffer) {
        self.pattern.seed = seed;
        let Elements { send, receive, .. } = self.shape;
        if self.in_place {
            b.set_used(self.before + send.max(receive) * self.element());
        } else {
            a.set_used(self.before + send * self.element());
            b.set_used(self.before + receive * self.element());
        }
        b.bytes().fill(UNWRITTEN);
        if let Some((at, count)) = self.sides.input {
            let run = self.pattern.of_input(self.rank, 0, count);
            let to = if self.in_place { b.bytes() } else { a.bytes() };
            run.fill(&mut to[at..at + run.len()]);
        }
    }

    /// Binds the call to the buffers.
    pub(crate) fn bind<'a>(&self, group: &'a BenchGroup, a: &'a mut Buffer, b: &'a mut Buffer) -> Bound<'a> {
        match self.in_place {
            true => group.bind_in_place(self.case, self.sides, b),
            false => group.bind(self.case, self.sides, a, b),
        }
    }

    /// Runs `warmup` calls, a barrier, and `iters` iterations. Returns the time of the iterations.
    pub(crate) fn run(
        &self,
        Ranks { world, group, .. }: Ranks<'_>,
        a: &mut Buffer,
        b: &mut Buffer,
        (warmup, iters): (usize, usize),
        pace: Iteration,
        each: Option<&mut Vec<f64>>,
    ) -> Result<Duration> {
        let mut call = self.bind(group, a, b);
        call.time(warmup)?;
        // All groups begin at the same time.
        world.barrier()?;
        call.iterate(iters, pace, each)
    }

    /// Returns the number of wrong elements of this rank: in its output, in memory that is not an output, and in an input that
    /// must be unchanged.
    pub(crate) fn wrong(&self, a: &mut Buffer, b: &mut Buffer) -> u64 {
        let output = match self.sides.output {
            Some((at, count)) => self.wrong_output(&b.bytes()[at..at + count * self.element()]),
            None if self.in_place => 0,
            None => b.bytes()[self.before..]
                .chunks(self.element())
                .filter(|e| e.iter().any(|byte| *byte != UNWRITTEN))
                .count() as u64,
        };
        let input = match self.sides.input {
            Some((_, count)) if !self.in_place => {
                self.pattern.of_input(self.rank, 0, count).wrong(&a.bytes()[self.before..])
            }
            _ => 0,
        };
        output + input
    }

    fn wrong_output(&self, found: &[u8]) -> u64 {
        let Setup { case, shape: Elements { count, receive, .. }, rank, ref pattern, .. } = *self;
        let ranks = pattern.ranks;
        // One block from every rank, which begins at element `start` of that rank's input.
        let blocks = |start: usize| {
            let block = count * self.element();
            (0..ranks)
                .map(|r| pattern.of_moved(r, start, count).wrong(&found[r * block..(r + 1) * block]))
                .sum()
        };
        match case.op {
            Op::AllGather | Op::Gather | Op::Hypercube => blocks(0),
            Op::AllToAll => blocks(rank * count),
            Op::AllToAllV => self.wrong_uneven(found),
            Op::ReduceScatter => pattern.of_reduced(rank * count, count).wrong(found),
            Op::AllReduce | Op::Reduce => pattern.of_reduced(0, receive).wrong(found),
            Op::Broadcast => pattern.of_input(case.root, 0, receive).wrong(found),
            Op::Scatter => pattern.of_input(case.root, rank * count, count).wrong(found),
            Op::SendRecv => pattern.of_input((rank + ranks - 1) % ranks, 0, receive).wrong(found),
            Op::Barrier => 0,
        }
    }

    /// Returns the number of wrong elements of alltoallv. A rank's block follows the blocks for the previous ranks.
    fn wrong_uneven(&self, found: &[u8]) -> u64 {
        let Setup { shape: Elements { receive, .. }, rank, ref pattern, .. } = *self;
        let mut rest = found;
        let wrong = (0..pattern.ranks).map(|from| {
            let sent = uneven(receive, pattern.ranks, from);
            let (block, behind) = rest.split_at(sent[rank] * self.element());
            rest = behind;
            pattern.of_input(from, sent[..rank].iter().sum(), sent[rank]).wrong(block)
        });
        wrong.sum()
    }

    /// Returns the number of bytes that were written outside of the buffers.
    pub(crate) fn outside(&self, a: &mut Buffer, b: &mut Buffer) -> u64 {
        let a = if self.in_place { 0 } else { a.overwritten() };
        (a + b.overwritten()) as u64
    }
}

/// Returns the wire format of the case between nodes, from the settings.
fn format(case: Case) -> Option<Format> {
    let formats = Config::get().ok()?.formats;
    formats.of(case.op.collective()?).filter(|_| case.dtype == DType::F32)
}
