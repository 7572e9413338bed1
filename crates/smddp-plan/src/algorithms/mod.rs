//! The table of algorithms: a new one is one file here and one line in `Algorithm::entry`.

mod hier;
mod mesh;
mod publish;

use crate::ir::{Ask, Channel, Collective, Lane, Program, Span, Step, Timed};
use crate::topology::Topology;
use hier::Inter;
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

/// Plans one rank of a group of at least two; `None` where the algorithm does not do it.
enum Planner {
    /// All ranks alike.
    Flat(fn(&Ask) -> Option<Program>),
    /// Mesh inside nodes, this between them.
    Hier(Inter),
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
        self.entry().0
    }

    /// The algorithm of that name, letter by letter; `hier-` may be left out.
    pub fn from_name(name: &str) -> Option<Self> {
        // `publish` comes before `hier-publish`.
        Self::ALL.into_iter().find(|a| a.spellings().any(|spelling| spelling == name))
    }

    /// As it may be written.
    pub(crate) fn spellings(self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name()).chain(self.name().strip_prefix("hier-"))
    }

    const fn planner(self) -> Planner {
        self.entry().1
    }

    const fn entry(self) -> (&'static str, Planner) {
        match self {
            Self::Publish => ("publish", Planner::Flat(publish::plan)),
            Self::Mesh => ("mesh", Planner::Flat(mesh::plan)),
            Self::HierMesh => ("hier", Planner::Hier(Inter::Mesh)),
            Self::HierRing => ("hier-ring", Planner::Hier(Inter::Ring)),
            Self::HierLog => ("hier-log", Planner::Hier(Inter::Log)),
            Self::HierRecursive => ("hier-recursive", Planner::Hier(Inter::Recursive)),
            Self::HierTree => ("hier-tree", Planner::Hier(Inter::Tree)),
            Self::HierPublish => ("hier-publish", Planner::Hier(Inter::Publish)),
        }
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
        matches!(self.planner(), Planner::Hier(_))
    }
}

/// The program of `ask.rank`, or `None` where the algorithm does not do this collective (or this shape), or
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
    match algorithm.planner() {
        Planner::Flat(plan) => plan(ask),
        // The same as the mesh, and as `publish`.
        Planner::Hier(Inter::Mesh | Inter::Publish) if topology.nodes() == 1 => None,
        Planner::Hier(inter) if topology.nodes() == 1 => {
            hier::plan(inter, ask, &Topology::blocks(ask.size, 1))
        }
        Planner::Hier(inter) => hier::plan(inter, ask, topology),
    }
}

/// A group of one: what comes in goes out.
fn alone(collective: Collective) -> Program {
    let copy = Step::Copy { source: Span::input(0), to: Span::output(0), finish: collective.reduces() };
    match collective {
        Collective::Barrier => Program::default(),
        _ => Program::lane(Vec::new(), vec![Timed { lag: 0, step: copy }]),
    }
}

/// A program of one lane while it is written.
#[derive(Default)]
struct Draft {
    channels: Vec<Channel>,
    lane: Lane,
    scratch_blocks: usize,
}

impl Draft {
    /// A new channel of mine; returns its number.
    fn channel(&mut self, readers: Vec<usize>) -> usize {
        self.channels.push(Channel { readers });
        self.channels.len() - 1
    }

    fn step(&mut self, lag: usize, step: Step) {
        self.lane.push(Timed { lag, step });
    }

    fn send(&mut self, lag: usize, channel: usize, source: Span, tee: Option<Span>) {
        self.step(lag, Step::Send { channel, source, tee });
    }

    /// My own block, from In to Out.
    fn keep(&mut self, lag: usize, me: usize) {
        self.step(lag, Step::Copy { source: Span::input(me), to: Span::output(me), finish: false });
    }

    fn done(self) -> Program {
        Program { scratch_blocks: self.scratch_blocks, ..Program::lane(self.channels, self.lane) }
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
