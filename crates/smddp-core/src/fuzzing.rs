//! Fuzz targets for settings and for data of other ranks; see `fuzz/`.

use std::collections::HashMap;

use smddp_net::interface::{self, Interface, choose_from};

use crate::config::network;
use crate::config::{Config, DEPRECATED, NetworkSource, SETTINGS};

/// Parses settings: one per line, after a byte that selects the name.
pub fn settings(bytes: &[u8]) {
    let names: Vec<&str> = SETTINGS
        .iter()
        .map(|s| s.name)
        .chain(DEPRECATED.iter().map(|deprecated| deprecated.name))
        .chain(interface::NAMES)
        .chain(["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
        .collect();
    let mut values = HashMap::new();
    for line in bytes.split(|&byte| byte == b'\n') {
        let Some((which, value)) = line.split_first() else { continue };
        let (name, value) =
            (names[usize::from(*which) % names.len()], String::from_utf8_lossy(value).into_owned());
        // A value that is not a table is a file name.
        if name != "SMDDP_TUNE" || value.contains(":@") {
            values.insert(name, value);
        }
    }
    let Ok(config) = Config::read(|name| values.get(name).cloned()) else { return };
    let _ = config.transport_options();
    for bytes in [config.staging, config.segment.unwrap_or_default(), config.stream] {
        assert!(bytes <= 1 << 40, "{bytes}");
    }
    if let Some((rank, ranks)) = config.launch.local {
        assert!(rank < ranks, "rank {rank} of {ranks}");
    }
    if let NetworkSource::Configured(network) = config.network {
        assert!(network.latency_ns.is_finite() && network.message_ns.is_finite());
        assert!(network.bytes_per_ns.is_finite() && network.bytes_per_ns > 0.0);
    }
    let here = ["eth0", "eth1", "lo", "docker0"].map(|name| Interface {
        name: name.to_owned(),
        index: 1,
        up: true,
        loopback: name == "lo",
        speed_mbit: None,
        addresses: vec![interface::Address { ip: [10, 0, 0, 1].into(), scope: 0 }],
    });
    match choose_from(&here, &config.interface, config.family) {
        Ok(choice) => drop(choice.to_string()),
        Err(error) => drop(error.to_string()),
    }
}

/// Combines network models of other ranks, 24 bytes each.
pub fn user_data(bytes: &[u8]) {
    if let Some(network) = network::combine_estimates(bytes.chunks(24)) {
        for figure in [network.latency_ns, network.message_ns, network.bytes_per_ns] {
            assert!(figure.is_finite() && figure >= 0.0, "{network:?}");
        }
        assert!(network.bytes_per_ns > 0.0, "{network:?}");
    }
}

#[cfg(test)]
#[path = "../../../fuzz/over.rs"]
mod over;

#[cfg(test)]
mod tests {
    use super::over::{MANY, over};

    #[test]
    fn arbitrary_settings_are_parsed_or_rejected() {
        over("settings", super::settings, MANY);
    }

    #[test]
    fn arbitrary_user_data_yields_valid_estimates_or_none() {
        over("user_data", super::user_data, MANY);
    }
}
