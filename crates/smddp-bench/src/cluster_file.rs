//! Built-in clusters, and cluster files (TOML; `docs/clusters/example.toml` documents every key).

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use smddp_plan::Network as Prices;
use smddp_plan::sim::{Cluster, Override, Port};
use toml::Spanned;

use crate::error::{Error, Result};
use crate::sizes::parse_size;

/// Names of the built-in clusters.
pub(crate) const BUILT_IN: [&str; 3] = ["p4d", "p5", "sockets"];

/// Largest file in bytes.
const MAX_FILE: usize = 1 << 20;
/// Largest number of ranks that is simulated.
const MAX_RANKS: usize = 1 << 20;

/// Returns a built-in cluster, or a cluster from a file. Without a number of nodes in the file it has one node.
pub(crate) fn load(name: &str) -> Result<Cluster> {
    match name {
        "p4d" => Ok(Cluster::p4d(1)),
        "p5" => Ok(Cluster::p5(1)),
        "sockets" => Ok(Cluster::sockets(1, 1)),
        file => {
            let text = smddp_core::files::read_text(Path::new(file), MAX_FILE).map_err(|error| {
                let names = BUILT_IN.join(", ");
                Error::Usage(format!("--cluster {file}: {error}; expected one of {names}, or a file"))
            })?;
            parse(&text, file).map_err(|reason| Error::Usage(format!("{file}: {reason}")))
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: Option<String>,
    nodes: Option<NonZeroUsize>,
    ranks_per_node: Option<NonZeroUsize>,
    /// Ranks of each node, instead of `nodes` and `ranks_per_node`.
    ranks: Option<Vec<NonZeroUsize>>,
    memory_rate: Option<Rate>,
    local: Local,
    network: Network,
    #[serde(default)]
    node: Vec<Node>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Local {
    rate: Rate,
    latency_us: Microseconds,
    #[serde(default)]
    message_us: Microseconds,
    #[serde(default)]
    multicast: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Network {
    rate: Rate,
    latency_us: Microseconds,
    #[serde(default)]
    message_us: Microseconds,
    rails: Option<NonZeroUsize>,
    window: Option<Size>,
    incast: Option<f64>,
    uplink_rate: Option<Rate>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Node {
    number: Spanned<usize>,
    rails: Option<NonZeroUsize>,
    rate: Option<Rate>,
    uplink_rate: Option<Rate>,
}

/// Bytes per second, written as `"100 Gbit/s"` or `"12.5 GB/s"`.
#[derive(Clone, Copy)]
struct Rate(f64);

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        rate(&text).map(Rate).map_err(D::Error::custom)
    }
}

fn rate(text: &str) -> std::result::Result<f64, String> {
    const UNITS: [(&str, f64); 8] = [
        ("Tbit/s", 1e12 / 8.0),
        ("Gbit/s", 1e9 / 8.0),
        ("Mbit/s", 1e6 / 8.0),
        ("kbit/s", 1e3 / 8.0),
        ("TB/s", 1e12),
        ("GB/s", 1e9),
        ("MB/s", 1e6),
        ("kB/s", 1e3),
    ];
    let wrong =
        || format!("invalid rate \"{text}\": expected a rate such as \"100 Gbit/s\" or \"12.5 GB/s\"");
    let found = UNITS.iter().find_map(|(unit, scale)| Some((text.trim().strip_suffix(unit)?, scale)));
    let (number, scale) = found.ok_or_else(wrong)?;
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    match number.is_finite() && number > 0.0 {
        true => Ok(number * scale),
        false => Err(format!("\"{text}\": a rate must be above 0")),
    }
}

#[derive(Clone, Copy, Default)]
struct Microseconds(f64);

impl<'de> Deserialize<'de> for Microseconds {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let value = f64::deserialize(from)?;
        match value.is_finite() && value >= 0.0 {
            true => Ok(Self(value)),
            false => Err(D::Error::custom(format!("{value} microseconds: a time must be 0 or more"))),
        }
    }
}

impl Microseconds {
    fn seconds(self) -> f64 {
        self.0 * 1e-6
    }
}

/// `"4M"`.
#[derive(Clone, Copy)]
struct Size(u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        match parse_size(&text).map_err(D::Error::custom)? {
            0 => Err(D::Error::custom("the window is 0 bytes: expected a size above 0")),
            bytes => Ok(Self(bytes as u64)),
        }
    }
}

/// Rejects too many ranks before the list of nodes is allocated. `None` is an overflow.
pub(crate) fn check_size(ranks: Option<usize>) -> std::result::Result<(), String> {
    match ranks.filter(|ranks| *ranks <= MAX_RANKS) {
        Some(_) => Ok(()),
        None => Err(format!("the cluster has more than {MAX_RANKS} ranks, the limit of the simulation")),
    }
}

/// Parses a cluster file. The error contains line and reason.
pub(crate) fn parse(text: &str, file: &str) -> std::result::Result<Cluster, String> {
    let read: File = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = 1 + before.matches('\n').count();
        format!("line {line}: {}", error.message().trim_end().replace('\n', "; "))
    })?;
    let ranks = match (&read.ranks, read.nodes, read.ranks_per_node) {
        (Some(_), Some(_), _) | (Some(_), _, Some(_)) => {
            return Err("'ranks' lists every node: remove 'nodes' and 'ranks_per_node'".into());
        }
        (Some(ranks), None, None) => {
            check_size(ranks.iter().try_fold(0, |sum: usize, n| sum.checked_add(n.get())))?;
            ranks.iter().map(|n| n.get()).collect()
        }
        (None, nodes, Some(each)) => {
            let nodes = nodes.map_or(1, NonZeroUsize::get);
            check_size(nodes.checked_mul(each.get()))?;
            vec![each.get(); nodes]
        }
        (None, _, None) => {
            return Err("missing 'ranks_per_node' (or 'ranks', a list of the ranks of each node)".into());
        }
    };
    let nodes = ranks.len();
    let mut overrides = BTreeMap::new();
    for node in &read.node {
        let line = 1 + text[..node.number.span().start].matches('\n').count();
        let number = *node.number.get_ref();
        let settings = Override {
            rails: node.rails.map(NonZeroUsize::get),
            rail_bytes_per_s: node.rate.map(|r| r.0),
            uplink_bytes_per_s: node.uplink_rate.map(|r| r.0),
        };
        if number >= nodes {
            return Err(format!(
                "line {line}: number = {number}, but there are only nodes 0 to {}",
                nodes - 1
            ));
        }
        if overrides.insert(number, settings).is_some() {
            return Err(format!("line {line}: number = {number} is defined twice"));
        }
    }
    let stem = Path::new(file).file_stem().map(|s| s.to_string_lossy().into_owned());
    let port = |rate: Rate, latency: Microseconds, message: Microseconds| Port {
        bytes_per_s: rate.0,
        latency_s: latency.seconds(),
        message_s: message.seconds(),
    };
    let cluster = Cluster {
        name: read.name.or(stem).unwrap_or_else(|| file.into()),
        ranks,
        local: port(read.local.rate, read.local.latency_us, read.local.message_us),
        local_multicast: read.local.multicast,
        network: port(read.network.rate, read.network.latency_us, read.network.message_us),
        rails: read.network.rails.map_or(1, NonZeroUsize::get),
        window: read.network.window.map_or(4 << 20, |size| size.0),
        // Clusters with shared host memory are assumed to use sockets between nodes, clusters with NVLink to use EFA.
        incast: read.network.incast.unwrap_or(match read.local.multicast {
            true => Prices::ASSUMED.incast,
            false => Prices::PACED.incast,
        }),
        memory_bytes_per_s: read.memory_rate.map(|r| r.0),
        uplink_bytes_per_s: read.network.uplink_rate.map(|r| r.0),
        overrides,
    };
    cluster.check().map(|()| cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "ranks_per_node = 2\n[local]\nrate = \"10 GB/s\"\nlatency_us = 1\n[network]\nrate = \"1 Gbit/s\"\n\
                         latency_us = 20\n";

    #[test]
    fn documented_example_is_valid() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/clusters/example.toml");
        let cluster = load(path).unwrap();
        assert_eq!((cluster.name.as_str(), cluster.ranks.as_slice()), ("lab", &[2, 2, 2, 2][..]));
        assert_eq!((cluster.network.bytes_per_s, cluster.local.bytes_per_s), (125e6, 8e9));
        assert_eq!(cluster.rail_bytes_per_s(3), 62.5e6);
        assert!(cluster.local_multicast);
    }

    #[test]
    fn minimal_file_is_valid() {
        let cluster = parse(MINIMAL, "dir/pair.toml").unwrap();
        assert_eq!(
            (cluster.name.as_str(), cluster.nodes(), cluster.size(), cluster.rails),
            ("pair", 1, 2, 1)
        );
    }

    #[test]
    fn malformed_files_are_rejected_with_line_and_reason() {
        for (from, to, line, expected) in [
            ("rate = \"1 Gbit/s\"", "rate = \"1 Gbps\"", "line 6", "invalid rate \"1 Gbps\""),
            ("rate = \"1 Gbit/s\"", "rate = \"0 Gbit/s\"", "line 6", "above 0"),
            ("rate = \"1 Gbit/s\"", "rate = 5", "line 6", "string"),
            ("latency_us = 20", "latency_us = -1", "line 7", "0 or more"),
            ("latency_us = 20", "latency = 20", "line 7", "unknown field `latency`"),
            ("latency_us = 20", "latency_us = 20\nwindow = \"0\"", "line 8", "window"),
            ("latency_us = 20", "latency_us = 20\nincast = 0.5", "", "network.incast = 0.5"),
            ("ranks_per_node = 2", "ranks_per_node = 0", "line 1", "nonzero"),
            ("ranks_per_node = 2", "ranks_per_node = ", "line 1", ""),
            ("ranks_per_node = 2", "", "", "ranks_per_node"),
            ("ranks_per_node = 2", "ranks = [1, 2]\nnodes = 2", "", "'ranks' lists every node"),
            ("latency_us = 20", "latency_us = 20\n[[node]]\nnumber = 1", "line 9", "only nodes 0 to 0"),
        ] {
            let text = MINIMAL.replace(from, to);
            let reason = parse(&text, "x.toml").map(|_| ()).unwrap_err();
            assert!(reason.contains(line) && reason.contains(expected), "{to}: {reason}");
        }
    }

    #[test]
    fn missing_file_is_rejected_with_the_built_in_clusters() {
        let error = load("/no/such/file.toml").map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("/no/such/file.toml") && error.contains("p4d, p5, sockets"), "{error}");
    }
}
