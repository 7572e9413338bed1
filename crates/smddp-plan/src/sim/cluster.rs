//! Description of the simulated machine.

use std::collections::BTreeMap;

use crate::choice::Network;
use crate::topology::Topology;

/// One direction of a port; both directions have the same properties.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Port {
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Seconds from the first byte sent to the first byte received.
    pub latency_s: f64,
    /// Seconds that a message occupies the port in addition to its bytes.
    pub message_s: f64,
}

impl Port {
    /// Returns the port with measured or assumed network parameters.
    pub fn of(network: Network) -> Self {
        let Network { latency_ns, message_ns, bytes_per_ns, .. } = network;
        Self { bytes_per_s: bytes_per_ns * 1e9, latency_s: latency_ns * 1e-9, message_s: message_ns * 1e-9 }
    }
}

/// Properties of one node that differ from the others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Override {
    /// Number of working rails.
    pub rails: Option<usize>,
    /// Rate of each rail.
    pub rail_bytes_per_s: Option<f64>,
    /// Rate of the node's uplink.
    pub uplink_bytes_per_s: Option<f64>,
}

/// Nodes, their ranks and their ports. Ranks are numbered node by node.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// Name for output.
    pub name: String,
    /// Number of ranks of each node.
    pub ranks: Vec<usize>,
    /// Port of each rank inside its node.
    pub local: Port,
    /// True if one write inside the node reaches all its readers (slots in shared memory). Otherwise the port
    /// of the writer carries one copy per reader (NVLink).
    pub local_multicast: bool,
    /// One rail (network device).
    pub network: Port,
    /// Rails of a node. Neighbouring ranks share rails if there are fewer rails than ranks; otherwise a rank
    /// uses several.
    pub rails: usize,
    /// Bytes that a rank may have in flight in the network before it waits. Use at least three
    /// bandwidth-delay products of a rank's rails.
    pub window: u64,
    /// Slowdown of the bytes of a message that queues behind a message of another node ([`Network::incast`]).
    /// 1 if senders are paced.
    pub incast: f64,
    /// Rate at which a rank copies and reduces; `None` if free.
    pub memory_bytes_per_s: Option<f64>,
    /// Rate of a node into the network and out of it, if it is below that of its rails (oversubscribed
    /// spine).
    pub uplink_bytes_per_s: Option<f64>,
    /// By node number.
    pub overrides: BTreeMap<usize, Override>,
}

impl Cluster {
    /// Returns p4d.24xlarge according to its data sheet: 8 GPUs, 4 rails of 100 Gbit/s, NVSwitch with 300
    /// GB/s per direction. Latency and message cost are assumptions.
    pub fn p4d(nodes: usize) -> Self {
        Self::gpus("p4d", nodes, 4, 15e-6, 300e9)
    }

    /// Returns p5.48xlarge according to its data sheet: 8 GPUs, 32 rails of 100 Gbit/s, NVSwitch with 450
    /// GB/s per direction. Latency and message cost are assumptions.
    pub fn p5(nodes: usize) -> Self {
        Self::gpus("p5", nodes, 32, 12e-6, 450e9)
    }

    /// Returns the assumptions of the engine without measurements: shared memory, and sockets over 10 Gbit/s.
    pub fn sockets(nodes: usize, ranks: usize) -> Self {
        Self {
            name: "sockets".into(),
            ranks: vec![ranks; nodes],
            local: Port { bytes_per_s: 10e9, latency_s: 0.15e-6, message_s: 0.25e-6 },
            local_multicast: true,
            network: Port::of(Network::ASSUMED),
            rails: 1,
            window: 4 << 20,
            incast: Network::ASSUMED.incast,
            memory_bytes_per_s: Some(10e9),
            uplink_bytes_per_s: None,
            overrides: BTreeMap::new(),
        }
    }

    fn gpus(name: &str, nodes: usize, rails: usize, latency_s: f64, nvlink: f64) -> Self {
        Self {
            name: name.into(),
            ranks: vec![8; nodes],
            local: Port { bytes_per_s: nvlink, latency_s: 2e-6, message_s: 0.3e-6 },
            local_multicast: false,
            network: Port { bytes_per_s: 12.5e9, latency_s, message_s: 0.3e-6 },
            rails,
            window: 4 << 20,
            incast: Network::PACED.incast,
            memory_bytes_per_s: None,
            uplink_bytes_per_s: None,
            overrides: BTreeMap::new(),
        }
    }

