//! Duration estimates from the cost model, without communication.

use smddp_plan::sim::{Cluster, Job, Port};
use smddp_plan::{Collective, Counts, Memory, Network};

use super::Communicator;
use crate::bind;
use crate::call::key::Key;
use crate::call::types::{DType, RedOp};
use crate::error::{Error, Result};

/// Maximum number of simulated messages, which takes tens of milliseconds. Larger buffers are extrapolated from
/// smaller ones.
const MAX_MESSAGES: u64 = 100_000;
/// Size in bytes above which time grows linearly with the size.
const LINEAR_SIZE: usize = 1 << 20;

impl Communicator {
    /// Estimates the duration in seconds of a collective on a whole host buffer of `bytes`. Simulates it with this
    /// group's nodes and network estimate.
    ///
    /// # Errors
    /// If the plan that the settings select cannot be simulated.
    pub fn estimate(&self, collective: Collective, dtype: DType, bytes: usize, root: usize) -> Result<f64> {
        if self.0.size == 1 {
            return Ok(0.0);
        }
        let cluster = self.cluster();
        let root = self.simulated_rank(root);
        let (mut smaller, mut job) = (bytes, self.job(collective, dtype, bytes, root));
        while smaller > LINEAR_SIZE && job.messages(&cluster) > MAX_MESSAGES {
            smaller /= 2;
            job = self.job(collective, dtype, smaller, root);
        }
        let result = job.run(&cluster, Vec::new()).map_err(|error| Error::System {
            operation: format!(
                "{} on group `{}` cannot be estimated",
                crate::name_of(collective),
                self.0.name
            ),
            reason: error.to_string(),
        })?;
        Ok(result.outcome.seconds * bytes.max(1) as f64 / smaller.max(1) as f64)
    }

    /// Estimates the duration in seconds of a message of `bytes` between this rank and `peer`; `None`: any other
    /// rank.
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

    /// Returns this group's nodes with the network estimate that algorithm selection uses.
    fn cluster(&self) -> Cluster {
        let topology = &self.0.facts.topology;
        let network = self.network().map_or(Network::ASSUMED, |estimate| estimate.network);
        let ranks = (0..topology.nodes()).map(|node| topology.ranks_of(node).len()).collect();
        Cluster { ranks, network: Port::of(network), incast: network.incast, ..Cluster::sockets(1, 1) }
    }

    /// Converts a rank to the simulator's numbering, node by node.
    fn simulated_rank(&self, rank: usize) -> usize {
        let topology = &self.0.facts.topology;
        let mut ordered = (0..topology.nodes()).flat_map(|node| topology.ranks_of(node).iter().copied());
        ordered.position(|one| one == rank).unwrap_or(0)
    }
}
