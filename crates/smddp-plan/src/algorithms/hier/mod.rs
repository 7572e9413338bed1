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

mod barrier;
mod direct;
mod double_tree;
mod down;
mod layout;
mod log;
mod numbers;
mod publish;
mod rooted;
mod routes;
mod trees;
mod up;

use super::Algorithm::{self, HierLog, HierMesh, HierPublish, HierRecursive, HierRing, HierTree};
use super::draft::{Draft, Role};
use crate::ir::{Ask, Buffer, Collective, Program};
use crate::topology::Topology;
use layout::{Layout, Uses};
pub(crate) use log::MANY as LOG_IN_PARTS;
use routes::Routes;
use trees::Tree;
use up::Then;

/// The program of `ask.rank` where there are at least two nodes.
pub(super) fn plan(algorithm: Algorithm, ask: &Ask, topology: &Topology) -> Option<Program> {
    use Collective::*;
    let me = ask.rank;
    Some(match (ask.collective, algorithm) {
        (Barrier, HierMesh | HierLog) => barrier::plan(algorithm, me, topology),
        (AllGather, HierLog) => log::all_gather(me, topology),
        (AllReduce, HierPublish) => publish::all_reduce(me, topology),
        (AllToAll | Gather | Scatter, HierMesh) => direct::plan(ask, topology),
        (AllGather, _) => all_gather(&Routes::each(topology, tree(algorithm)?), me),
        (ReduceScatter, _) => reduce_scatter(&Routes::each(topology, tree(algorithm)?), me),
        (AllReduce, _) => all_reduce(&all_reduce_routes(algorithm, topology)?, me),
        (Broadcast, _) => rooted::broadcast(&broadcast_routes(algorithm, topology, ask.root)?, ask),
        (Reduce, _) => rooted::reduce(&reduce_routes(algorithm, topology, ask.root)?, ask),
        _ => return None,
    })
}

/// For any number of homes: the tree under each.
fn tree(algorithm: Algorithm) -> Option<Tree> {
    match algorithm {
        HierMesh => Some(Tree::Star),
        HierRing => Some(Tree::Chain),
        HierRecursive => Some(Tree::Binomial),
        _ => None,
    }
}

fn all_reduce_routes(algorithm: Algorithm, topology: &Topology) -> Option<Routes<'_>> {
    match algorithm {
        // Each rail has another node on top.
        HierTree => Some(Routes::doubled(topology, |rail| rail % topology.nodes(), 0)),
        HierLog => Some(Routes::whole(topology, Tree::Binomial, 0)),
        _ => Some(Routes::spread(topology, tree(algorithm)?)),
    }
}

fn broadcast_routes(algorithm: Algorithm, topology: &Topology, root: usize) -> Option<Routes<'_>> {
    let (node, local) = (topology.node_of(root), topology.local(root));
    match algorithm {
        HierMesh => Some(Routes::through(topology, root)),
        HierRing => Some(Routes::rails(topology, Tree::Chain, node, local)),
        HierTree => Some(Routes::doubled(topology, |_| node, local)),
        HierLog => Some(Routes::whole(topology, Tree::Binomial, root)),
        HierPublish => Some(Routes::whole(topology, Tree::Star, root)),
        _ => None,
    }
}

fn reduce_routes(algorithm: Algorithm, topology: &Topology, root: usize) -> Option<Routes<'_>> {
    let (node, local) = (topology.node_of(root), topology.local(root));
    match algorithm {
        // The sums of two nodes meet at the root's; those of more in all nodes but the root's, whose link
        // would have to carry all of them otherwise.
        HierMesh if topology.nodes() == 2 => Some(Routes::rails(topology, Tree::Star, node, local)),
        HierMesh => Some(Routes::away(topology, root)),
        _ => broadcast_routes(algorithm, topology, root),
    }
}

/// A rank's block from In to Out, to its mates and to the other nodes.
fn all_gather(routes: &Routes<'_>, me: usize) -> Program {
    let mut draft = Draft::default();
    let layout = Layout::new(routes, me, Uses { down: true, near: true, ..Uses::default() }, &mut draft);
    for part in routes.homed_at(me) {
        let (input, output) = (routes.span(part, Buffer::In), routes.span(part, Buffer::Out));
        match layout.near(part) {
            Some(channel) => draft.send((Role::Near, 0), 0, channel, input, Some(output)),
            None => draft.copy((Role::Near, 0), input, output),
        }
        if let Some(channel) = layout.leaving(part) {
            draft.send((Role::Leave, 0), 0, channel, input, None);
        }
    }
    down::fan_out(&layout, &mut draft, |_| Buffer::In);
    draft.done()
}

/// Every rank's contribution up to the home of the block.
fn reduce_scatter(routes: &Routes<'_>, me: usize) -> Program {
    let mut draft = Draft::default();
    let layout = Layout::new(routes, me, Uses { up: true, ..Uses::default() }, &mut draft);
    up::fan_in(&layout, &mut draft, Then::Keep);
    draft.done()
}

/// Up, and down again as segments are reduced.
fn all_reduce(routes: &Routes<'_>, me: usize) -> Program {
    let mut draft = Draft::default();
    let uses = Uses { up: true, down: true, near: true, ..Uses::default() };
    let layout = Layout::new(routes, me, uses, &mut draft);
    up::fan_in(&layout, &mut draft, Then::All);
    down::fan_out(&layout, &mut draft, |_| Buffer::Out);
    draft.done()
}
