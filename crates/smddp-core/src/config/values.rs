//! Parsers of setting values, and their canonical text. Equal values of settings that ranks share have equal texts.

use std::time::Duration;

use smddp_net::interface::{self, AddressFamily, InterfaceFilter};
use smddp_plan::names::did_you_mean;
use smddp_plan::tune::Table;
use smddp_plan::{Algorithm, Formats};
use smddp_process::SingleCopy;

use crate::config::audit::Audit;
use crate::config::{NetworkSource, TransportChoice, files};
use crate::log::Level;

/// A value, or the description of the expected value.
type Read<T> = Result<T, String>;

/// Maximum size in bytes. Values derived from a size cannot overflow.
const MAX_BYTES: usize = 1 << 40;

/// Parses a size such as "64M", "4096" or "1g".
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

pub(super) fn bytes(least: usize) -> impl Fn(&str) -> Read<usize> {
    move |text| {
        parse_bytes(text)
            .filter(|n| (least..=MAX_BYTES).contains(n))
            .ok_or_else(|| format!("a size of {least} bytes to 1024G, like 65536 or 64M"))
    }
}

/// Returns `None` for an empty value.
pub(super) fn optional<T>(read: impl Fn(&str) -> Read<T>) -> impl Fn(&str) -> Read<Option<T>> {
    move |text| (!text.is_empty()).then(|| read(text)).transpose()
}

pub(super) fn unchanged<T: for<'a> From<&'a str>>(text: &str) -> Read<T> {
    Ok(text.into())
}

pub(super) fn algorithm(text: &str) -> Read<Algorithm> {
    let names = || {
        let hint = did_you_mean(text, Algorithm::ALL.into_iter().flat_map(Algorithm::spellings));
        format!("one of {}{hint}", Algorithm::ALL.map(Algorithm::name).join(", "))
    };
    Algorithm::from_name(&text.to_ascii_lowercase()).ok_or_else(names)
}

/// Maximum bytes of a file with a tuning table. Address records carry the table and have a lower limit.
const MAX_TABLE: usize = 1 << 20;

/// Parses a tuning table, or reads it from a file. A table contains ":@".
pub(super) fn tune(text: &str) -> Read<Table> {
    let lines = match text.is_empty() || text.contains(":@") {
        true => text.to_owned(),
        false => files::read_text(text.as_ref(), MAX_TABLE)
            .map_err(|error| format!("neither a table nor a file that can be read ({error})"))?,
    };
    Table::parse(&lines).map_err(|e| e.to_string())
}

/// Number of recorded operations.
pub(super) fn operations(text: &str) -> Read<usize> {
    let found = text.parse().ok().filter(|&number| number <= 1 << 20);
    found.ok_or_else(|| format!("a number from 0 to {}", 1 << 20))
}

pub(super) fn up_to_64(text: &str) -> Read<usize> {
    text.parse()
        .ok()
        .filter(|number| (1..=64).contains(number))
        .ok_or_else(|| "a number from 1 to 64".to_owned())
}

/// Maximum time of a setting. A larger value would overflow when added to a clock.
const MAX_TIME: Duration = Duration::from_secs(1_000_000_000);

pub(super) fn micros(text: &str) -> Read<Duration> {
    let found = text.parse().ok().map(Duration::from_micros).filter(|time| *time <= MAX_TIME);
    found.ok_or_else(|| format!("whole microseconds, at most {}", MAX_TIME.as_micros()))
}

pub(super) fn seconds(text: &str) -> Read<Duration> {
    let found = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    found.filter(|time| *time <= MAX_TIME).ok_or_else(|| format!("seconds, from 0 to {}", MAX_TIME.as_secs()))
}

pub(super) fn at_least_one_second(text: &str) -> Read<Duration> {
    seconds(text).ok().filter(|time| time.as_secs() > 0).ok_or_else(|| "seconds, 1 or more".to_owned())
}

/// A port, alone or after an address.
pub(super) fn port(text: &str) -> Read<String> {
    let number = text.rsplit_once(':').map_or(text, |(_, number)| number);
    let found = number.parse::<u16>().map(|_| text.to_owned());
    found.map_err(|_| "a port, or ADDRESS:PORT".to_owned())
}

