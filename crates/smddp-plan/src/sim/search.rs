//! The quickest plan that a replay finds, whatever the choice by cost says.

use super::cluster::Cluster;
use super::job::{Job, Run};
use crate::choice::{Group, Settings, Shape, alternatives};

/// Messages (estimated, one for each reader) of all cuts of one algorithm that are replayed: some ten seconds.
const BUDGET: u64 = 6_000_000;
/// An algorithm whose coarsest cut has more than this is left out.
const MOST_MESSAGES: u64 = 10_000_000;

/// With more ranks than this on several nodes, algorithms that take all ranks for alike are left out: what they send
/// over a node's link grows with its ranks.
const FLAT_RANKS: usize = 256;

/// What was replayed, quickest first, and what was left out.
#[derive(Debug, Default)]
pub struct Found {
    pub runs: Vec<Run>,
    /// With how many messages each.
    pub left_out: Vec<(u64, Job)>,
    /// Those that do not run on this cluster, with the reason.
    pub failed: Vec<String>,
}

/// Replays the call with every algorithm that may do it, in several cuts each.
pub fn search(
    cluster: &Cluster,
    shape: &Shape,
    root: usize,
    group: &Group<'_>,
    settings: &Settings<'_>,
) -> Found {
    let mut found = Found::default();
    let large = cluster.nodes() > 1 && cluster.size() > FLAT_RANKS;
    let job = |decision| Job { collective: shape.collective, root, decision };
    let all = alternatives(shape, group, settings).into_iter().map(job);
    let all: Vec<Job> = all.filter(|job| !large || job.decision.choice.algorithm.is_hierarchical()).collect();
    for jobs in all.chunk_by(|a, b| a.decision.choice.algorithm == b.decision.choice.algorithm) {
        // The coarsest cut has the fewest messages, and is tried in any case.
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
