//! Parts down from their homes: in each node the entry takes them and hands them on, to nodes and to mates.

use super::layout::Layout;
use crate::algorithms::draft::{Draft, Role};
use crate::ir::{Buffer, Source, Span, Step, reader_of_all};

/// Takes all parts but those of which I am the home; `first` is the buffer out of which homes send.
pub(super) fn fan_out(layout: &Layout<'_, '_>, draft: &mut Draft, first: impl Fn(usize) -> Buffer) {
    let Layout { routes, me, node, .. } = *layout;
    // My number among the readers of a mate's channel to its mates.
    let reader = |mate| {
        let local = |rank| routes.topology.local(rank);
        reader_of_all(local(mate), local(me))
    };
    for part in routes.rotated(node, true) {
        let (home, entry) = (routes.parts[part].home, routes.entry(part, node));
        let sent = routes.span(part, first(part));
        let to = Span { buffer: Buffer::Out, ..sent };
        if routes.home_node(part) == node {
            if home != me {
                let from = Source::whole(home, layout.near_of(part), reader(home), sent);
                draft.receive((Role::Near, 1), 0, from, to);
            }
            continue;
        }
        let slot = layout.down_slot(part);
        let (lane, lag) = slot;
        let share = layout.share(slot, entry);
        if entry != me {
            let from = Source::whole(entry, share.unwrap_or(0), reader(entry), to);
            draft.receive((Role::Share, lane), lag, from, to);
            continue;
        }
        let Some(parent) = routes.node(part, node).parent else { continue };
        let message = if parent == routes.home_node(part) { sent } else { to };
        let above = routes.entry(part, parent);
        let (channel, number) = layout.down_of(above, part);
        let from = Source::whole(above, channel, number, message);
        let leaving = layout.leaving(part);
        let at = (Role::Enter, lane);
        draft.step(at, lag, Step::Receive { from, to, forward: leaving.or(share) });
        if let (Some(_), Some(share)) = (leaving, share) {
            draft.send(at, lag, share, to, None);
        }
    }
}
