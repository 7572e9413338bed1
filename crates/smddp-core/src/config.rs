//! All settings, in one table; the only reader of the environment.

mod shared;

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use smddp_plan::tune::{Table, distance};
use smddp_plan::{Algorithm, Network, Settings};
use smddp_transport::fabric::{
    self,
    choose::{Provider, Unusable},
};
use smddp_transport::interface::{self, Family, Wanted};
use smddp_transport::joint::{Between, Means, may_have_efa};

use crate::error::{Error, Result};
use crate::network;

/// One row: what `smddp info` and docs/settings.md print.
pub struct Setting {
    pub name: &'static str,
    pub default: &'static str,
    pub what: &'static str,
    /// All ranks of a group must have the same value.
    pub shared: bool,
}

pub const SETTINGS: &[Setting] = &[
    Setting {
        name: "SMDDP_STAGING_BYTES",
        default: "64M",
        what: "cap of the process's staging memory (K, M, G allowed); grown on use, shared by all groups",
        shared: true,
    },
    Setting {
        name: "SMDDP_ALGO",
        default: "",
        what: "use this algorithm wherever it does the collective: publish or mesh, all ranks alike; hier-ring, hier-log, \
               hier-recursive, hier-tree (`hier-` may be left out), hier-publish, hier: the mesh inside nodes, this between them",
        shared: true,
    },
    Setting {
        name: "SMDDP_TUNE",
        default: "",
        what: "algorithms by size, as `smddp-bench tune` writes them: all_gather:64k-4m:@hier#all_reduce:0-32k:@tree, or the \
               name of a file with such lines",
        shared: true,
    },
    Setting {
        name: "SMDDP_SEGMENT_BYTES",
        default: "",
        what: "size of a pipelined piece, at most SMDDP_STAGING_BYTES; empty: chosen by size and number of ranks",
        shared: true,
    },
    Setting {
        name: "SMDDP_PROBE",
        default: "1",
        what: "0: no measurement of the network between nodes when the first group spans some; a usual one is assumed. What is \
               measured decides segments, and algorithms of collectives that do not reduce",
        shared: true,
    },
    Setting {
        name: "SMDDP_NETWORK",
        default: "",
        what: "the network between nodes, instead of a measurement: latency_us=15,message_us=1,gbit=10 (one way, for each \
               message, of a node's link); what is left out has these values",
        shared: true,
    },
    Setting {
        name: "SMDDP_STREAM_BYTES",
        default: "16M",
        what: "outputs of this size and more are written past the caches",
        shared: false,
    },
    Setting {
        name: "SMDDP_SPIN_US",
        default: "",
        what: "microseconds a waiting rank spins before it yields and sleeps; empty: 50, or 0 where ranks outnumber cores",
        shared: false,
    },
    Setting {
        name: "SMDDP_LEAVE_SECONDS",
        default: "10",
        what: "how long destroy_process_group waits for the other ranks, to hold what they called against each other; 0: it \
               does not, and calls that differ may go unnoticed",
        shared: false,
    },
    Setting {
        name: "SMDDP_TRANSPORT",
        default: "auto",
        what: "between nodes: auto (EFA where all ranks have it, tcp where none has), tcp, fabric (libfabric), or shm, \
               which makes ranks that cannot share memory an error",
        shared: true,
    },
    Setting {
        name: "SMDDP_REQUIRE",
        default: "",
        what: "any other way between nodes than this is an error: efa, tcp, fabric, or a libfabric provider",
        shared: true,
    },
    Setting {
        name: "SMDDP_LIBFABRIC",
        default: "",
        what: "libfabric's file; empty: the one that is loaded already, /opt/amazon/efa, the loader's path",
        shared: false,
    },
    Setting {
        name: "SMDDP_FABRIC_PROVIDER",
        default: "",
        what: "libfabric's provider for SMDDP_TRANSPORT=fabric, such as `tcp` or `tcp;ofi_rxm`; empty: efa",
        shared: true,
    },
    Setting {
        name: "SMDDP_SHM",
        default: "1",
        what: "0: ranks of one host do not share memory, each is a node of its own",
        shared: true,
    },
    Setting {
        name: "SMDDP_NODE",
        default: "",
        what: "ranks of one host with different names here are treated as different nodes",
        shared: false,
    },
    Setting {
        name: "SMDDP_SOCKET_IFNAME",
        default: "",
        what: "network interfaces to use between nodes, as in NCCL: `eth,ens` (beginnings), `=eth0` (whole names), `^docker,lo` \
               (not these); empty: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, else the fastest that is up",
        shared: false,
    },
    Setting {
        name: "SMDDP_SOCKET_FAMILY",
        default: "",
        what: "AF_INET or AF_INET6: the addresses to use; empty: either",
        shared: true,
    },
    Setting {
        name: "SMDDP_CUDA_PATH",
        default: "auto",
        what: "device memory within a node: auto (by reference where all devices of the group reach each other), ipc (else an \
               error), host (always through pinned memory)",
        shared: true,
    },
    Setting {
        name: "SMDDP_CUDA_AHEAD",
        default: "0",
        what: "1: where other ranks have not made a call yet, its wait keeps the stream and not the host. Only with a driver that \
               allocates and maps memory while a stream waits: with any other, a call on new memory hangs",
        shared: false,
    },
    Setting {
        name: "SMDDP_CUDA_LIBRARY",
        default: "",
        what: "the CUDA driver's file; empty: the one that is loaded already, then libcuda.so.1 on the loader's path",
        shared: false,
    },
    Setting {
        name: "SMDDP_DEBUG",
        default: "WARN",
        what: "VERSION, WARN, INFO or TRACE: what is told on standard error",
        shared: false,
    },
    Setting {
        name: "SMDDP_DEBUG_FILE",
        default: "",
        what: "write it to this file instead; %h is the host, %p the process",
        shared: false,
    },
];

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub staging: usize,
    pub algorithm: Option<Algorithm>,
    pub segment: Option<usize>,
    /// Whether the network is measured, unless it is known.
    pub probe: bool,
    pub network: Option<Network>,
    pub stream: usize,
    pub spin: Option<Duration>,
    /// How long a rank that leaves waits for the others.
    pub leave: Duration,
    pub between: Between,
    pub shm: bool,
    pub node: Option<String>,
    pub interface: Wanted,
    pub family: Family,
    pub library: Option<PathBuf>,
    pub provider: Option<String>,
    pub require: Option<String>,
    /// This rank's number on its host, and how many there are, where the launcher tells.
    pub local: Option<(usize, usize)>,
    pub tune: Table,
    pub device_path: DevicePath,
    pub cuda_ahead: bool,
    pub cuda: Option<PathBuf>,
    pub debug: Level,
    pub debug_file: Option<String>,
}

