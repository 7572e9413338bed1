//! How long a call would take, by the cost model: nothing moves, and no other rank is asked.

use smddp_plan::sim::{Cluster, Job, Port};
use smddp_plan::{Collective, Counts, Memory, Network};

use super::Communicator;
use crate::bind;
use crate::call::key::Key;
use crate::call::types::{DType, RedOp};
use crate::error::{Error, Result};

/// A replay of so many messages takes tens of milliseconds. Larger buffers are told by smaller ones.
const MESSAGES: u64 = 100_000;
/// Where time grows with the bytes and with nothing else.
const SMALLEST: usize = 1 << 20;

impl Communicator {
    /// Seconds of a collective on a whole buffer of `bytes` in host memory, as the simulator has it for this group's nodes and
    /// for what is known of its network.
    ///
    /// # Errors
    /// Where the plan that the settings ask for cannot be replayed.
    pub fn estimate(&self, collective: Collective, dtype: DType, bytes: usize, root: usize) -> Result<f64> {
        if self.0.size == 1 {
            return Ok(0.0);
        }
        let cluster = self.cluster();
        let root = self.in_node_order(root);
        let (mut smaller, mut job) = (bytes, self.job(collective, dtype, bytes, root));
        while smaller > SMALLEST && job.messages(&cluster) > MESSAGES {
            smaller /= 2;
            job = self.job(collective, dtype, smaller, root);
        }
        let run = job.run(&cluster, Vec::new()).map_err(|error| Error::System {
            what: format!("{} on group `{}` cannot be estimated", crate::name_of(collective), self.0.name),
            reason: error.to_string(),
        })?;
        Ok(run.outcome.seconds * bytes.max(1) as f64 / smaller.max(1) as f64)
    }

    /// Seconds of a message of `bytes` between this rank and `peer`; `None`: any other rank.
    pub fn estimate_message(&self, peer: Option<usize>, bytes: usize) -> f64 {
        let (cluster, topology) = (self.cluster(), &self.0.facts.topology);
        let local = match peer {
            Some(peer) => topology.share_node(peer, self.0.rank),
            None => topology.nodes() == 1,
        };
        let Port { bytes_per_s, latency_s, message_s } = if local { cluster.local } else { cluster.network };
        latency_s + message_s + bytes as f64 / bytes_per_s
    }

    fn job(&self, collective: Collective, dtype: DType, bytes: usize, root: usize) -> Job {
        let counts = Counts::of_buffer(collective, bytes / dtype.size(), self.0.size);
        let redop = if collective.reduces() { RedOp::Sum.code() } else { 0 };
        let key = Key {
            collective,
            dtype,
            redop,
            factor: 0,
            root,
            counts,
            memory: Memory::Host,
            site: 0,
            lossless: false,
        };
        Job { collective, root, decision: bind::plan_decision(&key, &self.0.facts, self.0.config) }
    }

    /// This group's nodes, with what the choice goes by.
    fn cluster(&self) -> Cluster {
        let topology = &self.0.facts.topology;
        let network = self.network().map_or(Network::ASSUMED, |known| known.network);
        let ranks = (0..topology.nodes()).map(|node| topology.ranks_of(node).len()).collect();
        Cluster { ranks, network: Port::of(network), incast: network.incast, ..Cluster::sockets(1, 1) }
    }

    /// A cluster's ranks are numbered node by node.
    fn in_node_order(&self, rank: usize) -> usize {
        let topology = &self.0.facts.topology;
        let mut ordered = (0..topology.nodes()).flat_map(|node| topology.ranks_of(node).iter().copied());
        ordered.position(|one| one == rank).unwrap_or(0)
    }
}
