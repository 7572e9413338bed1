//! Making a group: what this rank offers, and, with what all others offer, who is reached how.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::group::Group;
use super::means::{Between, Means};
use super::offer::Ends;
use super::reach::Reach;
use super::scripted::{Scripted, WireScript};
use crate::Card;
use crate::bootstrap::CardTree;
use crate::net::channels::{Net, Uplink};
use crate::process::Endpoint;
use crate::shm::{self, Unreachable};
use crate::token::Token;

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

/// Keeps this process's endpoint open to the other ranks of a group.
///
/// A rank that fails in `init` holds it until its error is in the store: a closed socket looks like the end of the process.
pub struct OpenEndpoint {
    _endpoint: Option<Arc<Endpoint>>,
    _token: Option<Arc<Token>>,
}

/// First half of making a group: nobody waits.
pub struct Prepared {
    shm: shm::Prepared,
    ends: Ends,
    means: Means,
    script: Option<WireScript>,
    /// Of the job's own, beside what the group's store knows.
    secret: Option<Vec<u8>>,
    token: Option<Arc<Token>>,
}

impl Prepared {
    pub fn new(rank: usize, size: usize, settings: Vec<(String, String)>, means: &Means) -> io::Result<Self> {
        // Made before `shm::Prepared` asks for it without the number of ranks.
        let here = means.local.map_or(size, |(_, ranks)| ranks.min(size));
        let endpoint = (size > 1)
            .then(|| Endpoint::among(means.staging, if means.shm { here } else { 1 }))
            .transpose()?;
        let mut shm = shm::Prepared::new(rank, size, means.staging, settings)?;
        let mut ends = Ends::default();
        if let Some(endpoint) = endpoint {
            let alone = (!means.shm || !endpoint.is_shared()).then(|| format!("rank {rank}"));
            shm.card_mut().node = alone.or_else(|| means.node.clone()).unwrap_or_default();
            (ends, shm.card_mut().offer) = Ends::open(&endpoint, rank, size, means);
        }
        Ok(Self { shm, ends, means: means.clone(), script: None, secret: None, token: None })
    }

    pub fn card(&self) -> &Card {
        self.shm.card()
    }

    /// Keeps the endpoint open after [`Prepared::connect`] has failed.
    pub fn open_endpoint(&self) -> OpenEndpoint {
        OpenEndpoint { _endpoint: Endpoint::existing(), _token: self.token.clone() }
    }

    /// Puts a word of the caller's own on the card.
    pub fn set_note(&mut self, note: Vec<u8>) {
        self.shm.card_mut().note = note;
    }

    /// Has the wire to other nodes do what a test says.
    pub fn set_script(&mut self, script: WireScript) {
        self.script = Some(script);
    }

    /// This rank's part of the tree along which cards travel.
    pub fn tree(&mut self) -> io::Result<CardTree> {
        let shared = self.card().token.clone();
        let token = shared.map(|shared| self.trust(&shared));
        CardTree::new(self.card(), token, self.secret.as_deref())
    }

    /// Has it call its parent: `first` is rank 0's address in the tree, `parent` the parent's. Whether that is a new one; an
    /// error says what is wrong with which of them.
    pub fn call_parent(
        &mut self,
        tree: &mut CardTree,
        first: &[u8],
        parent: &[u8],
        now: Instant,
    ) -> Result<bool, String> {
        let shared = tree.shared(first).map_err(|why| format!("rank 0 has {why}"))?;
        let token = self.trust(&shared);
        tree.call(token, parent, now).map_err(|why| format!("rank {} has {why}", tree.parent().unwrap_or(0)))
    }

    /// Only ranks with the same secret come into a group: before anything else.
    pub fn set_secret(&mut self, secret: Vec<u8>) {
        self.secret = Some(secret);
    }

    /// What rank 0 shares with all: from now on callers who have it are heard here. What it came to.
    pub(crate) fn trust(&mut self, shared: &Token) -> Arc<Token> {
        let token = Arc::new(match &self.secret {
            Some(secret) => shared.with(secret),
            None => shared.clone(),
        });
        self.shm.trust(&token);
        self.ends.trust(&token);
        self.token = Some(token.clone());
        token
    }

    /// As [`Prepared::connect`] does, where rank 0's card came by a way that nobody else reads.
    pub fn trust_card(&mut self, first: &Card) {
        if let Some(shared) = &first.token {
            self.trust(shared);
        }
    }

    /// Second half, with the cards of all ranks in rank order, mine included.
    pub fn connect(mut self, cards: Vec<Card>) -> Result<Joined, JoinError> {
        if self.token.is_none() && cards.len() > 1 {
            self.trust_card(&cards[0]);
            if self.token.is_none() {
                return Err(JoinError::Nodes(
                    "no token came from rank 0: its card is not the one that it made".to_owned(),
                ));
            }
        }
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
        "SMDDP_NODE or SMDDP_SHM says so, or a limit of one of these processes, which logged a warning"
    }
}
