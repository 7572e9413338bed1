//! Links over the simulated fabric: ranks are threads of one process, for tests.

use super::join::Joined;
use super::link::JointLink;
use super::route::Map;
use crate::net::fabric::process::staging;
use crate::net::fabric::srd::{Srd, SrdScript};
use crate::net::fabric::wire::FabricWire;
use crate::net::link::Net;
use crate::shm::{self, Endpoint};

/// A group of `size` ranks on nodes of `each`: shared memory inside a node, the simulated fabric between nodes.
pub fn over_srd(size: usize, each: usize, script: SrdScript) -> Result<(Srd, Vec<Joined>), String> {
    let cap = 64 << 20;
    let endpoint = Endpoint::get(cap).map_err(|e| e.to_string())?;
    let srd = Srd::new(size, script);
    let mut halves = Vec::new();
    for rank in 0..size {
        let shm = shm::Prepared::new(rank, size, cap, Vec::new()).map_err(|e| e.to_string())?;
        let engine = srd.engine(rank, staging(&endpoint), size)?;
        halves.push((shm, FabricWire::prepare(&engine, rank, size, size - 1)?));
    }
    let cards: Vec<_> = halves.iter().map(|(shm, _)| shm.card().clone()).collect();
    let addresses: Vec<_> = halves.iter().map(|(_, wire)| wire.address().clone()).collect();
    let nodes: Vec<usize> = (0..size).map(|rank| rank / each).collect();
    let mut joined = Vec::new();
    for (me, (shm, wire)) in halves.into_iter().enumerate() {
        let here: Vec<usize> = (0..size).filter(|&rank| nodes[rank] == nodes[me]).collect();
        let shm = shm.connect(here.iter().map(|&rank| cards[rank].clone()).collect());
        let shm = shm.map_err(|e| e.to_string())?;
        let there = |rank: usize| (nodes[rank] != nodes[me]).then(|| addresses[rank].clone());
        let wire = wire.connect(&(0..size).map(there).collect::<Vec<_>>())?;
        let names = (0..size).map(|rank| format!("rank {rank} (srd-sim)")).collect();
        let Some((endpoint, nonce)) = shm.home() else { return Err("a group of one".to_owned()) };
        let net = Net::new(me, size, Box::new(wire), endpoint, nonce);
        let count = here.len();
        let link = Box::new(JointLink::new(me, Map::new(size, here), names, shm, net));
        joined.push(Joined { link, nodes: nodes.clone(), here: count });
    }
    Ok((srd, joined))
}
