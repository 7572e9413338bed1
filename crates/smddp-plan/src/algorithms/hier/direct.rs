//! all_to_all, gather and scatter: every pair with data exchanges directly.
//!
//! One block per message, so pairs may differ in size. Local and remote peers have separate pipelines, and so
//! do sending and receiving. No rank waits for a free slot while it could receive.

use super::routes::pipeline_of;
use crate::algorithms::draft::{At, Draft, Role};
use crate::ir::{Collective, PlanRequest, Program, Source, Span, reader_of_all};
use crate::topology::Topology;

pub(super) fn plan(request: &PlanRequest, topology: &Topology) -> Program {
    let PlanRequest { collective, rank: me, root, .. } = *request;
    let mut draft = Draft::default();
    let to_root = collective == Collective::Gather;
    let sends = collective == Collective::AllToAll || (to_root != (me == root));
    let receives = collective == Collective::AllToAll || (to_root == (me == root));
    // Peers that this rank exchanges with: for gather and scatter only the root, or all ranks at the root.
    let exchanges = |peer: usize| collective == Collective::AllToAll || me == root || peer == root;
    let pipeline = |local: Role, remote: Role, peer: usize| -> At {
        if topology.share_node(me, peer) {
            return (local, 0);
        }
        (remote, pipeline_of(topology.node_of(peer), topology.node_of(me), remote == Role::Enter))
    };
    let number = |writer: usize, reader: usize| if to_root { 0 } else { reader_of_all(writer, reader) };
    if sends {
        for peer in (0..topology.size()).filter(|&peer| peer != me && exchanges(peer)) {
            draft.channel(vec![peer]);
        }
        for peer in rotated(me, topology, false).filter(|&peer| exchanges(peer)) {
            let block = Span::input(if to_root { me } else { peer });
            draft.send(pipeline(Role::Give, Role::Leave, peer), 0, number(me, peer), block, None);
        }
    }
    if collective == Collective::AllToAll || me == root {
        draft.copy((Role::Local, 0), Span::input(me), Span::output(me));
    }
    if receives {
        for peer in rotated(me, topology, true).filter(|&peer| exchanges(peer)) {
            let message = Span::input(if to_root { peer } else { me });
            let from = Source::whole(peer, number(peer, me), 0, message);
            let to = Span::output(if collective == Collective::Scatter { me } else { peer });
            draft.receive(pipeline(Role::Local, Role::Enter, peer), 0, from, to);
        }
    }
    draft.done()
}

/// Returns all other ranks: node by node after the own node, and inside each node from the own rail on.
/// `backwards` reverses both orders.
fn rotated(me: usize, topology: &Topology, backwards: bool) -> impl Iterator<Item = usize> + '_ {
    let (node, nodes, local) = (topology.node_of(me), topology.nodes(), topology.local(me));
    let rotate = move |from: usize, k: usize, n: usize| (if backwards { from + n - k } else { from + k }) % n;
    (0..nodes).map(move |k| rotate(node, k, nodes)).flat_map(move |n| {
        let ranks = topology.ranks_of(n);
        let first = local % ranks.len();
        (0..ranks.len()).map(move |k| ranks[rotate(first, k, ranks.len())]).filter(move |&rank| rank != me)
    })
}
