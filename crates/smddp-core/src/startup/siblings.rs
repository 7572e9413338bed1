//! Sibling groups: the groups of one mesh dimension, or of one split.
//!
//! DTensor, HSDP and similar libraries assume that equal inputs give sibling groups equal bits. By default the
//! order of a reduction depends on how nodes divide a group's ranks. So siblings that are divided differently need
//! the canonical order.

use std::collections::HashMap;

use smddp_plan::Formats;

use crate::config::{CanonicalOrder, Config};
use crate::log::{self, Level};

/// Returns true if the group of `ranks` of a job, and its siblings with it, need the canonical order.
///
/// `nodes`: the node of each rank of the job. `siblings`: the ranks of all sibling groups; if empty, the groups of
/// a mesh in rank order. All siblings get the same result.
pub(super) fn need_canonical_order(
    config: &Config,
    name: &str,
    nodes: &[usize],
    ranks: &[usize],
    siblings: &[Vec<usize>],
) -> bool {
    if config.canonical != CanonicalOrder::Auto || !are_divided_differently(nodes, ranks, siblings) {
        return false;
    }
    if config.formats == Formats::default() {
        return true;
    }
    let text = format!(
        "group `{name}`: nodes divide its ranks differently from those of its sibling groups, and SMDDP_WIRE_FORMAT={} excludes \
         the canonical order: equal inputs may give sibling groups different bits",
        config.formats
    );
    log::say(Level::Warn, &text);
    false
}

fn are_divided_differently(nodes: &[usize], ranks: &[usize], siblings: &[Vec<usize>]) -> bool {
    // The order of two summands does not change the result.
    if ranks.len() < 3 || ranks.iter().any(|&rank| rank >= nodes.len()) {
        return false;
    }
    let by_layout = if siblings.is_empty() { in_rank_order(ranks, nodes.len()) } else { Vec::new() };
    let own = division(nodes, ranks);
    siblings
        .iter()
        .chain(&by_layout)
        .filter(|sibling| sibling.len() == ranks.len() && sibling.iter().all(|&rank| rank < nodes.len()))
        .any(|sibling| division(nodes, sibling) != own)
}

/// Returns the node of each of these ranks, numbered in order of appearance.
fn division(nodes: &[usize], ranks: &[usize]) -> Vec<usize> {
    let mut numbers = HashMap::new();
    ranks
        .iter()
        .map(|&rank| {
            let next = numbers.len();
            *numbers.entry(nodes[rank]).or_insert(next)
        })
        .collect()
}

/// Returns the groups of the mesh dimension (or flattened dimensions) that contains this one, in a mesh of ranks in
/// row-major order. Empty if no such mesh exists.
fn in_rank_order(ranks: &[usize], size: usize) -> Vec<Vec<usize>> {
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    let (first, last) = (sorted[0], sorted[sorted.len() - 1]);
    let extent = last - first;
    let mut steps: Vec<usize> = sorted.iter().map(|rank| rank - first).collect();
    // First ranks of the siblings: offsets along the other dimensions, innermost first.
    let (mut begins, mut inner) = (vec![0], 1);
    while steps.len() > 1 {
        let stride = steps[1];
        let length = steps.iter().enumerate().take_while(|&(i, &step)| step == i * stride).count();
        let rows: Vec<usize> = steps.iter().step_by(length).copied().collect();
        let is_grid = |(i, &step): (usize, &usize)| step == rows[i / length] + i % length * stride;
        if !steps.len().is_multiple_of(length)
            || !stride.is_multiple_of(inner)
            || !steps.iter().enumerate().all(is_grid)
        {
            return Vec::new();
        }
        begins =
            (0..stride / inner).flat_map(|i| begins.iter().map(move |begin| begin + i * inner)).collect();
        (inner, steps) = (stride * length, rows);
    }
    let begins: Vec<usize> = (0..=size / inner)
        .flat_map(|i| begins.iter().map(move |begin| begin + i * inner))
        .filter(|begin| begin + extent < size)
        .collect();
    if !begins.contains(&first) {
        return Vec::new();
    }
    begins.iter().map(|begin| ranks.iter().map(|rank| rank - first + begin).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::{are_divided_differently, in_rank_order};

    /// Returns the groups of some dimensions of a row-major mesh, each in rank order.
    fn groups(shape: &[usize], of: &[bool]) -> Vec<Vec<usize>> {
        let size = shape.iter().product();
        let mut groups: Vec<(usize, Vec<usize>)> = Vec::new();
        for rank in 0..size {
            let (mut rest, mut other, mut scale) = (rank, 0, 1);
            for (dim, length) in shape.iter().enumerate().rev() {
                if !of[dim] {
                    other += rest % length * scale;
                    scale *= length;
                }
                rest /= length;
            }
            match groups.iter_mut().find(|(key, _)| *key == other) {
                Some((_, group)) => group.push(rank),
                None => groups.push((other, vec![rank])),
            }
        }
        groups.into_iter().map(|(_, group)| group).collect()
    }

    #[test]
    fn siblings_of_every_dimension_of_a_mesh_are_found() {
        let shapes: [&[usize]; 7] =
            [&[2, 3], &[3, 2], &[2, 4], &[4, 2], &[2, 3, 2], &[2, 2, 2, 2], &[3, 1, 4]];
        for shape in shapes {
            for bits in 1..1 << shape.len() {
                let of: Vec<bool> = (0..shape.len()).map(|dim| bits >> dim & 1 == 1).collect();
                let mut all = groups(shape, &of);
                all.sort_unstable();
                for group in all.iter().filter(|group| group.len() > 1) {
                    let mut found = in_rank_order(group, shape.iter().product());
                    found.sort_unstable();
                    assert_eq!(found, all, "{group:?} of dimensions {of:?} of {shape:?}");
                }
            }
        }
    }

    #[test]
    fn groups_outside_a_mesh_have_no_siblings() {
        for ranks in [&[0, 1, 3][..], &[1, 2, 3], &[0, 2, 3, 5]] {
            assert!(in_rank_order(ranks, 6).is_empty(), "{ranks:?}");
        }
        // A mesh of a subset of the ranks.
        assert_eq!(in_rank_order(&[4, 2, 0], 8), [[4, 2, 0], [5, 3, 1]]);
    }

    #[test]
    fn explicit_siblings_are_compared() {
        let (nodes, group) = ([0, 0, 0, 1, 1, 1], [0, 1, 2]);
        assert!(!are_divided_differently(&nodes, &group, &[]));
        assert!(are_divided_differently(&nodes, &group, &[group.to_vec(), vec![2, 3, 4]]));
        assert!(!are_divided_differently(&nodes, &group, &[group.to_vec(), vec![2, 3]]));
    }
}
