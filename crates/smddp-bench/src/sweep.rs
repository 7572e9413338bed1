//! The measurement of nccl-tests: each call timed and then checked, out of place and in place.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::buffers::Buffer;
use crate::calls::{Case, Pace};
use crate::cases;
use crate::cli::Cli;
use crate::error::Result;
use crate::op::{Elements, Op};
use crate::periter::PerIter;
use crate::ranks::Ranks;
use crate::row::{Measure, Row, Summary};
use crate::setup::Setup;

/// Measures `op` as `cli` says, on all ranks alike; `row` is told every row (on every rank).
pub(crate) fn measure(
    ranks: Ranks<'_>,
    op: Op,
    cli: &Cli,
    row: &mut dyn FnMut(&Row) -> Result<()>,
) -> Result<Summary> {
    let mut bench = Bench { ranks, op, cli, seed: 0, failed: 0, busbw: 0.0, halves: 0 };
    for _ in cli.rounds() {
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
        let (ranks, op, cli) = (self.ranks, self.op, self.cli);
        cases::each(ranks, op, cli, &mut |asked, input, output| {
            let out_of_place = self.half(asked.case, asked.shape, false, input, output)?;
            let in_place = self.half(asked.case, asked.shape, true, input, output)?;
            self.busbw += out_of_place.busbw + in_place.busbw;
            self.halves += 2;
            row(&asked.row(ranks.team, [out_of_place, in_place]))
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
        // Where there is no in-place form the second half repeats the first one, unchecked.
        let repeated = in_place && !case.op.has_in_place();
        let (cli, Ranks { world, team, one_host, .. }) = (self.cli, self.ranks);
        let mut setup = Setup::new(case, shape, team, in_place && !repeated, cli.unalign);
        setup.prepare(self.next_seed(), a, b);
        let pace = Pace { calls: cli.agg_iters, barrier: cli.blocking == 1 };
        let mut each = (cli.per_iter == 1).then(Vec::new);
        let counts = cli.counts(shape.send.max(shape.receive) * case.dtype.size());
        let mine = setup.run(self.ranks, a, b, counts, pace, each.as_mut())?;
        let calls = (counts.1 * cli.agg_iters) as f64;
        let seconds = world.average(mine.as_secs_f64() / calls, cli.average)?;
        let per_iter = each.map(|each| PerIter::gathered(world, &each, world.size(), cli)).transpose()?;
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

    fn next_seed(&mut self) -> u64 {
        self.seed += 1;
        self.seed
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
