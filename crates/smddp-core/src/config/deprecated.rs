//! Deprecated names of settings. Each one sets the setting that replaces it, with a warning.
//!
//! Settings that remain although their use is narrow:
//! - `SMDDP_SOCKET_FAMILY` corresponds to `NCCL_SOCKET_FAMILY`. All ranks must use one family, but interface names
//!   differ per host.
//! - `SMDDP_SPIN_US` trades latency for CPU time. The default depends on the ranks of this host, not on other programs.
//! - `SMDDP_STREAM_BYTES` depends on the cache sizes, like glibc's `x86_non_temporal_threshold`.
//! - `SMDDP_STRAGGLERS` starts a thread, and works without metrics.

use smddp_group::joint::InterNode;

use super::network::{self, NetworkSource};
use super::transports::{self, EFA, TransportChoice};
use super::values::named;
use super::{invalid_value, is_rank_node};
use crate::error::{Error, Result};

/// A deprecated name, as `smddp info` and docs/reference/settings.md print it.
pub struct DeprecatedSetting {
    /// The deprecated name.
    pub name: &'static str,
    /// Name of the setting that replaces it.
    pub replacement: &'static str,
    /// Equivalent values of the replacement.
    pub equivalents: &'static str,
    /// Translates a value, given the value of the replacement, if that is set.
    translate: fn(&str, Option<&str>) -> Translation,
}

/// Effect of a deprecated name on its replacement.
enum Translation {
    Set(String),
    /// The replacement has an equivalent or more specific value, or its default is equivalent.
    Unchanged,
    Contradiction,
    /// The deprecated name has an invalid value; with the expected values.
    Invalid(String),
}

/// All deprecated names, in the order of their translation.
pub const DEPRECATED: &[DeprecatedSetting] = &[
    DeprecatedSetting {
        name: "SMDDP_PROBE",
        replacement: "SMDDP_NETWORK",
        equivalents: "0: default",
        translate: probe,
    },
    DeprecatedSetting {
        name: "SMDDP_FABRIC_PROVIDER",
        replacement: "SMDDP_TRANSPORT",
        equivalents: "PROVIDER: fabric:PROVIDER, or auto:PROVIDER if SMDDP_TRANSPORT is auto",
        translate: provider,
    },
    DeprecatedSetting {
        name: "SMDDP_REQUIRE",
        replacement: "SMDDP_TRANSPORT",
        equivalents: "efa: efa; tcp: tcp; fabric: fabric; PROVIDER: fabric:PROVIDER",
        translate: require,
    },
    DeprecatedSetting { name: "SMDDP_SHM", replacement: "SMDDP_NODE", equivalents: "0: %r", translate: shm },
];

fn probe(value: &str, network: Option<&str>) -> Translation {
    let measures = match named(value) {
        Ok(measures) => measures,
        Err(want) => return Translation::Invalid(want),
    };
    match (measures, network.map(network::parse)) {
        (false, None) => Translation::Set("default".to_owned()),
        (false, Some(Ok(NetworkSource::Measured))) | (true, Some(Ok(NetworkSource::Default))) => {
            Translation::Contradiction
        }
        // An invalid value of the replacement is reported later.
        _ => Translation::Unchanged,
    }
}

fn provider(value: &str, transport: Option<&str>) -> Translation {
    match transport.map_or_else(|| Ok(TransportChoice::default()), transports::parse) {
        Ok(TransportChoice { inter_node: InterNode::Auto, provider: None }) => {
            Translation::Set(format!("auto:{value}"))
        }
        Ok(TransportChoice { inter_node: InterNode::Fabric, provider: None }) => {
            Translation::Set(format!("fabric:{value}"))
        }
        Ok(TransportChoice { provider: Some(provider), .. }) if provider != value => {
            Translation::Contradiction
        }
        // Other transports have no provider.
        _ => Translation::Unchanged,
    }
}

fn require(value: &str, transport: Option<&str>) -> Translation {
    let Ok(chosen) = transport.map_or_else(|| Ok(TransportChoice::default()), transports::parse) else {
        return Translation::Unchanged;
    };
    let value = value.to_ascii_lowercase();
    // A provider such as `tcp` also stands for `tcp;ofi_rxm`.
    let includes = |provider: &str| {
        value.strip_prefix(provider).is_some_and(|rest| rest.is_empty() || rest.starts_with(';'))
    };
    match (value.as_str(), chosen.inter_node, chosen.provider.as_deref()) {
        // The group has no transport between nodes.
        (_, InterNode::Nothing, _) | ("tcp", InterNode::Tcp, _) | ("fabric", InterNode::Fabric, _) => {
            Translation::Unchanged
        }
        ("tcp", InterNode::Auto, _) => Translation::Set("tcp".to_owned()),
        ("tcp", InterNode::Fabric, _) | (_, InterNode::Tcp, _) => Translation::Contradiction,
        ("fabric", InterNode::Auto, provider) => {
            Translation::Set(format!("fabric:{}", provider.unwrap_or(EFA)))
        }
        (_, _, Some(provider)) if !includes(provider) => Translation::Contradiction,
        (EFA, ..) => Translation::Set(EFA.to_owned()),
        (provider, ..) => Translation::Set(format!("fabric:{provider}")),
    }
}

