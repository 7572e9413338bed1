//! Times of each iteration (`-I 1`) on all ranks.

use serde::Serialize;

use crate::calls::BenchGroup;
use crate::cli::Cli;
use crate::error::Result;

/// Statistics with the keys of nccl-tests, in microseconds. They use the slowest rank of each iteration, without the skipped
/// iterations.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PerIter {
    /// Time of the slowest rank in each iteration.
    times_us: Vec<f64>,
    pub avg_us: f64,
    pub min_us: f64,
    pub max_us: f64,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    /// Standard deviation as a percentage of the average.
    pub cv_pct: f64,
    /// Time of each rank in each iteration.
    per_process_max_times_us: Vec<Vec<f64>>,
}

impl PerIter {
    /// Gathers the seconds of each iteration (`-m` calls) from all ranks, and keeps the `first` ranks.
    pub(crate) fn gathered(world: &BenchGroup, mine: &[f64], first: usize, cli: &Cli) -> Result<PerIter> {
        let calls = cli.agg_iters as f64;
        let mut bytes: Vec<u8> = mine.iter().flat_map(|t| (t / calls).to_ne_bytes()).collect();
        let all = world.gather_bytes(&mut bytes)?;
        let ranks: Vec<Vec<f64>> = all
            .chunks(bytes.len().max(1))
            .take(first)
            .map(|rank| rank.as_chunks().0.iter().map(|t| f64::from_ne_bytes(*t)).collect())
            .collect();
        Ok(PerIter::new(&ranks, cli.per_iter_skip))
    }

    /// Computes the statistics. `ranks` contains the seconds of each iteration, by rank.
    pub(crate) fn new(ranks: &[Vec<f64>], skip: usize) -> PerIter {
        let own: Vec<Vec<f64>> = ranks.iter().map(|times| times.iter().map(|t| t * 1e6).collect()).collect();
        let iterations = own.iter().map(Vec::len).min().unwrap_or(0);
        let times: Vec<f64> =
            (0..iterations).map(|i| own.iter().map(|times| times[i]).fold(0.0, f64::max)).collect();
        let mut counted = times[skip.min(times.len())..].to_vec();
        counted.sort_unstable_by(f64::total_cmp);
        let n = counted.len().max(1) as f64;
        let average = counted.iter().sum::<f64>() / n;
        let variance = counted.iter().map(|t| (t - average).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
        // The nearest-rank method returns only measured times.
        let percentile = |share: f64| {
            let at = ((share * n).ceil() as usize).clamp(1, counted.len().max(1)) - 1;
            counted.get(at).copied().unwrap_or(0.0)
        };
        PerIter {
            avg_us: average,
            min_us: counted.first().copied().unwrap_or(0.0),
            max_us: counted.last().copied().unwrap_or(0.0),
            p50_us: percentile(0.50),
            p90_us: percentile(0.90),
            p99_us: percentile(0.99),
            cv_pct: if average > 0.0 { variance.sqrt() / average * 100.0 } else { 0.0 },
            times_us: times,
            per_process_max_times_us: own,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iteration_time_is_that_of_the_slowest_rank() {
        let found = PerIter::new(&[vec![1e-6, 5e-6, 3e-6], vec![2e-6, 4e-6, 3e-6]], 0);
        assert_eq!(found.times_us.iter().map(|t| t.round()).collect::<Vec<_>>(), [2.0, 5.0, 3.0]);
        let is_close = |a: f64, b: f64| (a - b).abs() < 1e-6;
        assert!(
            is_close(found.avg_us, 10.0 / 3.0) && is_close(found.min_us, 2.0) && is_close(found.max_us, 5.0)
        );
        assert!(
            is_close(found.p99_us, 5.0)
                && is_close(found.cv_pct, (7.0f64 / 3.0).sqrt() / (10.0 / 3.0) * 100.0)
        );
        assert_eq!(found.per_process_max_times_us.len(), 2);
    }

    #[test]
    fn percentile_is_a_measured_time() {
        let times: Vec<f64> = (1..=200).rev().map(|t| f64::from(t) * 1e-6).collect();
        let found = PerIter::new(&[times], 0);
        assert_eq!([found.p50_us, found.p90_us, found.p99_us].map(f64::round), [100.0, 180.0, 198.0]);
    }

    #[test]
    fn skipped_iterations_are_listed_but_not_in_the_statistics() {
        let found = PerIter::new(&[vec![9e-6, 1e-6, 1e-6]], 1);
        assert!((found.max_us - 1.0).abs() < 1e-9 && found.times_us.len() == 3 && found.cv_pct < 1e-9);
    }
}
