//! Search for the fastest plan by simulation, independent of the cost model.

use super::cluster::Cluster;
use super::job::{Job, Run};
use crate::choice::{GroupShape, Settings, Shape, alternatives};

/// Maximum estimated messages (one per reader) over all simulated segment sizes of one algorithm: about ten
/// seconds.
const BUDGET: u64 = 6_000_000;
/// Maximum messages of the coarsest segmentation of an algorithm; above it the algorithm is skipped.
const MOST_MESSAGES: u64 = 10_000_000;

/// Maximum ranks on several nodes for algorithms that ignore nodes. Their traffic over a node link grows with
/// the ranks of the node.
const FLAT_RANKS: usize = 256;

/// Simulated plans, fastest first, and skipped plans.
#[derive(Debug, Default)]
pub struct SearchResult {
    /// Simulated plans, fastest first.
    pub runs: Vec<Run>,
    /// Skipped jobs with their estimated messages.
    pub left_out: Vec<(u64, Job)>,
    /// Plans that do not run on this cluster, with the reason.
    pub failed: Vec<String>,
}

/// Simulates the call with every algorithm that supports it, in several segment sizes each. `begins` receives each job
/// before its simulation, and its estimated messages.
pub fn search(
    cluster: &Cluster,
    shape: &Shape,
    root: usize,
    group: &GroupShape<'_>,
    settings: &Settings<'_>,
    begins: &mut dyn FnMut(&Job, u64),
) -> SearchResult {
    let mut found = SearchResult::default();
    let large = cluster.nodes() > 1 && cluster.size() > FLAT_RANKS;
    let job = |decision| Job { collective: shape.collective, root, decision };
    let all = alternatives(shape, group, settings).into_iter().map(job);
    let all: Vec<Job> = all.filter(|job| !large || job.decision.choice.algorithm.is_hierarchical()).collect();
    for jobs in all.chunk_by(|a, b| a.decision.choice.algorithm == b.decision.choice.algorithm) {
        // The coarsest segmentation has the fewest messages and is always simulated.
        let mut counted: Vec<(u64, &Job)> = jobs.iter().map(|job| (job.messages(cluster), job)).collect();
        counted.sort_by_key(|(messages, _)| *messages);
        let mut total = 0;
        for (i, (messages, job)) in counted.into_iter().enumerate() {
            total += messages;
            if i == 0 && messages > MOST_MESSAGES {
                found.left_out.push((messages, job.clone()));
                break;
            }
            if i > 0 && total > BUDGET {
                break;
            }
            begins(job, messages);
            match job.run(cluster, Vec::new()) {
                Ok(run) => found.runs.push(run),
                Err(error) => {
                    let name = job.decision.choice.algorithm.name();
                    found.failed.push(format!("{name}: {error}"));
                }
            }
        }
    }
    found.runs.sort_by(|a, b| a.outcome.seconds.total_cmp(&b.outcome.seconds));
    found
}