pub(super) fn interface_filter(text: &str) -> Read<InterfaceFilter> {
    Ok(InterfaceFilter { value: optional(unchanged)(text)?, from: interface::NAMES[0] })
}

/// A setting with a few named values.
pub(super) trait NamedValue: Copy + PartialEq + 'static {
    const NAMES: &'static [(&'static str, Self)];
    /// Names that other libraries use, each with its equivalent here.
    const FOREIGN: &'static [(&'static str, &'static str)] = &[];
}

pub(super) fn named<T: NamedValue>(text: &str) -> Read<T> {
    let found = T::NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
    let names = || T::NAMES.iter().map(|(name, _)| *name).filter(|name| !name.is_empty()).collect::<Vec<_>>();
    let foreign = || T::FOREIGN.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
    found.map(|(_, value)| *value).ok_or_else(|| {
        let hint = foreign().map_or_else(
            || did_you_mean(text, names().iter().copied()),
            |(_, meant)| format!("; did you mean {meant}?"),
        );
        format!("one of {}{hint}", names().join(", "))
    })
}

impl NamedValue for bool {
    const NAMES: &'static [(&'static str, Self)] = &[("0", false), ("1", true)];
}

impl NamedValue for AddressFamily {
    const NAMES: &'static [(&'static str, Self)] =
        &[("", Self::Any), ("AF_INET", Self::V4), ("AF_INET6", Self::V6)];
}

impl NamedValue for SingleCopy {
    const NAMES: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("0", Self::Never), ("1", Self::Always)];
}

/// Groups that use the canonical order of reductions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CanonicalOrder {
    /// Only sibling groups that nodes divide differently.
    Auto,
    /// No group.
    Never,
    /// All groups.
    Always,
}

impl NamedValue for CanonicalOrder {
    const NAMES: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("0", Self::Never), ("1", Self::Always)];
}

/// Action after a deadlock is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadlockAction {
    /// The ranks of the cycle raise an error.
    Error,
    /// The ranks of the cycle log it.
    Report,
    /// No search.
    Off,
}

impl NamedValue for DeadlockAction {
    const NAMES: &'static [(&'static str, Self)] =
        &[("error", Self::Error), ("report", Self::Report), ("off", Self::Off), ("0", Self::Off)];
}

/// Path of device memory within a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePath {
    /// By reference if possible.
    Auto,
    /// By reference, or an error.
    Reference,
    /// Through pinned host memory.
    Host,
}

impl NamedValue for DevicePath {
    const NAMES: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("ipc", Self::Reference), ("host", Self::Host)];
}

impl NamedValue for Level {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("VERSION", Self::Version),
        ("WARN", Self::Warn),
        ("INFO", Self::Info),
        ("TRACE", Self::Trace),
        ("NONE", Self::None),
        ("0", Self::None),
    ];
    const FOREIGN: &'static [(&'static str, &'static str)] =
        &[("DEBUG", "TRACE"), ("DETAIL", "TRACE"), ("WARNING", "WARN"), ("ERROR", "WARN"), ("OFF", "NONE")];
}

pub(super) trait ToSetting {
    fn to_setting(&self) -> String;
}

impl<T: NamedValue> ToSetting for T {
    fn to_setting(&self) -> String {
        T::NAMES
            .iter()
            .find(|(_, value)| value == self)
            .map_or_else(String::new, |(name, _)| (*name).to_owned())
    }
}

impl<T: ToSetting> ToSetting for Option<T> {
    fn to_setting(&self) -> String {
        self.as_ref().map_or_else(String::new, T::to_setting)
    }
}

