//! Making a group: what this rank offers, and, with what all others offer, who is reached how.

use std::io;

use super::group::Group;
use super::means::{Between, Means};
use super::offer::Ends;
use super::reach::Reach;
use super::scripted::{Scripted, WireScript};
use crate::Card;
use crate::net::channels::{Net, Uplink};
use crate::process::Endpoint;
use crate::shm::{self, Unreachable};

/// Why there is no group.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    #[error("{0}")]
    Nodes(String),
}

/// A group, and each rank's node.
pub struct Joined {
    pub group: Group,
    pub nodes: Vec<usize>,
    /// Ranks of this host, whether or not they share memory: they share its cores.
    pub crowd: usize,
    /// What there is between nodes, and why it is used or not.
    pub told: Vec<String>,
}

/// First half of making a group: nobody waits.
pub struct Prepared {
    shm: shm::Prepared,
    ends: Ends,
    means: Means,
    script: Option<WireScript>,
}

impl Prepared {
    pub fn new(rank: usize, size: usize, settings: Vec<(String, String)>, means: &Means) -> io::Result<Self> {
        let mut shm = shm::Prepared::new(rank, size, means.staging, settings)?;
        let mut ends = Ends::default();
        if size > 1 {
            let endpoint = Endpoint::get(means.staging)?;
            let alone = (!means.shm).then(|| format!("rank {rank}"));
            shm.card_mut().node = alone.or_else(|| means.node.clone()).unwrap_or_default();
            (ends, shm.card_mut().offer) = Ends::open(&endpoint, rank, size, means);
        }
        Ok(Self { shm, ends, means: means.clone(), script: None })
    }

    pub fn card(&self) -> &Card {
        self.shm.card()
    }

    /// Puts a word of the caller's own on the card.
    pub fn set_note(&mut self, note: Vec<u8>) {
        self.shm.card_mut().note = note;
    }

    /// Has the wire to other nodes do what a test says.
    pub fn set_script(&mut self, script: WireScript) {
        self.script = Some(script);
    }

    /// Second half, with the cards of all ranks in rank order, mine included.
    pub fn connect(self, cards: Vec<Card>) -> Result<Joined, JoinError> {
        let me = self.card().rank as usize;
        let nodes = nodes(&cards);
        let crowd = cards.iter().filter(|card| card.boot == self.card().boot).count();
        let here: Vec<usize> = (0..cards.len()).filter(|&r| nodes[r] == nodes[me]).collect();
        if here.len() == cards.len() {
            let group = group(me, self.shm, None, &cards, here)?;
            return Ok(Joined { group, nodes, crowd, told: Vec::new() });
        }
        if self.means.between == Between::Nothing {
            return Err(JoinError::Nodes(forbidden(&cards, &nodes)));
        }
        let (mut way, told) = self.ends.connect(me, &cards, &nodes, &self.means).map_err(JoinError::Nodes)?;
        if let Some(script) = self.script {
            way.wire = Box::new(Scripted::new(way.wire, script));
        }
        let group = group(me, self.shm, Some(way), &cards, here)?;
        Ok(Joined { group, nodes, crowd, told })
    }
}

/// Shared memory with the ranks `here`, and a way to all others, if there are any.
pub(super) fn group(
    me: usize,
    shm: shm::Prepared,
    way: Option<Uplink>,
    cards: &[Card],
    here: Vec<usize>,
) -> Result<Group, JoinError> {
    let near = shm.connect(here.iter().map(|&rank| cards[rank].clone()).collect())?;
    let way = way.filter(|_| here.len() < cards.len());
    let copies = way.as_ref().is_some_and(|way| way.wire.copies());
    let net = way.zip(near.home());
    let net = net.map(|(way, (endpoint, nonce))| Net::new(me, cards.len(), way, endpoint, nonce));
    let reach = Reach::new(me, cards.len(), here, copies);
    Ok(Group::new(reach, cards.iter().map(Card::name).collect(), near, net))
}

fn forbidden(cards: &[Card], nodes: &[usize]) -> String {
    let other = cards.iter().zip(nodes).find(|(_, node)| **node != nodes[0]).map(|(card, _)| card);
    format!(
        "{} and {} do not share memory ({}), and SMDDP_TRANSPORT=shm forbids any other way; unset it to go over the network",
        cards[0].name(),
        other.map_or_else(String::new, Card::name),
        other.map_or("", |other| apart(&cards[0], other)),
    )
}

/// Each rank's node, from what the cards say: memory can be shared inside one boot of one host, by processes of one
/// user that see the same abstract sockets. Whether it really can is tried when the group is made.
pub(super) fn nodes(cards: &[Card]) -> Vec<usize> {
    let label = |card: &Card| (card.boot.clone(), card.netns, card.uid, card.node.clone());
    let mut seen: std::collections::HashMap<_, usize> = std::collections::HashMap::new();
    cards
        .iter()
        .map(|card| {
            let next = seen.len();
            *seen.entry(label(card)).or_insert(next)
        })
        .collect()
}

/// What keeps two ranks from sharing memory.
fn apart(a: &Card, b: &Card) -> &'static str {
    if a.boot != b.boot {
        "they run on different hosts"
    } else if a.netns != b.netns {
        "their network namespaces differ, so unix sockets do not reach from one to the other"
    } else if a.uid != b.uid {
        "they run as different users"
    } else {
        "SMDDP_NODE or SMDDP_SHM says so"
    }
}