/// How device memory goes within a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePath {
    /// By reference where that is possible.
    Auto,
    /// By reference, or not at all.
    Reference,
    /// Through pinned host memory.
    Host,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            staging: 64 << 20,
            algorithm: None,
            segment: None,
            probe: true,
            network: None,
            stream: 16 << 20,
            spin: None,
            leave: Duration::from_secs(10),
            between: Between::Auto,
            shm: true,
            node: None,
            interface: Wanted { value: None, from: interface::NAMES[0] },
            family: Family::Any,
            library: None,
            provider: None,
            require: None,
            local: None,
            tune: Table::default(),
            device_path: DevicePath::Auto,
            cuda_ahead: false,
            cuda: None,
            debug: Level::Warn,
            debug_file: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    None,
    Version,
    Warn,
    Info,
    Trace,
}

/// More than any machine has: what is derived from a size stays a size.
const MOST_BYTES: usize = 1 << 40;

/// "64M", "4096", "1g".
pub fn parse_bytes(text: &str) -> Option<usize> {
    let text = text.trim();
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let shift = match unit.trim().to_ascii_lowercase().trim_end_matches(['b', 'i']) {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

fn bad(name: &str, value: &str, want: &str) -> Error {
    Error::Config(format!("{name}={value:?} is not valid: {want}; `smddp info` lists all settings"))
}

impl Config {
    /// The process's settings, read once.
    pub fn get() -> Result<&'static Config> {
        static CONFIG: OnceLock<Result<Config>> = OnceLock::new();
        CONFIG
            .get_or_init(|| {
                let config = Config::read(|name| std::env::var(name).ok())?;
                if config.debug >= Level::Warn {
                    for warning in unknown_names(std::env::vars().map(|(name, _)| name)) {
                        crate::log::line(&config, Level::Warn, &warning);
                    }
                }
                Ok(config)
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Those that decide about plans.
    pub fn plans(&self) -> Settings<'_> {
        Settings {
            algorithm: self.algorithm,
            tune: Some(&self.tune),
            segment: self.segment,
            staging: self.staging,
        }
    }

    /// Settings from any source; an empty value counts as not set.
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Config> {
        let get = |name: &str| lookup(name).filter(|v| !v.trim().is_empty());
        let bytes = |name: &'static str, least: usize| {
            get(name)
                .map(|v| {
                    parse_bytes(&v).filter(|n| (least..=MOST_BYTES).contains(n)).ok_or_else(|| {
                        bad(name, &v, &format!("a size of {least} bytes to 1024G, like 65536 or 64M"))
                    })
                })
                .transpose()
        };
        let algorithm = get("SMDDP_ALGO")
            .map(|v| {
                Algorithm::from_name(&v.trim().to_ascii_lowercase()).ok_or_else(|| {
                    bad(
                        "SMDDP_ALGO",
                        &v,
                        &format!("one of {}", Algorithm::ALL.map(Algorithm::name).join(", ")),
                    )
                })
            })
            .transpose()?;
        let between = match get("SMDDP_TRANSPORT").as_deref().map(str::trim) {
            None | Some("auto") => Between::Auto,
            Some("tcp") => Between::Tcp,
            Some("fabric") => Between::Fabric,
            Some("shm") => Between::Nothing,
            Some(v) => return Err(bad("SMDDP_TRANSPORT", v, "auto, tcp, fabric or shm")),
        };
        let flag = |name: &str, unset: bool| match get(name).as_deref().map(str::trim) {
            None => Ok(unset),
            Some("0") => Ok(false),
            Some("1") => Ok(true),
            Some(v) => Err(bad(name, v, "0 or 1")),
        };
        let network = get("SMDDP_NETWORK")
            .map(|v| network::parse(&v).map_err(|want| bad("SMDDP_NETWORK", &v, &want)))
            .transpose()?;
        let number = |name: &str| get(name).and_then(|v| Some(v.trim().parse::<u32>().ok()? as usize));
        let tune = match get("SMDDP_TUNE") {
            None => Table::default(),
            Some(v) => {
                // A table says which algorithm, a file has a name.
                let text = if v.contains(":@") {
                    v.clone()
                } else {
                    std::fs::read_to_string(v.trim())
                        .map_err(|e| bad("SMDDP_TUNE", &v, &format!("neither a table nor a file ({e})")))?
                };
                Table::parse(&text).map_err(|e| bad("SMDDP_TUNE", &v, &e.to_string()))?
            }
        };
        let family = match get("SMDDP_SOCKET_FAMILY") {
            None => Family::Any,
            Some(v) => Family::from_setting(&v)
                .ok_or_else(|| bad("SMDDP_SOCKET_FAMILY", &v, "AF_INET or AF_INET6"))?,
        };
        let spin = get("SMDDP_SPIN_US")
            .map(|v| {
                v.trim()
                    .parse()
                    .map(Duration::from_micros)
                    .map_err(|_| bad("SMDDP_SPIN_US", &v, "whole microseconds"))
            })
            .transpose()?;
        let leave = get("SMDDP_LEAVE_SECONDS")
            .map(|v| {
                let seconds = v.trim().parse::<f64>().ok();
                seconds
                    .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                    .ok_or_else(|| bad("SMDDP_LEAVE_SECONDS", &v, "seconds, 0 or more"))
            })
            .transpose()?;
        let device_path = match get("SMDDP_CUDA_PATH").as_deref().map(str::trim) {
            None | Some("auto") => DevicePath::Auto,
            Some("ipc") => DevicePath::Reference,
            Some("host") => DevicePath::Host,
            Some(v) => return Err(bad("SMDDP_CUDA_PATH", v, "auto, ipc or host")),
        };
        let debug = match get("SMDDP_DEBUG").unwrap_or_default().trim().to_ascii_uppercase().as_str() {
            "" | "WARN" => Level::Warn,
            "NONE" | "0" => Level::None,
            "VERSION" => Level::Version,
            "INFO" => Level::Info,
            "TRACE" => Level::Trace,
            other => return Err(bad("SMDDP_DEBUG", other, "VERSION, WARN, INFO or TRACE")),
        };
        let staging = bytes("SMDDP_STAGING_BYTES", 64 << 10)?.unwrap_or(64 << 20);
        let segment = bytes("SMDDP_SEGMENT_BYTES", 64)?.map(|n| n & !63);
        if segment.is_some_and(|bytes| bytes > staging) {
            let value = get("SMDDP_SEGMENT_BYTES").unwrap_or_default();
            let want = format!(
                "a piece lies in the staging memory, of which SMDDP_STAGING_BYTES allows {staging} bytes"
            );
            return Err(bad("SMDDP_SEGMENT_BYTES", &value, &want));
        }
        Ok(Config {
            staging,
            algorithm,
            segment,
            probe: flag("SMDDP_PROBE", true)?,
            network,
            stream: bytes("SMDDP_STREAM_BYTES", 0)?.unwrap_or(16 << 20),
            spin,
            leave: leave.unwrap_or(Duration::from_secs(10)),
            between,
            shm: flag("SMDDP_SHM", true)?,
            node: get("SMDDP_NODE"),
            interface: Wanted::first(&lookup),
            family,
            library: get("SMDDP_LIBFABRIC").map(PathBuf::from),
            provider: get("SMDDP_FABRIC_PROVIDER").map(|v| v.trim().to_owned()),
            require: get("SMDDP_REQUIRE").map(|v| v.trim().to_ascii_lowercase()),
            // A launcher that counts otherwise tells nothing.
            local: number("LOCAL_RANK").zip(number("LOCAL_WORLD_SIZE")).filter(|(rank, ranks)| rank < ranks),
            tune,
            device_path,
            cuda_ahead: flag("SMDDP_CUDA_AHEAD", false)?,
            cuda: get("SMDDP_CUDA_LIBRARY").map(PathBuf::from),
            debug,
            debug_file: get("SMDDP_DEBUG_FILE"),
        })
    }

    /// What the transports may use.
    pub(crate) fn means(&self) -> Means {
        Means {
            staging: self.staging,
            shm: self.shm,
            node: self.node.clone(),
            interface: self.interface.clone(),
            family: self.family,
            between: self.between,
            library: self.library.clone(),
            provider: self.provider.clone(),
            local: self.local,
            require: self.require.clone(),
        }
    }

    /// What serves between nodes, in words; the error says why nothing does.
    pub fn between_nodes(&self) -> std::result::Result<String, String> {
        let (names, way) = match self.between {
            Between::Nothing => return Err("SMDDP_TRANSPORT=shm forbids it".to_owned()),
            Between::Fabric => self.over_fabric()?,
            Between::Auto if may_have_efa() => self.over_fabric().or_else(|_| self.over_tcp())?,
            Between::Auto | Between::Tcp => self.over_tcp()?,
        };
        match &self.require {
            Some(wanted) if !names.contains(wanted) => {
                Err(format!("SMDDP_REQUIRE={wanted}, but there is {way}"))
            }
            _ => Ok(way),
        }
    }

    /// What `SMDDP_REQUIRE` may call it, and what it is.
    fn over_tcp(&self) -> std::result::Result<(Vec<String>, String), String> {
        let choice = interface::choose(&self.interface, self.family).map_err(|error| error.to_string())?;
        let warning = if choice.loopback { "; other hosts cannot reach it" } else { "" };
        Ok((vec!["tcp".to_owned()], format!("tcp {choice}{warning}")))
    }

    fn over_fabric(&self) -> std::result::Result<(Vec<String>, String), String> {
        let (choice, lines) = self.look_for_fabric();
        let provider = choice.map_err(|error| error.to_string())?.provider;
        Ok((vec!["fabric".to_owned(), provider], lines.join("; ")))
    }

    /// What libfabric offers here and why it is taken or not, in lines.
    pub fn fabric(&self) -> std::result::Result<Vec<String>, String> {
        let (choice, lines) = self.look_for_fabric();
        choice.map(|_| lines).map_err(|error| error.to_string())
    }

    fn look_for_fabric(&self) -> (std::result::Result<Provider, Unusable>, Vec<String>) {
        fabric::choose::choose_provider(&fabric::choose::Settings {
            library: self.library.clone(),
            provider: self.provider.clone(),
            address: None,
            local: self.local,
        })
    }
}

/// A warning for every `SMDDP_*` name that no setting has, with the nearest that exists.
fn unknown_names(names: impl Iterator<Item = String>) -> Vec<String> {
    names
        .filter(|name| name.starts_with("SMDDP_") && !SETTINGS.iter().any(|s| s.name == name))
        // The tests' and the historic library's own names are nobody's typo.
        .filter(|name| !name.starts_with("SMDDP_TEST_") && !name.starts_with("SMDDP_AG_"))
        .filter_map(|name| {
            let nearest = SETTINGS.iter().min_by_key(|s| distance(s.name, &name))?;
            Some(format!("{name} is not a setting and is ignored; did you mean {}?", nearest.name))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Result<Config> {
        Config::read(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn sizes_take_units() {
        assert_eq!(with(&[("SMDDP_STAGING_BYTES", "2M")]).unwrap().staging, 2 << 20);
        assert_eq!(with(&[("SMDDP_STAGING_BYTES", "1g")]).unwrap().staging, 1 << 30);
        assert_eq!(with(&[]).unwrap().staging, 64 << 20);
    }

    #[test]
    fn a_piece_is_no_larger_than_the_staging_memory() {
        let of =
            |segment, staging| with(&[("SMDDP_SEGMENT_BYTES", segment), ("SMDDP_STAGING_BYTES", staging)]);
        assert_eq!(of("64M", "").unwrap().segment, Some(64 << 20));
        assert_eq!(of("256M", "1G").unwrap().segment, Some(256 << 20));
        for (segment, staging, allowed) in [("65M", "", "67108864"), ("8G", "1G", "1073741824")] {
            let text = of(segment, staging).unwrap_err().to_string();
            assert!(text.contains("SMDDP_SEGMENT_BYTES") && text.contains(segment), "{text}");
            assert!(text.contains("SMDDP_STAGING_BYTES") && text.contains(allowed), "{text}");
        }
    }

    #[test]
    fn a_bad_value_names_the_setting_and_what_it_takes() {
        for (name, value) in [
            ("SMDDP_STAGING_BYTES", "lots"),
            ("SMDDP_ALGO", "rign"),
            ("SMDDP_DEBUG", "loud"),
            ("SMDDP_PROBE", "no"),
            ("SMDDP_CUDA_AHEAD", "maybe"),
            ("SMDDP_NETWORK", "gbit=fast"),
        ] {
            let text = with(&[(name, value)]).unwrap_err().to_string();
            assert!(text.contains(name) && text.to_lowercase().contains(value), "{text}");
        }
    }

    #[test]
    fn the_network_is_measured_unless_it_is_named_or_forbidden() {
        let Config { probe, network, .. } = with(&[]).unwrap();
        assert_eq!((probe, network), (true, None));
        assert!(!with(&[("SMDDP_PROBE", "0")]).unwrap().probe);
        let given = with(&[("SMDDP_NETWORK", "gbit=10, latency_us=2.5")]).unwrap().network;
        assert_eq!(given, Some(Network { latency_ns: 2_500.0, bytes_per_ns: 1.25, ..Network::ASSUMED }));
        // Ranks with different ones would cut a call differently.
        for name in ["SMDDP_PROBE", "SMDDP_NETWORK"] {
            assert!(SETTINGS.iter().any(|s| s.name == name && s.shared));
        }
    }

    #[test]
    fn a_misspelt_name_is_told_with_the_nearest_one() {
        let told = unknown_names(["SMDDP_STAGING_BYTE".to_owned(), "SMDDP_DEBUG".to_owned()].into_iter());
        assert_eq!(told.len(), 1);
        assert!(told[0].contains("did you mean SMDDP_STAGING_BYTES"), "{}", told[0]);
    }
}
