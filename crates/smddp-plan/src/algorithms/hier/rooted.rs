//! Broadcast and reduce: the root sends to the homes in its node, or receives from all homes.

use super::down::fan_out;
use super::layout::{Layout, Uses};
use super::routes::Routes;
use super::up::{Then, fan_in};
use crate::algorithms::draft::{Draft, Role};
use crate::ir::{Buffer, PlanRequest, Program, Source, Step, reader_of_all};

/// The root writes all data once for its local peers. Peers that are homes send their parts to the other
/// nodes.
pub(super) fn broadcast(routes: &Routes<'_>, request: &PlanRequest) -> Program {
    let PlanRequest { rank: me, root, .. } = *request;
    let mut draft = Draft::default();
    let uses = Uses { down: true, root_to_peers: Some(root), ..Uses::default() };
    let layout = Layout::new(routes, me, uses, &mut draft);
    let local_role = (Role::Local, 0);
    if !routes.topology.share_node(me, root) {
        fan_out(&layout, &mut draft, |part| match routes.parts[part].home == root {
            true => Buffer::In,
            false => Buffer::Out,
        });
        return draft.done();
    }
    for part in 0..routes.parts.len() {
        let (input, output) = (routes.span(part, Buffer::In), routes.span(part, Buffer::Out));
        if me != root {
            let local = |rank| routes.topology.local(rank);
            let from =
                Source::whole(root, layout.root_to_peers(), reader_of_all(local(root), local(me)), input);
            draft.step(local_role, 0, Step::Receive { from, to: output, forward: layout.outgoing(part) });
            continue;
        }
        if let Some(channel) = layout.outgoing(part) {
            draft.send((Role::Leave, routes.pipeline(part, layout.node, false)), 0, channel, input, None);
        }
        if layout.peers.is_empty() {
            draft.copy(local_role, input, output);
        } else {
            draft.send(local_role, 0, layout.root_to_peers(), input, Some(output));
        }
    }
    draft.done()
}

/// Every home sends its result to the root.
pub(super) fn reduce(routes: &Routes<'_>, request: &PlanRequest) -> Program {
    let PlanRequest { rank: me, root, .. } = *request;
    let mut draft = Draft::default();
    let uses = Uses { up: true, to_root: Some(root), ..Uses::default() };
    let layout = Layout::new(routes, me, uses, &mut draft);
    fan_in(&layout, &mut draft, Then::Root(root));
    let parts = if me == root { routes.rotated(layout.node, true) } else { Vec::new() };
    for part in parts.into_iter().filter(|&part| routes.parts[part].home != root) {
        let home = routes.parts[part].home;
        let from = Source::whole(home, layout.to_root_of(part), 0, routes.span(part, Buffer::In));
        let at = (Role::Enter, routes.pipeline(part, layout.node, true));
        draft.receive(at, 0, from, routes.span(part, Buffer::Out));
    }
    draft.done()
}
