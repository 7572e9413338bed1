//! Simulated fabric with the rules of EFA's SRD protocol: in one process, with a random seed.
//!
//! Messages, fragments of one-sided operations and completions overtake each other. Local memory needs a descriptor; remote memory
//! needs a random key and its virtual address. Messages are short, queues are full at random, and completion queues can overrun.
//! Each rule can be switched off, and violations are recorded.

mod endpoint;
mod world;

#[cfg(test)]
mod many_tests;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard};

use super::endpoint::FabricEndpoint;
use super::registration::RegisteredStaging;
use super::wire::{FabricWire, SharedEndpoint};
use crate::lock;
use endpoint::SrdRail;
use world::World;

/// Rule of the simulated fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Local memory needs its descriptor.
    Descriptor,
    /// The provider chooses the keys, at random.
    Key,
    /// Remote memory is identified by its virtual address.
    Address,
    /// The script limits the message size.
    Message,
    /// The script limits the size of a one-sided operation.
    OneSided,
    /// Messages, fragments and completions arrive in any order.
    Order,
    /// A receive buffer must be posted before its message arrives.
    Receive,
    /// Queues are full at random, and a caller must poll before it retries.
    Again,
    /// A completion queue that is not read overruns.
    Completions,
    /// A target serves one-sided operations of initiators in its address vector only.
    AddressVector,
    /// Devices have no native writes (as on P4d).
    Writes,
}

impl Rule {
    pub const ALL: [Self; 11] = [
        Self::Descriptor,
        Self::Key,
        Self::Address,
        Self::Message,
        Self::OneSided,
        Self::Order,
        Self::Receive,
        Self::Again,
        Self::Completions,
        Self::AddressVector,
        Self::Writes,
    ];
}

/// Parameters of a simulated fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SrdScript {
    pub seed: u64,
    /// Devices per rank.
    pub rails: usize,
    /// Maximum size of a message and of a one-sided operation, in bytes.
    pub message: usize,
    pub one_sided: usize,
    /// Maximum numbers of operations, receive buffers and completions per device.
    pub operations: usize,
    pub receives: usize,
    pub completions: usize,
    /// Set if the immediate data of a write uses up a receive buffer of the target.
    pub solicited: bool,
    /// Set if devices have native writes (as on P5); without them, `Rule::Writes` makes a write a violation.
    pub writes: bool,
    /// Rules that are switched off.
    pub without: Vec<Rule>,
}

impl Default for SrdScript {
    fn default() -> Self {
        Self {
            seed: 0,
            rails: 1,
            message: 8192,
            one_sided: 1 << 20,
            operations: 64,
            receives: 1024,
            completions: 4096,
            writes: false,
            solicited: false,
            without: Vec::new(),
        }
    }
}

/// Simulated fabric of one group of ranks.
#[derive(Clone)]
pub struct Srd(Arc<Mutex<World>>);

impl Srd {
    pub fn new(ranks: usize, script: SrdScript) -> Self {
        Self(Arc::new(Mutex::new(World::new(ranks, script))))
    }

    fn world(&self) -> MutexGuard<'_, World> {
        lock(&self.0)
    }

    /// Violated rules, with descriptions.
    pub fn violations(&self) -> Vec<(Rule, String)> {
        self.world().violations.clone()
    }

    /// Kills a rank: nothing reaches it and nothing arrives from it.
    pub fn kill(&self, rank: usize) {
        self.world().kill(rank);
    }

    /// Creates the endpoint of one rank.
    pub(crate) fn endpoint(
        &self,
        rank: usize,
        staging: RegisteredStaging,
        ranks: usize,
    ) -> Result<SharedEndpoint, String> {
        let SrdScript { rails, seed, .. } = self.world().script;
        let devices = (rank * rails..(rank + 1) * rails).map(|device| SrdRail::new(self.0.clone(), device));
        let name = format!("srd-sim (seed {seed})");
        Ok(Arc::new(Mutex::new(FabricEndpoint::new(name, devices.collect(), staging, ranks - 1, 16 << 20)?)))
    }
}

/// Creates a group of `size` ranks in this process, with the same staging memory. Entry r is the wire of rank r.
pub(crate) fn group(
    size: usize,
    script: SrdScript,
    staging: &RegisteredStaging,
) -> Result<(Srd, Vec<FabricWire>), String> {
    let srd = Srd::new(size, script);
    let endpoints =
        (0..size).map(|rank| srd.endpoint(rank, staging.clone(), size)).collect::<Result<Vec<_>, _>>()?;
    let wires = connect(&endpoints)?;
    Ok((srd, wires))
}

/// Creates another group over the same endpoints.
pub(crate) fn connect(endpoints: &[SharedEndpoint]) -> Result<Vec<FabricWire>, String> {
    let size = endpoints.len();
    let prepared = endpoints
        .iter()
        .enumerate()
        .map(|(rank, endpoint)| FabricWire::prepare(endpoint, rank, size, size - 1))
        .collect::<Result<Vec<_>, _>>()?;
    let (mut wires, addresses): (Vec<_>, Vec<_>) =
        prepared.into_iter().map(|(wire, address)| (wire, Some(address))).unzip();
    for (rank, wire) in wires.iter_mut().enumerate() {
        let mut others = addresses.clone();
        others[rank] = None;
        wire.connect(&others)?;
    }
    Ok(wires)
}
