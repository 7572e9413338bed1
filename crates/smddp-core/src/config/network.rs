//! Network model between nodes: setting, exchange between ranks, and log text.

use std::sync::Mutex;
use std::time::Duration;

use smddp_base::fork::PerProcess;
use smddp_plan::Network;
use smddp_plan::names::did_you_mean;

use crate::sync::lock;

/// Source of a network model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Built-in default; nothing was measured.
    Default,
    /// Set with `SMDDP_NETWORK`, or by the program.
    Configured,
    /// Measured by this group when it started.
    Measured,
    /// Measured by earlier groups of this process.
    Earlier,
}

/// A network model and its source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NetworkEstimate {
    /// Parameters of the model.
    pub network: Network,
    /// Source of the parameters.
    pub origin: Origin,
}

/// Formats as "between nodes: 16 us, 1.6 us a message, 1 Gbit/s a node (measured)".
impl std::fmt::Display for NetworkEstimate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Network { latency_ns, message_ns, bytes_per_ns, .. } = self.network;
        let origin = match self.origin {
            Origin::Default => "assumed",
            Origin::Configured => "set",
            Origin::Measured => "measured",
            Origin::Earlier => "measured by an earlier group",
        };
        let (latency, message, rate) = (
            format_value(latency_ns / 1e3),
            format_value(message_ns / 1e3),
            format_value(bytes_per_ns * 8.0),
        );
        write!(f, "between nodes: {latency} us, {message} us a message, {rate} Gbit/s a node ({origin})")
    }
}

/// Formats two significant digits, or all digits before the decimal point.
fn format_value(value: f64) -> String {
    let digits = if value >= 9.95 || value == 0.0 {
        0
    } else if value >= 0.995 {
        1
    } else {
        // Digits after the decimal point up to the second significant one.
        (1.0 - value.log10().floor()).clamp(2.0, 9.0) as usize
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Source of a group's network model (`SMDDP_NETWORK`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NetworkSource {
    /// Measurement by the first group that spans nodes.
    Measured,
    /// Built-in default.
    Default,
    /// Parameters of the setting.
    Configured(Network),
}

/// Parses `measure`, `default` or `latency_us=15,message_us=1,gbit=10`. The error names the expected form.
pub(crate) fn parse(text: &str) -> Result<NetworkSource, String> {
    match text.to_ascii_lowercase().as_str() {
        "measure" => Ok(NetworkSource::Measured),
        "default" => Ok(NetworkSource::Default),
        _ if text.contains('=') => parse_values(text).map(NetworkSource::Configured),
        _ => Err(format!(
            "measure, default, or latency_us=..,message_us=..,gbit=..{}",
            did_you_mean(text, ["measure", "default"])
        )),
    }
}

/// Parses `latency_us=15,message_us=1,gbit=10`. Omitted values have the default.
fn parse_values(text: &str) -> Result<Network, String> {
    let mut network = Network::ASSUMED;
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let want = || {
            format!(
                "{part:?} is not one of latency_us=.., message_us=.., gbit=.. with a number above 0 (message_us: or 0)"
            )
        };
        let (name, value) = part.split_once('=').ok_or_else(want)?;
        let name = name.trim();
        let value: f64 = value.trim().parse().map_err(|_| want())?;
        // The value in nanoseconds must be finite, too.
        let fits = (value * 1e3).is_finite() && (value > 0.0 || value == 0.0 && name == "message_us");
        match name {
            "latency_us" if fits => network.latency_ns = value * 1e3,
            "message_us" if fits => network.message_ns = value * 1e3,
            "gbit" if fits => network.bytes_per_ns = value / 8.0,
            _ => return Err(want()),
        }
    }
    Ok(network)
}

/// Returns the more expensive value of each property: a collective waits for its slowest rank.
pub(crate) fn slower(a: Network, b: Network) -> Network {
    Network {
        latency_ns: a.latency_ns.max(b.latency_ns),
        message_ns: a.message_ns.max(b.message_ns),
        bytes_per_ns: a.bytes_per_ns.min(b.bytes_per_ns),
        ..Network::ASSUMED
    }
}

/// Five steps per decade, so that two measurements of one network mostly give equal values.
const STEPS: [f64; 5] = [1.0, 1.6, 2.5, 4.0, 6.3];

/// Maximum delay of a process that shares its core, compared with its kernel. A longer delay indicates a busy host,
/// not a slow network.
const MAX_BUSY_DELAY: Duration = Duration::from_millis(10);

/// Limits a measured round trip to a plausible value. `kernel`: shortest round trip of the connection that the kernel
/// reports.
pub(crate) fn plausible_round_trip(measured: Duration, kernel: Option<Duration>) -> Duration {
    measured.min(kernel.unwrap_or_default() + MAX_BUSY_DELAY)
}

/// Bounds of plausible measurements. Values beyond them indicate a busy host, not a slow network.
const MAX_MESSAGE_NS: f64 = 2e4;
const MIN_BYTES_PER_NS: f64 = 0.0125;

/// Rounds each value to the nearest step, by ratio.
pub(crate) fn quantise(network: Network) -> Network {
    // All measured values are within these decades.
    let steps = || (-6..10).flat_map(|decade| STEPS.map(|step| step * 10f64.powi(decade)));
    let nearest = |value: f64| {
        let apart = |step: &f64| (step / value).max(value / step);
        steps().min_by(|a, b| apart(a).total_cmp(&apart(b))).unwrap_or(value)
    };
    let (latency, message) = (network.latency_ns, network.message_ns.min(MAX_MESSAGE_NS));
    let rate = network.bytes_per_ns.max(MIN_BYTES_PER_NS);
    Network {
        latency_ns: nearest(latency),
        message_ns: nearest(message),
        bytes_per_ns: nearest(rate * 8.0) / 8.0,
        ..Network::ASSUMED
    }
}

