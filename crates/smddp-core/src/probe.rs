//! A short look at the network between nodes, when the first group that spans some is made.
//!
//! One rank of each node, its leader, takes part; the leaders measure in pairs and agree along a binomial tree on the
//! slowest of what was found, then each tells its own node. All of it goes as messages between two ranks, so
//! the numbers of the group's collectives begin with 0 all the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use smddp_plan::{Network, Topology};

use crate::comm::{Communicator, Options, Work};
use crate::config::Level;
use crate::error::{Error, Result};
use crate::log;
use crate::network::{self, Known, Origin, WORDS, coarse, slower};
use crate::types::DType;

/// No message of a user has it: torch's tags are 32 bits wide.
const TAG: u64 = 0x736d_6464_7070_7262;
/// Messages there and back; the quickest counts.
const ROUND_TRIPS: usize = 10;
/// Small messages in a row, and how many such rows; again the quickest counts.
const ROW: usize = 17;
const ROWS: usize = 3;
/// Bytes of a large message: such a one is under way at once, without being asked for.
const LARGE: usize = 64 << 10;
/// Large messages of a train that nobody times: a shaped link lets about as much through at any speed.
const WARM: usize = 2;
/// Of the trains that are timed, the next one only where the one before was over sooner than it can be measured.
const TRAINS: [usize; 2] = [4, 32];
const LONG_ENOUGH: Duration = Duration::from_millis(1);

/// Makes the network known to a group of several nodes. Every rank of it calls this with what the cards say.
///
/// # Errors
/// As of a recv; the group is dead then on all ranks that are left.
pub(crate) fn learn(comm: &Communicator, noted: Option<Network>, timeout: Duration) -> Result<()> {
    let (config, begun) = (comm.config(), Instant::now());
    let (network, origin) = match (config.network, config.probe, noted) {
        (Some(network), ..) => (network, Origin::Set),
        (None, false, _) => (Network::ASSUMED, Origin::Assumed),
        (None, true, Some(network)) => (network, Origin::Before),
        (None, true, None) => {
            let until = begun + timeout;
            let found =
                measure(&Talk { comm, until }, comm.topology()).map_err(named).inspect_err(|error| {
                    comm.abort(&error.to_string());
                })?;
            network::remember(found);
            (found, Origin::Measured)
        }
    };
    let known = Known { network, origin };
    comm.set_network(known);
    let took =
        if origin == Origin::Measured { format!(" in {:.1?}", begun.elapsed()) } else { String::new() };
    log::say(Level::Info, &format!("group `{}`: {known}{took}", comm.name()));
    Ok(())
}

/// An error of one of the probe's messages says what it was for.
fn named(error: Error) -> Error {
    const WHAT: &str = "measuring the network between nodes (SMDDP_PROBE=0 goes without)";
    match error {
        Error::Timeout { what, group, after, missing, detail } => {
            Error::Timeout { what: format!("{WHAT}: {what}"), group, after, missing, detail }
        }
        Error::PeerLost { what, group, rank, who, how, advice } => {
            Error::PeerLost { what: format!("{WHAT}: {what}"), group, rank, who, how, advice }
        }
        Error::Closed { group, why } => Error::Closed { group, why: format!("{WHAT}: {why}") },
        other => other,
    }
}

fn measure(talk: &Talk<'_>, topology: &Topology) -> Result<Network> {
    let me = talk.comm.rank();
    let node = topology.node_of(me);
    let mates = topology.ranks_of(node);
    let leaders: Vec<usize> = (0..topology.nodes()).map(|n| topology.ranks_of(n)[0]).collect();
    let agreed = talk.memory(WORDS);
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
    // An empty message is one frame, as a collective's small ones are.
    let (token, empty, large) = (talk.memory(1), talk.memory(0), talk.memory(LARGE / 8));
    let round_trip = || {
        let begun = Instant::now();
        talk.send(peer, &empty)?.wait(None)?;
        talk.recv(peer, &empty)?;
        Ok(begun.elapsed())
    };
    // Connections are made by the first messages.
    round_trip()?;
    let least = |times: Result<Vec<Duration>>| Ok(times?.into_iter().min().unwrap_or_default());
    let there_and_back = least((0..ROUND_TRIPS).map(|_| round_trip()).collect())?;
    let train = |memory: &Memory, messages: usize| {
        let begun = Instant::now();
        let sends = (0..messages).map(|_| talk.send(peer, memory)).collect::<Result<Vec<_>>>()?;
        talk.recv(peer, &empty)?;
        let took = begun.elapsed();
        sends.iter().try_for_each(|send| send.wait(None))?;
        Ok(took)
    };
    let row = least((0..ROWS).map(|_| train(&empty, ROW)).collect())?;
    let mut rate = Network::ASSUMED.bytes_per_ns;
    for messages in [WARM].into_iter().chain(TRAINS) {
        token[0].store(messages as u64, Ordering::Relaxed);
        talk.send(peer, &token)?.wait(None)?;
        let took = train(&large, messages)?;
        // The end of the last one's way and the answer's are no part of it; but no more than half of it is that.
        let busy = took.saturating_sub(there_and_back).max(took / 2);
        rate = (messages * LARGE) as f64 / nanos(busy);
        if messages != WARM && took > LONG_ENOUGH {
            break;
        }
    }
    token[0].store(0, Ordering::Relaxed);
    talk.send(peer, &token)?.wait(None)?;
    let message_ns = nanos(row.saturating_sub(there_and_back)) / (ROW - 1) as f64;
    Ok(Network {
        latency_ns: nanos(there_and_back) / 2.0,
        message_ns,
        bytes_per_ns: rate,
        ..Network::ASSUMED
    })
}

/// The other side of [`ask`].
fn answer(talk: &Talk<'_>, peer: usize) -> Result<()> {
    let (token, empty, large) = (talk.memory(1), talk.memory(0), talk.memory(LARGE / 8));
    let hear = |memory: &Memory, messages: usize| {
        (0..messages).try_for_each(|_| talk.recv(peer, memory))?;
        talk.send(peer, &empty)?.wait(None)
    };
    for messages in std::iter::repeat_n(1, 1 + ROUND_TRIPS).chain([ROW; ROWS]) {
        hear(&empty, messages)?;
    }
    loop {
        talk.recv(peer, &token)?;
        match token[0].load(Ordering::Relaxed) as usize {
            0 => return Ok(()),
            messages => hear(&large, messages)?,
        }
    }
}

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
    let memory = talk.memory(1 + WORDS);
    let mut step = 1;
    while step < leaders.len() {
        if at & step > 0 {
            memory[0].store(u64::from(found.is_some()), Ordering::Relaxed);
            store(&memory[1..], found.unwrap_or_default());
            talk.send(leaders[at - step], &memory)?.wait(None)?;
            return Ok(None);
        }
        if at + step < leaders.len() {
            talk.recv(leaders[at + step], &memory)?;
            if memory[0].load(Ordering::Relaxed) > 0 {
                let theirs = load(&memory[1..]);
                found = Some(found.map_or(theirs, |mine| slower(mine, theirs)));
            }
        }
        step *= 2;
    }
    Ok(found.map(coarse))
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
    for (cell, word) in memory.iter().zip(network::to_words(network)) {
        cell.store(word, Ordering::Relaxed);
    }
}

fn load(memory: &[AtomicU64]) -> Network {
    let mut words = [0; WORDS];
    words.iter_mut().zip(memory).for_each(|(word, cell)| *word = cell.load(Ordering::Relaxed));
    network::from_words(words)
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
