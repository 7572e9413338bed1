//! Every writer publishes its data once, as one message to all ranks; each reader takes the blocks it needs.
//!
//! ```text
//!          rank 0        rank 1        rank 2
//! write    [ In 0 ]      [ In 1 ]      [ In 2 ]      one slot each, one message
//!              \  \_______/  |  \_______/  /
//! read      1, 2          2, 0          0, 1         directly from the slots of the writers
//! ```
//!
//! One hop and one message per rank: the lowest latency in shared memory. In exchange each reader of an
//! all_reduce reads the data of all ranks. This is the "double-buffered slot" collective for small messages
//! in MPI, for example Graham and Shipman, "MPI Support for Multi-core Architectures: Optimized Shared Memory
//! Collectives", 2008.
//!
//! Every reader reduces all contributions in rank order, so all ranks get the same bits. In place: the whole
//! In is in the slot (`Send`) before the `Reduce` of that segment writes Out.

use super::draft::{Draft, ONE};
use super::{others, rotated};
use crate::ir::{Association, Buffer, Collective, PlanRequest, Program, Source, Span, Step, reader_of_all};

/// Returns the message of `writer`, or `None` if it only reads.
fn message(request: &PlanRequest, writer: usize) -> Option<Span> {
    let whole = Span::new(Buffer::In, 0, request.size);
    match request.collective {
        Collective::AllGather => Some(Span::input(writer)),
        Collective::ReduceScatter | Collective::AllReduce | Collective::AllToAll => Some(whole),
        Collective::Broadcast | Collective::Scatter => (writer == request.root).then_some(whole),
        Collective::Reduce => (writer != request.root).then_some(whole),
        Collective::Gather => (writer != request.root).then_some(Span::input(writer)),
        Collective::Barrier => Some(Span::TOKEN),
    }
}

pub(super) fn plan(request: &PlanRequest) -> Option<Program> {
    use Collective::*;
    let PlanRequest { collective, rank: me, size, root, uneven_pairs, .. } = *request;
    if uneven_pairs {
        return None;
    }
    let to_root = matches!(collective, Gather | Reduce);
    let all_out = Span::new(Buffer::Out, 0, size);

    let mut draft = Draft::default();
    if let Some(source) = message(request, me) {
        let channel = draft.channel(if to_root { vec![root] } else { others(me, size).collect() });
        let tee = match collective {
            AllGather => Some(Span::output(me)),
            Broadcast => Some(all_out),
            _ => None,
        };
        draft.send(ONE, 0, channel, source, tee);
    }
    let keeps_own_block = match collective {
        AllToAll => true,
        Gather | Scatter => me == root,
        _ => false,
    };
    if keeps_own_block {
        draft.copy(ONE, Span::input(me), Span::output(me));
    }
    if to_root && me != root {
        return Some(draft.done());
    }

    let source = |from: usize, take: (usize, usize)| {
        let reader = if to_root { 0 } else { reader_of_all(from, me) };
        message(request, from).map(|message| Source { rank: from, channel: 0, reader, message, take })
    };
    if collective.reduces() {
        let (take, to) =
            if collective == ReduceScatter { ((me, 1), Span::output(me)) } else { ((0, size), all_out) };
        draft.step(
            ONE,
            1,
            Step::Reduce {
                from: others(me, size).filter_map(|p| source(p, take)).collect(),
                own: Some((me, Span::new(Buffer::In, take.0, take.1))),
                to: Some(to),
                send: None,
                finish: true,
                association: Association::InOrder,
            },
        );
        return Some(draft.done());
    }
    for peer in rotated(me, size) {
        let (take, to) = match collective {
            AllToAll => ((me, 1), Span::output(peer)),
            Scatter => ((me, 1), Span::output(me)),
            Broadcast => ((0, size), all_out),
            Barrier => ((0, 0), Span::TOKEN),
            _ => ((0, 1), Span::output(peer)),
        };
        if let Some(from) = source(peer, take) {
            draft.receive(ONE, 1, from, to);
        }
    }
    Some(draft.done())
}
