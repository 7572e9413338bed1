//! The measurement of nccl-tests: times and checks each call, out of place and in place.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::buffers::Buffer;
use crate::calls::{Case, Iteration};
use crate::cases;
use crate::cli::Cli;
use crate::error::Result;
use crate::op::{Elements, Op};
use crate::periter::PerIter;
use crate::ranks::Ranks;
use crate::row::{Measure, Row, Summary};
use crate::setup::Setup;

/// Measures `op` with the options of `cli` on all ranks. Calls `row` for every row on every rank.
pub(crate) fn measure(
    ranks: Ranks<'_>,
    op: Op,
    cli: &Cli,
    row: &mut dyn FnMut(&Row) -> Result<()>,
) -> Result<Summary> {
    let mut bench = Bench { ranks, op, cli, seed: 0, failed: 0, busbw: 0.0, halves: 0 };
    for _ in cli.cycles() {
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
    /// Sum over all halves of rows, and the number of halves.
    busbw: f64,
    halves: u32,
}

impl Bench<'_> {
    /// Measures all rows once.
    fn cycle(&mut self, row: &mut dyn FnMut(&Row) -> Result<()>) -> Result<()> {
        let (ranks, op, cli) = (self.ranks, self.op, self.cli);
        cases::each(ranks, op, cli, &mut |spec, input, output| {
            let out_of_place = self.half(spec.case, spec.shape, false, input, output)?;
            let in_place = self.half(spec.case, spec.shape, true, input, output)?;
            self.busbw += out_of_place.busbw + in_place.busbw;
            self.halves += 2;
            row(&spec.row(ranks.group, [out_of_place, in_place]))
        })
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
        // Without an in-place form the second half repeats the first half without checks.
        let repeated = in_place && !case.op.has_in_place();
        let (cli, Ranks { world, group, one_host, .. }) = (self.cli, self.ranks);
        let mut setup = Setup::new(case, shape, group, in_place && !repeated, cli.unalign);
        setup.prepare(self.next_seed(), a, b);
        let pace = Iteration { calls: cli.agg_iters, barrier: cli.blocking == 1 };
        let mut each = (cli.per_iter == 1).then(Vec::new);
        let counts = cli.counts(shape.send.max(shape.receive) * case.dtype.size());
        let mine = setup.run(self.ranks, a, b, counts, pace, each.as_mut())?;
        let calls = (counts.1 * cli.agg_iters) as f64;
        let seconds = world.average(mine.as_secs_f64() / calls, cli.average)?;
        let per_iter = each.map(|each| PerIter::gathered(world, &each, world.size(), cli)).transpose()?;
        let (algbw, busbw) = case.op.bandwidth(shape, case.dtype.size(), group.size(), seconds);

        let mut wrong = None;
        if !repeated {
            for _ in 0..self.cli.check {
                let (elements, outside) = match case.op {
                    Op::Barrier if !one_host => break,
                    Op::Barrier => (self.early_leaves()?, 0),
                    _ => {
                        setup.prepare(self.next_seed(), a, b);
                        setup.run(self.ranks, a, b, (1, 0), Iteration::default(), None)?;
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

    fn next_seed(&mut self) -> u64 {
        self.seed += 1;
        self.seed
    }

    /// Returns the number of barriers that this rank left before the last rank entered. Each rank is late once. All ranks must
    /// read the same clock.
    fn early_leaves(&self) -> Result<u64> {
        let group = self.ranks.group;
        let mut early = 0;
        for late in 0..group.size() {
            if late == group.rank() {
                let until = Instant::now() + Duration::from_micros(200);
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
            let mut entered = clock_ns().to_ne_bytes();
            group.barrier()?;
            let left = clock_ns();
            let all = group.gather_bytes(&mut entered)?;
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
