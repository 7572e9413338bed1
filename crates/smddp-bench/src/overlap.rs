//! OSU's tests of non-blocking collectives: overlap of a call with a computation of the rank.
//!
//! The computation is a fixed amount of work that takes as long as the call when each runs alone. CPU time that the call takes
//! from the computation makes it longer, which reduces the overlap.

use std::hint::black_box;
use std::time::Instant;

use crate::buffers::Buffer;
use crate::calls::Bound;
use crate::cases::{self, CaseSpec};
use crate::cli::Cli;
use crate::error::Result;
use crate::op::Op;
use crate::periter::PerIter;
use crate::ranks::Ranks;
use crate::row::{Measure, Osu, Row, Summary};
use crate::setup::Setup;

/// Measures `op` with the options of `cli` on all ranks. Calls `row` for every row on every rank.
pub(crate) fn measure(
    ranks: Ranks<'_>,
    op: Op,
    cli: &Cli,
    row: &mut dyn FnMut(&Row) -> Result<()>,
) -> Result<Summary> {
    let unit = unit_seconds();
    let mut summary = Summary::default();
    let mut rows = 0;
    for _ in cli.cycles() {
        cases::each(ranks, op, cli, &mut |spec, input, output| {
            let found = one(ranks, cli, unit, spec, (input, output), rows)?;
            rows += 1;
            summary.failed += u64::from(found.out_of_place.wrong.is_some_and(|wrong| wrong > 0));
            summary.busbw += found.out_of_place.busbw;
            row(&found)
        })?;
    }
    summary.busbw /= (rows as f64).max(1.0);
    Ok(summary)
}

fn one(
    ranks: Ranks<'_>,
    cli: &Cli,
    unit: f64,
    spec: &CaseSpec,
    (a, b): (&mut Buffer, &mut Buffer),
    seed: u64,
) -> Result<Row> {
    let Ranks { world, group, .. } = ranks;
    let mut setup = Setup::new(spec.case, spec.shape, group, false, cli.unalign);
    setup.prepare(seed << 16, a, b);
    let mut row = spec.row(group, [Measure::default(), Measure::default()]);
    let (warmup, iters) = cli.counts(row.bytes);
    let mut call = setup.bind(group, a, b);
    let average =
        |times: &[f64]| world.average(times.iter().sum::<f64>() / times.len().max(1) as f64, cli.average);
    timed(ranks, &mut call, warmup, 0)?;
    let communication = average(&timed(ranks, &mut call, iters, 0)?)?;
    let units = (communication / unit).ceil() as u64;
    let begun = Instant::now();
    (0..iters).for_each(|_| work(units));
    let computation = average(&[begun.elapsed().as_secs_f64() / iters as f64])?;
    let each = timed(ranks, &mut call, iters, units)?;
    let seconds = average(&each)?;
    let per_iter =
        (cli.per_iter == 1).then(|| PerIter::gathered(world, &each, world.size(), cli)).transpose()?;
    let mut wrong = None;
    // A barrier transfers no data to check.
    let checks = if spec.case.op == Op::Barrier { 0 } else { cli.check as u64 };
    for number in 0..checks {
        setup.prepare((seed << 16) + 1 + number, a, b);
        timed(ranks, &mut setup.bind(group, a, b), 1, units)?;
        let found = world.sum_u64(setup.wrong(a, b) + setup.outside(a, b))?;
        wrong = Some(wrong.unwrap_or(0) + found);
    }
    let (algbw, busbw) = spec.case.op.bandwidth(spec.shape, spec.case.dtype.size(), group.size(), seconds);
    row.out_of_place = Measure { seconds, algbw, busbw, wrong, per_iter };
    row.in_place = Measure { wrong: None, ..row.out_of_place.clone() };
    row.osu = Some(Osu::Overlap {
        compute_us: computation * 1e6,
        communication_us: communication * 1e6,
        overlap_pct: overlap_percent(seconds, computation, communication),
    });
    Ok(row)
}

/// Returns the percentage of the call that the computation hides.
fn overlap_percent(both: f64, computation: f64, communication: f64) -> f64 {
    if communication <= 0.0 {
        return 0.0;
    }
    (100.0 * (1.0 - (both - computation) / communication)).clamp(0.0, 100.0)
}

/// Returns the seconds of each of `iters` calls, each after a barrier and with `units` of concurrent work.
fn timed(Ranks { world, .. }: Ranks<'_>, call: &mut Bound<'_>, iters: usize, units: u64) -> Result<Vec<f64>> {
    let one = |_| {
        world.barrier()?;
        let begun = Instant::now();
        call.run_overlapped(&mut || work(units))?;
        Ok(begun.elapsed().as_secs_f64())
    };
    (0..iters).map(one).collect()
}

/// Runs arithmetic in which each step depends on the previous step.
fn work(units: u64) {
    let mut x = 1.0f64;
    for _ in 0..units {
        for _ in 0..16 {
            x = x * 0.999_999 + 1e-6;
        }
        x = black_box(x);
    }
}

/// Returns the seconds of a unit of work: the minimum of several measurements, since other processes may use the CPU.
fn unit_seconds() -> f64 {
    const UNITS: u64 = 20_000;
    let time = |_| {
        let begun = Instant::now();
        work(UNITS);
        begun.elapsed().as_secs_f64() / UNITS as f64
    };
    (0..5).map(time).fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_the_part_of_the_call_without_additional_time() {
        let overlap_percent =
            |both, computation, communication| overlap_percent(both, computation, communication).round();
        assert_eq!(overlap_percent(10.0, 10.0, 10.0), 100.0);
        assert_eq!(overlap_percent(20.0, 10.0, 10.0), 0.0);
        assert_eq!(overlap_percent(15.0, 10.0, 10.0), 50.0);
        assert_eq!((overlap_percent(25.0, 10.0, 10.0), overlap_percent(9.0, 10.0, 10.0)), (0.0, 100.0));
        assert_eq!(overlap_percent(1.0, 1.0, 0.0), 0.0);
    }

    #[test]
    fn a_unit_of_work_takes_time() {
        let unit = unit_seconds();
        assert!(unit > 1e-9 && unit < 1e-3, "{unit}");
    }
}
