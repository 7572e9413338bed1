//! Between nodes: every node with every other, one hop.
//!
//! A part that starts at one root goes through one other node each, so that the root's link carries it once.

use super::routes::Place;
use super::weave::{Role, Weave};
use crate::ir::{Program, Source, Span, Step};
use crate::topology::Topology;

/// All other nodes below the top one, its right neighbour first.
pub(super) fn star(top: usize, node: usize, nodes: usize) -> Place {
    if node != top {
        return Place { parent: Some(top), children: Vec::new(), depth: 1 };
    }
    Place { parent: None, children: (1..nodes).map(|k| (top + k) % nodes).collect(), depth: 0 }
}

/// `middle` below the top node, all others below `middle`.
pub(super) fn through(top: usize, middle: usize, node: usize, nodes: usize) -> Place {
    if node == top {
        Place { parent: None, children: vec![middle], depth: 0 }
    } else if node == middle {
        let others = (1..nodes).map(|k| (middle + k) % nodes).filter(|&n| n != top);
        Place { parent: Some(top), children: others.collect(), depth: 1 }
    } else {
        Place { parent: Some(middle), children: Vec::new(), depth: 2 }
    }
}

/// Everybody tells the leader of its node, each leader all others, and then its mates.
pub(super) fn barrier(me: usize, topology: &Topology) -> Program {
    let mut weave = Weave::default();
    let node = topology.node_of(me);
    let token = |rank, channel, reader| Step::Receive {
        from: Source { rank, channel, reader, message: Span::TOKEN, take: (0, 0) },
        to: Span::TOKEN,
        forward: None,
    };
    let ranks = topology.ranks_of(node);
    let (leader, mates) = (ranks[0], &ranks[1..]);
    if me != leader {
        let channel = weave.channel(vec![leader]);
        weave.send((Role::Near, 0), 0, channel, Span::TOKEN, None);
        weave.step((Role::Near, 0), 3, token(leader, 1, topology.local(me) - 1));
        return weave.done();
    }
    let mut leaders: Vec<usize> = (0..topology.nodes()).map(|n| topology.ranks_of(n)[0]).collect();
    leaders.sort_unstable();
    leaders.retain(|&rank| rank != me);
    let others = weave.channel(leaders.clone());
    for &mate in mates {
        weave.step((Role::Near, 0), 1, token(mate, 0, 0));
    }
    weave.send((Role::Near, 0), 1, others, Span::TOKEN, None);
    for &rank in &leaders {
        let reader = leaders.iter().filter(|&&r| r < me).count() - usize::from(rank < me);
        weave.step((Role::Near, 0), 2, token(rank, 0, reader));
    }
    if !mates.is_empty() {
        let channel = weave.channel(mates.to_vec());
        weave.send((Role::Near, 0), 2, channel, Span::TOKEN, None);
    }
    weave.done()
}
