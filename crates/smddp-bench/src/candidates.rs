//! Which algorithm and segment the model likes best for a job.

use smddp_plan::sim::{Cluster, Job, Run};
use smddp_plan::{Algorithm, Collective};

/// Messages (estimated) above which a candidate is not replayed unless it is asked for by name: about half a
/// minute, and gigabytes.
const MOST_MESSAGES: u64 = 60_000_000;

/// What was tried, quickest first, and what was left out.
pub(crate) struct Candidates {
    pub runs: Vec<Run>,
    /// With how many messages each.
    pub left_out: Vec<(Algorithm, u64)>,
    /// Those that do not run on this cluster, with the reason.
    pub failed: Vec<String>,
}

/// How the job may be cut.
#[derive(Clone, Copy, Default)]
pub(crate) struct Fixed {
    pub segment: Option<u64>,
    pub depth: Option<usize>,
    pub root: usize,
}

/// Replays `collective` with each of `algorithms` (all that do it, where there are none) in several cuts each.
pub(crate) fn try_all(
    cluster: &Cluster,
    collective: Collective,
    bytes: u64,
    algorithms: &[Algorithm],
    fixed: Fixed,
) -> Candidates {
    let named = !algorithms.is_empty();
    let algorithms = if named { algorithms } else { &Algorithm::ALL[..] };
    let mut found = Candidates { runs: Vec::new(), left_out: Vec::new(), failed: Vec::new() };
    for &algorithm in algorithms {
        let mut jobs = Job::cuts(cluster, collective, algorithm, bytes);
        if jobs.is_empty() && named {
            found.failed.push(format!("{} does not do this collective here", algorithm.name()));
        }
        for job in &mut jobs {
            job.segment = fixed.segment.unwrap_or(job.segment);
            job.depth = fixed.depth.unwrap_or(job.depth);
            job.root = fixed.root;
        }
        jobs.dedup();
        // The coarsest cut has the fewest messages.
        let counted = jobs.iter().map(|job| (job.messages(cluster), job));
        let (small, large): (Vec<_>, Vec<_>) = counted.partition(|(messages, _)| *messages <= MOST_MESSAGES);
        let mut chosen: Vec<&Job> = small.into_iter().map(|(_, job)| job).collect();
        if let (true, Some((messages, job))) = (chosen.is_empty(), large.iter().min_by_key(|(m, _)| *m)) {
            match named {
                true => chosen.push(job),
                false => found.left_out.push((algorithm, *messages)),
            }
        }
        for job in chosen {
            match job.run(cluster, Vec::new()) {
                Ok(run) => found.runs.push(run),
                Err(error) => found.failed.push(format!("{}: {error}", algorithm.name())),
            }
        }
    }
    found.runs.sort_by(|a, b| a.outcome.seconds.total_cmp(&b.outcome.seconds));
    found
}
