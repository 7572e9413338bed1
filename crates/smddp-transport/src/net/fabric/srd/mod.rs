//! A fabric with EFA's rules and none of its hardware: in one process, seeded.
//!
//! Messages, pieces of one-sided operations and completions overtake each other; memory has to be registered, named by
//! its descriptor here and by a random key and its virtual address there; messages are short, queues are full now and
//! then, completion queues overrun. Each rule can be switched off, and who breaks one is written down.

mod endpoint;
mod world;

#[cfg(test)]
mod many_tests;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard};

use super::endpoint::FabricEndpoint;
use super::registration::RegisteredStaging;
use super::wire::{FabricWire, SharedEngine};
use crate::lock;
use endpoint::SrdRail;
use world::World;

/// What holds on this fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Memory is given with its descriptor.
    Descriptor,
    /// The provider chooses keys, at random.
    Key,
    /// Remote memory is named by its virtual address.
    Address,
    /// A message has at most as many bytes as the script says.
    Message,
    /// So has a one-sided operation.
    OneSided,
    /// Messages, pieces and completions come in any order.
    Order,
    /// A receive buffer is there before its message.
    Receive,
    /// Queues are full now and then; one polls before one tries again.
    Again,
    /// A completion queue that is not read overruns.
    Completions,
    /// One-sided operations are served for initiators that the target has noted.
    Book,
    /// The device does not write (as on P4d).
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
        Self::Book,
        Self::Writes,
    ];
}

/// What a simulated fabric is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SrdScript {
    pub seed: u64,
    /// Devices of each rank.
    pub rails: usize,
    /// Bytes of the largest message, and of the largest one-sided operation.
    pub message: usize,
    pub one_sided: usize,
    /// Operations under way, receive buffers and completions, per device.
    pub operations: usize,
    pub receives: usize,
    pub completions: usize,
    /// Whether a write's number takes a receive buffer of the target.
    pub solicited: bool,
    /// Whether devices write (as on P5); with `Rule::Writes` in force they must not be asked to otherwise.
    pub writes: bool,
    /// Rules that do not hold.
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

/// The fabric of one group of ranks.
#[derive(Clone)]
pub struct Srd(Arc<Mutex<World>>);

impl Srd {
    pub fn new(ranks: usize, script: SrdScript) -> Self {
        Self(Arc::new(Mutex::new(World::new(ranks, script))))
    }

    fn world(&self) -> MutexGuard<'_, World> {
        lock(&self.0)
    }

    /// Rules broken so far, and how.
    pub fn violations(&self) -> Vec<(Rule, String)> {
        self.world().violations.clone()
    }

    /// A rank is gone: nothing reaches it and nothing comes from it any more.
    pub fn kill(&self, rank: usize) {
        self.world().kill(rank);
    }

    /// One rank's engine on it.
    pub(crate) fn engine(
        &self,
        rank: usize,
        staging: RegisteredStaging,
        ranks: usize,
    ) -> Result<SharedEngine, String> {
        let SrdScript { rails, seed, .. } = self.world().script;
        let devices = (rank * rails..(rank + 1) * rails).map(|device| SrdRail::new(self.0.clone(), device));
        let name = format!("srd-sim (seed {seed})");
        Ok(Arc::new(Mutex::new(FabricEndpoint::new(name, devices.collect(), staging, ranks - 1, 16 << 20)?)))
    }
}

/// A group of `size` ranks, all of one process and with the same staging memory: rank r's wire to the others is the
/// r-th.
pub(crate) fn group(
    size: usize,
    script: SrdScript,
    staging: &RegisteredStaging,
) -> Result<(Srd, Vec<FabricWire>), String> {
    let srd = Srd::new(size, script);
    let engines =
        (0..size).map(|rank| srd.engine(rank, staging.clone(), size)).collect::<Result<Vec<_>, _>>()?;
    let wires = connect(&engines)?;
    Ok((srd, wires))
}

/// A further group over the same engines.
pub(crate) fn connect(engines: &[SharedEngine]) -> Result<Vec<FabricWire>, String> {
    let size = engines.len();
    let prepared = engines
        .iter()
        .enumerate()
        .map(|(rank, engine)| FabricWire::prepare(engine, rank, size, size - 1))
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
