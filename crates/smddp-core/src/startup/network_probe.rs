//! Measurement of the network between nodes, at the creation of the first group with several nodes.
//!
//! One rank of each node, its leader, takes part. The leaders measure in pairs and agree along a binomial tree on
//! the slowest result. They also check whether the links of the tree are longer. Each leader then distributes the
//! result within its node. All data moves as point-to-point messages, so the sequence numbers of the group's
//! collectives still begin with 0.

mod estimate;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use smddp_plan::{Network, Topology};

use crate::call::types::DType;
use crate::communicator::{Communicator, Options, Work};
use crate::config::NetworkSource;
use crate::config::network::{self, NetworkEstimate, Origin, VALUES, quantise, slower};
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::sync::deadline::after;
use estimate::{Bandwidth, LARGE};

/// Tag of the probe's messages. No user message has it: torch's tags have 32 bits.
const TAG: u64 = 0x736d_6464_7070_7262;
/// Number of round trips, of which the shortest counts.
const ROUND_TRIPS: usize = 9;
/// Number of round trips on a long link, and the round trip time from which a link is long.
const FEW_ROUND_TRIPS: usize = 2;
const LONG_ROUND_TRIP: Duration = Duration::from_millis(1);
/// A tree link is measured if its latency exceeds the longest known one by this factor.
const LONGER_FACTOR: f64 = 2.0;
/// Number of small messages in a burst, and number of bursts, of which the fastest counts.
const BURST_MESSAGES: usize = 17;
const BURSTS: usize = 3;
/// Determines the network estimate of a group of several nodes. All ranks call this with the estimate in the rank
/// information.
///
/// # Errors
/// Errors of a recv. The group is then dead on all remaining ranks.
pub(crate) fn set_network_estimate(
    comm: &Communicator,
    shared: Option<Network>,
    timeout: Duration,
) -> Result<()> {
    let (config, begun) = (comm.config(), Instant::now());
    let (network, origin) = match (config.network, shared) {
        (NetworkSource::Configured(network), _) => (network, Origin::Configured),
        (NetworkSource::Default, _) => (Network::ASSUMED, Origin::Default),
        (NetworkSource::Measured, Some(network)) => (network, Origin::Earlier),
        (NetworkSource::Measured, None) => {
            let until = after(begun, timeout);
            let found = measure(&Messenger { comm, until }, comm.topology())
                .map_err(with_purpose)
                .inspect_err(|error| {
                    comm.abort(&error.to_string());
                })?;
            network::store_estimate(found);
            (found, Origin::Measured)
        }
    };
    let known = NetworkEstimate { network, origin };
    comm.set_network(known);
    let duration =
        if origin == Origin::Measured { format!(" in {:.1?}", begun.elapsed()) } else { String::new() };
    log::say(Level::Info, &format!("group `{}`: {known}{duration}", comm.name()));
    Ok(())
}

/// Adds the purpose of the probe to an error of one of its messages.
fn with_purpose(mut error: Error) -> Error {
    if let Error::Timeout { operation: text, .. }
    | Error::PeerLost { operation: text, .. }
    | Error::Closed { reason: text, .. } = &mut error
    {
        *text = format!("measuring the network between nodes (SMDDP_NETWORK=default disables it): {text}");
    }
    error
}

fn measure(messenger: &Messenger<'_>, topology: &Topology) -> Result<Network> {
    let me = messenger.comm.rank();
    let node = topology.node_of(me);
    let node_ranks = topology.ranks_of(node);
    let leaders: Vec<usize> = (0..topology.nodes()).map(|n| topology.ranks_of(n)[0]).collect();
    let agreed = messenger.memory(VALUES);
    if leaders[node] == me {
        let mut found: Option<Network> = None;
        for (measuring, answering) in pairs(leaders.len()) {
            if measuring == node {
                let measured = measure_link(messenger, leaders[answering])?;
                found = Some(found.map_or(measured, |known| slower(known, measured)));
            } else if answering == node {
                answer(messenger, leaders[measuring])?;
            }
        }
        if let Some(network) = reduce_slowest(messenger, &leaders, node, found)? {
            store(&agreed, network);
        }
        broadcast(messenger, &leaders, node, &agreed)?;
    }
    let index = node_ranks.iter().position(|&rank| rank == me).unwrap_or(0);
    broadcast(messenger, node_ranks, index, &agreed)?;
    Ok(load(&agreed))
}

/// Returns pairs of nodes in measuring order: each node with its neighbour, a last odd one with the first.
fn pairs(nodes: usize) -> impl Iterator<Item = (usize, usize)> {
    let even = (0..nodes / 2).map(|pair| (2 * pair, 2 * pair + 1));
    even.chain((nodes % 2 == 1 && nodes > 1).then(|| (nodes - 1, 0)))
}

