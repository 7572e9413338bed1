//! A rank whose only peer, on another node, makes no calls. A script controls the wire between them.

use std::time::Duration;

use smddp_core::Communicator;
use smddp_group::joint::{Joined, Prepared, WireScript};

use super::means;

/// A group of two ranks, of which only one has a communicator.
pub(crate) struct Fake {
    pub(crate) script: WireScript,
    prepared: [Prepared; 2],
}

impl Fake {
    pub(crate) fn new(script: WireScript) -> Self {
        let node = |rank| means(Some(format!("node {rank}")));
        let mut prepared = [0, 1].map(|rank| Prepared::new(rank, 2, Vec::new(), &node(rank)).unwrap());
        prepared[0].set_script(script.clone());
        Self { script, prepared }
    }

    /// Returns the communicator and the other rank. The other rank counts as dead after its drop.
    pub(crate) fn comm(self, timeout: Duration) -> (Communicator, Prepared) {
        let infos: Vec<_> = self.prepared.iter().map(|prepared| prepared.rank_info().clone()).collect();
        let [me, mut other] = self.prepared;
        other.trust_rank_info(&infos[0]);
        let Joined { group: link, nodes, .. } = me.connect(infos).unwrap();
        (Communicator::from_group(link, &nodes, "fake", timeout), other)
    }
}
