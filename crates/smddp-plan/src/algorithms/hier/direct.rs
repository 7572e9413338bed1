//! all_to_all, gather and scatter: every pair that has something to move does so directly.
//!
//! One block a message, so pairs may differ in size. Peers of one node and of others are in lanes of their own, and
//! sending and receiving too, so nobody waits for room while it could take something.

use super::routes::lane_of;
use crate::algorithms::draft::{At, Draft, Role};
use crate::ir::{Ask, Collective, Program, Source, Span, reader_of_all};
use crate::topology::Topology;

pub(super) fn plan(ask: &Ask, topology: &Topology) -> Program {
    let Ask { collective, rank: me, root, .. } = *ask;
    let mut draft = Draft::default();
    let to_root = collective == Collective::Gather;
    let sends = collective == Collective::AllToAll || (to_root != (me == root));
    let takes = collective == Collective::AllToAll || (to_root == (me == root));
    // Of those to whom a rank sends, or from whom it takes, only the root if it is not itself the root.
    let meets = |peer: usize| collective == Collective::AllToAll || me == root || peer == root;
    let lane = |near: Role, far: Role, peer: usize| -> At {
        if topology.share_node(me, peer) {
            return (near, 0);
        }
        (far, lane_of(topology.node_of(peer), topology.node_of(me), far == Role::Enter))
    };
    let number = |writer: usize, reader: usize| if to_root { 0 } else { reader_of_all(writer, reader) };
    if sends {
        for peer in (0..topology.size()).filter(|&peer| peer != me && meets(peer)) {
            draft.channel(vec![peer]);
        }
        for peer in rotated(me, topology, false).filter(|&peer| meets(peer)) {
            let block = Span::input(if to_root { me } else { peer });
            draft.send(lane(Role::Give, Role::Leave, peer), 0, number(me, peer), block, None);
        }
    }
    if collective == Collective::AllToAll || me == root {
        draft.copy((Role::Near, 0), Span::input(me), Span::output(me));
    }
    if takes {
        for peer in rotated(me, topology, true).filter(|&peer| meets(peer)) {
            let message = Span::input(if to_root { peer } else { me });
            let from = Source::whole(peer, number(peer, me), 0, message);
            let to = Span::output(if collective == Collective::Scatter { me } else { peer });
            draft.receive(lane(Role::Near, Role::Enter, peer), 0, from, to);
        }
    }
    draft.done()
}

/// All other ranks: node by node from mine on, and inside each from my own rail on; or the other way round.
fn rotated(me: usize, topology: &Topology, backwards: bool) -> impl Iterator<Item = usize> + '_ {
    let (node, nodes, local) = (topology.node_of(me), topology.nodes(), topology.local(me));
    let turn = move |from: usize, k: usize, n: usize| (if backwards { from + n - k } else { from + k }) % n;
    (0..nodes).map(move |k| turn(node, k, nodes)).flat_map(move |n| {
        let ranks = topology.ranks_of(n);
        let first = local % ranks.len();
        (0..ranks.len()).map(move |k| ranks[turn(first, k, ranks.len())]).filter(move |&rank| rank != me)
    })
}
