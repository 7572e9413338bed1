//! Broadcast and reduce: the root shares with the homes in its node, or takes from all homes.

use super::down::fan_out;
use super::layout::{Layout, Uses};
use super::routes::Routes;
use super::up::{Then, fan_in};
use super::weave::{Role, Weave};
use crate::ir::{Ask, Buffer, Program, Source, Step, reader_of_all};

/// The root writes everything once for its mates; those that are homes hand their parts to the other nodes.
pub(super) fn broadcast(routes: &Routes<'_>, ask: &Ask) -> Program {
    let Ask { rank: me, root, .. } = *ask;
    let mut weave = Weave::default();
    let uses = Uses { down: true, near_root: Some(root), ..Uses::default() };
    let layout = Layout::new(routes, me, uses, &mut weave);
    let near = (Role::Near, 0);
    if !routes.topology.share_node(me, root) {
        fan_out(&layout, &mut weave, |part| match routes.parts[part].home == root {
            true => Buffer::In,
            false => Buffer::Out,
        });
        return weave.done();
    }
    for part in 0..routes.parts.len() {
        let (input, output) = (routes.span(part, Buffer::In), routes.span(part, Buffer::Out));
        if me != root {
            let local = |rank| routes.topology.local(rank);
            let from = Source {
                rank: root,
                channel: layout.near_root(),
                reader: reader_of_all(local(root), local(me)),
                message: input,
                take: (0, input.blocks),
            };
            weave.step(near, 0, Step::Receive { from, to: output, forward: layout.leaving(part) });
            continue;
        }
        if let Some(channel) = layout.leaving(part) {
            weave.send((Role::Leave, routes.lane(part, layout.node, false)), 0, channel, input, None);
        }
        if layout.mates.is_empty() {
            weave.step(near, 0, Step::Copy { source: input, to: output, finish: false });
        } else {
            weave.send(near, 0, layout.near_root(), input, Some(output));
        }
    }
    weave.done()
}

/// Every home sends what it reduced to the root.
pub(super) fn reduce(routes: &Routes<'_>, ask: &Ask) -> Program {
    let Ask { rank: me, root, .. } = *ask;
    let mut weave = Weave::default();
    let uses = Uses { up: true, to_root: Some(root), ..Uses::default() };
    let layout = Layout::new(routes, me, uses, &mut weave);
    fan_in(&layout, &mut weave, Then::Root(root));
    let parts = if me == root { routes.rotated(layout.node, true) } else { Vec::new() };
    for part in parts.into_iter().filter(|&part| routes.parts[part].home != root) {
        let input = routes.span(part, Buffer::In);
        let from = Source {
            rank: routes.parts[part].home,
            channel: layout.to_root_of(part),
            reader: 0,
            message: input,
            take: (0, input.blocks),
        };
        let to = routes.span(part, Buffer::Out);
        weave.step(
            (Role::Enter, routes.lane(part, layout.node, true)),
            0,
            Step::Receive { from, to, forward: None },
        );
    }
    weave.done()
}
