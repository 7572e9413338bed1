//! Barrier: ranks signal the leader of their node, leaders exchange tokens in rounds, then each leader
//! releases its node.

use super::log::distances;
use crate::algorithms::Algorithm;
use crate::algorithms::draft::{Draft, ONE};
use crate::ir::{Program, Source, Span, reader_of_all};
use crate::topology::Topology;

/// One round of a leader: the nodes to whose leaders it sends, and the nodes from whose leaders it receives,
/// with its reader index there.
type Round = (Vec<usize>, Vec<(usize, usize)>);

/// Returns one round with all other nodes. With `hier-log`, returns rounds with the nodes at distance 1, 2,
/// 4, ... to the right.
fn rounds(algorithm: Algorithm, node: usize, nodes: usize) -> Vec<Round> {
    if algorithm == Algorithm::HierLog {
        let round = |d: usize| (vec![(node + d) % nodes], vec![((node + nodes - d) % nodes, 0)]);
        return distances(nodes).map(round).collect();
    }
    let others: Vec<usize> = (0..nodes).filter(|&n| n != node).collect();
    // Nodes are numbered by their first ranks, so leader ranks are in ascending order.
    let sources = others.iter().map(|&n| (n, reader_of_all(n, node))).collect();
    vec![(others, sources)]
}

pub(super) fn plan(algorithm: Algorithm, me: usize, topology: &Topology) -> Program {
    let mut draft = Draft::default();
    let leader_of = |node: usize| topology.ranks_of(node)[0];
    let token = |rank, channel, reader| Source::whole(rank, channel, reader, Span::TOKEN);
    let node = topology.node_of(me);
    let rounds = rounds(algorithm, node, topology.nodes());
    let last = rounds.len();
    let (leader, peers) = (leader_of(node), &topology.ranks_of(node)[1..]);
    if me != leader {
        let channel = draft.channel(vec![leader]);
        draft.send(ONE, 0, channel, Span::TOKEN, None);
        draft.receive(ONE, last + 2, token(leader, last, topology.local(me) - 1), Span::TOKEN);
        return draft.done();
    }
    for &peer in peers {
        draft.receive(ONE, 1, token(peer, 0, 0), Span::TOKEN);
    }
    for (round, (targets, sources)) in rounds.into_iter().enumerate() {
        let channel = draft.channel(targets.into_iter().map(leader_of).collect());
        draft.send(ONE, round + 1, channel, Span::TOKEN, None);
        for (other, reader) in sources {
            draft.receive(ONE, round + 2, token(leader_of(other), channel, reader), Span::TOKEN);
        }
    }
    if !peers.is_empty() {
        let channel = draft.channel(peers.to_vec());
        draft.send(ONE, last + 1, channel, Span::TOKEN, None);
    }
    draft.done()
}
