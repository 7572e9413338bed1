//! Several nodes: the mesh inside each, another algorithm between them.

use crate::ir::{Ask, Program};
use crate::topology::Topology;

/// What moves between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inter {
    Mesh,
    Ring,
    Log,
    Recursive,
    Tree,
    Publish,
}

/// The program of `ask.rank` where there are at least two nodes.
pub(super) fn plan(_inter: Inter, _ask: &Ask, _topology: &Topology) -> Option<Program> {
    None
}
