//! The fewest messages: log2(N) rounds, rounded up, at distances 1, 2, 4, ..
//!
//! ```text
//! all_gather, N = 6 (block numbers counted from the rank itself)
//!   has 0          <- 0      of the rank 1 to the right
//!   has 0 1        <- 0 1    of the rank 2 to the right
//!   has 0 1 2 3    <- 0 1    of the rank 4 to the right: all six
//! all_to_all: what is to go `i` to the right moves on in the rounds of i's bits: 5 = 1 + 4
//! barrier: in round k tell the rank 2^k to the right, hear from the one 2^k to the left
//! ```
//!
//! Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient Algorithms for All-to-All Communications in Multiport
//! Message-Passing Systems", 1997; the barrier is Hensgen, Finkel and Manber's dissemination barrier, 1988.
//!
//! The all_gather receives straight into Out (a run that wraps is two messages), so nothing is rotated at the
//! end. The all_to_all moves each block log2(N)/2 times on average, in Scratch: `0..N` is what I hold for the rank
//! `i` to the right of where it now is, `N..` the packed message. Deadlock: round `k` writes with lag `k` and reads
//! with lag `k + 1`, each on its own channel: two cells do.
//!
//! In place: all_gather writes only blocks of Out that no block of In shares.

use super::Draft;
use super::rounds::{Round, Rounds};
use crate::ir::{Ask, Buffer, Collective, Program, Source, Span, Step};

pub(super) fn plan(ask: &Ask) -> Option<Program> {
    match ask.collective {
        Collective::AllGather => Some(all_gather(ask)),
        Collective::AllToAll if !ask.uneven_pairs => Some(all_to_all(ask)),
        Collective::Barrier => Some(barrier(ask)),
        _ => None,
    }
}

/// 1, 2, 4, .. below `size`.
fn distances(size: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |d| Some(2 * d)).take_while(move |&d| d < size)
}

fn all_gather(ask: &Ask) -> Program {
    let rounds = distances(ask.size).map(|have| Round {
        buffer: if have == 1 { Buffer::In } else { Buffer::Out },
        first: 0,
        count: have.min(ask.size - have),
        distance: ask.size - have,
    });
    let mut draft = Draft::default();
    Rounds::new(ask, rounds.collect()).gather(&mut draft, 0, 0);
    draft.done()
}

fn all_to_all(ask: &Ask) -> Program {
    let Ask { rank: me, size, .. } = *ask;
    let mut draft = Draft::default();
    draft.keep(0, me);
    // Position i is what goes i to the right: In from my right neighbour on, and round to my left one.
    let (right, left) = (size - 1 - me, me);
    for (from, to, blocks) in [(me + 1, 1, right), (0, 1 + right, left)] {
        if blocks > 0 {
            let (source, to) = (Span::new(Buffer::In, from, blocks), Span::new(Buffer::Scratch, to, blocks));
            draft.step(0, Step::Copy { source, to, finish: false });
        }
    }
    for (k, distance) in distances(size).enumerate() {
        // Runs of positions with bit k: (first, its place in the message, blocks).
        let mut packed = 0;
        let runs: Vec<(usize, usize, usize)> = (distance..size)
            .step_by(2 * distance)
            .map(|first| {
                let blocks = distance.min(size - first);
                packed += blocks;
                (first, size + packed - blocks, blocks)
            })
            .collect();
        draft.scratch_blocks = draft.scratch_blocks.max(size + packed);
        for &(first, place, blocks) in &runs {
            let source = Span::new(Buffer::Scratch, first, blocks);
            let to = Span::new(Buffer::Scratch, place, blocks);
            draft.step(k, Step::Copy { source, to, finish: false });
        }
        let message = Span::new(Buffer::Scratch, size, packed);
        let channel = draft.channel(vec![(me + distance) % size]);
        draft.send(k, channel, message, None);
        let rank = (me + size - distance) % size;
        let from = Source { rank, channel, reader: 0, message, take: (0, packed) };
        draft.step(k + 1, Step::Receive { from, to: message, forward: None });
        for &(first, place, blocks) in &runs {
            let source = Span::new(Buffer::Scratch, place, blocks);
            // The last round's blocks have arrived; earlier ones may have to go on.
            let to = Span::new(Buffer::Scratch, first, blocks);
            draft.step(k + 1, Step::Copy { source, to, finish: false });
        }
    }
    let last = draft.channels.len();
    for i in 1..size {
        let to = Span::output((me + size - i) % size);
        draft.step(last, Step::Copy { source: Span::scratch(i), to, finish: false });
    }
    draft.done()
}

fn barrier(ask: &Ask) -> Program {
    let rounds =
        distances(ask.size).map(|distance| Round { buffer: Buffer::In, first: 0, count: 0, distance });
    let rounds = Rounds::new(ask, rounds.collect());
    let mut draft = Draft::default();
    for k in 0..rounds.rounds.len() {
        rounds.send(&mut draft, k, k, None);
        for from in rounds.sources(k) {
            draft.step(k + 1, Step::Receive { from, to: Span::TOKEN, forward: None });
        }
    }
    draft.done()
}