/// Measures the link to `peer`, which runs [`answer`].
fn measure_link(messenger: &Messenger<'_>, peer: usize) -> Result<Network> {
    let probe = LinkProbe::new(messenger, peer);
    // The first messages establish the connections.
    probe.round_trips(1)?;
    let first = probe.round_trips(1)?;
    let more = if first > LONG_ROUND_TRIP { FEW_ROUND_TRIPS } else { ROUND_TRIPS };
    let network = probe.measure(first.min(probe.round_trips(more)?))?;
    probe.order(END)?;
    Ok(network)
}

/// Measures the link to `peer` if it is longer than all known ones. Neighbouring nodes may be close while two
/// halves of the nodes are distant.
fn measure_if_longer(
    messenger: &Messenger<'_>,
    peer: usize,
    known: Option<Network>,
) -> Result<Option<Network>> {
    let probe = LinkProbe::new(messenger, peer);
    let round_trip = probe.round_trips(FEW_ROUND_TRIPS)?;
    let longer = |known: Network| nanos(round_trip) > LONGER_FACTOR * 2.0 * known.latency_ns;
    let is_longer = round_trip > LONG_ROUND_TRIP && known.is_none_or(longer);
    let found = is_longer.then(|| probe.measure(round_trip)).transpose()?;
    probe.order(END)?;
    Ok(found)
}

/// Measuring side of a link.
struct LinkProbe<'a> {
    messenger: &'a Messenger<'a>,
    peer: usize,
    order: Memory,
    /// Empty message: a single frame, like the small messages of collectives.
    empty: Memory,
}

impl<'a> LinkProbe<'a> {
    fn new(messenger: &'a Messenger<'a>, peer: usize) -> Self {
        Self { messenger, peer, order: messenger.memory(ORDER_WORDS), empty: messenger.memory(0) }
    }

    fn order(&self, order: [usize; ORDER_WORDS]) -> Result<()> {
        self.order.iter().zip(order).for_each(|(slot, word)| slot.store(word as u64, Ordering::Relaxed));
        self.messenger.send(self.peer, &self.order)?.wait(None)
    }

    /// Returns the shortest of `rounds` round trips.
    fn round_trips(&self, rounds: usize) -> Result<Duration> {
        self.order([rounds, 1, 0])?;
        let mut shortest = Duration::MAX;
        for _ in 0..rounds {
            let begun = Instant::now();
            self.messenger.send(self.peer, &self.empty)?.wait(None)?;
            self.messenger.recv(self.peer, &self.empty)?;
            shortest = shortest.min(begun.elapsed());
        }
        Ok(shortest)
    }

    /// Sends `messages` messages in a burst. Returns the times of the replies, one after each of `replies` equal
    /// parts.
    fn burst(&self, memory: &Memory, messages: usize, replies: usize) -> Result<[Duration; 2]> {
        let large = !memory.is_empty();
        self.order([replies, messages / replies, usize::from(large)])?;
        let begun = Instant::now();
        let sends =
            (0..messages).map(|_| self.messenger.send(self.peer, memory)).collect::<Result<Vec<_>>>()?;
        let mut times = [Duration::ZERO; 2];
        for time in &mut times[..replies] {
            self.messenger.recv(self.peer, &self.empty)?;
            *time = begun.elapsed();
        }
        sends.iter().try_for_each(|send| send.wait(None))?;
        Ok(times)
    }

    fn measure(&self, round_trip: Duration) -> Result<Network> {
        // The cost of a message depends on the hosts, and is not measurable on a long link.
        let mut message_ns = Network::ASSUMED.message_ns;
        if round_trip <= LONG_ROUND_TRIP {
            let bursts = (0..BURSTS)
                .map(|_| Ok(self.burst(&self.empty, BURST_MESSAGES, 1)?[0]))
                .collect::<Result<Vec<_>>>()?;
            let burst_time = bursts.into_iter().min().unwrap_or_default();
            message_ns = nanos(burst_time.saturating_sub(round_trip)) / (BURST_MESSAGES - 1) as f64;
        }
        let (large, mut bandwidth) = (self.messenger.memory(LARGE / 8), Bandwidth::new(round_trip));
        while let Some(messages) = bandwidth.next() {
            let [half, whole] = self.burst(&large, messages, 2)?;
            bandwidth.add(messages, half, whole);
        }
        let credible_round_trip =
            network::plausible_round_trip(round_trip, self.messenger.comm.round_trip(self.peer));
        Ok(Network {
            latency_ns: nanos(credible_round_trip) / 2.0,
            message_ns,
            bytes_per_ns: bandwidth.rate(),
            ..Network::ASSUMED
        })
    }
}

/// Answering side of a [`LinkProbe`].
fn answer(messenger: &Messenger<'_>, peer: usize) -> Result<()> {
    let (order, empty, large) =
        (messenger.memory(ORDER_WORDS), messenger.memory(0), messenger.memory(LARGE / 8));
    loop {
        messenger.recv(peer, &order)?;
        let [rounds, messages, bytes] = [0, 1, 2].map(|word: usize| order[word].load(Ordering::Relaxed));
        if rounds == 0 {
            return Ok(());
        }
        for _ in 0..rounds {
            let memory = if bytes > 0 { &large } else { &empty };
            (0..messages).try_for_each(|_| messenger.recv(peer, memory))?;
            messenger.send(peer, &empty)?.wait(None)?;
        }
    }
}

