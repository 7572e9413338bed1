//! Fabric rails over libfabric, one endpoint per device.

mod contexts;
mod rail;

#[cfg(test)]
mod exchange;
#[cfg(test)]
mod fake_tests;
#[cfg(test)]
mod peer_tests;
#[cfg(test)]
mod rule_tests;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
use rail::OfiRail;
#[cfg(test)]
pub(super) use rail::{OPERATIONS, RECEIVES};

use super::provider_choice::Provider;

/// Opens an endpoint on every selected device; returns their common name and the rails.
pub(crate) fn open(choice: &Provider) -> Result<(String, Vec<OfiRail>), String> {
    let mut rails = Vec::new();
    for info in choice.devices() {
        let Some(copy) = info.duplicate() else { return Err("out of memory".to_owned()) };
        let rail = OfiRail::open(copy)
            .map_err(|reason| format!("{} on {}: {reason}", choice.provider, info.domain()))?;
        rails.push(rail);
    }
    let devices = choice.rails().join("+");
    Ok((format!("{} (libfabric {}) {devices}", choice.provider, choice.version), rails))
}
