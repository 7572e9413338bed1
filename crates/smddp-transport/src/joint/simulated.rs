//! A group of threads whose nodes are joined by a simulated fabric.

use std::sync::Arc;

use super::join::{JoinError, Joined, group, nodes};
use super::means::Means;
use crate::net::channels::Uplink;
use crate::net::fabric::srd::{self, Srd, SrdScript};
use crate::net::fabric::staging::Staging;
use crate::net::tcp::{Door, Listeners, TcpEndpoint, Watches};
use crate::process::Endpoint;
use crate::shm;
use crate::token::Token;

/// The group's ends at `size` ranks of this process, rank `r` on the node that `node(r)` names, over a fabric of that script. As
/// beside a real one, their process's listener answers for those that do not drive.
pub fn simulated(
    size: usize,
    means: &Means,
    node: impl Fn(usize) -> String,
    script: SrdScript,
) -> Result<(Srd, Vec<Joined>), JoinError> {
    let wrong = |why: String| JoinError::Nodes(why);
    let mut prepared = Vec::new();
    for rank in 0..size {
        let mut one = shm::Prepared::new(rank, size, means.staging, Vec::new())
            .map_err(|error| wrong(error.to_string()))?;
        one.card_mut().node = node(rank);
        prepared.push(one);
    }
    let cards: Vec<_> = prepared.iter().map(|one| one.card().clone()).collect();
    let endpoint = Endpoint::get(means.staging).map_err(|error| wrong(error.to_string()))?;
    let listener =
        TcpEndpoint::get(&endpoint, &means.interface, means.family, means.peer_timeout, means.encrypts)
            .map_err(wrong)?;
    let doors: Vec<Door> = (0..size).map(|rank| listener.door(rank, size)).collect();
    let token = Token::random().map_err(|error| wrong(error.to_string()))?;
    let token = Arc::new(token);
    doors.iter().for_each(|door| door.trust(&token));
    let addresses: Vec<_> = doors.iter().map(|door| door.address.clone()).collect();
    let (srd, wires) = srd::group(size, script, &Staging::of(&endpoint)).map_err(wrong)?;
    let nodes = nodes(&cards);
    let joined = prepared
        .into_iter()
        .zip(wires.into_iter().zip(doors))
        .enumerate()
        .map(|(me, (shm, (wire, door)))| {
            let here = (0..size).filter(|&rank| nodes[rank] == nodes[me]).collect();
            let far = |(rank, address)| (nodes[rank] != nodes[me]).then_some(address);
            let addresses = addresses.iter().cloned().enumerate().map(far);
            let listeners = Listeners::new(me, door, addresses).map(Arc::new);
            let watches = listeners.clone().map(Watches::new);
            let way = Uplink { wire: Box::new(wire), listeners, watches };
            let group = group(me, shm, Some(way), &cards, here)?;
            Ok(Joined { group, nodes: nodes.clone(), crowd: size, told: Vec::new() })
        })
        .collect::<Result<_, JoinError>>()?;
    Ok((srd, joined))
}
