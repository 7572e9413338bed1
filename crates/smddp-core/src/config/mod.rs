//! All settings, in one table; the only reader of the environment.

pub mod cores;
pub mod files;
pub mod network;
mod transports;
mod values;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use smddp_plan::names::did_you_mean;
use smddp_plan::tune::Table;
use smddp_plan::{Algorithm, Formats, Network, Settings};
use smddp_transport::SingleCopy;
use smddp_transport::interface::{AddressFamily, InterfaceFilter};
use smddp_transport::joint::InterNode;

pub use self::values::{CanonicalOrder, DevicePath, parse_bytes};
use self::values::{
    ToSetting, algorithm, at_least_one_second, bytes, interface_filter, micros, named, operations, optional,
    port, seconds, tune, unchanged, up_to_64,
};
use crate::error::{Error, Result};
use crate::log::{self, Level};

/// One row: what `smddp info` and docs/settings.md print.
pub struct Setting {
    pub name: &'static str,
    pub default: &'static str,
    pub description: &'static str,
    /// All ranks of a group must have the same value.
    pub shared: bool,
}

impl Setting {
    /// What the environment says, if anything.
    pub fn environment_value(&self) -> Option<String> {
        from_environment(self.name).filter(|value| !value.trim().is_empty())
    }
}

fn from_environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

macro_rules! shared {
    (shared, $yes:expr, $no:expr) => {
        $yes
    };
    (own, $yes:expr, $no:expr) => {
        $no
    };
}

