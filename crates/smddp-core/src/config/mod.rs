//! The table of all settings, and the only reader of the environment.

pub mod audit;
pub mod cores;
mod deprecated;
pub mod files;
pub mod network;
mod transports;
mod values;

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use smddp_net::interface::{AddressFamily, InterfaceFilter};
use smddp_plan::names::did_you_mean;
use smddp_plan::tune::Table;
use smddp_plan::{Algorithm, Formats, Settings};
use smddp_process::SingleCopy;

use self::audit::Audit;
use self::deprecated::Translated;
pub use self::deprecated::{DEPRECATED, DeprecatedSetting};
pub use self::network::NetworkSource;
pub use self::transports::TransportChoice;
pub use self::values::{CanonicalOrder, DeadlockAction, DevicePath, parse_bytes};
use self::values::{
    ToSetting, algorithm, at_least_one_second, bytes, interface_filter, micros, named, operations, optional,
    port, seconds, tune, unchanged, up_to_64,
};
use crate::error::{Error, Result};
use crate::log::{self, Level};

/// One row of the table, as `smddp info` and docs/reference/settings.md print it.
pub struct Setting {
    /// Name of the environment variable.
    pub name: &'static str,
    /// Value if the variable is unset or empty.
    pub default: &'static str,
    /// Description with the accepted values.
    pub description: &'static str,
    /// True if all ranks of a group must have the same value.
    pub shared: bool,
}

