//! A short look at the network between nodes, when the first group that spans some is made.
//!
//! One rank of each node, its leader, takes part; the leaders measure in pairs and agree along a binomial tree on the
//! slowest of what was found (and look whether the tree's own ways are longer), then each tells its own node. All of it goes as messages between two ranks, so
//! the numbers of the group's collectives begin with 0 all the same.

mod estimate;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use smddp_plan::{Network, Topology};

use crate::call::types::DType;
use crate::communicator::{Communicator, Options, Work};
use crate::config::network::{self, NetworkEstimate, Origin, VALUES, quantise, slower};
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::sync::deadline::after;
use estimate::{Gauge, LARGE};

/// No message of a user has it: torch's tags are 32 bits wide.
const TAG: u64 = 0x736d_6464_7070_7262;
/// Messages there and back; the quickest counts.
const ROUND_TRIPS: usize = 9;
/// The same on a long way, and what makes it one.
const FEW_ROUND_TRIPS: usize = 2;
const FAR: Duration = Duration::from_millis(1);
/// So many times as long a way as the longest that was measured is measured too.
const LONGER: f64 = 2.0;
/// Small messages in a row, and how many such rows; again the quickest counts.
const ROW: usize = 17;
const ROWS: usize = 3;
/// Makes the network known to a group of several nodes. Every rank of it calls this with what the cards say.
///
/// # Errors
/// As of a recv; the group is dead then on all ranks that are left.
pub(crate) fn learn(comm: &Communicator, noted: Option<Network>, timeout: Duration) -> Result<()> {
    let (config, begun) = (comm.config(), Instant::now());
    let (network, origin) = match (config.network, config.probe, noted) {
        (Some(network), ..) => (network, Origin::Configured),
        (None, false, _) => (Network::ASSUMED, Origin::Default),
        (None, true, Some(network)) => (network, Origin::Earlier),
        (None, true, None) => {
            let until = after(begun, timeout);
            let found =
                measure(&Talk { comm, until }, comm.topology()).map_err(named).inspect_err(|error| {
                    comm.abort(&error.to_string());
                })?;
            network::store_estimate(found);
            (found, Origin::Measured)
        }
    };
    let known = NetworkEstimate { network, origin };
    comm.set_network(known);
    let took =
        if origin == Origin::Measured { format!(" in {:.1?}", begun.elapsed()) } else { String::new() };
    log::say(Level::Info, &format!("group `{}`: {known}{took}", comm.name()));
    Ok(())
}

/// An error of one of the probe's messages says what it was for.
fn named(mut error: Error) -> Error {
    if let Error::Timeout { what, .. } | Error::PeerLost { what, .. } | Error::Closed { reason: what, .. } =
        &mut error
    {
        *what = format!("measuring the network between nodes (SMDDP_PROBE=0 goes without): {what}");
    }
    error
}

fn measure(talk: &Talk<'_>, topology: &Topology) -> Result<Network> {
    let me = talk.comm.rank();
    let node = topology.node_of(me);
    let mates = topology.ranks_of(node);
    let leaders: Vec<usize> = (0..topology.nodes()).map(|n| topology.ranks_of(n)[0]).collect();
    let agreed = talk.memory(VALUES);
    if leaders[node] == me {
        let mut found: Option<Network> = None;
        for (asks, answers) in pairs(leaders.len()) {
            if asks == node {
                let seen = ask(talk, leaders[answers])?;
                found = Some(found.map_or(seen, |known| slower(known, seen)));
            } else if answers == node {
                answer(talk, leaders[asks])?;
            }
        }
        if let Some(network) = agree(talk, &leaders, node, found)? {
            store(&agreed, network);
        }
        spread(talk, &leaders, node, &agreed)?;
    }
    let place = mates.iter().position(|&rank| rank == me).unwrap_or(0);
    spread(talk, mates, place, &agreed)?;
    Ok(load(&agreed))
}

/// Nodes that measure together, in the order in which they do: each with its neighbour, an odd one with the first.
fn pairs(nodes: usize) -> impl Iterator<Item = (usize, usize)> {
    let even = (0..nodes / 2).map(|pair| (2 * pair, 2 * pair + 1));
    even.chain((nodes % 2 == 1 && nodes > 1).then(|| (nodes - 1, 0)))
}

/// What lies between this rank and `peer`, which answers.
fn ask(talk: &Talk<'_>, peer: usize) -> Result<Network> {
    let asker = Asker::new(talk, peer);
    // Connections are made by the first messages.
    asker.round_trips(1)?;
    let first = asker.round_trips(1)?;
    let more = if first > FAR { FEW_ROUND_TRIPS } else { ROUND_TRIPS };
    let network = asker.measure(first.min(asker.round_trips(more)?))?;
    asker.order(END)?;
    Ok(network)
}

