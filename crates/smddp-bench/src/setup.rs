//! One case in its buffers: laid out, run, checked.

use std::time::Duration;

use smddp_core::{Config, DType, Format};

use crate::buffers::Buffer;
use crate::calls::{Bound, Case, Pace, Sides, Team};
use crate::error::Result;
use crate::op::{Elements, Op, uneven};
use crate::pattern::{POISON, Pattern};
use crate::ranks::Ranks;

/// One case laid out in the buffers. Out of place: input in `a`, output in `b`. In place: both in `b`.
pub(crate) struct Setup {
    case: Case,
    shape: Elements,
    rank: usize,
    pattern: Pattern,
    in_place: bool,
    /// Bytes before the data of each buffer.
    before: usize,
    sides: Sides,
}

impl Setup {
    pub(crate) fn new(case: Case, shape: Elements, team: &Team, in_place: bool, unalign: usize) -> Setup {
        let (rank, ranks, element) = (team.rank(), team.size(), case.dtype.size());
        let mine = rank * shape.count * element;
        let before = unalign * element;
        let (input_at, output_at) = match case.op {
            Op::AllGather | Op::Gather | Op::Hypercube if in_place => (mine, 0),
            Op::ReduceScatter | Op::Scatter if in_place => (0, mine),
            _ => (0, 0),
        };
        let sides = Sides {
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

    /// Puts this rank's input in place and poison everywhere else.
    pub(crate) fn prepare(&mut self, seed: u64, a: &mut Buffer, b: &mut Buffer) {
        self.pattern.seed = seed;
        let Elements { send, receive, .. } = self.shape;
        if self.in_place {
            b.set_used(self.before + send.max(receive) * self.element());
        } else {
            a.set_used(self.before + send * self.element());
            b.set_used(self.before + receive * self.element());
        }
        b.bytes().fill(POISON);
        if let Some((at, count)) = self.sides.input {
            let run = self.pattern.of_input(self.rank, 0, count);
            let to = if self.in_place { b.bytes() } else { a.bytes() };
            run.fill(&mut to[at..at + run.len()]);
        }
    }

    /// The call, bound to the buffers.
    pub(crate) fn bind<'a>(&self, team: &'a Team, a: &'a mut Buffer, b: &'a mut Buffer) -> Bound<'a> {
        match self.in_place {
            true => team.bind_in_place(self.case, self.sides, b),
            false => team.bind(self.case, self.sides, a, b),
        }
    }

    /// Runs the call `warmup` times, then behind a barrier `iters` times at a pace; the time of the latter.
    pub(crate) fn run(
        &self,
        Ranks { world, team, .. }: Ranks<'_>,
        a: &mut Buffer,
        b: &mut Buffer,
        (warmup, iters): (usize, usize),
        pace: Pace,
        each: Option<&mut Vec<f64>>,
    ) -> Result<Duration> {
        let mut call = self.bind(team, a, b);
        call.time(warmup)?;
        // All groups begin together.
        world.barrier()?;
        call.iterate(iters, pace, each)
    }

    /// Wrong elements of this rank: of its output, of an output that it should not have got, and of its input
    /// where that had to stay as it was.
    pub(crate) fn wrong(&self, a: &mut Buffer, b: &mut Buffer) -> u64 {
        let output = match self.sides.output {
            Some((at, count)) => self.wrong_output(&b.bytes()[at..at + count * self.element()]),
            None if self.in_place => 0,
            None => b.bytes()[self.before..]
                .chunks(self.element())
                .filter(|e| e.iter().any(|byte| *byte != POISON))
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
        // One block from every rank, each beginning at element `start` of that rank's input.
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

    /// The same of alltoallv: a rank's block lies behind those for the ranks before.
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

    /// Bytes that were written outside the buffers in use.
    pub(crate) fn outside(&self, a: &mut Buffer, b: &mut Buffer) -> u64 {
        let a = if self.in_place { 0 } else { a.overwritten() };
        (a + b.overwritten()) as u64
    }
}

/// How the settings have a case's elements travel between nodes.
fn format(case: Case) -> Option<Format> {
    let formats = Config::get().ok()?.formats;
    formats.of(case.op.collective()?).filter(|_| case.dtype == DType::F32)
}
