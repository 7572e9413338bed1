//! A collective on a cluster: the programs of the plan, bound to sizes and simulated.

use super::blocks::Blocks;
use super::cluster::Cluster;
use super::engine::{FLOAT, Load, replay};
use super::line::line_seconds;
use super::outcome::{Deadlock, Outcome};
use super::path::PathSummary;
use crate::algorithms::plan;
use crate::choice::{Choice, Decision};
use crate::ir::{Collective, PlanRequest, Program};
use crate::topology::Topology;

/// Input of a simulation: the decision for a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Collective of the call.
    pub collective: Collective,
    /// Root of the collective; 0 for collectives without a root.
    pub root: usize,
    /// Algorithm and sizes of the call.
    pub decision: Decision,
}

/// A simulated job.
#[derive(Clone, Debug)]
pub struct Run {
    /// Input of the simulation.
    pub job: Job,
    /// Result of the simulation.
    pub outcome: Outcome,
    /// Ratio of the line-rate time to the simulated time; `None` on one node.
    pub line_share: Option<f64>,
}

/// Reason why a simulation has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedPlan {
    /// The algorithm does not support the collective; with both.
    #[error("{0} does not support {1:?} here")]
    Algorithm(&'static str, Collective),
    /// The programs deadlock.
    #[error(transparent)]
    Deadlock(#[from] Deadlock),
}

impl Job {
    /// Simulates the job; records the ports of the ranks in `watch` for drawing.
    ///
    /// # Errors
    /// Returns [`UnsupportedPlan`] if the algorithm does not support the call, or deadlocks with this number
    /// of slots.
    pub fn run(&self, cluster: &Cluster, watch: Vec<usize>) -> Result<Run, UnsupportedPlan> {
        let Self { collective, root, .. } = *self;
        let Choice { algorithm, segment, .. } = self.decision.choice;
        let depth = self.decision.choice.window();
        let topology = cluster.topology();
        let program = |rank| self.program(cluster, &topology, rank);
        let unsupported = || UnsupportedPlan::Algorithm(algorithm.name(), collective);
        program(0).ok_or_else(unsupported)?;
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
            return Err(unsupported());
        }
        let outcome = outcome?;
        let bytes = self.decision.bytes();
        let travel = self.decision.format.map_or(bytes, |format| format.bytes(bytes / FLOAT));
        let line = line_seconds(cluster, collective, travel as u64, root);
        let line_share = (line > 0.0).then_some(line / outcome.seconds);
        Ok(Run { job: self.clone(), outcome, line_share })
    }

    /// Estimates the messages of the whole job as the sends of rank 0 times the ranks. They determine the
    /// simulation time.
    pub fn messages(&self, cluster: &Cluster) -> u64 {
        let program = self.program(cluster, &cluster.topology(), 0);
        let segments = self.decision.longest().div_ceil(self.decision.choice.segment).max(1) as u64;
        let one = program.map_or(0, |program| {
            let sent = program.pipelines.iter().flatten().filter_map(|timed| timed.step.published());
            sent.map(|(channel, _)| program.channels[channel].readers.len() as u64).sum()
        });
        one * segments * cluster.size() as u64
    }

    /// Returns the program of a rank; `None` if the algorithm does not support the collective.
    pub fn program(&self, cluster: &Cluster, topology: &Topology, rank: usize) -> Option<Program> {
        let (collective, root, uneven_pairs) = (self.collective, self.root, self.decision.uneven_pairs());
        let canonical = self.decision.canonical;
        let request = PlanRequest { collective, rank, size: cluster.size(), root, uneven_pairs, canonical };
        plan(self.decision.choice.algorithm, &request, topology)
    }
}

impl Run {
    /// Returns the largest number of bytes that any node link carried in one direction.
    pub fn link_bytes(&self) -> u64 {
        self.outcome.out_bytes.iter().chain(&self.outcome.in_bytes).copied().max().unwrap_or(0)
    }

    /// Returns the time of the critical path by cause.
    pub fn path_summary(&self) -> PathSummary {
        PathSummary::of(&self.outcome.path, self.outcome.seconds)
    }
}
