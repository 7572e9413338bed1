//! Fabric endpoint of this process, shared by its groups.

use std::sync::{Arc, Mutex, Weak};

use smddp_base::fork::PerProcess;
use smddp_base::lock;
use smddp_process::{Endpoint, undisturbed};

use super::endpoint::FabricEndpoint;
use super::ofi;
use super::provider_choice::{Settings, choose_provider};
use super::registration::RegisteredStaging;
use super::wire::SharedEndpoint;

/// Endpoint of this process, if any group uses one.
#[derive(Default)]
struct Current {
    endpoint: Weak<Mutex<FabricEndpoint>>,
    /// Log lines of the provider selection: the providers found, and why each is used or not.
    found: Vec<String>,
}

static CURRENT: PerProcess<Mutex<Current>> = PerProcess::new();

/// Returns the process's endpoint; the settings of the first group apply. `peers` and `budget`: see [`FabricEndpoint::new`].
///
/// # Errors
/// The settings are invalid, no provider matches them, or a device of the provider cannot be opened. The text is for users.
pub fn shared(
    process: &Endpoint,
    settings: impl FnOnce() -> Result<Settings, String>,
    peers: usize,
    budget: usize,
) -> Result<SharedEndpoint, String> {
    let Current { endpoint, found } = &mut *lock(CURRENT.get());
    if let Some(endpoint) = endpoint.upgrade() {
        return Ok(endpoint);
    }
    let shared = open(process, &settings()?, peers, budget, found)?;
    *endpoint = Arc::downgrade(&shared);
    Ok(shared)
}

/// Opens an endpoint that only the caller uses. Arguments: see [`shared`].
///
/// # Errors
/// See [`shared`].
pub fn separate(
    process: &Endpoint,
    settings: impl FnOnce() -> Result<Settings, String>,
    peers: usize,
    budget: usize,
) -> Result<SharedEndpoint, String> {
    open(process, &settings()?, peers, budget, &mut lock(CURRENT.get()).found)
}

fn open(
    process: &Endpoint,
    settings: &Settings,
    peers: usize,
    budget: usize,
    found: &mut Vec<String>,
) -> Result<SharedEndpoint, String> {
    let (choice, lines) = choose_provider(settings);
    *found = lines;
    let choice = choice.map_err(|e| e.to_string())?;
    let (name, rails) = undisturbed("libfabric", || ofi::open(&choice))?;
    let new = FabricEndpoint::new(name, rails, RegisteredStaging::of(process), peers, budget)?;
    Ok(Arc::new(Mutex::new(new)))
}

/// Log lines of the last provider selection.
pub fn discovery_log() -> Vec<String> {
    lock(CURRENT.get()).found.clone()
}