/// The same where it is a longer way than is known: neighbours may all be near, and two halves of the nodes far apart.
fn ask_if_longer(talk: &Talk<'_>, peer: usize, known: Option<Network>) -> Result<Option<Network>> {
    let asker = Asker::new(talk, peer);
    let there_and_back = asker.round_trips(FEW_ROUND_TRIPS)?;
    let longer = |known: Network| nanos(there_and_back) > LONGER * 2.0 * known.latency_ns;
    let ask = there_and_back > FAR && known.is_none_or(longer);
    let found = ask.then(|| asker.measure(there_and_back)).transpose()?;
    asker.order(END)?;
    Ok(found)
}

/// The side that measures.
struct Asker<'a> {
    talk: &'a Talk<'a>,
    peer: usize,
    order: Memory,
    /// An empty message is one frame, as a collective's small ones are.
    empty: Memory,
}

impl<'a> Asker<'a> {
    fn new(talk: &'a Talk<'a>, peer: usize) -> Self {
        Self { talk, peer, order: talk.memory(ORDER), empty: talk.memory(0) }
    }

    fn order(&self, order: [usize; ORDER]) -> Result<()> {
        self.order.iter().zip(order).for_each(|(cell, word)| cell.store(word as u64, Ordering::Relaxed));
        self.talk.send(self.peer, &self.order)?.wait(None)
    }

    /// The quickest of so many.
    fn round_trips(&self, rounds: usize) -> Result<Duration> {
        self.order([rounds, 1, 0])?;
        let mut quickest = Duration::MAX;
        for _ in 0..rounds {
            let begun = Instant::now();
            self.talk.send(self.peer, &self.empty)?.wait(None)?;
            self.talk.recv(self.peer, &self.empty)?;
            quickest = quickest.min(begun.elapsed());
        }
        Ok(quickest)
    }

    /// So many messages in a row; after what time word came, one or two times in equal shares.
    fn train(&self, memory: &Memory, messages: usize, words: usize) -> Result<[Duration; 2]> {
        let large = !memory.is_empty();
        self.order([words, messages / words, usize::from(large)])?;
        let begun = Instant::now();
        let sends = (0..messages).map(|_| self.talk.send(self.peer, memory)).collect::<Result<Vec<_>>>()?;
        let mut took = [Duration::ZERO; 2];
        for word in &mut took[..words] {
            self.talk.recv(self.peer, &self.empty)?;
            *word = begun.elapsed();
        }
        sends.iter().try_for_each(|send| send.wait(None))?;
        Ok(took)
    }

    fn measure(&self, there_and_back: Duration) -> Result<Network> {
        // What a message costs is the hosts' matter, and is lost in the noise of a long way.
        let mut message_ns = Network::ASSUMED.message_ns;
        if there_and_back <= FAR {
            let rows =
                (0..ROWS).map(|_| Ok(self.train(&self.empty, ROW, 1)?[0])).collect::<Result<Vec<_>>>()?;
            let row = rows.into_iter().min().unwrap_or_default();
            message_ns = nanos(row.saturating_sub(there_and_back)) / (ROW - 1) as f64;
        }
        let (large, mut gauge) = (self.talk.memory(LARGE / 8), Gauge::new(there_and_back));
        while let Some(messages) = gauge.next() {
            let [half, whole] = self.train(&large, messages, 2)?;
            gauge.add(messages, half, whole);
        }
        let way = network::plausible_round_trip(there_and_back, self.talk.comm.round_trip(self.peer));
        Ok(Network {
            latency_ns: nanos(way) / 2.0,
            message_ns,
            bytes_per_ns: gauge.rate(),
            ..Network::ASSUMED
        })
    }
}

/// The other side of an [`Asker`].
fn answer(talk: &Talk<'_>, peer: usize) -> Result<()> {
    let (order, empty, large) = (talk.memory(ORDER), talk.memory(0), talk.memory(LARGE / 8));
    loop {
        talk.recv(peer, &order)?;
        let [rounds, messages, bytes] = [0, 1, 2].map(|word: usize| order[word].load(Ordering::Relaxed));
        if rounds == 0 {
            return Ok(());
        }
        for _ in 0..rounds {
            let memory = if bytes > 0 { &large } else { &empty };
            (0..messages).try_for_each(|_| talk.recv(peer, memory))?;
            talk.send(peer, &empty)?.wait(None)?;
        }
    }
}

