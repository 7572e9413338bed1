//! Ports, and the times at which they are free.

use super::cluster::Cluster;

/// Picoseconds.
pub(super) type Time = u64;

pub(super) fn picoseconds(seconds: f64) -> Time {
    (seconds * 1e12).round() as Time
}

pub(super) fn seconds(time: Time) -> f64 {
    time as f64 * 1e-12
}

/// One direction of a port.
#[derive(Clone, Copy, Debug)]
struct Direction {
    free: Time,
    ps_per_byte: f64,
    message: Time,
}

impl Direction {
    fn new(bytes_per_s: f64, message_s: f64) -> Self {
        Self { free: 0, ps_per_byte: 1e12 / bytes_per_s, message: picoseconds(message_s) }
    }

    fn span(&self, bytes: u64) -> Time {
        (bytes as f64 * self.ps_per_byte).round() as Time
    }
}

/// A message in flight: it has taken its out-port.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Departure {
    /// Time at which it got the port.
    pub(super) start: Time,
    /// Arrival time of its first byte.
    pub(super) arrives: Time,
    /// Earliest arrival time of its last byte.
    pub(super) last: Time,
}

/// A message that has taken its in-port.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) start: Time,
    pub(super) finish: Time,
}

/// All ports of a cluster. Each direction must be taken in the order of time.
pub(super) struct Ports {
    node: Vec<u32>,
    /// Index of each rank's rail (or bundle of rails).
    rail: Vec<u32>,
    rail_out: Vec<Direction>,
    rail_in: Vec<Direction>,
    /// Node of the last message on each rail.
    rail_from: Vec<u32>,
    incast: f64,
    local_out: Vec<Direction>,
    local_in: Vec<Direction>,
    uplink: Vec<Option<(Direction, Direction)>>,
    multicast: bool,
    pub(super) network_latency: Time,
    pub(super) local_latency: Time,
}

impl Ports {
    pub(super) fn new(cluster: &Cluster) -> Self {
        let mut rail = Vec::with_capacity(cluster.size());
        let mut rails = Vec::new();
        for (node, &ranks) in cluster.ranks.iter().enumerate() {
            let (count, rate) = (cluster.rails_of(node), cluster.rail_bytes_per_s(node));
            // Rails are assigned in order: neighbouring ranks share one, or one rank bundles several.
            let groups = count.min(ranks);
            rail.extend((0..ranks).map(|rank| (rails.len() + rank * groups / ranks) as u32));
            rails.extend((0..groups).map(|group| {
                let bundle = (group + 1) * count / groups - group * count / groups;
                Direction::new(rate * bundle as f64, cluster.network.message_s)
            }));
        }
        let local = vec![Direction::new(cluster.local.bytes_per_s, cluster.local.message_s); cluster.size()];
        let uplink = (0..cluster.nodes())
            .map(|node| {
                let direction = Direction::new(cluster.uplink(node)?, 0.0);
                Some((direction, direction))
            })
            .collect();
        Self {
            node: cluster.node_of().into_iter().map(|node| node as u32).collect(),
            rail,
            rail_out: rails.clone(),
            rail_from: vec![u32::MAX; rails.len()],
            rail_in: rails,
            incast: cluster.incast,
            local_out: local.clone(),
            local_in: local,
            uplink,
            multicast: cluster.local_multicast,
            network_latency: picoseconds(cluster.network.latency_s),
            local_latency: picoseconds(cluster.local.latency_s),
        }
    }

    pub(super) fn node(&self, rank: usize) -> usize {
        self.node[rank] as usize
    }

    /// Takes the rail of `rank` for a message into the network.
    pub(super) fn send(&mut self, rank: usize, bytes: u64, now: Time) -> Departure {
        let port = &mut self.rail_out[self.rail[rank] as usize];
        let start = now.max(port.free);
        let first = start + port.message;
        port.free = first + port.span(bytes);
        let latency = self.network_latency;
        Departure { start, arrives: first + latency, last: port.free + latency }
    }

    /// Returns true if messages of `rank` pass a narrower uplink after its rail.
    pub(super) fn has_uplink(&self, rank: usize) -> bool {
        self.uplink[self.node[rank] as usize].is_some()
    }

    /// Takes the uplink when the first byte of a message has passed the rail. (Taking it together with the
    /// rail would let messages that wait for their rails block others.)
    pub(super) fn pass_uplink(
        &mut self,
        rank: usize,
        bytes: u64,
        departure: Departure,
        now: Time,
    ) -> Departure {
        let Some((out, _)) = &mut self.uplink[self.node[rank] as usize] else {
            return departure;
        };
        let first = now.max(out.free);
        out.free = first + out.span(bytes);
        let latency = self.network_latency;
        Departure { arrives: first + latency, last: departure.last.max(out.free + latency), ..departure }
    }

    /// Takes the in-ports when the first byte of a message of `writer` reaches the node of `rank`.
    pub(super) fn receive(
        &mut self,
        rank: usize,
        writer: usize,
        bytes: u64,
        last: Time,
        now: Time,
    ) -> Arrival {
        let (mut first, mut last) = (now, last);
        if let Some((_, inward)) = &mut self.uplink[self.node[rank] as usize] {
            first = now.max(inward.free);
            inward.free = first + inward.span(bytes);
            last = last.max(inward.free);
        }
        let (rail, from) = (self.rail[rank] as usize, self.node[writer]);
        let port = &mut self.rail_in[rail];
        let start = first.max(port.free);
        // Streams of several nodes on one port lose part of its rate, unless one ended long before the other
        // arrives.
        let over = port.free + self.network_latency / 2;
        let congested = port.free > 0 && first < over && self.rail_from[rail] != from;
        let span = match congested {
            true => (port.span(bytes) as f64 * self.incast).round() as Time,
            false => port.span(bytes),
        };
        self.rail_from[rail] = from;
        port.free = start + port.message + span;
        Arrival { start, finish: last.max(start + span) }
    }

    /// Takes the local port of `rank` for a write to `readers` ranks of its node.
    pub(super) fn write(&mut self, rank: usize, bytes: u64, readers: usize, now: Time) -> Departure {
        let port = &mut self.local_out[rank];
        let copies = if self.multicast { 1 } else { readers as u64 };
        let start = now.max(port.free);
        port.free = start + port.message + port.span(bytes * copies);
        let latency = self.local_latency;
        Departure { start, arrives: start + port.message + latency, last: port.free + latency }
    }

    /// Takes the local port of `rank` when a write of a rank of its node arrives.
    pub(super) fn read(&mut self, rank: usize, bytes: u64, last: Time, now: Time) -> Arrival {
        let port = &mut self.local_in[rank];
        let start = now.max(port.free);
        // Reading from slots costs the reader; a write over NVLink does not.
        let message = if self.multicast { port.message } else { 0 };
        port.free = start + message + port.span(bytes);
        Arrival { start, finish: last.max(start + port.span(bytes)) }
    }
}
