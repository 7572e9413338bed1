//! Between nodes: the two binary trees of the flat `tree`, each with half of the parts.

use super::super::tree::Tree;
use super::routes::Place;

pub(super) fn pair(top: usize, second: bool, node: usize, nodes: usize) -> Place {
    let tree = Tree { size: nodes, root: top, second };
    Place { parent: tree.parent(node), children: tree.children(node), depth: tree.depth(node) }
}

pub(super) fn height(nodes: usize) -> usize {
    nodes.ilog2() as usize + 1
}
