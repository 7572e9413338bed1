//! Which ranks share a node.

/// Nodes of a group, found by probing: `node[r]` is the node of rank `r`, numbered by first appearance.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Topology {
    node: Vec<usize>,
    nodes: usize,
}

impl Topology {
    /// All ranks on one node.
    pub fn single(size: usize) -> Self {
        Self { node: vec![0; size], nodes: usize::from(size > 0) }
    }

    /// From any labels: equal label, same node.
    pub fn from_labels<T: PartialEq>(labels: &[T]) -> Self {
        let mut first: Vec<usize> = Vec::new();
        let node = (0..labels.len())
            .map(|r| match first.iter().position(|&f| labels[f] == labels[r]) {
                Some(n) => n,
                None => {
                    first.push(r);
                    first.len() - 1
                }
            })
            .collect();
        Self { node, nodes: first.len() }
    }

    pub fn size(&self) -> usize {
        self.node.len()
    }
    pub fn nodes(&self) -> usize {
        self.nodes
    }
    pub fn node_of(&self, rank: usize) -> usize {
        self.node[rank]
    }
    /// Ranks of a node, ascending; the first is its leader.
    pub fn ranks_of(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        self.node.iter().enumerate().filter(move |&(_, &n)| n == node).map(|(r, _)| r)
    }
}
