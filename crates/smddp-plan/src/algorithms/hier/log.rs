//! Between nodes: the fewest messages, log2 of the nodes rounded up: all_gather.
//!
//! ```text
//! all_gather, 6 nodes (counted from the node itself)
//!   has 0          <- 0      of the node 1 to the right
//!   has 0 1        <- 0 1    of the node 2 to the right
//!   has 0 1 2 3    <- 0 1    of the node 4 to the right: all six
//! ```
//!
//! Bruck's steps, over nodes. What a node has to send in a round is dealt to its rails in equal
//! shares, each in runs of blocks that lie in a row; a run is a message, from one rank to one rank, which hands it
//! to its mates. After each round every rank of a node has all, so any of them can send any run.
//!
//! With few nodes each round is one part, so that messages are fewest. With many, where this is also the way of the
//! large calls, a round sends in two parts: what the node had a round ago need not wait for the round before. So the
//! link has something to carry while the newest blocks are on their way; otherwise each round would add a latency in
//! which it is idle. Long runs are cut there, so that mates get the beginning of the last round before its end.
//! (Simulated, 256 MiB on 1,024 nodes of 8 ranks, 4 rails of 12.5 GB/s and 15 us: 95.0 % of line rate whole, 98.2 %
//! in parts.)
//!
//! Rounds grow and their blocks lie in a row because the nearest node comes first. (With the farthest first, as in
//! PAT, the largest round would go to the nearest node, but would be many messages.)
//!
//! Deadlock: what is written with one lag is read with the next, each run on its own channels: two cells do. Round `k`
//! sends its old part with lag `2k` and its new one with `2k + 1`; each is received and handed on with the lag after
//! that, and mates take it with the one after that. In place: only Out is sent, after In is in it.

use crate::algorithms::draft::{Draft, ONE};
use crate::ir::{Program, Source, Span, Step, reader_of_all};
use crate::topology::Topology;
use std::ops::Range;

/// From so many nodes on rounds go in parts.
pub(crate) const MANY: usize = 128;
/// There a run is at most the blocks that a rail gets in all over this.
const PIECES: usize = 16;

pub(super) fn distances(nodes: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |d| Some(2 * d)).take_while(move |&d| d < nodes)
}

/// A run of blocks that lie in a row, and the rail on which it travels.
type Run = (usize, Span);

/// One part of a round: of the nodes from the sender on, these go to the one `distance` to its left.
struct Part {
    distance: usize,
    nodes: Range<usize>,
    /// At which it is sent.
    lag: usize,
}

/// The parts of all rounds; a round's old part is before its new one.
fn parts(nodes: usize) -> Vec<Part> {
    let mut parts = Vec::new();
    for (round, distance) in distances(nodes).enumerate() {
        let count = distance.min(nodes - distance);
        let old = if nodes < MANY { 0 } else { count.min(distance / 2) };
        for (nodes, lag) in [(0..old, 2 * round), (old..count, 2 * round + 1)] {
            if !nodes.is_empty() {
                parts.push(Part { distance, nodes, lag });
            }
        }
    }
    parts
}

/// What `node` sends of a part: its blocks in equal shares for the rails. A share is one run, or a few where its
/// blocks do not lie in a row, or are many.
fn runs(topology: &Topology, node: usize, part: &Part) -> Vec<Run> {
    let nodes = topology.nodes();
    let of = |n: usize| topology.ranks_of((node + n) % nodes).iter().copied();
    let mut blocks: Vec<usize> = part.nodes.clone().flat_map(of).collect();
    // A few ascending runs, which this sort finds.
    blocks.sort();
    let rails = topology.node_sizes().0;
    let share = blocks.len().div_ceil(rails);
    let most = if nodes < MANY { share } else { topology.size().div_ceil(rails).div_ceil(PIECES) };
    let mut runs: Vec<Run> = Vec::new();
    for (i, block) in blocks.into_iter().enumerate() {
        match runs.last_mut() {
            Some((rail, run))
                if *rail == i / share && run.block + run.blocks == block && run.blocks < most =>
            {
                run.blocks += 1;
            }
            _ => runs.push((i / share, Span::output(block))),
        }
    }
    runs
}

/// How many of the runs travel on a rail.
fn on(rail: usize, runs: &[Run]) -> usize {
    runs.iter().filter(|(r, _)| *r == rail).count()
}

