//! Direct exchange between all pairs of ranks, one hop, in rotated order.
//!
//! ```text
//! all_gather                reduce_scatter            all_reduce
//! In r -> all  (lag 0)      In p -> p     (lag 0)     In p -> p           (lag 0)
//! Out p <- p   (lag 1)      Out r <- sum  (lag 1)     Out r <- sum -> all (lag 1)
//!                                                     Out p <- p          (lag 2)
//! ```
//!
//! Bandwidth-optimal if a message reaches all its readers at once (shared memory): each rank writes its share
//! once and reads every other share once. This is the pairwise exchange of Thakur, Rabenseifner and Gropp,
//! "Optimization of Collective Communication Operations in MPICH", 2005. In addition, one write serves all
//! readers, and segments are pipelined.
//!
//! Deadlock freedom: a message written in iteration `i` of the loop is read in iteration `i + 1` by the peer.
//! Two slots are sufficient. One is sufficient if each channel carries one message.
//!
//! In place (block `b` of In and Out is the same memory): segment `s` of In `p` is sent with lag 0. Out `p`
//! is written later, with lag 1 (all_gather: only blocks of other ranks) or lag 2 (all_reduce, reduce). Block
//! `me` is never sent as input; the `Reduce` that reads it also overwrites it.

use super::draft::{Draft, ONE};
use super::{others, rotated};
use crate::ir::{Association, Collective, PlanRequest, Program, Source, Span, Step, reader_of_all};

pub(super) fn plan(request: &PlanRequest) -> Program {
    match request.collective {
        Collective::AllGather => all_gather(request),
        Collective::ReduceScatter => reduce(request, Then::Keep),
        Collective::AllReduce => reduce(request, Then::All),
        Collective::Reduce => reduce(request, Then::Root),
        Collective::Broadcast => broadcast(request),
        Collective::Gather => gather(request),
        Collective::Scatter => scatter(request),
        Collective::AllToAll => all_to_all(request),
        Collective::Barrier => barrier(request),
    }
}

/// Message on the only channel of `writer`, which all ranks read.
fn from_all(writer: usize, me: usize, message: Span) -> Source {
    Source::whole(writer, 0, reader_of_all(writer, me), message)
}

/// Message on the channel from `writer` to `me`, where `writer` has one channel per peer in ascending order.
fn from_pair(writer: usize, me: usize, message: Span) -> Source {
    Source::whole(writer, reader_of_all(writer, me), 0, message)
}

/// Adds a channel for each peer in ascending order (`reader_of_all` is its number), and sends In `p` to each
/// `p`.
fn pairs(draft: &mut Draft, me: usize, size: usize) {
    for peer in others(me, size) {
        draft.channel(vec![peer]);
    }
    for peer in rotated(me, size) {
        draft.send(ONE, 0, reader_of_all(me, peer), Span::input(peer), None);
    }
}

fn all_gather(request: &PlanRequest) -> Program {
    let (me, mut draft) = (request.rank, Draft::default());
    let channel = draft.channel(others(me, request.size).collect());
    draft.send(ONE, 0, channel, Span::input(me), Some(Span::output(me)));
    for peer in rotated(me, request.size) {
        draft.receive(ONE, 1, from_all(peer, me, Span::input(peer)), Span::output(peer));
    }
    draft.done()
}

/// Destination of the reduced block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Keep,
    All,
    Root,
}

/// Rank `r` reduces block `r`. The result stays there, goes to all ranks, or goes to the root.
fn reduce(request: &PlanRequest, then: Then) -> Program {
    let PlanRequest { rank: me, size, root, .. } = *request;
    let mut draft = Draft::default();
    pairs(&mut draft, me, size);
    let keeps = then != Then::Root || me == root;
    let send = match then {
        Then::Keep => None,
        Then::All => Some(draft.channel(others(me, size).collect())),
        Then::Root => (me != root).then(|| draft.channel(vec![root])),
    };
    draft.step(
        ONE,
        1,
        Step::Reduce {
            from: others(me, size).map(|p| from_pair(p, me, Span::input(me))).collect(),
            own: Some((me, Span::input(me))),
            to: keeps.then_some(Span::output(me)),
            send,
            finish: true,
            association: Association::InOrder,
        },
    );
    if then == Then::All || (then == Then::Root && me == root) {
        for peer in rotated(me, size) {
            let (message, reader) = match then {
                Then::Root => (Span::input(peer), 0),
                _ => (Span::output(peer), reader_of_all(peer, me)),
            };
            draft.receive(ONE, 2, Source::whole(peer, size - 1, reader, message), Span::output(peer));
        }
    }
    draft.done()
}

/// One writer, all readers. A message carries one block, so that slots are small and fill early.
fn broadcast(request: &PlanRequest) -> Program {
    let PlanRequest { rank: me, size, root, .. } = *request;
    let mut draft = Draft::default();
    if me == root {
        let channel = draft.channel(others(me, size).collect());
        for block in 0..size {
            draft.send(ONE, 0, channel, Span::input(block), Some(Span::output(block)));
        }
    } else {
        for block in 0..size {
            draft.receive(ONE, 0, from_all(root, me, Span::input(block)), Span::output(block));
        }
    }
    draft.done()
}

fn gather(request: &PlanRequest) -> Program {
    let PlanRequest { rank: me, size, root, .. } = *request;
    let mut draft = Draft::default();
    if me != root {
        let channel = draft.channel(vec![root]);
        draft.send(ONE, 0, channel, Span::input(me), None);
        return draft.done();
    }
    draft.copy(ONE, Span::input(me), Span::output(me));
    for peer in rotated(me, size) {
        draft.receive(ONE, 0, Source::whole(peer, 0, 0, Span::input(peer)), Span::output(peer));
    }
    draft.done()
}

fn scatter(request: &PlanRequest) -> Program {
    let PlanRequest { rank: me, size, root, .. } = *request;
    let mut draft = Draft::default();
    if me == root {
        pairs(&mut draft, me, size);
        draft.copy(ONE, Span::input(me), Span::output(me));
    } else {
        draft.receive(ONE, 0, from_pair(root, me, Span::input(me)), Span::output(me));
    }
    draft.done()
}

/// One block per message, so pairs may differ in size.
fn all_to_all(request: &PlanRequest) -> Program {
    let (me, mut draft) = (request.rank, Draft::default());
    pairs(&mut draft, me, request.size);
    draft.copy(ONE, Span::input(me), Span::output(me));
    for peer in rotated(me, request.size) {
        draft.receive(ONE, 1, from_pair(peer, me, Span::input(me)), Span::output(peer));
    }
    draft.done()
}

fn barrier(request: &PlanRequest) -> Program {
    let (me, mut draft) = (request.rank, Draft::default());
    let channel = draft.channel(others(me, request.size).collect());
    draft.send(ONE, 0, channel, Span::TOKEN, None);
    for peer in rotated(me, request.size) {
        draft.receive(ONE, 1, from_all(peer, me, Span::TOKEN), Span::TOKEN);
    }
    draft.done()
}
