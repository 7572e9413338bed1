//! What unit tests share: a rank whose mates never come.

use smddp_transport::Group;
use smddp_transport::interface::{Family, Wanted};
use smddp_transport::joint::{Between, Means, Prepared};

/// Rank 0 of so many, all on this node.
pub(crate) fn group(size: usize) -> Group {
    let means = Means {
        staging: 4 << 20,
        shm: true,
        node: None,
        interface: Wanted { value: None, from: "" },
        family: Family::Any,
        peer_timeout: std::time::Duration::from_secs(20),
        between: Between::Nothing,
        encrypts: false,
        library: None,
        provider: None,
        local: None,
        require: None,
    };
    let prepared = |rank| Prepared::new(rank, size, Vec::new(), &means).unwrap();
    let all: Vec<Prepared> = (0..size).map(prepared).collect();
    let cards = all.iter().map(|one| one.card().clone()).collect();
    all.into_iter().next().unwrap().connect(cards).unwrap().group
}