    /// Returns the same machine with `nodes` nodes of `ranks` ranks.
    pub fn with_nodes(&self, nodes: usize, ranks: usize) -> Self {
        Self { ranks: vec![ranks; nodes], ..self.clone() }
    }

    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.iter().sum()
    }

    /// Returns the node of each rank.
    pub fn node_of(&self) -> Vec<usize> {
        self.ranks.iter().enumerate().flat_map(|(node, &ranks)| vec![node; ranks]).collect()
    }

    /// Returns the assignment of ranks to nodes.
    pub fn topology(&self) -> Topology {
        Topology::from_labels(&self.node_of())
    }

    /// Returns the network parameters for the engine's cost model.
    pub fn network_model(&self) -> Network {
        Network {
            latency_ns: self.network.latency_s * 1e9,
            message_ns: self.network.message_s * 1e9,
            bytes_per_ns: self.line_rate(0) * 1e-9,
            incast: self.incast,
        }
    }

    /// Returns the number of rails of a node.
    pub fn rails_of(&self, node: usize) -> usize {
        self.of(node).rails.unwrap_or(self.rails)
    }

    /// Returns the rate of each rail of a node, in bytes per second.
    pub fn rail_bytes_per_s(&self, node: usize) -> f64 {
        self.of(node).rail_bytes_per_s.unwrap_or(self.network.bytes_per_s)
    }

    /// Returns the rate of a node's uplink in bytes per second, if it is limited.
    pub fn uplink(&self, node: usize) -> Option<f64> {
        self.of(node).uplink_bytes_per_s.or(self.uplink_bytes_per_s)
    }

    /// Returns the bytes per second between the node and the network: its rails together, or its uplink.
    pub fn line_rate(&self, node: usize) -> f64 {
        let rails = self.rails_of(node) as f64 * self.rail_bytes_per_s(node);
        self.uplink(node).map_or(rails, |uplink| uplink.min(rails))
    }

    fn of(&self, node: usize) -> Override {
        self.overrides.get(&node).copied().unwrap_or_default()
    }

    /// Validates the description. An error has the value and its name in a cluster file.
    ///
    /// # Errors
    /// A description of the first invalid value.
    pub fn check(&self) -> Result<(), String> {
        let positive = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(format!("{name} = {value}: a rate must be above 0")),
        };
        let not_negative = |name: &str, value: f64| match value.is_finite() && value >= 0.0 {
            true => Ok(()),
            false => Err(format!("{name} = {value}: a time must be 0 or more")),
        };
        if self.ranks.is_empty() {
            return Err("nodes = 0: a cluster has at least one node".into());
        }
        if let Some(node) = self.ranks.iter().position(|&ranks| ranks == 0) {
            return Err(format!("ranks: node {node} has none"));
        }
        for (name, port) in [("local", &self.local), ("network", &self.network)] {
            positive(&format!("{name}.bytes_per_s"), port.bytes_per_s)?;
            not_negative(&format!("{name}.latency_us"), port.latency_s)?;
            not_negative(&format!("{name}.message_us"), port.message_s)?;
        }
        if !(self.incast.is_finite() && self.incast >= 1.0) {
            return Err(format!("network.incast = {}: it must be 1 or more", self.incast));
        }
        if self.window == 0 {
            return Err("network.window = 0: nothing could be sent".into());
        }
        if let Some(rate) = self.memory_bytes_per_s {
            positive("memory_bytes_per_s", rate)?;
        }
        if let Some((node, _)) = self.overrides.range(self.nodes()..).next() {
            return Err(format!("node {node}: there are only nodes 0 to {}", self.nodes() - 1));
        }
        for node in 0..self.nodes() {
            if self.rails_of(node) == 0 {
                return Err(format!("rails = 0 at node {node}: it could not send"));
            }
            positive(&format!("rail_bytes_per_s of node {node}"), self.rail_bytes_per_s(node))?;
            if let Some(rate) = self.uplink(node) {
                positive(&format!("uplink_bytes_per_s of node {node}"), rate)?;
            }
        }
        Ok(())
    }
}
