//! Canonical reduction order: one combination tree over the ranks of a group, independent of the plan. A
//! reduction in this order has the same bits for every algorithm, size, segmentation and node layout.
//!
//! ```text
//! ranks  0 1 2 3 4 5 6        ((0 1) (2 3)) ((4 5) 6)
//! ```
//!
//! The tree combines ranks in order, in pairs, then pairs of pairs, and so on. A subtree without a partner
//! waits for the next round. The ranks of a subtree are thus `a..min(a + 2^k, n)` with `a` a multiple of
//! `2^k`. This is the order of pairwise summation (Higham, "The accuracy of floating point summation", 1993),
//! whose error grows with log n.
//!
//! A plan keeps the order if every step combines whole sibling subtrees. This holds if each contribution goes
//! directly to the reducing rank. It also holds if the ranks of every node are a subtree (1, 2, 4, 8, ...
//! consecutive ranks). The node sum must then go directly to the reducing rank.

use std::ops::Range;

use super::Algorithm;
use crate::ir::{Association, Buffer, PlanRequest, Program, Step};
use crate::topology::Topology;

/// Returns true if two subtrees of the tree over `size` ranks are the halves of one subtree. `left` ends
/// where `right` starts.
pub(crate) fn halves(size: usize, left: &Range<usize>, right: &Range<usize>) -> bool {
    let half = (right.end - left.start).next_power_of_two() / 2;
    left.start.is_multiple_of(2 * half) && left.len() == half && (right.len() == half || right.end == size)
}

/// Returns the combination order of inputs with these ranks, or `None` if they do not form one subtree.
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

/// Maximum group size; the reducing rank keeps a stack as high as the tree.
const MOST: usize = 1 << 16;

/// Returns the program with reductions in tree order, or `None` if the plan cannot keep the order.
pub(super) fn arrange(
    mut program: Program,
    algorithm: Algorithm,
    request: &PlanRequest,
    topology: &Topology,
) -> Option<Program> {
    let by_node = match algorithm {
        Algorithm::Publish | Algorithm::Mesh => false,
        Algorithm::HierMesh | Algorithm::HierPublish => true,
        // Partial sums of several nodes are sent between nodes.
        _ => return None,
    };
    if request.size > MOST {
        return None;
    }
    let node = |rank: usize| subtree(request.size, topology.ranks_of(topology.node_of(rank)));
    // Checks all nodes, although this program may reduce data of a few, so that every rank gets the same
    // result.
    if by_node && !(0..topology.nodes()).all(|node| subtree(request.size, topology.ranks_of(node)).is_some())
    {
        return None;
    }
    for timed in program.pipelines.iter_mut().flatten() {
        let Step::Reduce { from, own, association: order, .. } = &mut timed.step else { continue };
        // A message from a rank of another node is the sum of that node.
        let mut inputs: Vec<Range<usize>> = Vec::with_capacity(from.len() + 1);
        for source in from.iter() {
            let alone = !by_node || topology.share_node(source.rank, request.rank);
            inputs.push(if alone { source.rank..source.rank + 1 } else { node(source.rank)? });
        }
        if let Some((at, span)) = own {
            let mine = if span.buffer == Buffer::Scratch {
                node(request.rank)?
            } else {
                request.rank..request.rank + 1
            };
            inputs.insert(*at, mine);
        }
        *order = association(request.size, &inputs)?;
    }
    Some(program)
}

/// Returns the ranks of a node if they form a subtree.
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
    fn tree_combines_pairs_and_pairs_of_pairs() {
        assert_eq!(tree(1), Association::Tree(vec![0]));
        assert_eq!(tree(4), Association::Tree(vec![0, 1, 0, 2]));
        assert_eq!(tree(7), Association::Tree(vec![0, 1, 0, 2, 0, 1, 2]));
    }

    #[test]
    fn aligned_power_of_two_nodes_are_subtrees() {
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
