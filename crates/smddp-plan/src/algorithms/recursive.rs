//! Recursive halving and doubling, in the form for any number of ranks.
//!
//! ```text
//! reduce_scatter, N = 5, seen from rank r (position i is block r + i):
//!   0 1 2 3 4      s = 5: positions 3..5 go to rank r+3, what comes from r-3 is added to 0..2
//!   0 1 2          s = 3: position 2 goes to rank r+2, what comes from r-2 is added to 0
//!   0 1            s = 2: position 1 goes to rank r+1, what comes from r-1 is added to 0
//!   0              s = 1: done
//! all_gather: the same rounds backwards; all_reduce: one, then the other
//! ```
//!
//! log2(N) rounds rounded up, and no byte more than the ring, for every N: Traeff, "Optimal, Non-pipelined
//! Reduce-scatter and Allreduce Algorithms", 2024; for powers of two the cost is that of recursive halving and
//! doubling in Thakur, Rabenseifner and Gropp, 2005.
//!
//! Partial sums lie in Scratch, block `r + i` for position `i`. Deadlock: round `k` writes with lag `k` and reads
//! with lag `k + 1`, each round on its own channels: two cells do.
//!
//! In place: In is read in round 0 only (lags 0 and 1); Out is written by the last reduction (in the same step
//! when that is round 0) or later.

use super::Draft;
use super::rounds::{Round, Rounds};
use crate::ir::{Ask, Buffer, Collective, Program, Span, Step};

pub(super) fn plan(ask: &Ask) -> Option<Program> {
    let n = ask.size;
    // (positions before, positions after) of each halving.
    let halvings: Vec<(usize, usize)> =
        std::iter::successors(Some((n, n.div_ceil(2))), |&(_, h)| (h > 1).then_some((h, h.div_ceil(2))))
            .collect();
    let scatter = || {
        halvings.iter().enumerate().map(|(k, &(s, h))| Round {
            buffer: if k == 0 { Buffer::In } else { Buffer::Scratch },
            first: h,
            count: s - h,
            distance: h,
        })
    };
    let gather = |first: Buffer| {
        halvings.iter().rev().enumerate().map(move |(k, &(s, h))| Round {
            buffer: if k == 0 { first } else { Buffer::Out },
            first: 0,
            count: s - h,
            distance: n - h,
        })
    };
    let count = halvings.len();
    let mut draft = Draft::default();
    match ask.collective {
        Collective::AllGather => {
            Rounds::new(ask, gather(Buffer::In).collect()).gather(&mut draft, 0, 0);
        }
        Collective::ReduceScatter => {
            reduce_scatter(&Rounds::new(ask, scatter().collect()), &mut draft, count);
        }
        Collective::AllReduce => {
            let rounds = Rounds::new(ask, scatter().chain(gather(Buffer::Out)).collect());
            reduce_scatter(&rounds, &mut draft, count);
            rounds.gather(&mut draft, count, count);
        }
        _ => return None,
    }
    Some(draft.done())
}

/// The first `count` rounds.
fn reduce_scatter(rounds: &Rounds, draft: &mut Draft, count: usize) {
    let (me, n) = (rounds.me, rounds.size);
    if count > 1 {
        draft.scratch_blocks = 2 * n;
    }
    for k in 0..count {
        let last = k + 1 == count;
        rounds.send(draft, k, k, None);
        let mut position = 0;
        for source in rounds.sources(k) {
            let scratch = Span::new(Buffer::Scratch, me + position, source.message.blocks);
            position += source.message.blocks;
            // In round 0 the blocks have the same numbers at both ends.
            let own = if k == 0 { source.message } else { scratch };
            draft.step(
                k + 1,
                Step::Reduce {
                    own: Some((usize::from(source.rank < me), own)),
                    from: vec![source],
                    to: Some(if last { Span::output(me) } else { scratch }),
                    send: None,
                    finish: last,
                },
            );
        }
        let Round { first: half, count: sent, .. } = rounds.rounds[k];
        if k == 0 && sent < half {
            // N is odd: position `half - 1` is neither sent nor added to, and is sent from Scratch later.
            let source = Span::input((me + half - 1) % n);
            draft.step(1, Step::Copy { source, to: Span::scratch(me + half - 1), finish: false });
        }
    }
}
