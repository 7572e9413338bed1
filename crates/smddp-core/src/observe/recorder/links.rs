//! Network estimate of a group and its TCP connections, as JSON for `smddp status` and metrics.

use std::cmp::Reverse;

use serde_json::{Value, json};
use smddp_group::links::LinkStats;
use smddp_plan::Network;

use super::Recorder;
use crate::config::network::Origin;

/// Maximum number of connections of a group in a dump, the slowest ones.
const MAX_LINKS: usize = 32;

/// Returns the estimate by which this group selects algorithms between nodes; null before it is known. `basis`: "default",
/// "set" or "measured".
pub(super) fn network(recorder: &Recorder) -> Option<Value> {
    let estimate = recorder.network.get()?;
    Some(json!({
        "latency_us": estimate.network.latency_ns / 1e3,
        "bytes_per_s": estimate.network.bytes_per_ns * 1e9,
        "basis": match estimate.origin {
            Origin::Default => "default",
            Origin::Configured => "set",
            Origin::Measured | Origin::Earlier => "measured",
        },
    }))
}

/// Returns the slowest TCP connections of this rank with ranks of other nodes, relative to the estimate.
pub(super) fn links(recorder: &Recorder) -> Vec<Value> {
    let links = recorder.members.peers.as_ref().map(|peers| peers.links()).unwrap_or_default();
    let network = recorder.network.get().map_or(Network::ASSUMED, |estimate| estimate.network);
    slowest(links, network).iter().map(link).collect()
}

fn slowest(mut links: Vec<LinkStats>, network: Network) -> Vec<LinkStats> {
    let slowness = |link: &LinkStats| {
        let round_trip = link.min_round_trip.map_or(0.0, |time| time.as_nanos() as f64);
        let rate = link.delivery_rate.max(link.mean_rate).map_or(f64::INFINITY, |rate| rate as f64 / 1e9);
        // Thousandths, because floating-point numbers have no total order.
        (1e3 * (round_trip / (2.0 * network.latency_ns)).max(network.bytes_per_ns / rate)) as u64
    };
    links.sort_by_cached_key(|link| Reverse(slowness(link)));
    links.truncate(MAX_LINKS);
    links
}

fn link(link: &LinkStats) -> Value {
    json!({
        "peer": link.peer,
        "rtt_us": link.round_trip.as_micros() as u64,
        "min_rtt_us": link.min_round_trip.map(|time| time.as_micros() as u64),
        "delivery_bytes_per_s": link.delivery_rate,
        "mean_bytes_per_s": link.mean_rate,
        "receiver_limited": link.receiver_limited,
        "sent_bytes": link.sent,
        "received_bytes": link.received,
        "retransmits": link.retransmits,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn of(peer: usize, min_round_trip_us: u64, mean_rate: Option<u64>) -> LinkStats {
        let min_round_trip = Some(Duration::from_micros(min_round_trip_us));
        LinkStats { peer, min_round_trip, mean_rate, ..LinkStats::default() }
    }

    #[test]
    fn dump_has_the_slowest_links_by_round_trip_or_rate() {
        let network = Network { latency_ns: 50_000.0, bytes_per_ns: 1.0, ..Network::ASSUMED };
        let fast = (0..40).map(|peer| of(peer, 100, Some(1_000_000_000)));
        let slow = [of(40, 500, None), of(41, 100, Some(100_000_000)), of(42, 100, Some(0))];
        let found = slowest(fast.chain(slow).collect(), network);
        let peers: Vec<usize> = found.iter().map(|link| link.peer).collect();
        assert_eq!((peers.len(), &peers[..4]), (MAX_LINKS, &[42, 41, 40, 0][..]));
    }
}
