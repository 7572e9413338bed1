//! Fixtures of unit tests: groups of this process.

use smddp_group::Group;
use smddp_group::joint::{InterNode, Prepared, TransportOptions};
use smddp_net::interface::{AddressFamily, InterfaceFilter};

/// Returns rank 0 of a group of `size` ranks on this node, whose peers never join.
pub(crate) fn group(size: usize) -> Group {
    connected(size, 1).remove(0)
}

/// Returns all ranks of a group on this node.
pub(crate) fn groups(size: usize) -> Vec<Group> {
    connected(size, size)
}

/// Connects the first `joining` ranks of a group of `size` ranks.
fn connected(size: usize, joining: usize) -> Vec<Group> {
    let options = TransportOptions {
        staging: 4 << 20,
        shm: true,
        node: None,
        interface: InterfaceFilter { value: None, from: "" },
        family: AddressFamily::Any,
        peer_timeout: std::time::Duration::from_secs(20),
        inter_node: InterNode::Nothing,
        encrypts: false,
        checksums: false,
        library: None,
        provider: None,
        separate_endpoint: false,
        local: None,
    };
    let prepare = |rank| Prepared::new(rank, size, Vec::new(), &options).unwrap();
    let all: Vec<Prepared> = (0..size).map(prepare).collect();
    let rank_infos: Vec<_> = all.iter().map(|prepared| prepared.rank_info().clone()).collect();
    let connect = |prepared: Prepared| prepared.connect(rank_infos.clone()).unwrap().group;
    all.into_iter().take(joining).map(connect).collect()
}
