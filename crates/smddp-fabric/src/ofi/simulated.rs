//! Endpoints of this process on a simulated fabric with EFA's rules, for tests.

use std::sync::atomic::AtomicU8;
use std::sync::{Arc, Mutex};

use fake_libfabric::{PATH, SimulatedFabric, knob};

use super::open;
use crate::endpoint::FabricEndpoint;
use crate::provider_choice::{Provider, Settings, choose_provider};
use crate::registration::RegisteredStaging;
use crate::wire::{FabricWire, SharedEndpoint};

/// Selects the simulated devices of a process of which this is local rank `local.0` of `local.1`.
pub(super) fn choose(provider: Option<&str>, local: Option<(usize, usize)>) -> Provider {
    let provider = provider.map(str::to_owned);
    let (choice, lines) =
        choose_provider(&Settings { library: Some(PATH.into()), provider, address: None, local });
    choice.unwrap_or_else(|reason| panic!("{reason}: {lines:?}"))
}

/// Staging memory of all ranks.
pub(super) struct Memory(Arc<Vec<AtomicU8>>);

impl Memory {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Arc::new((0..bytes).map(|_| AtomicU8::new(0)).collect()))
    }

    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        self.0[offset].as_ptr()
    }

    pub(super) fn staging(&self) -> RegisteredStaging {
        RegisteredStaging::new(self.at(0), self.0.len(), self.0.clone())
    }
}

/// Opens an endpoint for each rank, as separate processes would.
pub(super) fn endpoints(fabric: &SimulatedFabric, ranks: usize, memory: &Memory) -> Vec<SharedEndpoint> {
    let choice = choose(None, None);
    let endpoint = |_| {
        let (name, mut rails) = open(&choice).unwrap();
        let completions = fabric.get(knob::COMPLETIONS) as usize;
        // libfabric creates a queue of the requested size. These tests also need smaller ones.
        for rail in rails.iter_mut().filter(|_| completions > 0) {
            rail.limits.completions = completions;
        }
        let endpoint = FabricEndpoint::new(name, rails, memory.staging(), ranks - 1, 16 << 20);
        Arc::new(Mutex::new(endpoint.unwrap()))
    };
    (0..ranks).map(endpoint).collect()
}

/// Creates a group over the endpoints. Entry r is the wire of rank r.
pub(super) fn connect(endpoints: &[SharedEndpoint]) -> Vec<FabricWire> {
    let size = endpoints.len();
    let prepared = endpoints
        .iter()
        .enumerate()
        .map(|(rank, endpoint)| FabricWire::prepare(endpoint, rank, size, size - 1).unwrap());
    let (mut wires, addresses): (Vec<_>, Vec<_>) =
        prepared.map(|(wire, address)| (wire, Some(address))).unzip();
    for (rank, wire) in wires.iter_mut().enumerate() {
        let mut others = addresses.clone();
        others[rank] = None;
        wire.connect(&others).unwrap();
    }
    wires
}
