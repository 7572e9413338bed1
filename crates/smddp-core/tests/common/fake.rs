//! A rank whose only peer, on another node, never comes; and whose wire does what a test says.

use std::time::Duration;

use smddp_core::Communicator;
use smddp_transport::joint::{Joined, Prepared, WireScript};

use super::means;

/// One of two ranks.
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

    /// The other rank is what keeps its door open: without it, it is gone.
    pub(crate) fn comm(self, timeout: Duration) -> (Communicator, Prepared) {
        let cards: Vec<_> = self.prepared.iter().map(|prepared| prepared.card().clone()).collect();
        let [me, mut other] = self.prepared;
        other.trust_card(&cards[0]);
        let Joined { group: link, nodes, .. } = me.connect(cards).unwrap();
        (Communicator::over(link, &nodes, "fake", timeout), other)
    }
}
