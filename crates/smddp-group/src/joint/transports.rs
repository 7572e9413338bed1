//! Transports of a rank to other nodes, and the selection of the transport that a group uses.

use std::sync::Arc;

use smddp_fabric::process_endpoint::{discovery_log, separate, shared};
use smddp_fabric::provider_choice::Settings;
use smddp_fabric::wire::{FabricWire, SharedEndpoint};
use smddp_net::interface::{self, AddressFamily};
use smddp_net::token::Token;
use smddp_net::wire::Wire;
use smddp_process::Endpoint;
use smddp_tcp::{GroupListener, ProcessLiveness, Sideband, TcpAddress, TcpEndpoint, TcpWire};

use super::options::{InterNode, TransportOptions};
use crate::RankInfo;
use crate::channels::RemoteParts;
use crate::rank_info::TransportOffer;

/// Transports that this rank has opened before the group selects one.
#[derive(Default)]
pub(super) struct LocalTransports {
    group_listener: Option<GroupListener>,
    fabric: Option<FabricWire>,
}

/// Returns true if this host may have a fabric device. Opening libfabric is slow, so it is not tried without one.
pub fn may_have_efa() -> bool {
    let filled = |path: &str| std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some());
    std::path::Path::new("/sys/bus/pci/drivers/efa").exists() || filled("/sys/class/infiniband")
}

impl LocalTransports {
    /// Opens the transports that this rank offers. A failure is not an error yet: a group on one node needs none.
    pub(super) fn open(
        endpoint: &Arc<Endpoint>,
        rank: usize,
        size: usize,
        options: &TransportOptions,
    ) -> (Self, TransportOffer) {
        let (mut transports, inter_node) = (Self::default(), options.inter_node);
        let mut offer = TransportOffer::none("SMDDP_TRANSPORT forbids it");
        // A group on a fabric uses TCP to detect the end of a peer's process.
        if inter_node != InterNode::Nothing {
            offer.tcp = TcpEndpoint::get(
                endpoint,
                &options.interface,
                options.family,
                options.peer_timeout,
                options.encrypts,
            )
            .map(|tcp| {
                let loopback = tcp.interface.loopback;
                (transports.group_listener.insert(tcp.group_listener(rank, size)).address().clone(), loopback)
            });
        }
        if inter_node == InterNode::Fabric || inter_node == InterNode::Auto && may_have_efa() {
            offer.fabric = fabric_endpoint(endpoint, size, options).and_then(|engine| {
                let (mut wire, address) = FabricWire::prepare(&engine, rank, size, size - 1)?;
                // Peers may send from now on.
                if options.checksums {
                    wire.check_checksums();
                }
                transports.fabric = Some(wire);
                Ok(address)
            });
        } else if inter_node == InterNode::Auto {
            offer.fabric = Err("no EFA device".to_owned());
        }
        (transports, offer)
    }

    /// Accepts connections authenticated by that token.
    pub(super) fn trust(&self, token: &Arc<Token>) {
        self.group_listener.iter().for_each(|group_listener| group_listener.trust(token));
    }

