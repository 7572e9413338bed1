//! A collective on a cluster: the plan's own programs, bound to sizes and replayed.

use super::blocks::Blocks;
use super::cluster::Cluster;
use super::engine::{FLOAT, Load, Outcome, Stuck, replay};
use super::line::line_seconds;
use super::path::PathSummary;
use crate::algorithms::plan;
use crate::choice::{Choice, Decision};
use crate::ir::{Ask, Collective, Program};
use crate::topology::Topology;

/// What is to be replayed: what was decided about a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub collective: Collective,
    pub root: usize,
    pub decision: Decision,
}

/// A replayed job.
#[derive(Clone, Debug)]
pub struct Run {
    pub job: Job,
    pub outcome: Outcome,
    /// Share of the line rate that the busiest link reached; `None` on one node.
    pub line_share: Option<f64>,
}

/// Why there is no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unplanned {
    #[error("{0} does not do {1:?} here")]
    Algorithm(&'static str, Collective),
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

impl Job {
    /// Replays the job; the ports of the ranks in `watch` are recorded for drawing.
    ///
    /// # Errors
    /// [`Unplanned`] where the algorithm does not do it, or deadlocks with so few cells.
    pub fn run(&self, cluster: &Cluster, watch: Vec<usize>) -> Result<Run, Unplanned> {
        let Self { collective, root, .. } = *self;
        let Choice { algorithm, segment, .. } = self.decision.choice;
        let depth = self.decision.choice.window();
        let topology = cluster.topology();
        let program = |rank| self.program(cluster, &topology, rank);
        let refused = || Unplanned::Algorithm(algorithm.name(), collective);
        program(0).ok_or_else(refused)?;
        let blocks = Blocks::new(&self.decision.blocks[0]);
        let load = Load { blocks, segment: segment as u64, depth, format: self.decision.format, watch };
        let mut complete = true;
        let outcome = replay(cluster, &load, |rank| {
            program(rank).unwrap_or_else(|| {
                complete = false;
                Program::default()
            })
        });
        if !complete {
            return Err(refused());
        }
        let outcome = outcome?;
        let bytes = self.decision.bytes();
        let travel = self.decision.format.map_or(bytes, |format| format.bytes(bytes / FLOAT));
        let line = line_seconds(cluster, collective, travel as u64, root);
        let line_share = (line > 0.0).then_some(line / outcome.seconds);
        Ok(Run { job: self.clone(), outcome, line_share })
    }

    /// Messages of the whole job, roughly (what rank 0 sends, times the ranks): what a replay costs.
    pub fn messages(&self, cluster: &Cluster) -> u64 {
        let program = self.program(cluster, &cluster.topology(), 0);
        let segments = self.decision.longest().div_ceil(self.decision.choice.segment).max(1) as u64;
        let one = program.map_or(0, |program| {
            let sent = program.lanes.iter().flatten().filter_map(|timed| timed.step.published());
            sent.map(|(channel, _)| program.channels[channel].readers.len() as u64).sum()
        });
        one * segments * cluster.size() as u64
    }

    /// The program of a rank; `None` where the algorithm does not do the collective.
    pub fn program(&self, cluster: &Cluster, topology: &Topology, rank: usize) -> Option<Program> {
        let (collective, root, uneven_pairs) = (self.collective, self.root, self.decision.uneven_pairs());
        let canonical = self.decision.canonical;
        let ask = Ask { collective, rank, size: cluster.size(), root, uneven_pairs, canonical };
        plan(self.decision.choice.algorithm, &ask, topology)
    }
}

impl Run {
    /// Most bytes that any node's link carried in one direction.
    pub fn link_bytes(&self) -> u64 {
        self.outcome.out_bytes.iter().chain(&self.outcome.in_bytes).copied().max().unwrap_or(0)
    }

    pub fn path_summary(&self) -> PathSummary {
        PathSummary::of(&self.outcome.path, self.outcome.seconds)
    }
}
