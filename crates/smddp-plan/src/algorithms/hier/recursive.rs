//! Between nodes: distances that halve, the farthest first, so that what is largest in sum goes nearest.
//!
//! Counted from the top node, the parent of `o` is `o` without its lowest bit: a binomial tree. All of them
//! together are recursive doubling (down) and halving (up), for any number of nodes.

use super::routes::Place;

fn offset(top: usize, node: usize, nodes: usize) -> usize {
    (node + nodes - top) % nodes
}

/// Distances to the children of offset `o`, greatest first.
fn distances(o: usize, nodes: usize) -> impl Iterator<Item = usize> {
    let lowest = if o == 0 { nodes.next_power_of_two() } else { o & o.wrapping_neg() };
    std::iter::successors(Some(lowest / 2), |d| Some(d / 2))
        .take_while(|&d| d > 0)
        .filter(move |d| o + d < nodes)
}

pub(super) fn binomial(top: usize, node: usize, nodes: usize) -> Place {
    let o = offset(top, node, nodes);
    let parent = (o > 0).then(|| ((o & (o - 1)) + top) % nodes);
    let children = distances(o, nodes).map(|d| (o + d + top) % nodes).collect();
    Place { parent, children, depth: o.count_ones() as usize }
}

pub(super) fn has_children(top: usize, node: usize, nodes: usize) -> bool {
    let o = offset(top, node, nodes);
    // The nearest child is at distance 1.
    o.is_multiple_of(2) && o + 1 < nodes
}

pub(super) fn height(nodes: usize) -> usize {
    (nodes - 1).checked_ilog2().map_or(0, |bits| bits as usize + 1)
}
