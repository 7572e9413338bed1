//! What all ranks of a group must have set alike: the values that were read, in one way of writing each.

use smddp_transport::interface::Family;
use smddp_transport::joint::Between;

use super::{Config, DevicePath, SETTINGS};

impl Config {
    /// (name, value) of each setting that ranks share, in the order of the table. "64M" and "67108864" are the same here.
    pub(crate) fn shared(&self) -> Vec<(String, String)> {
        let names = SETTINGS.iter().filter(|setting| setting.shared).map(|setting| setting.name);
        names.map(|name| (name.to_owned(), self.written(name))).collect()
    }

    fn written(&self, name: &str) -> String {
        let flag = |on: bool| u8::from(on).to_string();
        match name {
            "SMDDP_STAGING_BYTES" => size(self.staging),
            "SMDDP_ALGO" => self.algorithm.map_or_else(String::new, |algorithm| algorithm.name().to_owned()),
            // A file's name says nothing of what is in it.
            "SMDDP_TUNE" => self.tune.to_string(),
            "SMDDP_SEGMENT_BYTES" => self.segment.map_or_else(String::new, size),
            "SMDDP_PROBE" => flag(self.probe),
            "SMDDP_NETWORK" => self.network.map_or_else(String::new, |network| {
                let (latency, message) = (network.latency_ns / 1e3, network.message_ns / 1e3);
                format!("latency_us={latency},message_us={message},gbit={}", network.bytes_per_ns * 8.0)
            }),
            "SMDDP_TRANSPORT" => match self.between {
                Between::Auto => "auto",
                Between::Nothing => "shm",
                Between::Tcp => "tcp",
                Between::Fabric => "fabric",
            }
            .to_owned(),
            "SMDDP_REQUIRE" => self.require.clone().unwrap_or_default(),
            "SMDDP_FABRIC_PROVIDER" => self.provider.clone().unwrap_or_default(),
            "SMDDP_SHM" => flag(self.shm),
            "SMDDP_SOCKET_FAMILY" => match self.family {
                Family::Any => "",
                Family::V4 => "AF_INET",
                Family::V6 => "AF_INET6",
            }
            .to_owned(),
            "SMDDP_CUDA_PATH" => match self.device_path {
                DevicePath::Auto => "auto",
                DevicePath::Reference => "ipc",
                DevicePath::Host => "host",
            }
            .to_owned(),
            // A row that is new in the table; the test below does not let it stay so.
            other => other.to_owned(),
        }
    }
}

/// With the largest unit that leaves no remainder.
fn size(bytes: usize) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let unit = units.into_iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    unit.map_or_else(|| bytes.to_string(), |(shift, name)| format!("{}{name}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        let lookup = |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Config::read(lookup).unwrap().shared()
    }

    #[test]
    fn settings_that_mean_the_same_are_the_same() {
        for (name, one, other) in [
            ("SMDDP_STAGING_BYTES", "64M", "67108864"),
            ("SMDDP_STAGING_BYTES", "64M", " 64 m "),
            ("SMDDP_STAGING_BYTES", "64M", ""),
            ("SMDDP_ALGO", "ring", " RING "),
            ("SMDDP_SEGMENT_BYTES", "64k", "65536"),
            ("SMDDP_NETWORK", "gbit=10,latency_us=2.5", " latency_us=2.50, gbit=10.0"),
            ("SMDDP_TRANSPORT", "tcp", " tcp"),
            ("SMDDP_TRANSPORT", "auto", ""),
            ("SMDDP_REQUIRE", "efa", "EFA "),
            ("SMDDP_PROBE", "1", ""),
            ("SMDDP_SOCKET_FAMILY", "AF_INET", "af_inet"),
        ] {
            assert_eq!(with(&[(name, one)]), with(&[(name, other)]), "{name}={one:?} and {other:?}");
        }
        assert_eq!(with(&[]), Config::default().shared());
    }

    #[test]
    fn every_setting_that_ranks_share_is_compared_by_its_value() {
        for (name, value) in [
            ("SMDDP_STAGING_BYTES", "32M"),
            ("SMDDP_ALGO", "ring"),
            ("SMDDP_TUNE", "all_reduce:0-32k:@tree"),
            ("SMDDP_SEGMENT_BYTES", "64k"),
            ("SMDDP_PROBE", "0"),
            ("SMDDP_NETWORK", "gbit=3"),
            ("SMDDP_TRANSPORT", "tcp"),
            ("SMDDP_REQUIRE", "efa"),
            ("SMDDP_FABRIC_PROVIDER", "tcp"),
            ("SMDDP_SHM", "0"),
            ("SMDDP_SOCKET_FAMILY", "AF_INET6"),
            ("SMDDP_CUDA_PATH", "host"),
        ] {
            let (usual, other) = (with(&[]), with(&[(name, value)]));
            let differ: Vec<_> =
                usual.iter().zip(&other).filter(|(a, b)| a != b).map(|(a, _)| &a.0).collect();
            assert_eq!(differ, [name]);
        }
        let named = |(name, value): &(String, String)| name == value;
        assert!(!with(&[]).iter().any(named), "a setting without a value: {:?}", with(&[]));
        assert_eq!(with(&[]).len(), 12, "a setting that no line above tries");
    }
}
