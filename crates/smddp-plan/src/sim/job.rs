//! A collective on a cluster: the plan's own programs, bound to sizes and replayed.

use super::blocks::Blocks;
use super::cluster::Cluster;
use super::engine::{Load, Outcome, Stuck, replay};
use super::line::line_seconds;
use super::path::PathSummary;
use crate::algorithms::{Algorithm, plan};
use crate::ir::{Ask, Collective, Program};
use crate::topology::Topology;

/// What is to be replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    pub collective: Collective,
    pub algorithm: Algorithm,
    /// The whole buffer, as nccl-tests counts.
    pub bytes: u64,
    pub root: usize,
    /// Bytes of a block that move as one piece.
    pub segment: u64,
    /// Cells a channel.
    pub depth: usize,
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

/// Largest pieces that are tried, in bytes of a message.
const PIECES: [u64; 4] = [256 << 10, 512 << 10, 1 << 20, 4 << 20];
/// Cells a channel has in the choice made here: what is under way on one channel is about a megabyte or more.
const DEPTH: usize = 4;

impl Job {
    /// Replays the job; the ports of the ranks in `watch` are recorded for drawing.
    ///
    /// # Errors
    /// [`Unplanned`] where the algorithm does not do it, or deadlocks with so few cells.
    pub fn run(&self, cluster: &Cluster, watch: Vec<usize>) -> Result<Run, Unplanned> {
        let Job { collective, algorithm, bytes, root, .. } = *self;
        let topology = cluster.topology();
        let program = |rank| program(algorithm, collective, cluster, &topology, rank, root);
        let refused = || Unplanned::Algorithm(algorithm.name(), collective);
        program(0).ok_or_else(refused)?;
        let blocks = Blocks::Even { bytes, count: cluster.size() as u64 };
        let load = Load { blocks, segment: self.segment, depth: self.depth, watch };
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
        let line = line_seconds(cluster, collective, bytes, root);
        let line_share = (line > 0.0).then_some(line / outcome.seconds);
        Ok(Run { job: *self, outcome, line_share })
    }

    /// Messages of the whole job, roughly (what rank 0 sends, times the ranks): what a replay costs.
    pub fn messages(&self, cluster: &Cluster) -> u64 {
        let topology = cluster.topology();
        let program = program(self.algorithm, self.collective, cluster, &topology, 0, self.root);
        let block = self.bytes.div_ceil(cluster.size() as u64);
        let segments = block.div_ceil(self.segment.max(1)).max(1);
        let one = program.map_or(0, |program| {
            let sent = program.lanes.iter().flatten().filter_map(|timed| timed.step.published());
            sent.map(|(channel, _)| program.channels[channel].readers.len() as u64).sum()
        });
        one * segments * cluster.size() as u64
    }

    /// The ways to cut the job that are worth trying, for one algorithm: by the largest piece that moves as one
    /// message. Empty where the algorithm does not do it.
    pub fn cuts(cluster: &Cluster, collective: Collective, algorithm: Algorithm, bytes: u64) -> Vec<Self> {
        let topology = cluster.topology();
        let Some(program) = program(algorithm, collective, cluster, &topology, 0, 0) else {
            return Vec::new();
        };
        let spans = program.lanes.iter().flatten().filter_map(|timed| timed.step.published());
        let message = spans.map(|(_, span)| span.blocks).max().unwrap_or(1).max(1) as u64;
        let block = bytes.div_ceil(cluster.size() as u64).max(1);
        let mut segments: Vec<u64> = PIECES
            .iter()
            .map(|piece| (piece / message).min(block).max(64).next_multiple_of(64))
            .chain([block.next_multiple_of(64)])
            // More than this is messages without end.
            .filter(|segment| block.div_ceil(*segment) <= 1024)
            .collect();
        segments.sort_unstable();
        segments.dedup();
        let job = |segment| Self { collective, algorithm, bytes, root: 0, segment, depth: DEPTH };
        segments.into_iter().map(job).collect()
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

fn program(
    algorithm: Algorithm,
    collective: Collective,
    cluster: &Cluster,
    topology: &Topology,
    rank: usize,
    root: usize,
) -> Option<Program> {
    let ask = Ask { collective, rank, size: cluster.size(), root, uneven_pairs: false };
    plan(algorithm, &ask, topology)
}
