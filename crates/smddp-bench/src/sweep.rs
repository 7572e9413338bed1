//! The measurement: every type, op, root and size in turn, timed and then checked.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use smddp_core::{DType, RedOp};

use crate::buffers::Buffer;
use crate::calls::{Case, Pace, Sides, Team};
use crate::cli::Cli;
use crate::error::Result;
use crate::op::{Elements, Op, uneven};
use crate::pattern::{POISON, Pattern};
use crate::periter::PerIter;
use crate::sizes::sweep;
use crate::types::{DTYPES, REDOPS, has};

/// One half of a row.
#[derive(Clone, Debug)]
pub(crate) struct Measure {
    pub seconds: f64,
    /// GB/s.
    pub algbw: f64,
    pub busbw: f64,
    /// Wrong elements on all ranks; `None` where nothing was checked.
    pub wrong: Option<u64>,
    /// Where that was asked for.
    pub per_iter: Option<PerIter>,
}

#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub bytes: usize,
    pub count: usize,
    pub dtype: &'static str,
    pub redop: &'static str,
    pub root: i64,
    pub out_of_place: Measure,
    pub in_place: Measure,
    /// The way the call takes, in the engine's words.
    pub path: Option<String>,
}

/// What is left when all rows are done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Summary {
    /// Checks that found a wrong element, or a byte written outside a buffer.
    pub failed: u64,
    /// Average over both halves of all rows, GB/s.
    pub busbw: f64,
}

/// Who measures.
#[derive(Clone, Copy)]
pub(crate) struct Ranks<'a> {
    /// All of them: times and wrong elements are over all.
    pub world: &'a Team,
    /// Those that make the calls together, or all.
    pub team: &'a Team,
    /// Ranks of the smallest such group.
    pub fewest: usize,
    /// All ranks are on one host.
    pub one_host: bool,
}

/// Measures `op` as `cli` says, on all ranks alike; `row` is told every row (on every rank).
pub(crate) fn measure(
    ranks: Ranks<'_>,
    op: Op,
    cli: &Cli,
    row: &mut dyn FnMut(&Row) -> Result<()>,
) -> Result<Summary> {
    let mut bench = Bench { ranks, op, cli, seed: 0, failed: 0, busbw: 0.0, halves: 0 };
    for cycle in 0.. {
        if cli.cycles > 0 && cycle == cli.cycles {
            break;
        }
        bench.cycle(row)?;
    }
    Ok(Summary { failed: bench.failed, busbw: bench.busbw / f64::from(bench.halves.max(1)) })
}

struct Bench<'a> {
    ranks: Ranks<'a>,
    op: Op,
    cli: &'a Cli,
    seed: u64,
    failed: u64,
    /// Sum over all halves of rows, and how many these are.
    busbw: f64,
    halves: u32,
}