/// Words of an order to the answering side: number of replies, messages before each reply, and 1 for large
/// messages.
const ORDER_WORDS: usize = 3;
const END: [usize; ORDER_WORDS] = [0; ORDER_WORDS];

fn nanos(time: Duration) -> f64 {
    time.as_nanos().max(1) as f64
}

/// Reduces the slowest results of all leaders, rounded to coarse steps, to the first leader.
fn reduce_slowest(
    messenger: &Messenger<'_>,
    leaders: &[usize],
    at: usize,
    mut found: Option<Network>,
) -> Result<Option<Network>> {
    let memory = messenger.memory(1 + VALUES);
    let mut step = 1;
    while step < leaders.len() {
        if at & step > 0 {
            memory[0].store(u64::from(found.is_some()), Ordering::Relaxed);
            store(&memory[1..], found.unwrap_or_default());
            messenger.send(leaders[at - step], &memory)?.wait(None)?;
            if step > 1 {
                answer(messenger, leaders[at - step])?;
            }
            return Ok(None);
        }
        if at + step < leaders.len() {
            messenger.recv(leaders[at + step], &memory)?;
            if memory[0].load(Ordering::Relaxed) > 0 {
                let theirs = load(&memory[1..]);
                found = Some(found.map_or(theirs, |mine| slower(mine, theirs)));
            }
            // The leaders of the first step have measured this link already. The other links connect all nodes, so
            // at least one of them is long if any link is.
            if step > 1
                && let Some(measured) = measure_if_longer(messenger, leaders[at + step], found)?
            {
                found = Some(found.map_or(measured, |known| slower(known, measured)));
            }
        }
        step *= 2;
    }
    Ok(found.map(quantise))
}

/// Broadcasts `memory` of the first of `ranks` to all of them; `at` is the index of this rank.
fn broadcast(messenger: &Messenger<'_>, ranks: &[usize], at: usize, memory: &Memory) -> Result<()> {
    let mut step = ranks.len().next_power_of_two();
    while step > 1 {
        step /= 2;
        if at % (2 * step) == step {
            messenger.recv(ranks[at - step], memory)?;
        } else if at.is_multiple_of(2 * step) && at + step < ranks.len() {
            messenger.send(ranks[at + step], memory)?.wait(None)?;
        }
    }
    Ok(())
}

fn store(memory: &[AtomicU64], network: Network) {
    for (slot, word) in memory.iter().zip(network::to_bits(network)) {
        slot.store(word, Ordering::Relaxed);
    }
}

fn load(memory: &[AtomicU64]) -> Network {
    let mut words = [0; VALUES];
    words.iter_mut().zip(memory).for_each(|(word, slot)| *word = slot.load(Ordering::Relaxed));
    network::from_bits(words)
}

/// Message memory, kept alive while a message may access it.
type Memory = Arc<[AtomicU64]>;

/// Messages of the probe, with a common deadline.
struct Messenger<'a> {
    comm: &'a Communicator,
    until: Instant,
}

impl Messenger<'_> {
    fn memory(&self, words: usize) -> Memory {
        (0..words).map(|_| AtomicU64::new(0)).collect()
    }

    fn options(&self, memory: &Memory) -> Options {
        let timeout = self.until.saturating_duration_since(Instant::now());
        Options { timeout: Some(timeout), keep: Some(Box::new(memory.clone())), on: None }
    }

    fn send(&self, to: usize, memory: &Memory) -> Result<Work> {
        let (start, count) = (memory.as_ptr().cast(), memory.len() * 8);
        // SAFETY: `keep` holds the memory until the message is over. No thread writes it meanwhile: a token is
        // reused only after its work has completed, and the messages of a burst are only read.
        unsafe { self.comm.send(start, count, DType::U8, to, TAG, self.options(memory)) }
    }

    /// Receives a message and returns when it has arrived.
    fn recv(&self, from: usize, memory: &Memory) -> Result<()> {
        let (start, count) = (memory.as_ptr().cast_mut().cast(), memory.len() * 8);
        // SAFETY: `keep` holds the memory until the message is over, and it consists of cells that allow writes
        // through a shared reference. This thread waits meanwhile; no other message in progress uses the same
        // memory.
        let work = unsafe { self.comm.recv(start, count, DType::U8, Some(from), TAG, self.options(memory)) };
        work?.wait(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_measures_one_or_two_links() {
        for nodes in 2..40 {
            let nodes_seen: std::collections::HashSet<usize> =
                pairs(nodes).flat_map(|(a, b)| [a, b]).collect();
            assert_eq!(nodes_seen.len(), nodes);
            for node in 0..nodes {
                assert!(pairs(nodes).filter(|&(a, b)| a == node || b == node).count() <= 2);
            }
        }
    }
}
