//! Preview of the engine's decisions for a hypothetical group: the same keys, binding and planner, without ranks.

use std::sync::{Arc, OnceLock};

use smddp_base::SendChannel;
use smddp_group::Routes;
use smddp_plan::{Collective, Counts, Decision, GroupShape, Memory, Network, Settings, Shape, Topology};
use smddp_shm::HEADER_PAYLOAD_BYTES;

use crate::bind::{GroupFacts, bind, describe_decision, plan_decision};
use crate::call::key::Key;
use crate::call::types::{DType, RedOp};
use crate::config::Config;
use crate::error::Result;

/// A call on hypothetical buffers.
#[derive(Clone, Debug, PartialEq)]
pub struct HypotheticalCall {
    /// The collective.
    pub collective: Collective,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the buffers.
    pub counts: Counts,
    /// Root of a rooted collective, else 0.
    pub root: usize,
    /// Location of the buffers.
    pub memory: Memory,
}

impl HypotheticalCall {
    /// Creates a call on a whole buffer of `bytes`, as nccl-tests counts them.
    pub fn new(collective: Collective, dtype: DType, bytes: usize, size: usize) -> Self {
        let counts = Counts::of_buffer(collective, bytes / dtype.size(), size);
        Self { collective, dtype, counts, root: 0, memory: Memory::Host }
    }

    fn key(&self) -> Key {
        Key {
            collective: self.collective,
            dtype: self.dtype,
            redop: if self.collective.reduces() { RedOp::Sum.code() } else { 0 },
            factor: 0,
            root: self.root,
            counts: self.counts.clone(),
            memory: self.memory,
            site: 0,
            lossless: false,
        }
    }
}

/// A hypothetical group.
pub struct HypotheticalGroup<'a> {
    facts: GroupFacts,
    config: &'a Config,
}

impl<'a> HypotheticalGroup<'a> {
    /// Creates a group. `network` applies between nodes; a group on one node uses the headers of shared memory.
    pub fn new(topology: Topology, network: Network, config: &'a Config) -> Self {
        let inline_bytes = if topology.nodes() > 1 { 0 } else { HEADER_PAYLOAD_BYTES };
        // No data is sent, so any routes suffice.
        let routes = Arc::new(Routes::local(0, topology.size()));
        Self {
            facts: GroupFacts {
                rank: 0,
                topology,
                inline_bytes,
                routes,
                assumed: network,
                network: OnceLock::new(),
                canonical: OnceLock::new(),
            },
            config,
        }
    }

    /// Returns the decision that every rank makes for the call.
    pub fn decide(&self, call: &HypotheticalCall) -> Decision {
        plan_decision(&call.key(), &self.facts, self.config)
    }

    /// Returns the planner's input for the call, for callers that compare other choices.
    pub fn planner_request(&self, call: &HypotheticalCall) -> (Shape, GroupShape<'_>, Settings<'_>) {
        (call.key().shape(), self.facts.group(), self.config.plans())
    }

    /// Describes the decision like [`crate::Communicator::path`].
    pub fn path(&self, variant: &str, call: &HypotheticalCall) -> String {
        describe_decision(variant, &self.decide(call))
    }

    /// Returns the send channels of `rank`, with their messages and bytes.
    ///
    /// # Errors
    ///
    /// If the call cannot be bound.
    pub fn send_channels(&self, rank: usize, call: &HypotheticalCall) -> Result<Vec<SendChannel>> {
        let facts = GroupFacts { rank, ..self.facts.clone() };
        Ok(Arc::unwrap_or_clone(bind(&call.key(), &facts, self.config)?.channel_layout).send_channels)
    }
}
