//! How a rank can be reached from other nodes, and which of the ways a group takes.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::join::{JoinError, Means, name};
use crate::net::fabric;
use crate::net::fabric::wire::{FabricWire, Prepared as Slot};
use crate::net::link::Way;
use crate::net::tcp::{Door, TcpAddress, TcpWire, Watches};
use crate::net::wire::Wire;
use crate::process::{Card, Endpoint};

/// What may be used between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// EFA where every rank has it, our own sockets where none has.
    Auto,
    Nothing,
    Tcp,
    Fabric,
}

/// What a rank's card says of it; errors say why not.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    /// And whether the address is a loopback one.
    pub(crate) tcp: Result<(TcpAddress, bool), String>,
    pub(crate) fabric: Result<fabric::Address, String>,
}

impl Offer {
    pub(crate) fn none(why: &str) -> Self {
        Self { tcp: Err(why.to_owned()), fabric: Err(why.to_owned()) }
    }
}

/// This rank's ends, until it is known which one the group takes.
#[derive(Default)]
pub(super) struct Ends {
    door: Option<Door>,
    slot: Option<Slot>,
}

/// A fabric is worth looking for where a device might carry it: opening libfabric is slow.
pub fn may_have_efa() -> bool {
    let filled = |path: &str| std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some());
    std::path::Path::new("/sys/bus/pci/drivers/efa").exists() || filled("/sys/class/infiniband")
}

impl Ends {
    /// What this rank offers. Having nothing is no error yet: a group of one node needs nothing.
    pub(super) fn open(endpoint: &Arc<Endpoint>, rank: usize, size: usize, means: &Means) -> (Self, Offer) {
        let (mut ends, between) = (Self::default(), means.between);
        let mut offer = Offer::none("SMDDP_TRANSPORT forbids it");
        // Over a fabric it tells of a peer's end.
        if between != Between::Nothing {
            offer.tcp = endpoint.tcp(&means.interface, means.family).map(|tcp| {
                let loopback = tcp.interface.loopback;
                (ends.door.insert(tcp.door(rank, size)).address.clone(), loopback)
            });
        }
        if between == Between::Fabric || between == Between::Auto && may_have_efa() {
            offer.fabric = endpoint.fabric(means, size).and_then(|engine| {
                let slot = FabricWire::prepare(&engine, rank, size, size - 1)?;
                Ok(ends.slot.insert(slot).address().clone())
            });
        } else if between == Between::Auto {
            offer.fabric = Err("no EFA device".to_owned());
        }
        (ends, offer)
    }

    /// The way that all ranks take, found by each of them from the same cards; who watches them, where the wire does not; and in
    /// lines what was found and why.
    pub(super) fn connect(
        self,
        me: usize,
        cards: &[Card],
        nodes: &[usize],
        means: &Means,
    ) -> Result<(Way, Vec<String>), JoinError> {
        let wrong = |text: String| Err(JoinError::Nodes(text));
        let fabric = match means.between {
            Between::Fabric => true,
            Between::Auto => cards.iter().any(|card| card.offer.fabric.is_ok()),
            _ => false,
        };
        // Never half of the job over something slower, and nobody told.
        let lacking = cards.iter().find_map(|card| Some((card, card.offer.fabric.as_ref().err()?)));
        if fabric && let Some((card, why)) = lacking {
            let advice = match means.between {
                Between::Auto => "other ranks have EFA; SMDDP_TRANSPORT=tcp takes sockets for all",
                _ => "SMDDP_TRANSPORT=fabric was asked for; SMDDP_TRANSPORT=tcp needs no libfabric",
            };
            return wrong(format!("{}: {why}. {advice}", name(card)));
        }
        if !fabric {
            check_addresses(cards)?;
        }
        let other = |card: &Card| nodes[card.rank as usize] != nodes[me];
        let (mut told, mut watches) = (Vec::new(), None);
        let wire: Box<dyn Wire> = if fabric {
            told.extend(Endpoint::existing().map(|endpoint| endpoint.found()).unwrap_or_default());
            let Some(slot) = self.slot else { return wrong("this rank has no fabric".to_owned()) };
            let address = |card: &Card| card.offer.fabric.clone().ok().filter(|_| other(card));
            let addresses: Vec<_> = cards.iter().map(address).collect();
            let wire = slot.connect(&addresses).map_err(JoinError::Nodes)?;
            // Nobody is watched without a listener: said, as deaths are then noticed later.
            let unwatched = match (&self.door, &cards[me].offer.tcp) {
                (Some(door), _) => door.endpoint.serve().err().map(|error| error.to_string()),
                (None, offer) => Some(offer.as_ref().err().cloned().unwrap_or_default()),
            };
            match (self.door, unwatched) {
                (Some(door), None) => {
                    told.push(format!("peers are watched over tcp {}", door.endpoint.interface));
                    let watched =
                        cards.iter().map(|card| watchable(card, &cards[me]).filter(|_| other(card)));
                    watches = Some(Watches::new(me, door, watched.collect()));
                }
                (_, why) => {
                    told.push(format!("peers are not watched over tcp: {}", why.unwrap_or_default()));
                }
            }
            Box::new(wire)
        } else {
            let Some(door) = self.door else { return wrong("this rank listens nowhere".to_owned()) };
            if let Some((_, why)) = lacking.filter(|_| means.between == Between::Auto) {
                told.push(format!("fabric: none: {why}"));
            }
            told.push(format!("tcp {}", door.endpoint.interface));
            door.endpoint
                .serve()
                .map_err(|e| JoinError::Nodes(format!("no thread to answer other nodes: {e}")))?;
            let address = |card: &Card| card.offer.tcp.clone().ok().filter(|_| other(card)).map(|(a, _)| a);
            Box::new(TcpWire::new(me, door, cards.iter().map(address).collect()))
        };
        if let Some(wanted) = &means.require {
            let way = wire.name();
            if !way.split([' ', ',']).any(|word| word == wanted) {
                let why = lacking.map_or_else(String::new, |(card, why)| format!("; {}: {why}", name(card)));
                return wrong(format!("SMDDP_REQUIRE={wanted}, but the way between nodes is {way}{why}"));
            }
        }
        Ok((Way { wire, watches }, told))
    }
}

/// Where a connection to that rank's process can be tried.
fn watchable(card: &Card, mine: &Card) -> Option<TcpAddress> {
    let (address, loopback) = card.offer.tcp.as_ref().ok()?;
    let near = (&card.boot, card.netns) == (&mine.boot, mine.netns);
    (near || !loopback).then(|| address.clone())
}

/// Every rank has an address that the others can reach.
pub(super) fn check_addresses(cards: &[Card]) -> Result<(), JoinError> {
    for card in cards {
        match &card.offer.tcp {
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