/// A rank's channels: what it sends to other nodes, part by part; its own block for its mates; what it hands to its
/// mates, part by part.
pub(super) fn all_gather(me: usize, topology: &Topology) -> Program {
    let mut draft = Draft::default();
    let (node, nodes, local) = (topology.node_of(me), topology.nodes(), topology.local(me));
    let ranks = topology.ranks_of(node);
    let mates: Vec<usize> = ranks.iter().copied().filter(|&rank| rank != me).collect();
    let parts = parts(nodes);
    let sent: Vec<Vec<Run>> = parts.iter().map(|part| runs(topology, node, part)).collect();

    let mut outgoing = Vec::new();
    for (part, runs) in parts.iter().zip(&sent) {
        let left = topology.rank_at((node + nodes - part.distance) % nodes, local);
        outgoing.push((0..on(local, runs)).map(|_| draft.channel(vec![left])).collect::<Vec<_>>());
    }
    // What each of my node has sent to others: the number of its channel to its mates.
    let mut near: Vec<usize> =
        (0..ranks.len()).map(|rail| sent.iter().map(|runs| on(rail, runs)).sum()).collect();
    let (input, output) = (Span::input(me), Span::output(me));
    if mates.is_empty() {
        draft.copy(ONE, input, output);
    } else {
        let channel = draft.channel(mates.clone());
        draft.send(ONE, 0, channel, input, Some(output));
    }
    let from_mate = |local_of: usize, channel, message| {
        Source::whole(ranks[local_of], channel, reader_of_all(local_of, local), message)
    };
    for k in (1..ranks.len()).map(|k| (local + k) % ranks.len()) {
        let from = from_mate(k, near[k], Span::input(ranks[k]));
        draft.receive(ONE, 1, from, Span::output(ranks[k]));
    }
    near.iter_mut().for_each(|channels| *channels += 1);

    let send = |draft: &mut Draft, number: usize| {
        let mine = sent[number].iter().filter(|(rail, _)| *rail == local);
        for (&(_, run), &channel) in mine.zip(&outgoing[number]) {
            draft.send(ONE, parts[number].lag, channel, run, None);
        }
    };
    // Of one lag, what is sent comes before what is received, which may have to be waited for; unless it is what a
    // mate has received.
    let early = |number: usize| parts[number].lag == parts[number - 1].lag + 1;
    if !parts.is_empty() {
        send(&mut draft, 0);
    }
    for (number, part) in parts.iter().enumerate() {
        if number + 1 < parts.len() && early(number + 1) {
            send(&mut draft, number + 1);
        }
        let right = (node + part.distance) % nodes;
        let mut channel: usize =
            parts[..number].iter().map(|part| on(local, &runs(topology, right, part))).sum();
        for (rail, run) in runs(topology, right, part) {
            if rail == local {
                let rank = topology.rank_at(right, rail);
                let from = Source::whole(rank, channel, 0, run);
                channel += 1;
                let forward = (!mates.is_empty()).then(|| draft.channel(mates.clone()));
                draft.step(ONE, part.lag + 1, Step::Receive { from, to: run, forward });
            } else {
                let from = from_mate(rail, near[rail], run);
                draft.receive(ONE, part.lag + 2, from, run);
            }
            near[rail] += 1;
        }
        if number + 1 < parts.len() && !early(number + 1) {
            send(&mut draft, number + 1);
        }
    }
    draft.done()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::Algorithm;
    use crate::check::{Operation, Sizes, check, programs};
    use crate::ir::Collective;

    #[test]
    fn rounds_in_parts_gather_everything_once_with_two_cells() {
        // Even, uneven and single ranks a node, block by block and cyclic; powers of two and others.
        let labels: [Vec<usize>; 4] = [
            (0..MANY).collect(),
            (0..2 * MANY + 60).map(|rank| rank % (MANY + 30)).collect(),
            (0..2 * MANY).map(|rank| rank / 2).collect(),
            (0..MANY + 5).flat_map(|node| vec![node; 1 + node % 2]).collect(),
        ];
        for labels in labels {
            let topology = Topology::from_labels(&labels);
            let programs = programs(Algorithm::HierLog, Collective::AllGather, &topology, 0, false).unwrap();
            for segments in [1, 3] {
                let operation = Operation {
                    collective: Collective::AllGather,
                    root: 0,
                    programs: &programs,
                    sizes: &Sizes::Blocks(vec![segments; topology.size()]),
                    in_place: true,
                };
                check(&operation, 2).unwrap();
            }
        }
    }
}
