//! One tree of combinations over the ranks of a group, whatever the plan: a reduction that keeps it has the same bits for
//! every algorithm, size, cut and split into nodes.
//!
//! ```text
//! ranks  0 1 2 3 4 5 6        ((0 1) (2 3)) ((4 5) 6)
//! ```
//!
//! Ranks in order, in pairs, pairs of pairs, and so on; what has no partner waits for the next round. So the ranks of a
//! subtree are `a..min(a + 2^k, n)` with `a` a multiple of `2^k`. It is the order of a pairwise summation (Higham, "The
//! accuracy of floating point summation", 1993), whose error grows with log n.
//!
//! A plan keeps it if what every step combines are whole subtrees that meet there. That is so where each rank's contribution goes
//! straight to the rank that reduces it, and where the ranks of every node are a subtree (1, 2, 4, 8, ... in a row) whose sum
//! does.

use std::ops::Range;

use super::Algorithm;
use crate::ir::{Ask, Association, Buffer, Program, Step};
use crate::topology::Topology;

/// Whether two subtrees of the tree over `size` ranks are the two halves of one; `left` ends where `right` begins.
pub(crate) fn halves(size: usize, left: &Range<usize>, right: &Range<usize>) -> bool {
    let half = (right.end - left.start).next_power_of_two() / 2;
    left.start.is_multiple_of(2 * half) && left.len() == half && (right.len() == half || right.end == size)
}

/// How inputs that stand for these ranks are combined to one subtree; `None` where they are none.
fn association(size: usize, inputs: &[Range<usize>]) -> Option<Association> {
    let mut stack: Vec<Range<usize>> = Vec::new();
    let mut joins = Vec::with_capacity(inputs.len());
    for input in inputs {
        let mut top = input.clone();
        let mut joined = 0;
        while let Some(left) = stack.last().filter(|left| left.end == top.start && halves(size, left, &top)) {
            top.start = left.start;
            stack.pop();
            joined += 1;
        }
        stack.push(top);
        joins.push(joined);
    }
    (stack.len() == 1).then_some(Association::Tree(joins))
}

/// Ranks of the largest group: who reduces keeps a stack as high as the tree.
const MOST: usize = 1 << 16;

/// The same program with its reductions in the order of the tree; `None` where it cannot keep it.
pub(super) fn arrange(
    mut program: Program,
    algorithm: Algorithm,
    ask: &Ask,
    topology: &Topology,
) -> Option<Program> {
    let by_node = match algorithm {
        Algorithm::Publish | Algorithm::Mesh => false,
        Algorithm::HierMesh | Algorithm::HierPublish => true,
        // Sums of several nodes travel.
        _ => return None,
    };
    if ask.size > MOST {
        return None;
    }
    let node = |rank: usize| subtree(ask.size, topology.ranks_of(topology.node_of(rank)));
    // All of them, though this program may meet a few: every rank comes to the same.
    if by_node && !(0..topology.nodes()).all(|node| subtree(ask.size, topology.ranks_of(node)).is_some()) {
        return None;
    }
    for timed in program.lanes.iter_mut().flatten() {
        let Step::Reduce { from, own, association: order, .. } = &mut timed.step else { continue };
        // What another node's rank sends is its node's sum.
        let mut inputs: Vec<Range<usize>> = Vec::with_capacity(from.len() + 1);
        for source in from.iter() {
            let alone = !by_node || topology.share_node(source.rank, ask.rank);
            inputs.push(if alone { source.rank..source.rank + 1 } else { node(source.rank)? });
        }
        if let Some((at, span)) = own {
            let mine = if span.buffer == Buffer::Scratch { node(ask.rank)? } else { ask.rank..ask.rank + 1 };
            inputs.insert(*at, mine);
        }
        *order = association(ask.size, &inputs)?;
    }
    Some(program)
}

/// The ranks of a node, if they are a subtree.
fn subtree(size: usize, ranks: &[usize]) -> Option<Range<usize>> {
    let (first, end) = (*ranks.first()?, *ranks.last()? + 1);
    let whole = ranks.len().next_power_of_two();
    let is =
        end - first == ranks.len() && first.is_multiple_of(whole) && (ranks.len() == whole || end == size);
    is.then_some(first..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(size: usize) -> Association {
        association(size, &(0..size).map(|rank| rank..rank + 1).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn pairs_and_pairs_of_pairs() {
        assert_eq!(tree(1), Association::Tree(vec![0]));
        assert_eq!(tree(4), Association::Tree(vec![0, 1, 0, 2]));
        assert_eq!(tree(7), Association::Tree(vec![0, 1, 0, 2, 0, 1, 2]));
    }

    #[test]
    fn nodes_of_a_power_of_two_in_a_row_are_subtrees() {
        let over = |size: usize, each: usize| {
            let ends = |first: usize| first..(first + each).min(size);
            association(size, &(0..size).step_by(each).map(ends).collect::<Vec<_>>())
        };
        for size in 1..40 {
            for each in [1, 2, 4, 8] {
                assert!(over(size, each).is_some(), "{size} ranks, {each} a node");
            }
        }
        assert!(over(6, 3).is_none() && over(12, 6).is_none() && over(9, 3).is_none());
        assert_eq!(subtree(7, &[4, 5, 6]), Some(4..7));
        assert_eq!(subtree(8, &[4, 5, 6]), None);
        assert_eq!(subtree(8, &[1, 2]), None);
        assert_eq!(subtree(8, &[0, 2]), None);
    }
}
