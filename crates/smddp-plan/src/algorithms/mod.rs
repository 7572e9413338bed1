//! Algorithms. A new one needs a file here, its variant in [`Algorithm`] and a line in [`plan`];
//! CONTRIBUTING.md has the list.

mod canonical;
mod draft;
mod hier;
mod mesh;
mod publish;

use crate::ir::{Collective, PlanRequest, Program, Span, Step, Timed};
use crate::topology::Topology;
pub(crate) use canonical::halves;
pub(crate) use hier::LOG_IN_PARTS;

/// Algorithms of plans.
///
/// - `publish`: every rank writes its whole input once, and each reader takes the blocks it needs (small
///   messages).
/// - `mesh`: every pair exchanges directly, one hop, in rotated order.
///
/// These two ignore nodes. The others combine the mesh inside each node with the algorithm in their name
/// between nodes (`hier` alone: mesh). On one node they treat each rank as a node, unless the result equals
/// one of the first two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Algorithm {
    /// One message of the whole input to all ranks.
    Publish = 0,
    /// Direct exchange between every pair of ranks.
    Mesh = 1,
    /// Mesh inside nodes and between them.
    HierMesh = 2,
    /// Ring between nodes.
    HierRing = 3,
    /// Bruck's algorithm between nodes: as few messages as possible.
    HierLog = 4,
    /// Binomial tree of nodes for each part of the data.
    HierRecursive = 5,
    /// Double binary tree between nodes.
    HierTree = 6,
    /// One message of each node's sum to all other nodes.
    HierPublish = 7,
}

impl Algorithm {
    /// All algorithms, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Publish,
        Self::Mesh,
        Self::HierMesh,
        Self::HierRing,
        Self::HierLog,
        Self::HierRecursive,
        Self::HierTree,
        Self::HierPublish,
    ];

    /// Returns the name used in settings and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Mesh => "mesh",
            Self::HierMesh => "hier",
            Self::HierRing => "hier-ring",
            Self::HierLog => "hier-log",
            Self::HierRecursive => "hier-recursive",
            Self::HierTree => "hier-tree",
            Self::HierPublish => "hier-publish",
        }
    }

    /// Returns the algorithm with this exact name; the prefix `hier-` is optional.
    pub fn from_name(name: &str) -> Option<Self> {
        // `publish` precedes `hier-publish`, so the short name selects it.
        Self::ALL.into_iter().find(|a| a.spellings().any(|spelling| spelling == name))
    }

    /// Returns the accepted names.
    pub fn spellings(self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name()).chain(self.name().strip_prefix("hier-"))
    }

    /// Returns the minimum number of slots per channel for which the plan cannot deadlock, if the largest
    /// block has `segments` segments. One slot is sufficient only if no rank writes a second segment before
    /// it reads the first.
    pub const fn least_depth(self, segments: usize) -> usize {
        if segments <= 1 && matches!(self, Self::Publish | Self::Mesh) { 1 } else { 2 }
    }

    /// Returns true if a partial result has the element type, so that 16-bit floats round at every hop.
    pub const fn rounds_per_hop(self) -> bool {
        match self {
            Self::HierRing | Self::HierTree | Self::HierRecursive | Self::HierLog => true,
            // Rounds once inside each node and once between nodes.
            Self::Publish | Self::Mesh | Self::HierMesh | Self::HierPublish => false,
        }
    }

    /// Returns true if the algorithm combines transfers inside nodes with transfers between nodes.
    pub const fn is_hierarchical(self) -> bool {
        !matches!(self, Self::Publish | Self::Mesh)
    }
}

/// Returns the program of `request.rank`. `None` if the algorithm does not support the collective, shape or
/// order. `None` also for an invalid request: a rank outside the group, or a topology of another size.
///
/// Every program, independent of the algorithm, has these properties:
/// - The steps of a pipeline ascend by lag, so that a plan with a single segment can drop all lags.
/// - It cannot deadlock with [`Algorithm::least_depth`] slots per channel.
/// - It is correct if In and Out are the same memory, block by block.
pub fn plan(algorithm: Algorithm, request: &PlanRequest, topology: &Topology) -> Option<Program> {
    if request.rank >= request.size || request.root >= request.size || topology.size() != request.size {
        return None;
    }
    if request.size == 1 {
        return Some(alone(request.collective));
    }
    let program = match algorithm {
        Algorithm::Publish => publish::plan(request),
        Algorithm::Mesh => Some(mesh::plan(request)),
        // These equal `mesh` and `publish` on one node.
        Algorithm::HierMesh | Algorithm::HierPublish if topology.nodes() == 1 => None,
        _ if topology.nodes() == 1 => hier::plan(algorithm, request, &Topology::blocks(request.size, 1)),
        _ => hier::plan(algorithm, request, topology),
    }?;
    if request.canonical && request.collective.reduces() {
        return canonical::arrange(program, algorithm, request, topology);
    }
    Some(program)
}

/// Program of a group of one rank: copies the input to the output.
fn alone(collective: Collective) -> Program {
    let copy = Step::Copy { source: Span::input(0), to: Span::output(0), finish: collective.reduces() };
    match collective {
        Collective::Barrier => Program::default(),
        _ => Program::single_pipeline(Vec::new(), vec![Timed { lag: 0, step: copy }]),
    }
}

/// Returns all ranks except `me` in ascending order.
fn others(me: usize, size: usize) -> impl Iterator<Item = usize> {
    (0..size).filter(move |&r| r != me)
}

/// Returns all ranks except `me`, starting after `me`, so that no two ranks poll the same peer at once.
fn rotated(me: usize, size: usize) -> impl Iterator<Item = usize> {
    (1..size).map(move |k| (me + k) % size)
}
