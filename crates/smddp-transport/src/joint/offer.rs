//! How a rank can be reached from other nodes, and which of the ways a group takes.

use std::sync::Arc;

use super::means::{Between, Means};
use crate::Card;
use crate::card::Offer;
use crate::net::channels::Uplink;
use crate::net::fabric::choose::Settings;
use crate::net::fabric::current::{found, shared};
use crate::net::fabric::wire::{FabricWire, SharedEngine};
use crate::net::interface::{self, Family};
use crate::net::tcp::{Door, Listeners, TcpAddress, TcpEndpoint, TcpWire, Watches};
use crate::net::wire::Wire;
use crate::process::Endpoint;
use crate::token::Token;

/// This rank's ends, until it is known which one the group takes.
#[derive(Default)]
pub(super) struct Ends {
    door: Option<Door>,
    fabric: Option<FabricWire>,
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
            offer.tcp = TcpEndpoint::get(
                endpoint,
                &means.interface,
                means.family,
                means.peer_timeout,
                means.encrypts,
            )
            .map(|tcp| {
                let loopback = tcp.interface.loopback;
                (ends.door.insert(tcp.door(rank, size)).address.clone(), loopback)
            });
        }
        if between == Between::Fabric || between == Between::Auto && may_have_efa() {
            offer.fabric = engine(endpoint, size, means).and_then(|engine| {
                let (wire, address) = FabricWire::prepare(&engine, rank, size, size - 1)?;
                ends.fabric = Some(wire);
                Ok(address)
            });
        } else if between == Between::Auto {
            offer.fabric = Err("no EFA device".to_owned());
        }
        (ends, offer)
    }

    /// Callers who have that token are heard from now on.
    pub(super) fn trust(&self, token: &Arc<Token>) {
        self.door.iter().for_each(|door| door.trust(token));
    }

    /// The way that all ranks take, found by each of them from the same cards; who watches them, where the wire does not; and in
    /// lines what was found and why.
    pub(super) fn connect(
        self,
        me: usize,
        cards: &[Card],
        nodes: &[usize],
        means: &Means,
    ) -> Result<(Uplink, Vec<String>), String> {
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
            return Err(format!("{}: {why}. {advice}", card.name()));
        }
        if !fabric {
            check_addresses(cards)?;
        } else if means.encrypts {
            return Err("SMDDP_ENCRYPT=1, and libfabric does not encrypt; SMDDP_TRANSPORT=tcp takes sockets, which do, or \
                        encrypt the network below"
                .to_owned());
        }
        let other = |card: &Card| nodes[card.rank as usize] != nodes[me];
        let (mut told, mut watches) = (Vec::new(), None);
        let listeners = self.door.and_then(|door| {
            let called = |card: &Card| match fabric {
                true => watchable(card, &cards[me]),
                false => card.offer.tcp.clone().ok().map(|(address, _)| address),
            };
            let address = |card: &Card| called(card).filter(|_| other(card));
            Listeners::new(me, door, cards.iter().map(address)).map(Arc::new)
        });
        let wire: Box<dyn Wire> = if fabric {
            told.extend(found());
            let Some(mut wire) = self.fabric else { return Err("this rank has no fabric".to_owned()) };
            let address = |card: &Card| card.offer.fabric.clone().ok().filter(|_| other(card));
            wire.connect(&cards.iter().map(address).collect::<Vec<_>>())?;
            // Nobody is watched without a listener: said, as deaths are then noticed later.
            told.push(match (&listeners, &cards[me].offer.tcp) {
                (Some(listeners), _) => format!("peers are watched over tcp {}", listeners.interface()),
                (None, offer) => {
                    let why = offer.as_ref().err().map_or("", String::as_str);
                    format!("peers are not watched over tcp: {why}")
                }
            });
            watches = listeners.clone().map(Watches::new);
            Box::new(wire)
        } else {
            let Some(listeners) = listeners.clone() else {
                return Err("this rank listens nowhere".to_owned());
            };
            if let Some((_, why)) = lacking.filter(|_| means.between == Between::Auto) {
                told.push(format!("fabric: none: {why}"));
            }
            told.push(format!("tcp {}", listeners.interface()));
            Box::new(TcpWire::new(listeners).map_err(|e| format!("no epoll for connections: {e}"))?)
        };
        if let Some(wanted) = &means.require {
            let way = wire.name();
            if !way.split([' ', ',']).any(|word| word == wanted) {
                let why = lacking.map_or_else(String::new, |(card, why)| format!("; {}: {why}", card.name()));
                return Err(format!("SMDDP_REQUIRE={wanted}, but the way between nodes is {way}{why}"));
            }
        }
        Ok((Uplink { wire, listeners, watches }, told))
    }
}

/// The process's ends on the fabric.
fn engine(endpoint: &Arc<Endpoint>, size: usize, means: &Means) -> Result<SharedEngine, String> {
    let settings = || -> Result<Settings, String> {
        let named = means.interface.value.is_some() || means.family != Family::Any;
        let address = named
            .then(|| interface::choose(&means.interface, means.family).map_err(|e| e.to_string()))
            .transpose()?
            .map(|choice| choice.address.ip);
        let (library, provider) = (means.library.clone(), means.provider.clone());
        Ok(Settings { library, provider, address, local: means.local })
    };
    // A quarter of the staging, as for any operation.
    shared(endpoint, settings, size - 1, means.staging / 4)
}

/// Where a connection to that rank's process can be tried.
fn watchable(card: &Card, mine: &Card) -> Option<TcpAddress> {
    let (address, loopback) = card.offer.tcp.as_ref().ok()?;
    let near = (&card.boot, card.netns) == (&mine.boot, mine.netns);
    (near || !loopback).then(|| address.clone())
}

/// Every rank has an address that the others can reach.
pub(super) fn check_addresses(cards: &[Card]) -> Result<(), String> {
    for card in cards {
        match &card.offer.tcp {
            Err(why) => return Err(format!("{}: {why}", card.name())),
            Ok((address, true)) => {
                let other = cards.iter().find(|c| (&c.boot, c.netns) != (&card.boot, card.netns));
                if let Some(other) = other {
                    return Err(format!(
                        "{} has only the loopback address {}, which {} cannot reach; name an interface with \
                         SMDDP_SOCKET_IFNAME",
                        card.name(),
                        address.socket.ip(),
                        other.name(),
                    ));
                }
            }
            Ok(_) => {}
        }
    }
    Ok(())
}