macro_rules! to_setting {
    ($($(#[$doc:meta])* $type:ty: |$value:ident| $text:expr;)*) => {$(
        $(#[$doc])*
        impl ToSetting for $type {
            fn to_setting(&self) -> String {
                let $value = self;
                $text
            }
        }
    )*};
}

to_setting! {
    /// Uses the largest unit without a remainder.
    usize: |bytes| {
        let units = [(30, "G"), (20, "M"), (10, "K")];
        let unit = units.into_iter().find(|(shift, _)| *bytes > 0 && bytes.is_multiple_of(1 << shift));
        unit.map_or_else(|| bytes.to_string(), |(shift, name)| format!("{}{name}", bytes >> shift))
    };
    String: |text| text.clone();
    Algorithm: |algorithm| algorithm.name().to_owned();
    /// The content of the table: a file name does not identify it.
    Table: |table| table.to_string();
    Formats: |formats| formats.to_string();
    Audit: |audit| audit.to_string();
    TransportChoice: |choice| choice.to_string();
    NetworkSource: |source| match source {
        NetworkSource::Measured => "measure".to_owned(),
        NetworkSource::Default => "default".to_owned(),
        NetworkSource::Configured(network) => {
            let (latency, message) = (network.latency_ns / 1e3, network.message_ns / 1e3);
            format!("latency_us={latency},message_us={message},gbit={}", network.bytes_per_ns * 8.0)
        }
    };
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn with(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        let lookup = |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Config::read(lookup).unwrap().shared()
    }

    #[test]
    fn equivalent_values_have_equal_texts() {
        for (name, one, other) in [
            ("SMDDP_STAGING_BYTES", "64M", "67108864"),
            ("SMDDP_STAGING_BYTES", "64M", " 64 m "),
            ("SMDDP_STAGING_BYTES", "64M", ""),
            ("SMDDP_ALGO", "ring", " RING "),
            ("SMDDP_SEGMENT_BYTES", "64k", "65536"),
            ("SMDDP_WIRE_FORMAT", "bf16", "all_reduce=BF16, all_gather=bf16,reduce_scatter=bf16"),
            ("SMDDP_NETWORK", "gbit=10,latency_us=2.5", " latency_us=2.50, gbit=10.0"),
            ("SMDDP_TRANSPORT", "tcp", " tcp"),
            ("SMDDP_TRANSPORT", "auto", ""),
            ("SMDDP_TRANSPORT", "efa", "Fabric:efa "),
            ("SMDDP_TRANSPORT", "efa", "fabric"),
            ("SMDDP_NETWORK", "measure", ""),
            ("SMDDP_SOCKET_FAMILY", "AF_INET", "af_inet"),
            ("SMDDP_AUDIT", "wire,results", "RESULTS:100, wire"),
        ] {
            assert_eq!(with(&[(name, one)]), with(&[(name, other)]), "{name}={one:?} and {other:?}");
        }
        assert_eq!(with(&[]), Config::default().shared());
    }

    #[test]
    fn every_shared_setting_is_compared_by_value() {
        for (name, value) in [
            ("SMDDP_STAGING_BYTES", "32M"),
            ("SMDDP_ALGO", "ring"),
            ("SMDDP_CANONICAL_ORDER", "1"),
            ("SMDDP_TUNE", "all_reduce:0-32k:@tree"),
            ("SMDDP_WIRE_FORMAT", "int8"),
            ("SMDDP_SEGMENT_BYTES", "64k"),
            ("SMDDP_NETWORK", "default"),
            ("SMDDP_NETWORK", "gbit=3"),
            ("SMDDP_TRANSPORT", "tcp"),
            ("SMDDP_TRANSPORT", "efa"),
            ("SMDDP_TRANSPORT", "fabric:tcp"),
            ("SMDDP_TRANSPORT", "auto:efa-direct"),
            ("SMDDP_SOCKET_FAMILY", "AF_INET6"),
            ("SMDDP_ENCRYPT", "1"),
            ("SMDDP_AUDIT", "wire"),
            ("SMDDP_AUDIT", "results:7"),
            ("SMDDP_CUDA_PATH", "host"),
        ] {
            let (usual, other) = (with(&[]), with(&[(name, value)]));
            let differ: Vec<_> =
                usual.iter().zip(&other).filter(|(a, b)| a != b).map(|(a, _)| &a.0).collect();
            assert_eq!(differ, [name]);
        }
        assert_eq!(with(&[]).len(), 12, "a shared setting is missing in the list above");
    }
}
