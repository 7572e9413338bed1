//! Between nodes: one after the other, from the top node to the right.

use super::routes::Place;

pub(super) fn chain(top: usize, node: usize, nodes: usize) -> Place {
    let depth = (node + nodes - top) % nodes;
    let parent = (depth > 0).then_some((node + nodes - 1) % nodes);
    let below = (depth + 1 < nodes).then_some((node + 1) % nodes);
    Place { parent, children: below.into_iter().collect(), depth }
}
