//! Inter-node algorithm for small all_reduce: every leader writes its whole node sum once, to all other
//! leaders.
//!
//! ```text
//! peers      In ----> leader                                       (lag 0)
//! leaders             sum of the node ----> all leaders            (lag 1)
//!                                           sum of the sums -> peers  (lag 2)
//! ```
//!
//! One hop between nodes. Every leader adds the same sums in node order, its own sum as it was sent, so all
//! ranks get the same bits. Elements are rounded once in the node and once between nodes. Each node link
//! carries the whole buffer once for each other node, so the algorithm suits small buffers.

use crate::algorithms::draft::{Draft, ONE};
use crate::ir::{Association, Buffer, Program, Source, Span, Step};
use crate::topology::Topology;

pub(super) fn all_reduce(me: usize, topology: &Topology) -> Program {
    let mut draft = Draft::default();
    let (node, size) = (topology.node_of(me), topology.size());
    let all = |buffer| Span::new(buffer, 0, size);
    let ranks = topology.ranks_of(node);
    let (leader, peers) = (ranks[0], &ranks[1..]);
    if me != leader {
        let channel = draft.channel(vec![leader]);
        draft.send(ONE, 0, channel, all(Buffer::In), None);
        let out = all(Buffer::Out);
        draft.receive(ONE, 3, Source::whole(leader, 1, topology.local(me) - 1, out), out);
        return draft.done();
    }
    // Message of a leader: the sum of its node, or its own input if it is the only rank.
    let sent = |node| all(if topology.ranks_of(node).len() > 1 { Buffer::Scratch } else { Buffer::In });
    let others: Vec<usize> = (0..topology.nodes()).filter(|&n| n != node).collect();
    let channel = draft.channel(others.iter().map(|&n| topology.ranks_of(n)[0]).collect());
    if peers.is_empty() {
        draft.send(ONE, 1, channel, all(Buffer::In), None);
    } else {
        draft.scratch_blocks = size;
        draft.step(
            ONE,
            1,
            Step::Reduce {
                from: peers.iter().map(|&peer| Source::whole(peer, 0, 0, all(Buffer::In))).collect(),
                own: Some((0, all(Buffer::In))),
                to: Some(all(Buffer::Scratch)),
                send: Some(channel),
                finish: false,
                association: Association::InOrder,
            },
        );
    }
    // Nodes are numbered by their first ranks, so leader ranks are in ascending order.
    let reader = |writer: usize| if node < writer { node } else { node - 1 };
    let from =
        others.iter().map(|&n| Source::whole(topology.ranks_of(n)[0], 0, reader(n), sent(n))).collect();
    let send = (!peers.is_empty()).then(|| draft.channel(peers.to_vec()));
    let (own, to) = (Some((node, sent(node))), Some(all(Buffer::Out)));
    draft.step(ONE, 2, Step::Reduce { from, own, to, send, finish: true, association: Association::InOrder });
    draft.done()
}
