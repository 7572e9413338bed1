//! Which algorithm and segment the model likes best for a job.

use smddp_plan::sim::{Cluster, Job, Run};
use smddp_plan::{Algorithm, Collective};

/// Messages (estimated, one for each reader) of all cuts of one algorithm that are replayed: some ten seconds.
const BUDGET: u64 = 6_000_000;
/// An algorithm whose coarsest cut has more than this is left out unless it is asked for by name.
const MOST_MESSAGES: u64 = 10_000_000;

/// With more ranks than this on several nodes, algorithms that take all ranks for alike are tried by name only: what
/// they send over a node's link grows with its ranks.
const FLAT_RANKS: usize = 256;

/// What was tried, quickest first, and what was left out.
pub(crate) struct Candidates {
    pub runs: Vec<Run>,
    /// With how many messages each.
    pub left_out: Vec<(u64, Job)>,
    /// Those that do not run on this cluster, with the reason.
    pub failed: Vec<String>,
}

impl Candidates {
    fn replay(&mut self, cluster: &Cluster, job: &Job) {
        match job.run(cluster, Vec::new()) {
            Ok(run) => self.runs.push(run),
            Err(error) => self.failed.push(format!("{}: {error}", job.algorithm.name())),
        }
    }
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
    let large = cluster.nodes() > 1 && cluster.size() > FLAT_RANKS;
    for &algorithm in algorithms {
        if large && !named && !algorithm.is_hierarchical() {
            continue;
        }
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
        // The coarsest cut has the fewest messages, and is tried in any case.
        let mut counted: Vec<(u64, &Job)> = jobs.iter().map(|job| (job.messages(cluster), job)).collect();
        counted.sort_by_key(|(messages, _)| *messages);
        match counted.first() {
            Some(&(messages, job)) if !named && messages > MOST_MESSAGES => {
                found.left_out.push((messages, *job));
                continue;
            }
            _ => {}
        }
        let mut total = 0;
        let within = |(i, (messages, _)): &(usize, &(u64, &Job))| {
            total += messages;
            *i == 0 || total <= BUDGET
        };
        let chosen: Vec<&Job> =
            counted.iter().enumerate().take_while(within).map(|(_, (_, job))| *job).collect();
        chosen.into_iter().for_each(|job| found.replay(cluster, job));
    }
    if found.runs.is_empty()
        && let Some((_, job)) = found.left_out.iter().min_by_key(|(messages, _)| *messages).copied()
    {
        found.left_out.retain(|(_, other)| *other != job);
        found.replay(cluster, &job);
    }
    found.runs.sort_by(|a, b| a.outcome.seconds.total_cmp(&b.outcome.seconds));
    found
}
