//! Reduction of contributions up to the homes: the entry of each node reduces the data of its node and of the
//! nodes below.

use super::layout::Layout;
use crate::algorithms::draft::{Draft, Role};
use crate::ir::{Association, Buffer, Source, Span, Step};

/// Destination of a home's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Its own Out.
    Keep,
    /// Its Out, its local peers and down to the other nodes.
    All,
    /// This rank.
    Root(usize),
}

/// Adds the reductions. Inputs are in node order: sums of lower nodes, contributions of the own node by rank,
/// other sums.
pub(super) fn fan_in(layout: &Layout<'_, '_>, draft: &mut Draft, then: Then) {
    let Layout { routes, me, node, .. } = *layout;
    for part in routes.rotated(node, false) {
        let slot = layout.up_slot(part);
        let (pipeline, lag) = slot;
        let input = routes.span(part, Buffer::In);
        let entry = routes.entry(part, node);
        if entry != me {
            draft.send((Role::Give, pipeline), lag, layout.give(slot, entry), input, None);
            continue;
        }
        let mut below = routes.node(part, node).children;
        below.sort_unstable();
        let split = below.partition_point(|&child| child < node);
        let source = |rank, channel| Source::whole(rank, channel, 0, input);
        let sum = |&child: &usize| {
            let entry = routes.entry(part, child);
            source(entry, layout.up_of(entry, part))
        };
        let mut from: Vec<Source> = below[..split].iter().map(sum).collect();
        let own = from.len() + layout.peers.partition_point(|&peer| peer < me);
        from.extend(
            layout.peers.iter().zip(layout.given(slot)).map(|(&peer, &channel)| source(peer, channel)),
        );
        from.extend(below[split..].iter().map(sum));

        let at = (Role::Up, pipeline);
        let output = Span { buffer: Buffer::Out, ..input };
        let (to, send, finish) = match (layout.up(part), then) {
            (Some(channel), _) => (None, Some(channel), false),
            (None, Then::Keep) => (Some(output), None, true),
            (None, Then::All) => (Some(output), layout.outgoing(part), true),
            (None, Then::Root(root)) if root == me => (Some(output), None, true),
            (None, Then::Root(_)) => (None, layout.outgoing(part), true),
        };
        match (from.is_empty(), send) {
            (true, Some(channel)) => draft.send(at, lag, channel, input, None),
            _ => {
                let (own, association) = (Some((own, input)), Association::InOrder);
                draft.step(at, lag, Step::Reduce { from, own, to, send, finish, association });
            }
        }
        if let (true, Some(channel)) = (finish && then == Then::All, layout.to_peers(part)) {
            draft.send(at, lag, channel, output, None);
        }
    }
}
