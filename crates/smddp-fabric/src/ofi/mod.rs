//! Fabric rails over libfabric, one endpoint per device.

#[allow(unsafe_code)]
mod contexts;
#[allow(unsafe_code)]
mod rail;

#[cfg(test)]
#[allow(unsafe_code)]
mod exchange;
#[cfg(test)]
#[allow(unsafe_code)]
mod fake_tests;
#[cfg(test)]
#[allow(unsafe_code)]
mod peer_tests;
#[cfg(test)]
#[allow(unsafe_code)]
mod rule_tests;
#[cfg(test)]
mod simulated;
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

use super::provider_choice::Provider;
use rail::OfiRail;
#[cfg(test)]
pub(super) use rail::{OPERATIONS, RECEIVES};

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