    /// Connects the transport between nodes, which each rank selects from the same rank information. Returns the wire, the sideband
    /// and liveness connections that it needs, and log lines with the reasons for the selection.
    pub(super) fn connect(
        self,
        me: usize,
        rank_infos: &[RankInfo],
        nodes: &[usize],
        options: &TransportOptions,
    ) -> Result<(RemoteParts, Vec<String>), String> {
        let fabric = match options.inter_node {
            InterNode::Fabric => true,
            InterNode::Auto => rank_infos.iter().any(|rank_info| rank_info.offer.fabric.is_ok()),
            _ => false,
        };
        // A job in which only some ranks have a fabric is an error: it must not use a slower transport silently.
        let missing =
            rank_infos.iter().find_map(|rank_info| Some((rank_info, rank_info.offer.fabric.as_ref().err()?)));
        if fabric && let Some((rank_info, reason)) = missing {
            let advice = match options.inter_node {
                InterNode::Auto => "other ranks have EFA; SMDDP_TRANSPORT=tcp uses sockets for all",
                _ => "SMDDP_TRANSPORT requires libfabric; SMDDP_TRANSPORT=tcp needs none",
            };
            return Err(format!("{}: {reason}. {advice}", rank_info.name()));
        }
        if !fabric {
            check_addresses(rank_infos)?;
        } else if options.encrypts {
            return Err("SMDDP_ENCRYPT=1 requires encryption, which libfabric does not provide: set SMDDP_TRANSPORT=tcp, or unset \
                        SMDDP_ENCRYPT if the network encrypts"
                .to_owned());
        }
        let other = |rank_info: &RankInfo| nodes[rank_info.address.rank as usize] != nodes[me];
        let (mut log_lines, mut watches) = (Vec::new(), None);
        let listeners = self.group_listener.and_then(|group_listener| {
            let address_of = |rank_info: &RankInfo| match fabric {
                true => liveness_address(rank_info, &rank_infos[me]),
                false => rank_info.offer.tcp.clone().ok().map(|(address, _)| address),
            };
            let address = |rank_info: &RankInfo| address_of(rank_info).filter(|_| other(rank_info));
            Sideband::new(me, group_listener, rank_infos.iter().map(address)).map(Arc::new)
        });
        let wire: Box<dyn Wire> = if fabric {
            log_lines.extend(discovery_log());
            let Some(mut wire) = self.fabric else {
                return Err("this rank has not opened a libfabric endpoint".to_owned());
            };
            let address =
                |rank_info: &RankInfo| rank_info.offer.fabric.clone().ok().filter(|_| other(rank_info));
            wire.connect(&rank_infos.iter().map(address).collect::<Vec<_>>())?;
            // Logged because the death of a peer is detected later without liveness connections.
            log_lines.push(match (&listeners, &rank_infos[me].offer.tcp) {
                (Some(listeners), _) => format!("peers are watched over tcp {}", listeners.interface()),
                (None, offer) => {
                    let reason = offer.as_ref().err().map_or("", String::as_str);
                    format!("peers are not watched over tcp: {reason}")
                }
            });
            watches = listeners.clone().map(ProcessLiveness::new);
            if watches.is_some() {
                wire.set_watched();
            }
            Box::new(wire)
        } else {
            let Some(listeners) = listeners.clone() else {
                return Err("this rank has not opened a TCP listener".to_owned());
            };
            if let Some((_, reason)) = missing.filter(|_| options.inter_node == InterNode::Auto) {
                log_lines.push(format!("fabric: none: {reason}"));
            }
            log_lines.push(format!("tcp {}", listeners.interface()));
            let mut wire = TcpWire::new(listeners).map_err(|e| format!("no epoll for connections: {e}"))?;
            if options.checksums {
                wire.check_checksums();
            }
            Box::new(wire)
        };
        let checksums = options.checksums;
        Ok((RemoteParts { wire, sideband: listeners, liveness: watches, checksums }, log_lines))
    }
}

/// Returns the process's fabric endpoint.
fn fabric_endpoint(
    endpoint: &Arc<Endpoint>,
    size: usize,
    options: &TransportOptions,
) -> Result<SharedEndpoint, String> {
    let settings = || -> Result<Settings, String> {
        let named = options.interface.value.is_some() || options.family != AddressFamily::Any;
        let address = named
            .then(|| interface::choose(&options.interface, options.family).map_err(|e| e.to_string()))
            .transpose()?
            .map(|choice| choice.address.ip);
        let (library, provider) = (options.library.clone(), options.provider.clone());
        Ok(Settings { library, provider, address, local: options.local })
    };
    // A quarter of the staging pool, which is also the limit of any operation.
    let budget = options.staging / 4;
    match options.separate_endpoint {
        true => separate(endpoint, settings, size - 1, budget),
        false => shared(endpoint, settings, size - 1, budget),
    }
}

/// Returns the address for a liveness connection to that rank's process, if this rank can reach it.
fn liveness_address(rank_info: &RankInfo, mine: &RankInfo) -> Option<TcpAddress> {
    let (address, loopback) = rank_info.offer.tcp.as_ref().ok()?;
    let network = |rank_info: &RankInfo| (rank_info.address.boot.clone(), rank_info.address.netns);
    let local = network(rank_info) == network(mine);
    (local || !loopback).then(|| address.clone())
}

/// Checks that every rank has a TCP address that the others can reach.
pub(super) fn check_addresses(rank_infos: &[RankInfo]) -> Result<(), String> {
    for rank_info in rank_infos {
        match &rank_info.offer.tcp {
            Err(reason) => return Err(format!("{}: {reason}", rank_info.name())),
            Ok((address, true)) => {
                let network = (&rank_info.address.boot, rank_info.address.netns);
                let other = rank_infos.iter().find(|c| (&c.address.boot, c.address.netns) != network);
                if let Some(other) = other {
                    return Err(format!(
                        "{} has only the loopback address {}, which {} cannot reach; name an interface with \
                         SMDDP_SOCKET_IFNAME",
                        rank_info.name(),
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
