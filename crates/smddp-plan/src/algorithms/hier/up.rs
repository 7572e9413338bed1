//! Contributions up to the homes: in each node the entry reduces what its mates, itself and the nodes below have.

use super::layout::Layout;
use crate::algorithms::draft::{Draft, Role};
use crate::ir::{Association, Buffer, Source, Span, Step};

/// Where a home's result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// To its own Out.
    Keep,
    /// To its Out, its mates and down to the other nodes.
    All,
    /// To this rank.
    Root(usize),
}

/// In the order of the nodes: the sums of those below mine, my node's contributions rank by rank, the other sums.
pub(super) fn fan_in(layout: &Layout<'_, '_>, draft: &mut Draft, then: Then) {
    let Layout { routes, me, node, .. } = *layout;
    for part in routes.rotated(node, false) {
        let slot = layout.up_slot(part);
        let (lane, lag) = slot;
        let input = routes.span(part, Buffer::In);
        let entry = routes.entry(part, node);
        if entry != me {
            draft.send((Role::Give, lane), lag, layout.give(slot, entry), input, None);
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
        let own = from.len() + layout.mates.partition_point(|&mate| mate < me);
        from.extend(
            layout.mates.iter().zip(layout.given(slot)).map(|(&mate, &channel)| source(mate, channel)),
        );
        from.extend(below[split..].iter().map(sum));

        let at = (Role::Up, lane);
        let output = Span { buffer: Buffer::Out, ..input };
        let (to, send, finish) = match (layout.up(part), then) {
            (Some(channel), _) => (None, Some(channel), false),
            (None, Then::Keep) => (Some(output), None, true),
            (None, Then::All) => (Some(output), layout.leaving(part), true),
            (None, Then::Root(root)) if root == me => (Some(output), None, true),
            (None, Then::Root(_)) => (None, layout.leaving(part), true),
        };
        match (from.is_empty(), send) {
            (true, Some(channel)) => draft.send(at, lag, channel, input, None),
            _ => {
                let (own, association) = (Some((own, input)), Association::InOrder);
                draft.step(at, lag, Step::Reduce { from, own, to, send, finish, association });
            }
        }
        if let (true, Some(channel)) = (finish && then == Then::All, layout.near(part)) {
            draft.send(at, lag, channel, output, None);
        }
    }
}