impl Bench<'_> {
    /// All rows.
    fn cycle(&mut self, row: &mut dyn FnMut(&Row) -> Result<()>) -> Result<()> {
        let Bench { ranks: Ranks { team, .. }, op, cli, .. } = *self;
        for (dtype_name, dtype) in self.dtypes() {
            let element = dtype.size();
            let sizes = match op {
                Op::Barrier => vec![0],
                _ => sweep(cli.min_bytes, cli.max_bytes, cli.step_factor, cli.step_bytes, element),
            };
            let shapes: Vec<Elements> =
                sizes.iter().map(|bytes| op.shape(bytes / element, team.size())).collect();
            let most = |of: fn(&Elements) -> usize| shapes.iter().map(of).max().unwrap_or(0) * element;
            let before = cli.unalign * element;
            let mut input = Buffer::new(before + most(|s| s.send))?;
            let mut output = Buffer::new(before + most(|s| s.send.max(s.receive)))?;
            for (redop_name, redop) in self.redops(dtype)? {
                for root in self.roots() {
                    let case = Case { op, dtype, redop, root };
                    for shape in &shapes {
                        let out_of_place = self.half(case, *shape, false, &mut input, &mut output)?;
                        let in_place = self.half(case, *shape, true, &mut input, &mut output)?;
                        self.busbw += out_of_place.busbw + in_place.busbw;
                        self.halves += 2;
                        let bytes = shape.send.max(shape.receive) * element;
                        row(&Row {
                            bytes,
                            count: shape.count,
                            dtype: dtype_name,
                            redop: redop_name,
                            root: if op.has_root() { root as i64 } else { -1 },
                            out_of_place,
                            in_place,
                            path: op
                                .collective()
                                .map(|collective| team.comm().path(collective, dtype, bytes)),
                        })?;
                    }
                }
            }
        }
        Ok(())
    }

    fn dtypes(&self) -> Vec<(&'static str, DType)> {
        if self.op == Op::Barrier { vec![("none", DType::U8)] } else { self.cli.dtype.of(&DTYPES) }
    }

    /// The ops for one type; of all ops those that the type has.
    fn redops(&self, dtype: DType) -> Result<Vec<(&'static str, RedOp)>> {
        if !self.op.reduces() {
            return Ok(vec![("none", RedOp::Sum)]);
        }
        let asked = self.cli.redop.of(&REDOPS);
        // Of all types those that have the op, too; one that was asked for with another is refused by the command line.
        Ok(asked.into_iter().filter(|(_, op)| has(dtype, *op)).collect())
    }

    fn roots(&self) -> Vec<usize> {
        match (self.op.has_root(), usize::try_from(self.cli.root)) {
            (false, _) => vec![0],
            (true, Ok(root)) => vec![root],
            (true, Err(_)) => (0..self.ranks.fewest).collect(),
        }
    }

    /// Times and checks one case, out of place or in place.
    fn half(
        &mut self,
        case: Case,
        shape: Elements,
        in_place: bool,
        a: &mut Buffer,
        b: &mut Buffer,
    ) -> Result<Measure> {
        // Where there is no in-place form the second half repeats the first one, unchecked.
        let repeated = in_place && !case.op.has_in_place();
        let (cli, Ranks { world, team, one_host, .. }) = (self.cli, self.ranks);
        let mut setup = Setup::new(case, shape, team, in_place && !repeated, cli.unalign);
        setup.prepare(self.next_seed(), a, b);
        let pace = Pace { calls: cli.agg_iters, barrier: cli.blocking == 1 };
        let mut each = (cli.per_iter == 1).then(Vec::new);
        let counts = (cli.warmup_iters.max(1), cli.iters);
        let mine = setup.run(self.ranks, a, b, counts, pace, each.as_mut())?;
        let seconds = self.over_ranks(mine.as_secs_f64() / (cli.iters * cli.agg_iters) as f64)?;
        let per_iter = each.map(|each| self.per_iter(&each)).transpose()?;
        let (algbw, busbw) = case.op.bandwidth(shape, case.dtype.size(), team.size(), seconds);

        let mut wrong = None;
        if !repeated {
            for _ in 0..self.cli.check {
                let (elements, outside) = match case.op {
                    Op::Barrier if !one_host => break,
                    Op::Barrier => (self.early_leaves()?, 0),
                    _ => {
                        setup.prepare(self.next_seed(), a, b);
                        setup.run(self.ranks, a, b, (1, 0), Pace::default(), None)?;
                        (setup.wrong(a, b), setup.outside(a, b))
                    }
                };
                let elements = world.sum_u64(elements)?;
                let outside = world.sum_u64(outside)?;
                wrong = Some(wrong.unwrap_or(0) + elements);
                if elements + outside > 0 {
                    self.failed += 1;
                    break;
                }
            }
        }
        Ok(Measure { seconds, algbw, busbw, wrong, per_iter })
    }

    /// All ranks' iterations, from this rank's, in seconds of one call.
    fn per_iter(&self, mine: &[f64]) -> Result<PerIter> {
        let calls = self.cli.agg_iters as f64;
        let mut bytes: Vec<u8> = mine.iter().flat_map(|t| (t / calls).to_ne_bytes()).collect();
        let all = self.ranks.world.gather_bytes(&mut bytes)?;
        let ranks: Vec<Vec<f64>> = all
            .chunks(bytes.len().max(1))
            .map(|rank| rank.as_chunks().0.iter().map(|t| f64::from_ne_bytes(*t)).collect())
            .collect();
        Ok(PerIter::new(&ranks, self.cli.per_iter_skip))
    }

    fn next_seed(&mut self) -> u64 {
        self.seed += 1;
        self.seed
    }

    /// The ranks' times as one, as `-a` says.
    fn over_ranks(&self, seconds: f64) -> Result<f64> {
        self.ranks.world.average(seconds, self.cli.average)
    }

    /// Barriers that I left before the last rank came: each rank in turn comes late. All ranks read one clock.
    fn early_leaves(&self) -> Result<u64> {
        let team = self.ranks.team;
        let mut early = 0;
        for late in 0..team.size() {
            if late == team.rank() {
                let until = Instant::now() + Duration::from_micros(200);
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
            let mut entered = clock_ns().to_ne_bytes();
            team.barrier()?;
            let left = clock_ns();
            let all = team.gather_bytes(&mut entered)?;
            let last = all.as_chunks().0.iter().map(|t: &[u8; 8]| i64::from_ne_bytes(*t)).max();
            early += u64::from(last > Some(left));
        }
        Ok(early)
    }
}

fn clock_ns() -> i64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}

/// One case laid out in the buffers. Out of place: input in `a`, output in `b`. In place: both in `b`.
struct Setup {
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
    fn new(case: Case, shape: Elements, team: &Team, in_place: bool, unalign: usize) -> Setup {
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
        let pattern = Pattern { dtype: case.dtype, redop, ranks, seed: 0 };
        Setup { case, shape, rank, pattern, in_place, before, sides }
    }

    fn element(&self) -> usize {
        self.case.dtype.size()
    }

    /// Puts this rank's input in place and poison everywhere else.
    fn prepare(&mut self, seed: u64, a: &mut Buffer, b: &mut Buffer) {
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

    /// Runs the call `warmup` times, then behind a barrier `iters` times at a pace; the time of the latter.
    fn run(
        &self,
        Ranks { world, team, .. }: Ranks<'_>,
        a: &mut Buffer,
        b: &mut Buffer,
        (warmup, iters): (usize, usize),
        pace: Pace,
        each: Option<&mut Vec<f64>>,
    ) -> Result<Duration> {
        let mut call = match self.in_place {
            true => team.bind_in_place(self.case, self.sides, b),
            false => team.bind(self.case, self.sides, a, b),
        };
        call.time(warmup)?;
        // All groups begin together.
        world.barrier()?;
        call.iterate(iters, pace, each)
    }

    /// Wrong elements of this rank: of its output, of an output that it should not have got, and of its input
    /// where that had to stay as it was.
    fn wrong(&self, a: &mut Buffer, b: &mut Buffer) -> u64 {
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
                .map(|r| pattern.of_input(r, start, count).wrong(&found[r * block..(r + 1) * block]))
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
    fn outside(&self, a: &mut Buffer, b: &mut Buffer) -> u64 {
        let a = if self.in_place { 0 } else { a.overwritten() };
        (a + b.overwritten()) as u64
    }
}