fn shm(value: &str, node: Option<&str>) -> Translation {
    match (named(value), node) {
        (Err(want), _) => Translation::Invalid(want),
        (Ok(false), None) => Translation::Set("%r".to_owned()),
        (Ok(shares), Some(node)) if shares == is_rank_node(node) => Translation::Contradiction,
        _ => Translation::Unchanged,
    }
}

/// Values that deprecated names set.
#[derive(Default)]
pub(super) struct Translated {
    /// Replacement, its value, and the deprecated name that set it last.
    values: Vec<(&'static str, String, &'static str)>,
    /// Deprecated names that are set, with their values.
    used: Vec<(&'static DeprecatedSetting, String)>,
}

impl Translated {
    /// Translates all deprecated names for which `get` has a value.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid value, or a value that contradicts the replacement.
    pub(super) fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let mut translated = Self::default();
        for deprecated in DEPRECATED {
            let DeprecatedSetting { name, replacement, .. } = *deprecated;
            let Some(value) = get(name) else { continue };
            let value = value.trim().to_owned();
            let current = translated.get(replacement).or_else(|| get(replacement));
            let current = current.as_deref().map(str::trim);
            match (deprecated.translate)(&value, current) {
                Translation::Set(set) => {
                    translated.values.retain(|(set, ..)| *set != replacement);
                    translated.values.push((replacement, set, name));
                }
                Translation::Unchanged => {}
                Translation::Contradiction => {
                    let from = translated.values.iter().find(|(set, ..)| *set == replacement);
                    let from = from.map_or_else(String::new, |(.., from)| format!(" (from {from})"));
                    return Err(Error::Config(format!(
                        "{name}={value:?} contradicts {replacement}={:?}{from}: unset {name}, which is deprecated",
                        current.unwrap_or_default(),
                    )));
                }
                Translation::Invalid(want) => return Err(invalid_value(name, &value, &want)),
            }
            translated.used.push((deprecated, value));
        }
        Ok(translated)
    }

    /// Returns the value that deprecated names set.
    pub(super) fn get(&self, replacement: &str) -> Option<String> {
        self.values.iter().find(|(name, ..)| *name == replacement).map(|(_, value, _)| value.clone())
    }

