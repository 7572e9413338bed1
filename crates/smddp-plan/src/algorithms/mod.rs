//! The algorithms. A new one is a file here, its variant in [`Algorithm`] and a line in [`plan`]; CONTRIBUTING.md has the list.

mod canonical;
mod draft;
mod hier;
mod mesh;
mod publish;

use crate::ir::{Ask, Collective, Program, Span, Step, Timed};
use crate::topology::Topology;
pub(crate) use canonical::halves;
pub(crate) use hier::LOG_IN_PARTS;

/// `publish`: everybody writes all it has once, each reader takes what it needs (small messages).
/// `mesh`: every pair exchanges directly, one hop, in rotated order.
///
/// These two take all ranks for alike. The others compose the mesh inside each node with the algorithm that they are
/// named after between nodes (`hier` alone: mesh). On one node each rank is taken for a node of its own, where that is not
/// one of the first two again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Algorithm {
    Publish = 0,
    Mesh = 1,
    HierMesh = 2,
    HierRing = 3,
    HierLog = 4,
    HierRecursive = 5,
    HierTree = 6,
    HierPublish = 7,
}

impl Algorithm {
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

    /// As settings and logs write it.
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

    /// The algorithm of that name, letter by letter; `hier-` may be left out.
    pub fn from_name(name: &str) -> Option<Self> {
        // `publish` comes before `hier-publish`.
        Self::ALL.into_iter().find(|a| a.spellings().any(|spelling| spelling == name))
    }

    /// As it may be written.
    pub fn spellings(self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name()).chain(self.name().strip_prefix("hier-"))
    }

    /// Fewest cells a channel needs for the plan not to deadlock, when the largest block has `segments`
    /// segments. One is enough only where a rank need not write a second segment before it reads the first.
    pub const fn least_depth(self, segments: usize) -> usize {
        if segments <= 1 && matches!(self, Self::Publish | Self::Mesh) { 1 } else { 2 }
    }

    /// Whether a partial result travels in the element type, so that 16-bit floats round at every hop.
    pub const fn rounds_per_hop(self) -> bool {
        match self {
            Self::HierRing | Self::HierTree | Self::HierRecursive | Self::HierLog => true,
            // Once inside each node and once between them.
            Self::Publish | Self::Mesh | Self::HierMesh | Self::HierPublish => false,
        }
    }

    /// Whether it composes what moves inside nodes with what moves between them.
    pub const fn is_hierarchical(self) -> bool {
        !matches!(self, Self::Publish | Self::Mesh)
    }
}

/// The program of `ask.rank`, or `None` where the algorithm does not do this collective (or this shape, or order), or
/// the question makes no sense (a rank outside the group, a topology of another size).
///
/// Of every program, whatever the algorithm:
/// - the steps of a lane ascend by lag, so that with a single segment all lags can be dropped;
/// - it cannot deadlock with [`Algorithm::least_depth`] cells a channel;
/// - it is right when In and Out are the same memory, block by block.
pub fn plan(algorithm: Algorithm, ask: &Ask, topology: &Topology) -> Option<Program> {
    if ask.rank >= ask.size || ask.root >= ask.size || topology.size() != ask.size {
        return None;
    }
    if ask.size == 1 {
        return Some(alone(ask.collective));
    }
    let program = match algorithm {
        Algorithm::Publish => publish::plan(ask),
        Algorithm::Mesh => Some(mesh::plan(ask)),
        // The same as the mesh, and as `publish`.
        Algorithm::HierMesh | Algorithm::HierPublish if topology.nodes() == 1 => None,
        _ if topology.nodes() == 1 => hier::plan(algorithm, ask, &Topology::blocks(ask.size, 1)),
        _ => hier::plan(algorithm, ask, topology),
    }?;
    if ask.canonical && ask.collective.reduces() {
        return canonical::arrange(program, algorithm, ask, topology);
    }
    Some(program)
}

/// A group of one: what comes in goes out.
fn alone(collective: Collective) -> Program {
    let copy = Step::Copy { source: Span::input(0), to: Span::output(0), finish: collective.reduces() };
    match collective {
        Collective::Barrier => Program::default(),
        _ => Program::lane(Vec::new(), vec![Timed { lag: 0, step: copy }]),
    }
}

/// Everybody but `me`, ascending.
fn others(me: usize, size: usize) -> impl Iterator<Item = usize> {
    (0..size).filter(move |&r| r != me)
}

/// Everybody but `me`, from my right neighbour on, so that no two ranks look at the same peer at once.
fn rotated(me: usize, size: usize) -> impl Iterator<Item = usize> {
    (1..size).map(move |k| (me + k) % size)
}
