//! Between nodes: the fewest messages, log2 of the nodes rounded up: all_gather and barrier.
//!
//! ```text
//! all_gather, 6 nodes (counted from the node itself)
//!   has 0          <- 0      of the node 1 to the right
//!   has 0 1        <- 0 1    of the node 2 to the right
//!   has 0 1 2 3    <- 0 1    of the node 4 to the right: all six
//! ```
//!
//! Bruck's steps, as in the flat `log`, over nodes. What a node has to send in a round is cut in runs of blocks that
//! lie in a row, about as many as there are rails; each run is one message, from one rank to one rank, which hands
//! it to its mates. After each round every rank of a node has all, so any of them can send any run.
//!
//! Rounds grow and their blocks lie in a row because the nearest node comes first. (With the farthest first, as in
//! PAT, the largest round would go to the nearest node, but would be many messages.)
//!
//! Deadlock: round `k` sends with lag `2k + 1`, receives and hands on with lag `2k + 2`, mates take it with lag
//! `2k + 3`, each run on its own channels: two cells do. In place: only Out is sent, after In is in it.

use super::weave::{Role, Weave};
use crate::ir::{Program, Source, Span, Step, reader_of_all};
use crate::topology::Topology;

const LANE: (Role, usize) = (Role::Near, 0);

fn distances(nodes: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |d| Some(2 * d)).take_while(move |&d| d < nodes)
}

/// Blocks of `count` nodes from `first` on, in runs of about one rail's share.
fn runs(topology: &Topology, first: usize, count: usize) -> Vec<Span> {
    let nodes = topology.nodes();
    let mut blocks: Vec<usize> =
        (first..first + count).flat_map(|n| topology.ranks_of(n % nodes).iter().copied()).collect();
    blocks.sort_unstable();
    let most = blocks.len().div_ceil(topology.node_sizes().0);
    let mut runs: Vec<Span> = Vec::new();
    for block in blocks {
        match runs.last_mut() {
            Some(run) if run.block + run.blocks == block && run.blocks < most => run.blocks += 1,
            _ => runs.push(Span::output(block)),
        }
    }
    runs
}

/// Of the numbers `0..count` dealt to the ranks of a node, those that the rank with index `local` gets.
fn dealt(count: usize, local: usize, ranks: usize) -> usize {
    count.saturating_sub(local).div_ceil(ranks)
}

/// A rank's channels: what it sends to other nodes, round by round; its own block for its mates; what it hands to
/// its mates, round by round.
pub(super) fn all_gather(me: usize, topology: &Topology) -> Program {
    let mut weave = Weave::default();
    let (node, nodes, local) = (topology.node_of(me), topology.nodes(), topology.local(me));
    let ranks = topology.ranks_of(node);
    let mates: Vec<usize> = ranks.iter().copied().filter(|&rank| rank != me).collect();
    let rounds: Vec<(usize, usize)> = distances(nodes).map(|d| (d, d.min(nodes - d))).collect();
    let sent: Vec<Vec<Span>> = rounds.iter().map(|&(_, count)| runs(topology, node, count)).collect();

    let mut outgoing = Vec::new();
    for (&(distance, _), runs) in rounds.iter().zip(&sent) {
        let left = (node + nodes - distance) % nodes;
        let mine = (local..runs.len()).step_by(ranks.len());
        outgoing.push(mine.map(|i| weave.channel(vec![topology.rank_at(left, i)])).collect::<Vec<_>>());
    }
    // What each of my node has sent to others: the number of its channel to its mates.
    let mut near: Vec<usize> =
        (0..ranks.len()).map(|l| sent.iter().map(|runs| dealt(runs.len(), l, ranks.len())).sum()).collect();
    let (input, output) = (Span::input(me), Span::output(me));
    if mates.is_empty() {
        weave.step(LANE, 0, Step::Copy { source: input, to: output, finish: false });
    } else {
        let channel = weave.channel(mates.clone());
        weave.send(LANE, 0, channel, input, Some(output));
    }
    let from_mate = |local_of: usize, channel, message| Source {
        rank: ranks[local_of],
        channel,
        reader: reader_of_all(local_of, local),
        message,
        take: (0, message.blocks),
    };
    for k in (1..ranks.len()).map(|k| (local + k) % ranks.len()) {
        let from = from_mate(k, near[k], Span::input(ranks[k]));
        weave.step(LANE, 1, Step::Receive { from, to: Span::output(ranks[k]), forward: None });
    }
    near.iter_mut().for_each(|channels| *channels += 1);

    for (round, &(distance, count)) in rounds.iter().enumerate() {
        let lag = 2 * round + 1;
        let mine = sent[round].iter().skip(local).step_by(ranks.len());
        for (&run, &channel) in mine.zip(&outgoing[round]) {
            weave.send(LANE, lag, channel, run, None);
        }
        let right = (node + distance) % nodes;
        let theirs = topology.ranks_of(right).len();
        // What each of them has sent in earlier rounds.
        let earlier: Vec<usize> =
            rounds[..round].iter().map(|&(_, count)| runs(topology, right, count).len()).collect();
        for (i, run) in runs(topology, right, count).into_iter().enumerate() {
            let (at, by) = (i % ranks.len(), i % theirs);
            if at == local {
                let before: usize = earlier.iter().map(|&runs| dealt(runs, by, theirs)).sum();
                let from = Source {
                    rank: topology.rank_at(right, i),
                    channel: before + i / theirs,
                    reader: 0,
                    message: run,
                    take: (0, run.blocks),
                };
                let forward = (!mates.is_empty()).then(|| weave.channel(mates.clone()));
                weave.step(LANE, lag + 1, Step::Receive { from, to: run, forward });
            } else {
                let from = from_mate(at, near[at], run);
                weave.step(LANE, lag + 2, Step::Receive { from, to: run, forward: None });
            }
            near[at] += 1;
        }
    }
    weave.done()
}

/// Leaders tell the leader at distance 1, 2, 4, .. to the right, after their mates and before them.
pub(super) fn barrier(me: usize, topology: &Topology) -> Program {
    let mut weave = Weave::default();
    let (node, nodes) = (topology.node_of(me), topology.nodes());
    let token = |rank, channel, reader| Step::Receive {
        from: Source { rank, channel, reader, message: Span::TOKEN, take: (0, 0) },
        to: Span::TOKEN,
        forward: None,
    };
    let (leader, mates) = (topology.ranks_of(node)[0], &topology.ranks_of(node)[1..]);
    let rounds = distances(nodes).count();
    if me != leader {
        let channel = weave.channel(vec![leader]);
        weave.send(LANE, 0, channel, Span::TOKEN, None);
        weave.step(LANE, rounds + 2, token(leader, rounds, topology.local(me) - 1));
        return weave.done();
    }
    for &mate in mates {
        weave.step(LANE, 1, token(mate, 0, 0));
    }
    for (round, distance) in distances(nodes).enumerate() {
        let channel = weave.channel(vec![topology.ranks_of((node + distance) % nodes)[0]]);
        weave.send(LANE, round + 1, channel, Span::TOKEN, None);
        let left = topology.ranks_of((node + nodes - distance) % nodes)[0];
        weave.step(LANE, round + 2, token(left, channel, 0));
    }
    if !mates.is_empty() {
        let channel = weave.channel(mates.to_vec());
        weave.send(LANE, rounds + 1, channel, Span::TOKEN, None);
    }
    weave.done()
}