/// What it does; NAME = default, whether ranks share it, field: type = what reads it, which is given the default where
/// nothing is set and says what it wants where it is given nonsense.
macro_rules! settings {
    ($($(#[doc = $description:literal])+ $name:ident = $default:literal, $scope:ident, $field:ident: $type:ty = $read:expr;)*) => {
        pub const SETTINGS: &[Setting] = &[$(Setting {
            name: stringify!($name),
            default: $default,
            description: concat!($($description),+).trim_ascii_start(),
            shared: shared!($scope, true, false),
        }),*];

        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $($(#[doc = $description])+ pub $field: $type,)*
            pub launch: Launch,
        }

        impl Config {
            fn read_table(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
                Ok(Self {
                    $($field: {
                        let value = get(stringify!($name));
                        let text = value.as_deref().unwrap_or($default).trim();
                        $read(text).map_err(|want| invalid_value(stringify!($name), text, &want))?
                    },)*
                    launch: Launch::read(get),
                })
            }

            /// (name, value) of each setting that ranks share, in the order of the table: what means the same is written alike.
            pub(crate) fn shared(&self) -> Vec<(String, String)> {
                let rows = [$((stringify!($name), shared!($scope, Some(self.$field.to_setting()), None))),*];
                rows.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
            }
        }
    };
}

settings! {
    /// cap of the process's staging memory (K, M, G allowed); grown on use, shared by all groups
    SMDDP_STAGING_BYTES = "64M", shared, staging: usize = bytes(64 << 10);
    /// use this algorithm wherever it does the collective: publish or mesh, all ranks alike; hier-ring, hier-log,
    /// hier-recursive, hier-tree (`hier-` may be left out), hier-publish, hier: the mesh inside nodes, this between them
    SMDDP_ALGO = "", shared, algorithm: Option<Algorithm> = optional(algorithm);
    /// algorithms by size, and if wanted by memory and ranks of the group, as `smddp-bench tune` writes them:
    /// all_gather:64k-4m:@hier#all_reduce:0-32k:host:[8]:@tree; or the name of a file with such lines
    SMDDP_TUNE = "", shared, tune: Table = tune;
    /// 1: reductions combine the ranks' values in one order, a tree over the group's ranks, whatever the algorithm, the size, the
    /// wire and the split into nodes: the same bits on any of them; auto: in groups of a mesh dimension or a split that nodes divide
    /// differently; 0: never (docs/reproducibility.md)
    SMDDP_CANONICAL_ORDER = "auto", shared, canonical: CanonicalOrder = named;
    /// how all_gather, reduce_scatter and all_reduce of 32-bit floats, 64 KiB and more, travel between nodes: bf16, f16 or int8
    /// (a scale for each 256), or by collective: all_gather=bf16,reduce_scatter=int8; empty: as they are (docs/formats.md)
    SMDDP_WIRE_FORMAT = "", shared, formats: Formats = Formats::parse;
    /// size of a pipelined piece, at most SMDDP_STAGING_BYTES; empty: chosen by size and number of ranks
    SMDDP_SEGMENT_BYTES = "", shared, segment: Option<usize> = optional(|text| Ok(bytes(64)(text)? & !63));
    /// 0: no measurement of the network between nodes when the first group spans some; a usual one is assumed. What is
    /// measured decides segments, and algorithms of collectives that do not reduce
    SMDDP_PROBE = "1", shared, probe: bool = named;
    /// the network between nodes, instead of a measurement: latency_us=15,message_us=1,gbit=10 (one way, for each message, of
    /// a node's link); what is left out has these values
    SMDDP_NETWORK = "", shared, network: Option<Network> = optional(network::parse);
    /// outputs of this size and more are written past the caches
    SMDDP_STREAM_BYTES = "16M", own, stream: usize = bytes(0);
    /// threads, its own among them, that a waiting rank has for copies and reductions of 64 KiB and more; 1: itself alone; empty: its
    /// share of the cores, 4 at most, where that is 3 or more
    SMDDP_THREADS = "", own, threads: Option<usize> = optional(up_to_64);
    /// whether ranks of a node read large messages of each other where they lie (process_vm_readv), without staging: auto where that
    /// is quicker, which is measured, and permitted; 1: wherever it is permitted; 0: never
    SMDDP_SINGLE_COPY = "auto", own, single_copy: SingleCopy = named;
    /// microseconds a waiting rank spins before it yields and sleeps; empty: 50, or 0 where ranks outnumber cores
    SMDDP_SPIN_US = "", own, spin: Option<Duration> = optional(micros);
    /// how long destroy_process_group waits for the other ranks, to hold what they called against each other; 0: it does not,
    /// and calls that differ may go unnoticed
    SMDDP_LEAVE_SECONDS = "10", own, leave: Duration = seconds;
    /// seconds after which a host that answers nothing any more, not even that it lives, is lost, while some rank waits for one of
    /// its ranks; 1 at least. A process that is stopped on a host that answers ends a call at its deadline only
    SMDDP_PEER_TIMEOUT = "10", own, peer_timeout: Duration = at_least_one_second;
    /// between nodes: auto (EFA where all ranks have it, tcp where none has), tcp, fabric (libfabric), or shm, which makes
    /// ranks that cannot share memory an error
    SMDDP_TRANSPORT = "auto", shared, between: InterNode = named;
    /// any other way between nodes than this is an error: efa, tcp, fabric, or a libfabric provider
    SMDDP_REQUIRE = "", shared, require: Option<String> = optional(|text| Ok(text.to_ascii_lowercase()));
    /// libfabric's file; empty: the one that is loaded already, /opt/amazon/efa, the loader's path
    SMDDP_LIBFABRIC = "", own, library: Option<PathBuf> = optional(unchanged);
    /// libfabric's provider for SMDDP_TRANSPORT=fabric, such as `tcp` or `tcp;ofi_rxm`; empty: efa
    SMDDP_FABRIC_PROVIDER = "", shared, provider: Option<String> = optional(unchanged);
    /// 0: ranks of one host do not share memory, each is a node of its own
    SMDDP_SHM = "1", shared, shm: bool = named;
    /// ranks of one host with different names here are treated as different nodes
    SMDDP_NODE = "", own, node: Option<String> = optional(unchanged);
    /// network interfaces to use between nodes, as in NCCL: `eth,ens` (beginnings), `=eth0` (whole names), `^docker,lo` (not
    /// these); empty: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, else the fastest that is up
    SMDDP_SOCKET_IFNAME = "", own, interface: InterfaceFilter = interface_filter;
    /// AF_INET or AF_INET6: the addresses to use; empty: either
    SMDDP_SOCKET_FAMILY = "", shared, family: AddressFamily = named;
    /// a file of 32 bytes or more that only this job's ranks have, the same for all: with it, whoever reads the store still
    /// cannot speak to a rank; empty: the store's word is enough (docs/security.md)
    SMDDP_JOB_TOKEN_FILE = "", own, token_file: Option<PathBuf> = optional(unchanged);
    /// 1: what ranks of different nodes send each other is encrypted and held against changes, over tcp; libfabric cannot, and is an error
    /// then (docs/security.md)
    SMDDP_ENCRYPT = "0", shared, encrypts: bool = named;
    /// device memory within a node: auto (by reference where all devices of the group reach each other), ipc (else an error),
    /// host (always through pinned memory)
    SMDDP_CUDA_PATH = "auto", shared, device_path: DevicePath = named;
    /// multiprocessors that a reduction on a device takes at most, 1 to 64: what it takes, the model's kernels beside it have not
    SMDDP_CUDA_SMS = "8", own, multiprocessors: usize = up_to_64;
    /// the CUDA driver's file; empty: the one that is loaded already, then libcuda.so.1 on the loader's path
    SMDDP_CUDA_LIBRARY = "", own, cuda: Option<PathBuf> = optional(unchanged);
    /// what is told on standard error: VERSION, WARN (what is wrong, too), INFO (the ways that bytes take, ranks that are
    /// seconds late, why a group failed), TRACE (each collective)
    SMDDP_DEBUG = "WARN", own, debug: Level = named;
    /// write it to this file instead; %h is the host, %p the process
    SMDDP_DEBUG_FILE = "", own, debug_file: Option<String> = optional(unchanged);
    /// collectives of each group that the recorder keeps, the newest, and as many messages, 64 bytes each; 0: none
    SMDDP_RECORDER = "256", own, recorder: usize = operations;
    /// a folder where each process leaves what its recorder has when a group fails, as smddp-HOST-PID.json
    SMDDP_DUMP_DIR = "", own, dump_dir: Option<PathBuf> = optional(unchanged);
    /// 0: no Python line of the main thread is told to other ranks and to `smddp status`; no signal is used
    SMDDP_STACKS = "1", own, stacks: bool = named;
    /// a file that each rank writes its metrics to, in Prometheus' text format, for node_exporter's textfile collector; %h is
    /// the host, %p the process, %r the rank, which is put before the name's end where neither %p nor %r is in it
    SMDDP_METRICS_FILE = "", own, metrics_file: Option<String> = optional(unchanged);
    /// seconds between two looks at the recorder for metrics, and two writings of SMDDP_METRICS_FILE; 1 at least
    SMDDP_METRICS_INTERVAL = "10", own, metrics_interval: Duration = at_least_one_second;
    /// PORT or ADDRESS:PORT where the first rank of a host serves its metrics to Prometheus, at 127.0.0.1 where no address is
    /// given; the host's other ranks (LOCAL_RANK) have the next ports. 0: any that is free; empty: none
    SMDDP_METRICS_PORT = "", own, metrics_port: Option<String> = optional(port);
    /// 1: each host's first process lays the recorders of the host's ranks side by side, every 4 seconds at least, and
    /// tells which rank comes last again and again; `smddp status` does when it is asked, whatever is set here
    SMDDP_STRAGGLERS = "0", own, stragglers: bool = named;
}

/// What launchers and other libraries say, which are no settings of ours.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Launch {
    pub rank: Option<String>,
    /// This rank's number on its host, and how many there are.
    pub local: Option<(usize, usize)>,
}

impl Launch {
    fn read(get: impl Fn(&str) -> Option<String>) -> Self {
        let number = |name: &str| get(name)?.trim().parse::<u32>().ok().map(|number| number as usize);
        Self {
            rank: get("RANK"),
            // A launcher that counts otherwise tells nothing.
            local: number("LOCAL_RANK").zip(number("LOCAL_WORLD_SIZE")).filter(|(rank, ranks)| rank < ranks),
        }
    }
}

fn invalid_value(name: &str, value: &str, want: &str) -> Error {
    Error::Config(format!("{name}={value:?} is not valid: {want} (`smddp info` lists all settings)"))
}

impl Default for Config {
    fn default() -> Self {
        Self::read(|_| None).unwrap_or_else(|error| unreachable!("a default of the table: {error}"))
    }
}

impl Config {
    /// The process's settings, read once.
    pub fn get() -> Result<&'static Config> {
        static CONFIG: OnceLock<Result<Config>> = OnceLock::new();
        CONFIG
            .get_or_init(|| {
                let config = Config::read(from_environment)?;
                log::open(config.debug, config.debug_file.clone(), config.launch.rank.clone());
                for warning in
                    unknown_names(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()))
                {
                    log::say(Level::Warn, &warning);
                }
                Ok(config)
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    /// What SMDDP_JOB_TOKEN_FILE says, if it is set.
    pub(crate) fn job_secret(&self) -> Result<Option<Vec<u8>>> {
        /// Half of it may be guessed.
        const FEWEST: usize = 32;
        const MOST: usize = 64 << 10;
        let Some(path) = &self.token_file else { return Ok(None) };
        let wrong = |want: String| invalid_value("SMDDP_JOB_TOKEN_FILE", &path.to_string_lossy(), &want);
        let read = files::read(path, MOST).map_err(|error| wrong(format!("it cannot be read: {error}")));
        let (bytes, about) = read?;
        let mode = about.permissions().mode();
        // A group may be let in to read: secrets are mounted so for those who may have them.
        if mode & 0o026 != 0 {
            let want = format!(
                "a file that others cannot read or change, and its mode is {:03o}: chmod 600 (a mounted secret: defaultMode 0400)",
                mode & 0o777
            );
            return Err(wrong(want));
        }
        let secret = bytes.trim_ascii().to_vec();
        if secret.len() < FEWEST {
            let want = format!(
                "{FEWEST} bytes at least, and it has {}: `openssl rand -hex 32` makes such",
                secret.len()
            );
            return Err(wrong(want));
        }
        Ok(Some(secret))
    }

    /// Those that decide about plans.
    pub fn plans(&self) -> Settings<'_> {
        Settings {
            algorithm: self.algorithm,
            tune: Some(&self.tune),
            segment: self.segment,
            staging: self.staging,
            canonical: self.canonical == CanonicalOrder::Always,
            formats: self.formats,
        }
    }

    /// Settings from any source; an empty value counts as not set.
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Config> {
        let get = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        let mut config = Self::read_table(get)?;
        if config.interface.value.is_none() {
            // Other libraries' names will do.
            config.interface = InterfaceFilter::first(&lookup);
        }
        if config.segment.is_some_and(|bytes| bytes > config.staging) {
            let want = format!(
                "a piece lies in the staging memory, of which SMDDP_STAGING_BYTES allows {} bytes",
                config.staging
            );
            return Err(invalid_value(
                "SMDDP_SEGMENT_BYTES",
                &get("SMDDP_SEGMENT_BYTES").unwrap_or_default(),
                &want,
            ));
        }
        if config.canonical == CanonicalOrder::Always && config.formats != Formats::default() {
            let want = "unset it with SMDDP_CANONICAL_ORDER=1, since compression rounds differently for each node layout";
            return Err(invalid_value("SMDDP_WIRE_FORMAT", &config.formats.to_string(), want));
        }
        Ok(config)
    }
}

/// A warning for every `SMDDP_*` name that no setting has, with the setting whose name is similar.
fn unknown_names(names: impl Iterator<Item = String>) -> Vec<String> {
    names
        .filter(|name| name.starts_with("SMDDP_") && !SETTINGS.iter().any(|s| s.name == name))
        // The tests' and the historic library's own names are nobody's typo.
        .filter(|name| !name.starts_with("SMDDP_TEST_") && !name.starts_with("SMDDP_AG_"))
        .map(|name| {
            let hint = did_you_mean(&name, SETTINGS.iter().map(|setting| setting.name));
            format!("{name} is not a setting and is ignored{hint} (`smddp info` lists all settings)")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_settings_says_what_the_table_says() {
        let mut settings: Vec<&Setting> = SETTINGS.iter().collect();
        settings.sort_by_key(|setting| setting.name);
        let row = |setting: &&Setting| {
            let default = if setting.default.is_empty() { "-" } else { setting.default };
            format!("| `{}` | `{default}` | {} |\n", setting.name, setting.description.replace('|', "\\|"))
        };
        let page = include_str!("../../../../docs/settings.md");
        assert!(page.ends_with(&settings.iter().map(row).collect::<String>()), "run `make docs`");
    }

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
    fn formats_and_one_order_for_any_layout_exclude_each_other() {
        let text =
            with(&[("SMDDP_WIRE_FORMAT", "bf16"), ("SMDDP_CANONICAL_ORDER", "1")]).unwrap_err().to_string();
        assert!(text.contains("SMDDP_WIRE_FORMAT") && text.contains("SMDDP_CANONICAL_ORDER"), "{text}");
        assert!(with(&[("SMDDP_WIRE_FORMAT", "fp8")]).unwrap_err().to_string().contains("int8"));
    }

    #[test]
    fn a_bad_value_names_the_setting_and_what_it_takes() {
        for (name, value) in [
            ("SMDDP_STAGING_BYTES", "lots"),
            ("SMDDP_ALGO", "rign"),
            ("SMDDP_DEBUG", "loud"),
            ("SMDDP_LEAVE_SECONDS", "1e300"),
            ("SMDDP_LEAVE_SECONDS", "1e18"),
            ("SMDDP_PEER_TIMEOUT", "inf"),
            ("SMDDP_SPIN_US", "18446744073709551615"),
            ("SMDDP_TUNE", "/dev/zero"),
            ("SMDDP_TUNE", "/dev"),
            ("SMDDP_PROBE", "no"),
            ("SMDDP_NETWORK", "gbit=fast"),
        ] {
            let text = with(&[(name, value)]).unwrap_err().to_string();
            assert!(text.contains(name) && text.to_lowercase().contains(value), "{text}");
        }
    }

    #[test]
    fn similar_values_and_names_of_other_libraries_are_suggested() {
        for (name, value, meant) in [
            ("SMDDP_DEBUG", "DEBUG", "TRACE"),
            ("SMDDP_DEBUG", "warning", "WARN"),
            ("SMDDP_DEBUG", "INFOS", "INFO"),
            ("SMDDP_ALGO", "rign", "ring"),
            ("SMDDP_TRANSPORT", "fabrik", "fabric"),
        ] {
            let text = with(&[(name, value)]).unwrap_err().to_string();
            assert!(text.contains(&format!("did you mean {meant}?")), "{text}");
        }
        for (name, value) in [("SMDDP_DEBUG", "loudest"), ("SMDDP_ALGO", "something")] {
            let text = with(&[(name, value)]).unwrap_err().to_string();
            assert!(!text.contains("did you mean"), "{text}");
        }
    }

    #[test]
    fn the_network_is_measured_unless_it_is_named_or_forbidden() {
        let Config { probe, network, .. } = with(&[]).unwrap();
        assert_eq!((probe, network), (true, None));
        assert!(!with(&[("SMDDP_PROBE", "0")]).unwrap().probe);
        let network = with(&[("SMDDP_NETWORK", "gbit=10, latency_us=2.5")]).unwrap().network;
        assert_eq!(network, Some(Network { latency_ns: 2_500.0, bytes_per_ns: 1.25, ..Network::ASSUMED }));
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
        let warning = unknown_names(["SMDDP_TIMEOUT".to_owned()].into_iter()).concat();
        assert!(!warning.contains("did you mean") && warning.contains("smddp info"), "{warning}");
    }
}
