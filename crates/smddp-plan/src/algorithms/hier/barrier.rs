//! Everybody tells the leader of its node, leaders tell each other in rounds, and then each its mates.

use super::log::distances;
use crate::algorithms::Algorithm;
use crate::algorithms::draft::{Draft, ONE};
use crate::ir::{Program, Source, Span, reader_of_all};
use crate::topology::Topology;

/// Of one round: the nodes to whose leaders a leader tells, and those of whose it hears, with its number among their
/// readers.
type Round = (Vec<usize>, Vec<(usize, usize)>);

/// In one round all others; with `hier-log` the one at distance 1, 2, 4, .. to the right.
fn rounds(algorithm: Algorithm, node: usize, nodes: usize) -> Vec<Round> {
    if algorithm == Algorithm::HierLog {
        let round = |d: usize| (vec![(node + d) % nodes], vec![((node + nodes - d) % nodes, 0)]);
        return distances(nodes).map(round).collect();
    }
    let others: Vec<usize> = (0..nodes).filter(|&n| n != node).collect();
    // Nodes are numbered by their first ranks, so leaders ascend with them.
    let hears = others.iter().map(|&n| (n, reader_of_all(n, node))).collect();
    vec![(others, hears)]
}

pub(super) fn plan(algorithm: Algorithm, me: usize, topology: &Topology) -> Program {
    let mut draft = Draft::default();
    let leader_of = |node: usize| topology.ranks_of(node)[0];
    let token = |rank, channel, reader| Source::whole(rank, channel, reader, Span::TOKEN);
    let node = topology.node_of(me);
    let rounds = rounds(algorithm, node, topology.nodes());
    let last = rounds.len();
    let (leader, mates) = (leader_of(node), &topology.ranks_of(node)[1..]);
    if me != leader {
        let channel = draft.channel(vec![leader]);
        draft.send(ONE, 0, channel, Span::TOKEN, None);
        draft.receive(ONE, last + 2, token(leader, last, topology.local(me) - 1), Span::TOKEN);
        return draft.done();
    }
    for &mate in mates {
        draft.receive(ONE, 1, token(mate, 0, 0), Span::TOKEN);
    }
    for (round, (tells, hears)) in rounds.into_iter().enumerate() {
        let channel = draft.channel(tells.into_iter().map(leader_of).collect());
        draft.send(ONE, round + 1, channel, Span::TOKEN, None);
        for (other, reader) in hears {
            draft.receive(ONE, round + 2, token(leader_of(other), channel, reader), Span::TOKEN);
        }
    }
    if !mates.is_empty() {
        let channel = draft.channel(mates.to_vec());
        draft.send(ONE, last + 1, channel, Span::TOKEN, None);
    }
    draft.done()
}