    /// Returns a warning for each deprecated name in use.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> {
        self.used.iter().map(|(DeprecatedSetting { name, replacement, .. }, value)| {
            let instead = match self.get(replacement) {
                Some(new) => format!("set {replacement}={new} instead"),
                None => format!("unset it; {replacement} replaces it"),
            };
            format!("{name}={value} is deprecated: {instead}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, SETTINGS};
    use super::*;

    fn lookup(pairs: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        move |name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
    }

    fn read(pairs: &[(&str, &str)]) -> Config {
        Config::read(lookup(pairs)).unwrap()
    }

    #[test]
    fn deprecated_names_are_not_settings_and_have_a_replacement() {
        let is_setting = |name: &str| SETTINGS.iter().any(|setting| setting.name == name);
        for DeprecatedSetting { name, replacement, .. } in DEPRECATED {
            assert!(!is_setting(name) && is_setting(replacement), "{name}");
        }
    }

    #[test]
    fn deprecated_name_equals_its_replacement() {
        for (old, new) in [
            (&[("SMDDP_PROBE", "0")][..], &[("SMDDP_NETWORK", "default")][..]),
            (&[("SMDDP_PROBE", "1")], &[]),
            (&[("SMDDP_PROBE", "0"), ("SMDDP_NETWORK", "gbit=3")], &[("SMDDP_NETWORK", "gbit=3")]),
            (&[("SMDDP_SHM", "0")], &[("SMDDP_NODE", "%r")]),
            (&[("SMDDP_SHM", "1")], &[]),
            (&[("SMDDP_SHM", "1"), ("SMDDP_NODE", "a")], &[("SMDDP_NODE", "a")]),
            (&[("SMDDP_FABRIC_PROVIDER", "efa-direct")], &[("SMDDP_TRANSPORT", "auto:efa-direct")]),
            (
                &[("SMDDP_FABRIC_PROVIDER", "tcp;ofi_rxm"), ("SMDDP_TRANSPORT", "fabric")],
                &[("SMDDP_TRANSPORT", "fabric:tcp;ofi_rxm")],
            ),
            (&[("SMDDP_FABRIC_PROVIDER", "net"), ("SMDDP_TRANSPORT", "tcp")], &[("SMDDP_TRANSPORT", "tcp")]),
            (&[("SMDDP_REQUIRE", "EFA ")], &[("SMDDP_TRANSPORT", "efa")]),
            (&[("SMDDP_REQUIRE", "efa"), ("SMDDP_TRANSPORT", "auto")], &[("SMDDP_TRANSPORT", "efa")]),
            (&[("SMDDP_REQUIRE", "tcp")], &[("SMDDP_TRANSPORT", "tcp")]),
            (&[("SMDDP_REQUIRE", "fabric")], &[("SMDDP_TRANSPORT", "efa")]),
            (&[("SMDDP_REQUIRE", "net")], &[("SMDDP_TRANSPORT", "fabric:net")]),
            (
                &[
                    ("SMDDP_REQUIRE", "fabric"),
                    ("SMDDP_FABRIC_PROVIDER", "tcp"),
                    ("SMDDP_TRANSPORT", "fabric"),
                ],
                &[("SMDDP_TRANSPORT", "fabric:tcp")],
            ),
            (
                &[
                    ("SMDDP_REQUIRE", "tcp;ofi_rxm"),
                    ("SMDDP_FABRIC_PROVIDER", "tcp"),
                    ("SMDDP_TRANSPORT", "fabric"),
                ],
                &[("SMDDP_TRANSPORT", "fabric:tcp;ofi_rxm")],
            ),
            (&[("SMDDP_REQUIRE", "efa"), ("SMDDP_TRANSPORT", "shm")], &[("SMDDP_TRANSPORT", "shm")]),
        ] {
            assert_eq!(read(old).shared(), read(new).shared(), "{old:?}");
            assert_eq!(read(old).node, read(new).node, "{old:?}");
        }
    }

    #[test]
    fn contradiction_names_the_deprecated_name_and_its_replacement() {
        for (pairs, from) in [
            (&[("SMDDP_PROBE", "0"), ("SMDDP_NETWORK", "measure")][..], ""),
            (&[("SMDDP_PROBE", "1"), ("SMDDP_NETWORK", "default")], ""),
            (&[("SMDDP_SHM", "0"), ("SMDDP_NODE", "a")], ""),
            (&[("SMDDP_SHM", "1"), ("SMDDP_NODE", "%r")], ""),
            (&[("SMDDP_FABRIC_PROVIDER", "tcp"), ("SMDDP_TRANSPORT", "efa")], ""),
            (&[("SMDDP_REQUIRE", "efa"), ("SMDDP_TRANSPORT", "tcp")], ""),
            (&[("SMDDP_REQUIRE", "tcp"), ("SMDDP_TRANSPORT", "fabric")], ""),
            (&[("SMDDP_REQUIRE", "efa"), ("SMDDP_FABRIC_PROVIDER", "tcp")], "SMDDP_TRANSPORT"),
        ] {
            let text = Config::read(lookup(pairs)).unwrap_err().to_string();
            assert!(pairs.iter().all(|(name, _)| text.contains(name)) && text.contains(from), "{text}");
            assert!(text.contains("contradicts") && text.contains("deprecated"), "{text}");
        }
    }

    #[test]
    fn invalid_value_names_the_setting_that_has_it() {
        for (pairs, name) in [
            (&[("SMDDP_PROBE", "no")][..], "SMDDP_PROBE"),
            (&[("SMDDP_SHM", "no")], "SMDDP_SHM"),
            (&[("SMDDP_PROBE", "0"), ("SMDDP_NETWORK", "gbit=fast")], "SMDDP_NETWORK"),
            (&[("SMDDP_REQUIRE", "efa"), ("SMDDP_TRANSPORT", "udp")], "SMDDP_TRANSPORT"),
        ] {
            let text = Config::read(lookup(pairs)).unwrap_err().to_string();
            assert!(text.starts_with(name) && text.contains("is not valid"), "{text}");
        }
    }

    #[test]
    fn warning_names_the_replacement_and_its_value() {
        let warnings = |pairs: &[(&str, &str)]| -> Vec<String> {
            Translated::read(&lookup(pairs)).unwrap().warnings().collect()
        };
        assert_eq!(
            warnings(&[("SMDDP_SHM", "0"), ("SMDDP_REQUIRE", "efa")]),
            [
                "SMDDP_REQUIRE=efa is deprecated: set SMDDP_TRANSPORT=efa instead",
                "SMDDP_SHM=0 is deprecated: set SMDDP_NODE=%r instead",
            ]
        );
        assert_eq!(
            warnings(&[("SMDDP_PROBE", "1")]),
            ["SMDDP_PROBE=1 is deprecated: unset it; SMDDP_NETWORK replaces it"]
        );
        assert_eq!(warnings(&[("SMDDP_NODE", "%r")]), [""; 0]);
    }
}
