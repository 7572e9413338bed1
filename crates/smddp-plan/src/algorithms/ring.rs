//! Every rank reads from its left neighbour and writes to its right one; blocks go round.
//!
//! ```text
//! all_gather, block 0:        0 -> 1 -> 2 -> 3        hop k has lag k, and a channel of its own
//! reduce_scatter, block 0:    1 -> 2 -> 3 -> 0        each hop adds its own contribution
//! all_reduce:                 the second, then the first
//! broadcast from 2:           2 -> 3 -> 0 -> 1        a chain, all blocks over one channel a link
//! reduce to 2:                3 -> 0 -> 1 -> 2
//! ```
//!
//! Bandwidth-optimal with neighbours only; N-1 hops of latency. The ring all_reduce is Patarasuk and Yuan,
//! "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009.
//!
//! Deadlock: what hop `k` writes in one iteration, hop `k + 1` reads in the next, so two cells a channel do; on a
//! channel shared by hops the same depth would not. In a chain nobody waits for anything to the right of it.
//!
//! In place: in an all_reduce, block `b` of In is last read at hop `j < N` (lag `j`), and block `b` of Out is
//! written at a hop `>= N`, or at hop `N - 1` by the very step that reads it.

use super::Draft;
use crate::ir::{Ask, Collective, Program, Source, Span, Step};

pub(super) fn plan(ask: &Ask) -> Option<Program> {
    match ask.collective {
        Collective::AllGather => Some(all_gather(ask)),
        Collective::ReduceScatter => Some(reduce_scatter(ask, false)),
        Collective::AllReduce => Some(reduce_scatter(ask, true)),
        Collective::Broadcast => Some(broadcast(ask)),
        Collective::Reduce => Some(reduce(ask)),
        _ => None,
    }
}

/// What my left neighbour writes to its channel `channel`, whole.
fn from_left(ask: &Ask, channel: usize, message: Span) -> Source {
    let left = (ask.rank + ask.size - 1) % ask.size;
    Source { rank: left, channel, reader: 0, message, take: (0, message.blocks) }
}

fn all_gather(ask: &Ask) -> Program {
    let Ask { rank: me, size, .. } = *ask;
    let right = (me + 1) % size;
    let mut draft = Draft::default();
    let channel = draft.channel(vec![right]);
    draft.send(0, channel, Span::input(me), Some(Span::output(me)));
    for hop in 1..size {
        let block = (me + size - hop) % size;
        let message = if hop == 1 { Span::input(block) } else { Span::output(block) };
        let from = from_left(ask, hop - 1, message);
        let forward = (hop + 1 < size).then(|| draft.channel(vec![right]));
        draft.step(hop, Step::Receive { from, to: Span::output(block), forward });
    }
    draft.done()
}

/// Hops 0..N reduce; with `gather`, hops N..2N-1 hand the results round.
fn reduce_scatter(ask: &Ask, gather: bool) -> Program {
    let Ask { rank: me, size, .. } = *ask;
    let right = (me + 1) % size;
    // The block that rank `me` has in its hands at hop `h`.
    let block_at = |hop: usize| (me + 2 * size - 1 - hop) % size;
    let mut draft = Draft::default();
    let channel = draft.channel(vec![right]);
    draft.send(0, channel, Span::input(block_at(0)), None);
    for hop in 1..size {
        let block = block_at(hop);
        let last = hop + 1 == size;
        let send = (!last || gather).then(|| draft.channel(vec![right]));
        draft.step(
            hop,
            Step::Reduce {
                from: vec![from_left(ask, hop - 1, Span::input(block))],
                own: Some((1, Span::input(block))),
                to: last.then_some(Span::output(block)),
                send,
                finish: last,
            },
        );
    }
    if gather {
        for hop in size..2 * size - 1 {
            let block = block_at(hop);
            let from = from_left(ask, hop - 1, Span::output(block));
            let forward = (hop + 2 < 2 * size).then(|| draft.channel(vec![right]));
            draft.step(hop, Step::Receive { from, to: Span::output(block), forward });
        }
    }
    draft.done()
}

fn broadcast(ask: &Ask) -> Program {
    let Ask { rank: me, size, root, .. } = *ask;
    // Links behind the root.
    let place = (me + size - root) % size;
    let mut draft = Draft::default();
    let channel = (place + 1 < size).then(|| draft.channel(vec![(me + 1) % size]));
    for block in 0..size {
        let to = Span::output(block);
        match channel {
            Some(channel) if place == 0 => draft.send(0, channel, Span::input(block), Some(to)),
            forward => {
                let message = if place == 1 { Span::input(block) } else { to };
                draft.step(0, Step::Receive { from: from_left(ask, 0, message), to, forward });
            }
        }
    }
    draft.done()
}

fn reduce(ask: &Ask) -> Program {
    let Ask { rank: me, size, root, .. } = *ask;
    // Links behind the first of the chain; the root is the last.
    let place = (me + size - root - 1) % size;
    let mut draft = Draft::default();
    let send = (me != root).then(|| draft.channel(vec![(me + 1) % size]));
    for block in 0..size {
        let own = Span::input(block);
        match send {
            Some(channel) if place == 0 => draft.send(0, channel, own, None),
            send => draft.step(
                0,
                Step::Reduce {
                    from: vec![from_left(ask, 0, own)],
                    own: Some((1, own)),
                    to: (me == root).then_some(Span::output(block)),
                    send,
                    finish: me == root,
                },
            ),
        }
    }
    draft.done()
}
