//! Parts down from their homes: in each node the entry takes them and hands them on, to nodes and to mates.

use super::layout::Layout;
use super::weave::{Role, Weave};
use crate::ir::{Buffer, Source, Span, Step, reader_of_all};

/// Takes all parts but those of which I am the home; `first` is the buffer out of which homes send.
pub(super) fn fan_out(layout: &Layout<'_, '_>, weave: &mut Weave, first: impl Fn(usize) -> Buffer) {
    let Layout { routes, me, node, .. } = *layout;
    let whole = |rank, channel, reader, message: Span| Source {
        rank,
        channel,
        reader,
        message,
        take: (0, message.blocks),
    };
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
                let from = whole(home, layout.near_of(part), reader(home), sent);
                weave.step((Role::Near, 1), 0, Step::Receive { from, to, forward: None });
            }
            continue;
        }
        let slot = layout.down_slot(part);
        let (lane, lag) = slot;
        let share = layout.share(slot, entry);
        if entry != me {
            let from = whole(entry, share.unwrap_or(0), reader(entry), to);
            weave.step((Role::Share, lane), lag, Step::Receive { from, to, forward: None });
            continue;
        }
        let Some(parent) = routes.place(part, node).parent else { continue };
        let message = if parent == routes.home_node(part) { sent } else { to };
        let above = routes.entry(part, parent);
        let (channel, number) = layout.down_of(above, part);
        let from = whole(above, channel, number, message);
        let leaving = layout.leaving(part);
        let at = (Role::Enter, lane);
        weave.step(at, lag, Step::Receive { from, to, forward: leaving.or(share) });
        if let (Some(_), Some(share)) = (leaving, share) {
            weave.send(at, lag, share, to, None);
        }
    }
}