/// Number of 64-bit values of a network model, as ranks exchange it.
pub(crate) const VALUES: usize = 3;

pub(crate) fn to_bits(network: Network) -> [u64; VALUES] {
    let Network { latency_ns, message_ns, bytes_per_ns, .. } = network;
    [latency_ns, message_ns, bytes_per_ns].map(f64::to_bits)
}

pub(crate) fn from_bits(bits: [u64; VALUES]) -> Network {
    let [latency_ns, message_ns, bytes_per_ns] = bits.map(f64::from_bits);
    Network { latency_ns, message_ns, bytes_per_ns, ..Network::ASSUMED }
}

/// Model measured by earlier groups of this process.
static EARLIER: PerProcess<Mutex<Option<Network>>> = PerProcess::new();

pub(crate) fn store_estimate(network: Network) {
    *lock(EARLIER.get()) = Some(network);
}

/// Encodes the stored model for this rank's address record; empty if there is none.
pub(crate) fn encode_estimate() -> Vec<u8> {
    let earlier = *lock(EARLIER.get());
    earlier
        .map(|network| to_bits(network).into_iter().flat_map(u64::to_le_bytes).collect())
        .unwrap_or_default()
}

/// Combines the models of all ranks, or returns `None` if any rank has none. All ranks get the same result.
pub(crate) fn combine_estimates<'a>(notes: impl Iterator<Item = &'a [u8]>) -> Option<Network> {
    let decode = |encoded: &[u8]| {
        let mut bits = [0; VALUES];
        let chunks = encoded.as_chunks::<8>();
        if chunks.0.len() != VALUES || !chunks.1.is_empty() {
            return None;
        }
        bits.iter_mut().zip(chunks.0).for_each(|(word, bytes)| *word = u64::from_le_bytes(*bytes));
        let Network { latency_ns, message_ns, bytes_per_ns, incast } = from_bits(bits);
        let in_range = latency_ns.min(bytes_per_ns) > 0.0 && message_ns >= 0.0;
        let finite = [latency_ns, message_ns, bytes_per_ns].iter().all(|value| value.is_finite());
        (in_range && finite).then_some(Network { latency_ns, message_ns, bytes_per_ns, incast })
    };
    let all: Option<Vec<Network>> = notes.map(decode).collect();
    all?.into_iter().reduce(slower)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_network_error_names_the_invalid_part() {
        for (text, part) in
            [("gbit=10,speed=3", "speed=3"), ("gbit=1,latency_us", "latency_us"), ("gbit=0", "gbit=0")]
        {
            assert!(parse(text).unwrap_err().contains(&format!("{part:?}")));
        }
        assert!(parse("latency_us").unwrap_err().contains("latency_us=.."));
        assert_eq!(parse_values("message_us=0").unwrap().message_ns, 0.0);
    }

    #[test]
    fn similar_measurements_give_equal_values() {
        let of = |noise: f64| {
            quantise(Network {
                latency_ns: 15_700.0 * noise,
                message_ns: 980.0 / noise,
                bytes_per_ns: 0.1175 * noise,
                ..Network::ASSUMED
            })
        };
        assert_eq!(
            of(1.0),
            Network { latency_ns: 16_000.0, message_ns: 1_000.0, bytes_per_ns: 0.125, ..Network::ASSUMED }
        );
        for noise in [0.9, 1.1] {
            assert_eq!(of(noise), of(1.0));
        }
    }

    #[test]
    fn long_round_trip_is_accepted_if_the_kernel_measured_it() {
        let ms = Duration::from_millis;
        assert_eq!(plausible_round_trip(ms(50), Some(ms(49))), ms(50));
        assert_eq!(plausible_round_trip(ms(50), Some(ms(1))), ms(11));
        assert_eq!(plausible_round_trip(ms(50), None), ms(10));
        let remote = Network { latency_ns: 25e6, ..Network::ASSUMED };
        assert_eq!(quantise(remote).latency_ns, 25e6);
    }

    #[test]
    fn ranks_agree_on_the_slowest_model_or_on_none() {
        let fast = Network { latency_ns: 5_000.0, message_ns: 400.0, bytes_per_ns: 4.0, ..Network::ASSUMED };
        let encode = |n: Network| to_bits(n).into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>();
        let both = [encode(fast), encode(Network::ASSUMED)];
        assert_eq!(combine_estimates(both.iter().map(Vec::as_slice)), Some(slower(fast, Network::ASSUMED)));
        let lacking = [encode(fast), Vec::new()];
        assert_eq!(combine_estimates(lacking.iter().map(Vec::as_slice)), None);
    }

    #[test]
    fn values_have_two_significant_digits() {
        let known = |latency_ns, bytes_per_ns| {
            let network = Network { latency_ns, message_ns: 1_600.0, bytes_per_ns, ..Network::ASSUMED };
            NetworkEstimate { network, origin: Origin::Measured }.to_string()
        };
        assert_eq!(
            known(16_000.0, 0.125),
            "between nodes: 16 us, 1.6 us a message, 1 Gbit/s a node (measured)"
        );
        assert!(known(2_500.0, 0.1175).contains(" 2.5 us, ") && known(1.0, 0.1175).contains("0.94 Gbit/s"));
        assert!(known(10.0, 12.5).contains(" 0.01 us") && known(10.0, 12.5).contains(" 100 Gbit/s"));
    }
}
