//! What people and other ranks say, made of arbitrary bytes. See `fuzz/`.

use std::collections::HashMap;

use smddp_transport::interface::{self, Interface, choose_from};

use crate::config::network;
use crate::config::{Config, SETTINGS};

/// Values of settings: one a line, behind a byte that says which.
pub fn settings(bytes: &[u8]) {
    let names: Vec<&str> = SETTINGS
        .iter()
        .map(|s| s.name)
        .chain(interface::NAMES)
        .chain(["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
        .collect();
    let mut values = HashMap::new();
    for line in bytes.split(|&byte| byte == b'\n') {
        let Some((which, value)) = line.split_first() else { continue };
        let (name, value) =
            (names[usize::from(*which) % names.len()], String::from_utf8_lossy(value).into_owned());
        // What is no table is a file's name.
        if name != "SMDDP_TUNE" || value.contains(":@") {
            values.insert(name, value);
        }
    }
    let Ok(config) = Config::read(|name| values.get(name).cloned()) else { return };
    let _ = config.means();
    for bytes in [config.staging, config.segment.unwrap_or_default(), config.stream] {
        assert!(bytes <= 1 << 40, "{bytes}");
    }
    if let Some((rank, ranks)) = config.launch.local {
        assert!(rank < ranks, "rank {rank} of {ranks}");
    }
    if let Some(network) = config.network {
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

/// Reads the network estimates in other ranks' user data, 24 bytes each.
pub fn user_data(bytes: &[u8]) {
    if let Some(network) = network::noted(bytes.chunks(24)) {
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
    fn settings_of_any_bytes_are_read_or_refused() {
        over("settings", super::settings, MANY);
    }

    #[test]
    fn arbitrary_user_data_yields_valid_estimates_or_none() {
        over("user_data", super::user_data, MANY);
    }
}
