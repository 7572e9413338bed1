//! Fixtures of unit tests: groups of ranks of this process.

use smddp_group::Group;
use smddp_group::joint::{InterNode, Prepared, TransportOptions};
use smddp_net::interface::{AddressFamily, InterfaceFilter};

/// Returns rank 0 of a group of `size` ranks on this node.
pub(crate) fn group(size: usize) -> Group {
    groups(size, 1).swap_remove(0)
}

/// Returns the first `count` ranks of a group of `size` ranks on this node. The other ranks never join.
pub(crate) fn groups(size: usize, count: usize) -> Vec<Group> {
    let options = TransportOptions {
        staging: 4 << 20,
        shm: true,
        node: None,
        interface: InterfaceFilter { value: None, from: "" },
        family: AddressFamily::Any,
        peer_timeout: std::time::Duration::from_secs(20),
        inter_node: InterNode::Nothing,
        encrypts: false,
        library: None,
        provider: None,
        separate_endpoint: false,
        local: None,
    };
    let prepare = |rank| Prepared::new(rank, size, Vec::new(), &options).unwrap();
    let all: Vec<Prepared> = (0..size).map(prepare).collect();
    let rank_infos: Vec<_> = all.iter().map(|prepared| prepared.rank_info().clone()).collect();
    all.into_iter().take(count).map(|prepared| prepared.connect(rank_infos.clone()).unwrap().group).collect()
}