/// What the answering side is to do next: so many times hear so many messages, large ones or none, and say so.
const ORDER: usize = 3;
const END: [usize; ORDER] = [0; ORDER];

fn nanos(time: Duration) -> f64 {
    time.as_nanos().max(1) as f64
}

/// The slowest that any leader has found, at the first of them; in coarse steps.
fn agree(
    talk: &Talk<'_>,
    leaders: &[usize],
    at: usize,
    mut found: Option<Network>,
) -> Result<Option<Network>> {
    let memory = talk.memory(1 + VALUES);
    let mut step = 1;
    while step < leaders.len() {
        if at & step > 0 {
            memory[0].store(u64::from(found.is_some()), Ordering::Relaxed);
            store(&memory[1..], found.unwrap_or_default());
            talk.send(leaders[at - step], &memory)?.wait(None)?;
            if step > 1 {
                answer(talk, leaders[at - step])?;
            }
            return Ok(None);
        }
        if at + step < leaders.len() {
            talk.recv(leaders[at + step], &memory)?;
            if memory[0].load(Ordering::Relaxed) > 0 {
                let theirs = load(&memory[1..]);
                found = Some(found.map_or(theirs, |mine| slower(mine, theirs)));
            }
            // The two of the first step have measured. Of the ways of the others, which join all nodes, one at least
            // is a long way if any is.
            if step > 1
                && let Some(seen) = ask_if_longer(talk, leaders[at + step], found)?
            {
                found = Some(found.map_or(seen, |known| slower(known, seen)));
            }
        }
        step *= 2;
    }
    Ok(found.map(quantise))
}

/// What the first of `ranks` has in `memory` comes to all of them; this rank is number `at`.
fn spread(talk: &Talk<'_>, ranks: &[usize], at: usize, memory: &Memory) -> Result<()> {
    let mut step = ranks.len().next_power_of_two();
    while step > 1 {
        step /= 2;
        if at % (2 * step) == step {
            talk.recv(ranks[at - step], memory)?;
        } else if at.is_multiple_of(2 * step) && at + step < ranks.len() {
            talk.send(ranks[at + step], memory)?.wait(None)?;
        }
    }
    Ok(())
}

fn store(memory: &[AtomicU64], network: Network) {
    for (cell, word) in memory.iter().zip(network::to_bits(network)) {
        cell.store(word, Ordering::Relaxed);
    }
}

fn load(memory: &[AtomicU64]) -> Network {
    let mut words = [0; VALUES];
    words.iter_mut().zip(memory).for_each(|(word, cell)| *word = cell.load(Ordering::Relaxed));
    network::from_bits(words)
}

/// Words that a message is sent from or received in; alive as long as anybody may touch them.
type Memory = Arc<[AtomicU64]>;

/// Messages of the probe, all of which are over by the same time.
struct Talk<'a> {
    comm: &'a Communicator,
    until: Instant,
}

impl Talk<'_> {
    fn memory(&self, words: usize) -> Memory {
        (0..words).map(|_| AtomicU64::new(0)).collect()
    }

    fn options(&self, memory: &Memory) -> Options {
        let timeout = self.until.saturating_duration_since(Instant::now());
        Options { timeout: Some(timeout), keep: Some(Box::new(memory.clone())), on: None }
    }

    fn send(&self, to: usize, memory: &Memory) -> Result<Work> {
        let (start, count) = (memory.as_ptr().cast(), memory.len() * 8);
        // SAFETY: `keep` holds the memory until the message is over. Until then nobody writes it: a token is sent
        // again or received in when its work is waited for, a train's messages are only read.
        unsafe { self.comm.send(start, count, DType::U8, to, TAG, self.options(memory)) }
    }

    /// Returns when it is here.
    fn recv(&self, from: usize, memory: &Memory) -> Result<()> {
        let (start, count) = (memory.as_ptr().cast_mut().cast(), memory.len() * 8);
        // SAFETY: `keep` holds the memory until the message is over, and it is made of cells that may be written through
        // a shared address. Until then this thread waits; no message under way uses the same memory.
        let work = unsafe { self.comm.recv(start, count, DType::U8, Some(from), TAG, self.options(memory)) };
        work?.wait(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_measures_its_link() {
        for nodes in 2..40 {
            let met: std::collections::HashSet<usize> = pairs(nodes).flat_map(|(a, b)| [a, b]).collect();
            assert_eq!(met.len(), nodes);
            for node in 0..nodes {
                assert!(pairs(nodes).filter(|&(a, b)| a == node || b == node).count() <= 2);
            }
        }
    }
}
