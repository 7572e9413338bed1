//! The engine of this process, which its groups share.

use std::sync::{Arc, Mutex, Weak};

use super::endpoint::FabricEndpoint;
use super::ofi;
use super::provider_choice::{Settings, choose_provider};
use super::registration::RegisteredStaging;
use super::wire::SharedEngine;
use crate::fork::PerProcess;
use crate::lock;
use crate::process::{Endpoint, undisturbed};

#[derive(Default)]
struct Current {
    engine: Weak<Mutex<FabricEndpoint>>,
    /// What was found of a fabric and why it is used or not, in lines.
    found: Vec<String>,
}

static CURRENT: PerProcess<Mutex<Current>> = PerProcess::new();

/// The process's engine; the first group's settings count. `peers` and `budget`: see [`FabricEndpoint::new`].
pub(crate) fn shared(
    endpoint: &Endpoint,
    settings: impl FnOnce() -> Result<Settings, String>,
    peers: usize,
    budget: usize,
) -> Result<SharedEngine, String> {
    let Current { engine, found } = &mut *lock(CURRENT.get());
    if let Some(engine) = engine.upgrade() {
        return Ok(engine);
    }
    let (choice, lines) = choose_provider(&settings()?);
    *found = lines;
    let choice = choice.map_err(|e| e.to_string())?;
    let (name, rails) = undisturbed("libfabric", || ofi::open(&choice))?;
    let new = FabricEndpoint::new(name, rails, RegisteredStaging::of(endpoint), peers, budget)?;
    let shared = Arc::new(Mutex::new(new));
    *engine = Arc::downgrade(&shared);
    Ok(shared)
}

/// What the last look for a fabric found, in lines.
pub(crate) fn found() -> Vec<String> {
    lock(CURRENT.get()).found.clone()
}
