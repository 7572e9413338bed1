//! Every pair of ranks exchanges directly, one hop, in rotated order.
//!
//! ```text
//! all_gather                reduce_scatter            all_reduce
//! In r -> all  (lag 0)      In p -> p     (lag 0)     In p -> p           (lag 0)
//! Out p <- p   (lag 1)      Out r <- sum  (lag 1)     Out r <- sum -> all (lag 1)
//!                                                     Out p <- p          (lag 2)
//! ```
//!
//! Bandwidth-optimal where a message reaches all its readers at once (shared memory): each rank writes its
//! share once and reads each other's share once. Direct exchange of all pairs, as in Thakur, Rabenseifner and
//! Gropp, "Optimization of Collective Communication Operations in MPICH", 2005 ("pairwise exchange"), with one
//! write for all readers, and segments as the pipeline.
//!
//! Deadlock: a message written in iteration `i` of the loop is read in iteration `i + 1` at the other end. Two
//! cells are enough for that; one is, where each channel carries one message.
//!
//! In place (In and Out block `b` are the same memory): segment `s` of In `p` is sent with lag 0, and Out `p` is
//! written with lag 1 (all_gather: only blocks that were never mine) or lag 2 (all_reduce, reduce), so after
//! it was sent. Block `me` is never sent as input; the `Reduce` that reads it is the one that overwrites it.

use super::draft::{Draft, ONE};
use super::{others, rotated};
use crate::ir::{Ask, Association, Collective, Program, Source, Span, Step, reader_of_all};

pub(super) fn plan(ask: &Ask) -> Program {
    match ask.collective {
        Collective::AllGather => all_gather(ask),
        Collective::ReduceScatter => reduce(ask, Then::Keep),
        Collective::AllReduce => reduce(ask, Then::All),
        Collective::Reduce => reduce(ask, Then::Root),
        Collective::Broadcast => broadcast(ask),
        Collective::Gather => gather(ask),
        Collective::Scatter => scatter(ask),
        Collective::AllToAll => all_to_all(ask),
        Collective::Barrier => barrier(ask),
    }
}

/// `writer`'s only channel, which goes to all.
fn from_all(writer: usize, me: usize, message: Span) -> Source {
    Source::whole(writer, 0, reader_of_all(writer, me), message)
}

/// `writer`'s channel to me, where it has one for each peer, ascending.
fn from_pair(writer: usize, me: usize, message: Span) -> Source {
    Source::whole(writer, reader_of_all(writer, me), 0, message)
}

/// A channel for each peer, ascending (so `reader_of_all` is its number), and In `p` to each `p`.
fn pairs(draft: &mut Draft, me: usize, size: usize) {
    for peer in others(me, size) {
        draft.channel(vec![peer]);
    }
    for peer in rotated(me, size) {
        draft.send(ONE, 0, reader_of_all(me, peer), Span::input(peer), None);
    }
}

fn all_gather(ask: &Ask) -> Program {
    let (me, mut draft) = (ask.rank, Draft::default());
    let channel = draft.channel(others(me, ask.size).collect());
    draft.send(ONE, 0, channel, Span::input(me), Some(Span::output(me)));
    for peer in rotated(me, ask.size) {
        draft.receive(ONE, 1, from_all(peer, me, Span::input(peer)), Span::output(peer));
    }
    draft.done()
}

/// Where the reduced block goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Keep,
    All,
    Root,
}

/// Rank `r` reduces block `r`; then it stays, goes to all, or goes to the root.
fn reduce(ask: &Ask, then: Then) -> Program {
    let Ask { rank: me, size, root, .. } = *ask;
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

/// One writer, all readers; a message carries one block, so that cells stay small and fill early.
fn broadcast(ask: &Ask) -> Program {
    let Ask { rank: me, size, root, .. } = *ask;
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

fn gather(ask: &Ask) -> Program {
    let Ask { rank: me, size, root, .. } = *ask;
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

fn scatter(ask: &Ask) -> Program {
    let Ask { rank: me, size, root, .. } = *ask;
    let mut draft = Draft::default();
    if me == root {
        pairs(&mut draft, me, size);
        draft.copy(ONE, Span::input(me), Span::output(me));
    } else {
        draft.receive(ONE, 0, from_pair(root, me, Span::input(me)), Span::output(me));
    }
    draft.done()
}

/// One block a message, so pairs may differ in size.
fn all_to_all(ask: &Ask) -> Program {
    let (me, mut draft) = (ask.rank, Draft::default());
    pairs(&mut draft, me, ask.size);
    draft.copy(ONE, Span::input(me), Span::output(me));
    for peer in rotated(me, ask.size) {
        draft.receive(ONE, 1, from_pair(peer, me, Span::input(me)), Span::output(peer));
    }
    draft.done()
}

fn barrier(ask: &Ask) -> Program {
    let (me, mut draft) = (ask.rank, Draft::default());
    let channel = draft.channel(others(me, ask.size).collect());
    draft.send(ONE, 0, channel, Span::TOKEN, None);
    for peer in rotated(me, ask.size) {
        draft.receive(ONE, 1, from_all(peer, me, Span::TOKEN), Span::TOKEN);
    }
    draft.done()
}
