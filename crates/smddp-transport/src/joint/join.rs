//! Making a group's link: what this rank offers, and, with what all others offer, who is reached how.

use std::io;
use std::sync::Arc;

use super::link::JointLink;
use super::route::Map;
use crate::Link;
use crate::net::interface::{Family, Wanted};
use crate::net::link::Net;
use crate::net::tcp::{Door, TcpWire};
use crate::shm::{self, Card, Endpoint, Unreachable};

/// What may be used, as the settings say.
#[derive(Clone, Debug)]
pub struct Means {
    /// Cap of the staging pool in bytes.
    pub staging: usize,
    /// Whether ranks of one host may share memory at all.
    pub shm: bool,
    /// Ranks that name different nodes do not share memory.
    pub node: Option<String>,
    pub interface: Wanted,
    pub family: Family,
    pub between: Between,
}

/// What may be used between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    Nothing,
    Tcp,
}

/// Why there is no link.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    #[error("{0}")]
    Nodes(String),
}

/// A link, and each rank's node.
pub struct Joined {
    pub link: Box<dyn Link>,
    pub nodes: Vec<usize>,
    /// Ranks of this host, whether or not they share memory: they share its cores.
    pub crowd: usize,
}

/// First half of making a link: nobody waits.
pub struct Prepared {
    shm: shm::Prepared,
    door: Option<Door>,
    between: Between,
}

impl Prepared {
    pub fn new(rank: usize, size: usize, settings: Vec<(String, String)>, means: &Means) -> io::Result<Self> {
        let mut shm = shm::Prepared::new(rank, size, means.staging, settings)?;
        let mut door = None;
        if size > 1 {
            let alone = (!means.shm).then(|| format!("rank {rank}"));
            shm.card_mut().node = alone.or_else(|| means.node.clone()).unwrap_or_default();
            if means.between == Between::Tcp {
                // No interface is no error yet: a group of one node needs none.
                let endpoint = Endpoint::get(means.staging)?;
                let found = endpoint.tcp(&means.interface, means.family).map(|tcp| {
                    let loopback = tcp.interface.loopback;
                    (door.insert(tcp.door()).address.clone(), loopback)
                });
                shm.card_mut().tcp = found;
            }
        }
        Ok(Self { shm, door, between: means.between })
    }

    pub fn card(&self) -> &Card {
        self.shm.card()
    }

    /// Second half, with the cards of all ranks in rank order, mine included.
    pub fn connect(self, cards: Vec<Card>) -> Result<Joined, JoinError> {
        let me = self.card().rank as usize;
        let nodes = nodes(&cards);
        let crowd = cards.iter().filter(|card| card.boot == self.card().boot).count();
        let here: Vec<usize> = (0..cards.len()).filter(|&r| nodes[r] == nodes[me]).collect();
        if here.len() == cards.len() {
            let link = self.shm.connect(cards)?;
            return Ok(Joined { link: Box::new(link), nodes, crowd });
        }
        self.check(&cards, &nodes)?;
        let Some(door) = self.door else {
            return Err(JoinError::Nodes("this rank listens nowhere".to_owned()));
        };
        door.serve().map_err(|e| JoinError::Nodes(format!("no thread to answer other nodes: {e}")))?;
        let names = cards
            .iter()
            .map(|card| format!("rank {} (host {}, pid {})", card.rank, card.host, card.pid))
            .collect();
        let addresses = cards
            .iter()
            .zip(&nodes)
            .map(|(card, node)| {
                card.tcp.as_ref().ok().filter(|_| *node != nodes[me]).map(|(address, _)| address.clone())
            })
            .collect();
        let size = cards.len();
        let mates = here.iter().map(|&rank| cards[rank].clone()).collect();
        let shm = self.shm.connect(mates)?;
        let Some((endpoint, nonce)) = shm.home() else {
            return Err(JoinError::Nodes("this rank has no shared memory".to_owned()));
        };
        let net = Net::new(me, size, Box::new(TcpWire::new(me, door, addresses)), endpoint, nonce);
        let link = JointLink::new(me, Map::new(size, here), names, shm, net);
        Ok(Joined { link: Box::new(link), nodes, crowd })
    }

    /// Every rank finds the same trouble, from the same cards.
    fn check(&self, cards: &[Card], nodes: &[usize]) -> Result<(), JoinError> {
        let name = |card: &Card| format!("rank {} (host {}, pid {})", card.rank, card.host, card.pid);
        if self.between == Between::Nothing {
            let (a, b) = (&cards[0], cards.iter().zip(nodes).find(|(_, n)| **n != nodes[0]).map(|(c, _)| c));
            return Err(JoinError::Nodes(format!(
                "{} and {} do not share memory ({}), and SMDDP_TRANSPORT=shm forbids any other way; unset it to go over the \
                 network",
                name(a),
                b.map_or_else(String::new, name),
                b.map_or("", |b| apart(a, b)),
            )));
        }
        for card in cards {
            match &card.tcp {
                Err(why) => return Err(JoinError::Nodes(format!("{}: {why}", name(card)))),
                Ok((address, true)) => {
                    let other = cards.iter().find(|c| (&c.boot, c.netns) != (&card.boot, card.netns));
                    if let Some(other) = other {
                        return Err(JoinError::Nodes(format!(
                            "{} has only the loopback address {}, which {} cannot reach; name an interface with \
                             SMDDP_SOCKET_IFNAME",
                            name(card),
                            address.socket.ip(),
                            name(other),
                        )));
                    }
                }
                Ok(_) => {}
            }
        }
        Ok(())
    }
}

/// Each rank's node, from what the cards say: memory can be shared inside one boot of one host, by processes of one
/// user that see the same abstract sockets. Whether it really can is tried when the link is made.
fn nodes(cards: &[Card]) -> Vec<usize> {
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

impl Door {
    fn serve(&self) -> io::Result<()> {
        Arc::clone(&self.endpoint).serve()
    }
}
