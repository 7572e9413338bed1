//! Distribution of parts from their homes: in each node the entry receives a part and forwards it to nodes
//! and local peers.

use super::layout::Layout;
use crate::algorithms::draft::{Draft, Role};
use crate::ir::{Buffer, Source, Span, Step, reader_of_all};

/// Receives all parts of other homes; `first` returns the buffer from which a home sends.
pub(super) fn fan_out(layout: &Layout<'_, '_>, draft: &mut Draft, first: impl Fn(usize) -> Buffer) {
    let Layout { routes, me, node, .. } = *layout;
    // Index of this rank among the readers of a channel from a local peer to its peers.
    let reader = |peer| {
        let local = |rank| routes.topology.local(rank);
        reader_of_all(local(peer), local(me))
    };
    for part in routes.rotated(node, true) {
        let (home, entry) = (routes.parts[part].home, routes.entry(part, node));
        let sent = routes.span(part, first(part));
        let to = Span { buffer: Buffer::Out, ..sent };
        if routes.home_node(part) == node {
            if home != me {
                let from = Source::whole(home, layout.to_peers_of(part), reader(home), sent);
                draft.receive((Role::Local, 1), 0, from, to);
            }
            continue;
        }
        let slot = layout.down_slot(part);
        let (pipeline, lag) = slot;
        let share = layout.share(slot, entry);
        if entry != me {
            let from = Source::whole(entry, share.unwrap_or(0), reader(entry), to);
            draft.receive((Role::Share, pipeline), lag, from, to);
            continue;
        }
        let Some(parent) = routes.node(part, node).parent else { continue };
        let message = if parent == routes.home_node(part) { sent } else { to };
        let above = routes.entry(part, parent);
        let (channel, number) = layout.down_of(above, part);
        let from = Source::whole(above, channel, number, message);
        let outgoing = layout.outgoing(part);
        let at = (Role::Enter, pipeline);
        draft.step(at, lag, Step::Receive { from, to, forward: outgoing.or(share) });
        if let (Some(_), Some(share)) = (outgoing, share) {
            draft.send(at, lag, share, to, None);
        }
    }
}
