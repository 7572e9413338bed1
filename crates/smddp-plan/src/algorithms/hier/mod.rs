//! Hierarchical algorithms for several nodes: the mesh inside each node, another algorithm between nodes.
//!
//! The data is divided into *parts*, mostly blocks. Each part has a *home*: the rank that contributes it
//! (all_gather) or reduces it (reduce_scatter). Between nodes it moves along a tree of nodes rooted at the
//! node of its home. The algorithms differ only in that tree:
//!
//! ```text
//! mesh          ring                recursive (8 nodes)        tree
//! home          home -> 1 -> 2      home -> 4 -> 6 -> 7        two trees, each for half of the parts
//! | \ \                                  -> 2 -> 3, 4 -> 5
//! 1  2 3                                 -> 1
//! ```
//!
//! Down the tree (all_gather): one rank of each node, the *entry*, receives the part. It forwards the part to
//! its local peers and to the next nodes. Up the tree (reduce_scatter): in each node the entry takes the
//! contributions of its local peers, its own and the sums of the nodes below. It reduces them in one pass and
//! sends one sum. A part therefore crosses the link of a node once each way, independent of the number of
//! ranks. An all_reduce goes up and then down. Broadcast and reduce use one direction, between the root and
//! the homes. The entry has the local index of the home, modulo the ranks of its node. The ranks of a node
//! thus share the traffic, each on one rail.
//!
//! A channel stays inside the node or leaves it, never both. Parts of different homes are in several
//! pipelines, so that one may wait while another progresses.
//!
//! Deadlock freedom: between nodes each part has separate channels. A message is read one iteration after it
//! is written, so two slots per channel are sufficient. A channel inside a node carries the parts of one
//! pipeline in pipeline order. The pipeline that reads it (or writes it) uses the same order and has no other
//! steps.
//!
//! In place: the step that writes a part of Out reads the last contribution to it, or takes a message that
//! depends on all contributions.

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
use crate::ir::{Buffer, Collective, PlanRequest, Program};
use crate::topology::Topology;
use layout::{Layout, Uses};
pub(crate) use log::MANY as LOG_IN_PARTS;
use routes::Routes;
use trees::Tree;
use up::Then;

/// Returns the program of `request.rank` for at least two nodes.
pub(super) fn plan(algorithm: Algorithm, request: &PlanRequest, topology: &Topology) -> Option<Program> {
    use Collective::*;
    let me = request.rank;
    Some(match (request.collective, algorithm) {
        (Barrier, HierMesh | HierLog) => barrier::plan(algorithm, me, topology),
        (AllGather, HierLog) => log::all_gather(me, topology),
        (AllReduce, HierPublish) => publish::all_reduce(me, topology),
        (AllToAll | Gather | Scatter, HierMesh) => direct::plan(request, topology),
        (AllGather, _) => all_gather(&Routes::each(topology, tree(algorithm)?), me),
        (ReduceScatter, _) => reduce_scatter(&Routes::each(topology, tree(algorithm)?), me),
        (AllReduce, _) => all_reduce(&all_reduce_routes(algorithm, topology)?, me),
        (Broadcast, _) => rooted::broadcast(&broadcast_routes(algorithm, topology, request.root)?, request),
        (Reduce, _) => rooted::reduce(&reduce_routes(algorithm, topology, request.root)?, request),
        _ => return None,
    })
}

/// Returns the tree below each home, for algorithms that allow any number of homes.
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
        // Each rail has another root node.
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
        // With two nodes the sums meet at the root's node. With more nodes they meet at all nodes except the
        // root's, whose link would otherwise carry all of them.
        HierMesh if topology.nodes() == 2 => Some(Routes::rails(topology, Tree::Star, node, local)),
        HierMesh => Some(Routes::away(topology, root)),
        _ => broadcast_routes(algorithm, topology, root),
    }
}

/// Copies a rank's block from In to Out and sends it to its local peers and to the other nodes.
fn all_gather(routes: &Routes<'_>, me: usize) -> Program {
    let mut draft = Draft::default();
    let layout = Layout::new(routes, me, Uses { down: true, local: true, ..Uses::default() }, &mut draft);
    for part in routes.homed_at(me) {
        let (input, output) = (routes.span(part, Buffer::In), routes.span(part, Buffer::Out));
        match layout.to_peers(part) {
            Some(channel) => draft.send((Role::Local, 0), 0, channel, input, Some(output)),
            None => draft.copy((Role::Local, 0), input, output),
        }
        if let Some(channel) = layout.outgoing(part) {
            draft.send((Role::Leave, 0), 0, channel, input, None);
        }
    }
    down::fan_out(&layout, &mut draft, |_| Buffer::In);
    draft.done()
}

/// Sends the contributions of all ranks up to the home of each block.
fn reduce_scatter(routes: &Routes<'_>, me: usize) -> Program {
    let mut draft = Draft::default();
    let layout = Layout::new(routes, me, Uses { up: true, ..Uses::default() }, &mut draft);
    up::fan_in(&layout, &mut draft, Then::Keep);
    draft.done()
}

/// Reduces up, and distributes segments down as they are reduced.
fn all_reduce(routes: &Routes<'_>, me: usize) -> Program {
    let mut draft = Draft::default();
    let uses = Uses { up: true, down: true, local: true, ..Uses::default() };
    let layout = Layout::new(routes, me, uses, &mut draft);
    up::fan_in(&layout, &mut draft, Then::All);
    down::fan_out(&layout, &mut draft, |_| Buffer::Out);
    draft.done()
}
