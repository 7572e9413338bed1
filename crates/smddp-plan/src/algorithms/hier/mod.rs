//! Several nodes: the mesh inside each, another algorithm between them.
//!
//! What moves is cut in *parts*, mostly blocks. Each part has a *home*: the rank that contributes it (all_gather) or
//! reduces it (reduce_scatter). Between nodes it travels along a tree of nodes under its home's node; the algorithms
//! differ in that tree alone:
//!
//! ```text
//! mesh          ring                recursive (8 nodes)        tree
//! home          home -> 1 -> 2      home -> 4 -> 6 -> 7        two of them, each with half of the parts
//! | \ \                                  -> 2 -> 3, 4 -> 5
//! 1  2 3                                 -> 1
//! ```
//!
//! Down the tree (all_gather): in each node one rank, the *entry*, receives the part, hands it to its mates and on
//! to the next nodes. Up the tree (reduce_scatter): in each node the entry takes its mates' contributions, its own
//! and the sums of the nodes below, reduces them in one pass and sends one sum on. So a part crosses the link of a
//! node once each way, however many ranks the node has. An all_reduce goes up and then down; broadcast and reduce do
//! one of the two, between the root and homes. The entry has the local index of the home (modulo the ranks of its
//! node), so the ranks of a node share the traffic, each on its own rail.
//!
//! A channel stays inside the node or leaves it, never both. Parts of different homes are in several lanes, so that
//! one may wait while another goes on.
//!
//! Deadlock: between nodes a part has channels of its own, and a message is read one iteration after it is written,
//! so two cells a channel do. A channel inside a node carries the parts of one lane in the order of that lane,
//! and is read by (or written from) a lane that does nothing else, in the same order.
//!
//! In place: a part of Out is written by the step that reads the last contribution to it, or by one that takes a
//! message which could not be made before all contributions had been read.

mod direct;
mod down;
mod layout;
mod log;
mod mesh;
mod numbers;
mod publish;
mod recursive;
mod ring;
mod rooted;
mod routes;
mod tree;
mod up;
mod weave;

use crate::ir::{Ask, Buffer, Collective, Program, Step};
use crate::topology::Topology;
use layout::{Layout, Uses};
pub(crate) use log::MANY as LOG_IN_PARTS;
use routes::{Routes, Shape};
use up::Then;
use weave::{Role, Weave};

/// What moves between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inter {
    Mesh,
    Ring,
    Log,
    Recursive,
    Tree,
    Publish,
}

/// The program of `ask.rank` where there are at least two nodes.
pub(super) fn plan(inter: Inter, ask: &Ask, topology: &Topology) -> Option<Program> {
    use Collective::*;
    let me = ask.rank;
    Some(match (ask.collective, inter) {
        (AllGather, Inter::Log) => log::all_gather(me, topology),
        (Barrier, Inter::Log) => log::barrier(me, topology),
        (Barrier, Inter::Mesh) => mesh::barrier(me, topology),
        (AllReduce, Inter::Publish) => publish::all_reduce(me, topology),
        (AllToAll | Gather | Scatter, Inter::Mesh) => direct::plan(ask, topology),
        (AllGather, _) => all_gather(&Routes::each(topology, inter.shape()?), me),
        (ReduceScatter, _) => reduce_scatter(&Routes::each(topology, inter.shape()?), me),
        (AllReduce, _) => all_reduce(&inter.all_reduce(topology)?, me),
        (Broadcast, _) => rooted::broadcast(&inter.broadcast(topology, ask.root)?, ask),
        (Reduce, _) => rooted::reduce(&inter.reduce(topology, ask.root)?, ask),
        _ => return None,
    })
}

impl Inter {
    /// For any number of homes: the tree under each.
    fn shape(self) -> Option<Shape> {
        match self {
            Self::Mesh => Some(Shape::Star),
            Self::Ring => Some(Shape::Chain),
            Self::Recursive => Some(Shape::Binomial),
            Self::Log | Self::Tree | Self::Publish => None,
        }
    }

    fn all_reduce(self, topology: &Topology) -> Option<Routes<'_>> {
        match self {
            // Each rail has another node on top.
            Self::Tree => Some(Routes::pairs(topology, |rail| rail % topology.nodes(), 0)),
            Self::Log => Some(Routes::whole(topology, Shape::Binomial, 0)),
            _ => Some(Routes::spread(topology, self.shape()?)),
        }
    }

    fn broadcast(self, topology: &Topology, root: usize) -> Option<Routes<'_>> {
        let (node, local) = (topology.node_of(root), topology.local(root));
        Some(match self {
            Self::Mesh => Routes::through(topology, root),
            Self::Ring => Routes::rails(topology, Shape::Chain, node, local),
            Self::Tree => Routes::pairs(topology, |_| node, local),
            Self::Log => Routes::whole(topology, Shape::Binomial, root),
            Self::Publish => Routes::whole(topology, Shape::Star, root),
            Self::Recursive => return None,
        })
    }

    fn reduce(self, topology: &Topology, root: usize) -> Option<Routes<'_>> {
        let (node, local) = (topology.node_of(root), topology.local(root));
        match self {
            // The sums of two nodes meet at the root's; those of more in all nodes but the root's, whose link
            // would have to carry all of them otherwise.
            Self::Mesh if topology.nodes() == 2 => Some(Routes::rails(topology, Shape::Star, node, local)),
            Self::Mesh => Some(Routes::away(topology, root)),
            _ => self.broadcast(topology, root),
        }
    }
}

/// A rank's block from In to Out, to its mates and to the other nodes.
fn all_gather(routes: &Routes<'_>, me: usize) -> Program {
    let mut weave = Weave::default();
    let layout = Layout::new(routes, me, Uses { down: true, near: true, ..Uses::default() }, &mut weave);
    for part in routes.homed_at(me) {
        let (input, output) = (routes.span(part, Buffer::In), routes.span(part, Buffer::Out));
        match layout.near(part) {
            Some(channel) => weave.send((Role::Near, 0), 0, channel, input, Some(output)),
            None => {
                weave.step((Role::Near, 0), 0, Step::Copy { source: input, to: output, finish: false });
            }
        }
        if let Some(channel) = layout.leaving(part) {
            weave.send((Role::Leave, 0), 0, channel, input, None);
        }
    }
    down::fan_out(&layout, &mut weave, |_| Buffer::In);
    weave.done()
}

/// Every rank's contribution up to the home of the block.
fn reduce_scatter(routes: &Routes<'_>, me: usize) -> Program {
    let mut weave = Weave::default();
    let layout = Layout::new(routes, me, Uses { up: true, ..Uses::default() }, &mut weave);
    up::fan_in(&layout, &mut weave, Then::Keep);
    weave.done()
}

/// Up, and down again as segments are reduced.
fn all_reduce(routes: &Routes<'_>, me: usize) -> Program {
    let mut weave = Weave::default();
    let uses = Uses { up: true, down: true, near: true, ..Uses::default() };
    let layout = Layout::new(routes, me, uses, &mut weave);
    up::fan_in(&layout, &mut weave, Then::All);
    down::fan_out(&layout, &mut weave, |_| Buffer::Out);
    weave.done()
}
