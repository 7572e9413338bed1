//! A group of threads whose nodes are connected by a simulated fabric.

use std::sync::Arc;

use super::join::{JoinError, Joined, group, nodes};
use super::options::TransportOptions;
use crate::net::channels::RemoteParts;
use crate::net::fabric::registration::RegisteredStaging;
use crate::net::fabric::srd::{self, Srd, SrdScript};
use crate::net::tcp::{GroupListener, ProcessLiveness, Sideband, TcpEndpoint};
use crate::process::Endpoint;
use crate::shm;
use crate::token::Token;

/// Creates a group of `size` ranks of this process over a simulated fabric with that script. Rank `r` is on node `node(r)`. As with a
/// real fabric, the listener of the process answers for ranks that do not make progress.
pub fn simulated(
    size: usize,
    options: &TransportOptions,
    node: impl Fn(usize) -> String,
    script: SrdScript,
) -> Result<(Srd, Vec<Joined>), JoinError> {
    let wrong = |reason: String| JoinError::Nodes(reason);
    let mut prepared = Vec::new();
    for rank in 0..size {
        let mut one = shm::Prepared::new(rank, size, options.staging, Vec::new())
            .map_err(|error| wrong(error.to_string()))?;
        one.rank_info_mut().node = node(rank);
        prepared.push(one);
    }
    let rank_infos: Vec<_> = prepared.iter().map(|one| one.rank_info().clone()).collect();
    let endpoint = Endpoint::get(options.staging).map_err(|error| wrong(error.to_string()))?;
    let listener = TcpEndpoint::get(
        &endpoint,
        &options.interface,
        options.family,
        options.peer_timeout,
        options.encrypts,
    )
    .map_err(wrong)?;
    let group_listeners: Vec<GroupListener> =
        (0..size).map(|rank| listener.group_listener(rank, size)).collect();
    let token = Token::random().map_err(|error| wrong(error.to_string()))?;
    let token = Arc::new(token);
    group_listeners.iter().for_each(|group_listener| group_listener.trust(&token));
    let addresses: Vec<_> =
        group_listeners.iter().map(|group_listener| group_listener.address.clone()).collect();
    let (srd, wires) = srd::group(size, script, &RegisteredStaging::of(&endpoint)).map_err(wrong)?;
    let nodes = nodes(&rank_infos);
    let joined = prepared
        .into_iter()
        .zip(wires.into_iter().zip(group_listeners))
        .enumerate()
        .map(|(me, (shm, (wire, group_listener)))| {
            let here = (0..size).filter(|&rank| nodes[rank] == nodes[me]).collect();
            let remote = |(rank, address)| (nodes[rank] != nodes[me]).then_some(address);
            let addresses = addresses.iter().cloned().enumerate().map(remote);
            let listeners = Sideband::new(me, group_listener, addresses).map(Arc::new);
            let watches = listeners.clone().map(ProcessLiveness::new);
            let parts = RemoteParts { wire: Box::new(wire), sideband: listeners, liveness: watches };
            let group = group(me, shm, Some(parts), &rank_infos, here)?;
            Ok(Joined { group, nodes: nodes.clone(), local_ranks: size, log_lines: Vec::new() })
        })
        .collect::<Result<_, JoinError>>()?;
    Ok((srd, joined))
}