impl Setting {
    /// Returns the value that this name or a deprecated one has in the environment, if it is not empty.
    pub fn environment_value(&self) -> Option<String> {
        let get = |name: &str| from_environment(name).filter(|value| !value.trim().is_empty());
        Translated::read(&get)
            .ok()
            .and_then(|translated| translated.get(self.name))
            .or_else(|| get(self.name))
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

/// Rows of the table: description; NAME = default, whether ranks share it, field: type = parser. The parser receives
/// the default if the setting is unset. Its error describes the expected value.
macro_rules! settings {
    ($($(#[doc = $description:literal])+ $name:ident = $default:literal, $scope:ident, $field:ident: $type:ty = $read:expr;)*) => {
        /// All settings.
        pub const SETTINGS: &[Setting] = &[$(Setting {
            name: stringify!($name),
            default: $default,
            description: concat!($($description),+).trim_ascii_start(),
            shared: shared!($scope, true, false),
        }),*];

        /// Values of all settings.
        #[allow(rustdoc::broken_intra_doc_links)] // The descriptions are texts of docs/reference/settings.md, too.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $($(#[doc = $description])+ pub $field: $type,)*
            /// Values from launchers.
            pub launch: Launch,
        }

        impl Config {
            fn read_table(get: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
                Ok(Self {
                    $($field: {
                        let value = get(stringify!($name));
                        let text = value.as_deref().unwrap_or($default).trim();
                        $read(text).map_err(|want| invalid_value(stringify!($name), text, &want))?
                    },)*
                    launch: Launch::read(get),
                })
            }

            /// Returns (name, value) of each setting that ranks share, in the order of the table. Equivalent values
            /// have equal texts.
            pub(crate) fn shared(&self) -> Vec<(String, String)> {
                let rows = [$((stringify!($name), shared!($scope, Some(self.$field.to_setting()), None))),*];
                rows.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
            }
        }
    };
}

settings! {
    /// maximum bytes of staging memory of the process (K, M and G allowed); it grows on demand, and all groups share
    /// it
    SMDDP_STAGING_BYTES = "64M", shared, staging: usize = bytes(64 << 10);
    /// algorithm for every collective that it supports. publish, mesh: all ranks take equal roles. hier-ring,
    /// hier-log, hier-recursive, hier-tree (`hier-` may be omitted), hier-publish, hier: mesh inside nodes, this
    /// algorithm between them
    SMDDP_ALGO = "", shared, algorithm: Option<Algorithm> = optional(algorithm);
    /// algorithms by size range, and optionally by memory type and number of ranks, as `smddp-bench tune` writes
    /// them: all_gather:64k-4m:@hier#all_reduce:0-32k:host:[8]:@tree; or the name of a file with such lines
    SMDDP_TUNE = "", shared, tune: Table = tune;
    /// 1: every reduction combines the values of the ranks in one fixed order, a tree over the group's ranks, for
    /// equal bits with any algorithm, size, transport and split into nodes. auto: only in groups of a mesh dimension
    /// or a split that nodes divide differently. 0: never (docs/guides/determinism.md)
    SMDDP_CANONICAL_ORDER = "auto", shared, canonical: CanonicalOrder = named;
    /// format between nodes of 32-bit floats in all_gather, reduce_scatter and all_reduce of 64 KiB and more: bf16,
    /// f16 or int8 (one scale per 256 elements), or by collective: all_gather=bf16,reduce_scatter=int8. Empty:
    /// uncompressed (docs/guides/compression.md)
    SMDDP_WIRE_FORMAT = "", shared, formats: Formats = Formats::parse;
    /// bytes of a pipeline segment, at most SMDDP_STAGING_BYTES. Empty: chosen by size and number of ranks
    SMDDP_SEGMENT_BYTES = "", shared, segment: Option<usize> = optional(|text| Ok(bytes(64)(text)? & !63));
    /// the network between nodes, which determines segments, and algorithms of collectives that do not reduce.
    /// measure: when the first group that spans nodes starts. latency_us=15,message_us=1,gbit=10: one-way latency,
    /// time per message, link rate of a node; omitted values have these defaults. default: all of these defaults
    SMDDP_NETWORK = "measure", shared, network: NetworkSource = network::parse;
    /// minimum bytes of an output that is written with non-temporal stores, past the caches
    SMDDP_STREAM_BYTES = "16M", own, stream: usize = bytes(0);
    /// threads that a waiting rank uses for copies and reductions of 64 KiB and more, including its own. 1: only its
    /// own. Empty: its share of the cores, at most 4, if that is 3 or more; else 1
    SMDDP_THREADS = "", own, threads: Option<usize> = optional(up_to_64);
    /// direct reads of large messages from the memory of other ranks of the node (process_vm_readv), without staging.
    /// auto: if permitted, and faster by measurement. 1: if permitted. 0: never
    SMDDP_SINGLE_COPY = "auto", own, single_copy: SingleCopy = named;
    /// microseconds that a waiting rank spins before it yields and sleeps. Empty: 50, or 0 if ranks outnumber cores
    SMDDP_SPIN_US = "", own, spin: Option<Duration> = optional(micros);
    /// seconds that destroy_process_group waits for the other ranks, to compare their calls. 0: no wait, and
    /// mismatched calls may not be reported
    SMDDP_LEAVE_SECONDS = "10", own, leave: Duration = seconds;
    /// seconds without any response after which a host is reported lost, while a rank waits for one of its ranks; at
    /// least 1. If a process is stopped but its host responds, calls end at their deadline only
    SMDDP_PEER_TIMEOUT = "10", own, peer_timeout: Duration = at_least_one_second;
    /// transport between nodes: auto (EFA if all ranks have it, tcp if none has), efa (an error for ranks without it),
    /// tcp, fabric:PROVIDER (libfabric with a provider such as `tcp` or `tcp;ofi_rxm`; fabric: efa), or shm (an error
    /// for ranks that cannot share memory). auto:PROVIDER: auto, with that provider for EFA, such as `efa-direct`
    SMDDP_TRANSPORT = "auto", shared, transport: TransportChoice = transports::parse;
    /// path of libfabric. Empty: the library that is loaded already, /opt/amazon/efa, then the loader's path
    SMDDP_LIBFABRIC = "", own, library: Option<PathBuf> = optional(unchanged);
    /// node name. Ranks of one host with different names are treated as different nodes. With %r, the rank, each rank
    /// is a separate node, and ranks do not share memory
    SMDDP_NODE = "", own, node: Option<String> = optional(unchanged);
    /// network interfaces between nodes, as in NCCL: `eth,ens` (prefixes), `=eth0` (exact names), `^docker,lo`
    /// (excluded). Empty: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, else the fastest interface that is up
    SMDDP_SOCKET_IFNAME = "", own, interface: InterfaceFilter = interface_filter;
    /// address family: AF_INET or AF_INET6. Empty: either
    SMDDP_SOCKET_FAMILY = "", shared, family: AddressFamily = named;
    /// file of at least 32 bytes that only the ranks of this job can read, with equal content on all of them. With
    /// it, a process that can read the store still cannot connect to a rank. Empty: the store is trusted
    /// (docs/security.md)
    SMDDP_JOB_TOKEN_FILE = "", own, token_file: Option<PathBuf> = optional(unchanged);
    /// 1: encrypt and authenticate all data between nodes over tcp. An error with libfabric, which does not support
    /// it (docs/security.md)
    SMDDP_ENCRYPT = "0", shared, encrypts: bool = named;
    /// checks for corrupted data: wire (a CRC32C of each frame between nodes), results or results:N (the ranks compare a
    /// digest of the result of every N-th all_reduce, 100 by default), or both: wire,results:50. Empty: none
    /// (docs/reliability.md)
    SMDDP_AUDIT = "", shared, audit: Audit = Audit::parse;
    /// device memory within a node: auto (by reference if all devices of the group can access each other), ipc (by
    /// reference, or an error), host (always through pinned memory)
    SMDDP_CUDA_PATH = "auto", shared, device_path: DevicePath = named;
    /// maximum number of SMs that one reduction may occupy, 1 to 64
    SMDDP_CUDA_SMS = "8", own, multiprocessors: usize = up_to_64;
    /// path of the CUDA driver. Empty: the library that is loaded already, then libcuda.so.1 on the loader's path
    SMDDP_CUDA_LIBRARY = "", own, cuda: Option<PathBuf> = optional(unchanged);
    /// log level on standard error: VERSION, WARN (also problems), INFO (also transports and algorithms, ranks that
    /// are seconds late, reasons of group failures), TRACE (also each collective)
    SMDDP_DEBUG = "WARN", own, debug: Level = named;
    /// log file instead of standard error. %h is the host, %p the process id
    SMDDP_DEBUG_FILE = "", own, debug_file: Option<String> = optional(unchanged);
    /// number of collectives of each group that the recorder keeps, and the same number of messages, newest first; 64
    /// bytes each. 0: none
    SMDDP_RECORDER = "256", own, recorder: usize = operations;
    /// folder where each process writes its recorder when a group fails, or when a call of another rank has waited
    /// for it for a minute, as smddp-HOST-PID.json
    SMDDP_DUMP_DIR = "", own, dump_dir: Option<PathBuf> = optional(unchanged);
    /// 0: do not report the Python line of the main thread to other ranks and to `smddp status`, and use no signal
    SMDDP_STACKS = "1", own, stacks: bool = named;
    /// possible deadlocks: report (all ranks of a cycle of waits log it), error (they raise DeadlockError), off. The search
    /// begins after 0.5 s of waiting
    SMDDP_DEADLOCK = "report", own, deadlock: DeadlockAction = named;
    /// file for the metrics of each rank in Prometheus' text format, for node_exporter's textfile collector. %h is
    /// the host, %p the process id, %r the rank; without %p and %r, the rank is inserted before the file extension
    SMDDP_METRICS_FILE = "", own, metrics_file: Option<String> = optional(unchanged);
    /// seconds between two updates of the metrics and of SMDDP_METRICS_FILE; at least 1
    SMDDP_METRICS_INTERVAL = "10", own, metrics_interval: Duration = at_least_one_second;
    /// PORT or ADDRESS:PORT where the first rank of a host serves its metrics to Prometheus; the default address is
    /// 127.0.0.1. The other ranks of the host (LOCAL_RANK) use the next ports. 0: any free port. Empty: none
    SMDDP_METRICS_PORT = "", own, metrics_port: Option<String> = optional(port);
    /// 1: the first process of each host compares the recorders of the host's ranks, at least every 4 seconds, and
    /// reports a rank that is repeatedly the last. `smddp status` always does so on request
    SMDDP_STRAGGLERS = "0", own, stragglers: bool = named;
}

/// Values from launchers, which are not settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Launch {
    /// This process's rank in the job.
    pub rank: Option<String>,
    /// This rank's index on its host, and the number of ranks there.
    pub local: Option<(usize, usize)>,
}

impl Launch {
    fn read(get: &dyn Fn(&str) -> Option<String>) -> Self {
        let number = |name: &str| get(name)?.trim().parse::<u32>().ok().map(|number| number as usize);
        Self {
            rank: get("RANK"),
            // Inconsistent values are ignored.
            local: number("LOCAL_RANK").zip(number("LOCAL_WORLD_SIZE")).filter(|(rank, ranks)| rank < ranks),
        }
    }
}

fn invalid_value(name: &str, value: &str, want: &str) -> Error {
    Error::Config(format!("{name}={value:?} is not valid: {want} (`smddp info` lists all settings)"))
}

/// Rejects a setting that is not UTF-8, which would otherwise count as unset.
fn check_utf8(variables: impl Iterator<Item = (OsString, OsString)>) -> Result<()> {
    for (name, value) in variables {
        let Some(name) = name.to_str().filter(|name| name.starts_with("SMDDP_")) else { continue };
        if value.to_str().is_none() {
            return Err(invalid_value(name, &value.to_string_lossy(), "expected UTF-8 text"));
        }
    }
    Ok(())
}

impl Default for Config {
    fn default() -> Self {
        Self::read(|_| None).unwrap_or_else(|error| unreachable!("a default of the table: {error}"))
    }
}

impl Config {
    /// Returns the settings of the process, which are read once.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid value, or for values that contradict each other; the same error in
    /// every later call.
    pub fn get() -> Result<&'static Config> {
        static CONFIG: OnceLock<Result<Config>> = OnceLock::new();
        CONFIG
            .get_or_init(|| {
                check_utf8(std::env::vars_os())?;
                let (config, deprecated) = Config::read_with_warnings(&from_environment)?;
                log::open(config.debug, config.debug_file.clone(), config.launch.rank.clone());
                let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
                deprecated.iter().chain(&unknown_names(names)).for_each(|text| log::say(Level::Warn, text));
                Ok(config)
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Returns the content of the file SMDDP_JOB_TOKEN_FILE, if it is set.
    pub(crate) fn job_secret(&self) -> Result<Option<Vec<u8>>> {
        /// Minimum bytes. Half of them may be guessable.
        const MIN_BYTES: usize = 32;
        const MAX_BYTES: usize = 64 << 10;
        let Some(path) = &self.token_file else { return Ok(None) };
        let invalid = |want: String| invalid_value("SMDDP_JOB_TOKEN_FILE", &path.to_string_lossy(), &want);
        let content =
            files::read(path, MAX_BYTES).map_err(|error| invalid(format!("it cannot be read: {error}")));
        let (bytes, about) = content?;
        let mode = about.permissions().mode();
        // Group read permission is allowed: orchestrators mount secrets that way.
        if mode & 0o026 != 0 {
            let want = format!(
                "expected a file that other users cannot read or write, found mode {:03o}: chmod 600 (a mounted secret: defaultMode 0400)",
                mode & 0o777
            );
            return Err(invalid(want));
        }
        let secret = bytes.trim_ascii().to_vec();
        if secret.len() < MIN_BYTES {
            let want = format!(
                "expected at least {MIN_BYTES} bytes, found {}: create it with `openssl rand -hex 32`",
                secret.len()
            );
            return Err(invalid(want));
        }
        Ok(Some(secret))
    }

    /// Returns the settings of the planner.
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

    /// Reads settings from any source. An empty value counts as unset.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid value, or for values that contradict each other.
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Config> {
        Ok(Self::read_with_warnings(&lookup)?.0)
    }

    /// Reads settings, and returns a warning for each deprecated name in use.
    fn read_with_warnings(lookup: &dyn Fn(&str) -> Option<String>) -> Result<(Config, Vec<String>)> {
        let set = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        let translated = Translated::read(&set)?;
        let get = |name: &str| translated.get(name).or_else(|| set(name));
        let mut config = Self::read_table(&get)?;
        if config.interface.value.is_none() {
            // Names that other libraries use are accepted, too.
            config.interface = InterfaceFilter::first(lookup);
        }
        if config.segment.is_some_and(|bytes| bytes > config.staging) {
            let want = format!("expected at most SMDDP_STAGING_BYTES, which is {} bytes", config.staging);
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
        Ok((config, translated.warnings().collect()))
    }
}

/// Returns true for a node name that differs for each rank (`SMDDP_NODE`).
fn is_rank_node(node: &str) -> bool {
    node.contains("%r")
}

/// Returns a warning for every unknown `SMDDP_*` name, with a similar setting.
fn unknown_names(names: impl Iterator<Item = String>) -> Vec<String> {
    names
        .filter(|name| name.starts_with("SMDDP_") && !SETTINGS.iter().any(|s| s.name == name))
        .filter(|name| !DEPRECATED.iter().any(|deprecated| deprecated.name == name))
        // Names of the tests and of the historic library are known.
        .filter(|name| !name.starts_with("SMDDP_TEST_") && !name.starts_with("SMDDP_AG_"))
        .map(|name| {
            let hint = did_you_mean(&name, SETTINGS.iter().map(|setting| setting.name));
            format!("{name} is not a setting and is ignored{hint} (`smddp info` lists all settings)")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use smddp_plan::Network;

    use super::*;

    #[test]
    fn settings_that_are_not_utf8_are_rejected_with_their_name() {
        use std::os::unix::ffi::OsStringExt;
        let broken = || OsString::from_vec(vec![0xff]);
        let check = |name: OsString| check_utf8([(name, broken())].into_iter());
        let error = check("SMDDP_ALGO".into()).unwrap_err().to_string();
        assert!(error.contains("SMDDP_ALGO") && error.contains("UTF-8"), "{error}");
        assert_eq!((check("HOME".into()), check(broken())), (Ok(()), Ok(())));
    }

    fn with(pairs: &[(&str, &str)]) -> Result<Config> {
        Config::read(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn sizes_accept_units() {
        assert_eq!(with(&[("SMDDP_STAGING_BYTES", "2M")]).unwrap().staging, 2 << 20);
        assert_eq!(with(&[("SMDDP_STAGING_BYTES", "1g")]).unwrap().staging, 1 << 30);
        assert_eq!(with(&[]).unwrap().staging, 64 << 20);
    }

    #[test]
    fn segment_size_is_limited_by_the_staging_memory() {
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
    fn wire_formats_and_canonical_order_are_mutually_exclusive() {
        let text =
            with(&[("SMDDP_WIRE_FORMAT", "bf16"), ("SMDDP_CANONICAL_ORDER", "1")]).unwrap_err().to_string();
        assert!(text.contains("SMDDP_WIRE_FORMAT") && text.contains("SMDDP_CANONICAL_ORDER"), "{text}");
        assert!(with(&[("SMDDP_WIRE_FORMAT", "fp8")]).unwrap_err().to_string().contains("int8"));
    }

    #[test]
    fn invalid_value_error_names_the_setting_and_the_expected_values() {
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
            ("SMDDP_NETWORK", "gbit=fast"),
            ("SMDDP_TRANSPORT", "fabric:"),
            ("SMDDP_TRANSPORT", "tcp:efa"),
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
            ("SMDDP_NETWORK", "mesure", "measure"),
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
    fn network_is_measured_unless_configured_or_disabled() {
        let of = |text| with(&[("SMDDP_NETWORK", text)]).unwrap().network;
        assert_eq!((of(""), of("measure")), (NetworkSource::Measured, NetworkSource::Measured));
        assert_eq!(of("Default"), NetworkSource::Default);
        let network = Network { latency_ns: 2_500.0, bytes_per_ns: 1.25, ..Network::ASSUMED };
        assert_eq!(of("gbit=10, latency_us=2.5"), NetworkSource::Configured(network));
        // Ranks with different models would choose different segments.
        assert!(SETTINGS.iter().any(|s| s.name == "SMDDP_NETWORK" && s.shared));
    }

    #[test]
    fn misspelt_name_warning_suggests_the_nearest_setting() {
        let warnings = unknown_names(["SMDDP_STAGING_BYTE".to_owned(), "SMDDP_DEBUG".to_owned()].into_iter());
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("did you mean SMDDP_STAGING_BYTES"), "{}", warnings[0]);
        let warning = unknown_names(["SMDDP_TIMEOUT".to_owned()].into_iter()).concat();
        assert!(!warning.contains("did you mean") && warning.contains("smddp info"), "{warning}");
    }
}
