//! Listeners of a group's ranks: this rank's listener, and the addresses of the others.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smddp_net::interface::SelectedInterface;

use super::address::{Credential, TcpAddress};
use super::deadlock_probe::ProbeSender;
use super::endpoint::GroupListener;
use super::links::OpenLinks;
use super::status_query::StatusPeers;
use super::straggler_query::StragglerQuery;

/// TCP listeners of a group. A group with another wire uses them for liveness connections and straggler queries.
pub struct Sideband {
    pub(super) me: usize,
    pub(super) group_listener: GroupListener,
    credential: Credential,
    /// Addresses by rank; `None` for a rank that is not reachable this way.
    addresses: Arc<[Option<TcpAddress>]>,
    /// Open connections of the group's wire.
    pub(super) links: Arc<OpenLinks>,
}

impl Sideband {
    /// Starts accepting connections, because the group spans nodes. Returns `None` if the listener has no token yet.
    pub fn new(
        me: usize,
        group_listener: GroupListener,
        addresses: impl Iterator<Item = Option<TcpAddress>>,
    ) -> Option<Self> {
        let credential = Credential {
            rank: me,
            token: group_listener.token()?,
            encrypts: group_listener.endpoint.encrypts,
        };
        let mine = group_listener.endpoint.interface.address;
        let here = |theirs: TcpAddress| TcpAddress { socket: mine.reaches(theirs.socket), ..theirs };
        let addresses = addresses.map(|address| address.map(here)).collect();
        group_listener.endpoint.serve();
        Some(Self { me, group_listener, credential, addresses, links: Arc::default() })
    }

    /// Returns the network interface of this process.
    pub fn interface(&self) -> &SelectedInterface {
        &self.group_listener.endpoint.interface
    }

    /// Returns the time without any answer after which a host counts as lost.
    pub(super) fn peer_timeout(&self) -> Duration {
        self.group_listener.endpoint.peer_timeout
    }

    /// Returns the identity that this rank uses in connections to others.
    pub(super) fn credential(&self) -> &Credential {
        &self.credential
    }

    pub(super) fn size(&self) -> usize {
        self.addresses.len()
    }

    pub(super) fn address(&self, peer: usize) -> Option<&TcpAddress> {
        self.addresses.get(peer)?.as_ref()
    }

    /// Creates a query of the operations that `peers` have started, in that order. It leaves out peers without an
    /// address. Used once a deadline has passed.
    pub fn straggler_query(&self, peers: &[usize]) -> StragglerQuery {
        let address = |&peer: &usize| Some((peer, self.address(peer)?.clone()));
        StragglerQuery::new(self.credential.clone(), peers.iter().filter_map(address))
    }

    /// Returns the ranks of other nodes, for status queries.
    pub fn status_peers(&self) -> StatusPeers {
        StatusPeers {
            credential: self.credential.clone(),
            addresses: self.addresses.clone(),
            links: self.links.clone(),
        }
    }

    /// Returns the sender of deadlock probes to the other ranks.
    pub fn probe_sender(&self) -> ProbeSender {
        ProbeSender::new(self.credential.clone(), self.addresses.clone())
    }

    /// Sets the number by which status queries refer to this rank.
    pub fn set_status_id(&self, status_id: u64) {
        self.group_listener.pending.status_id.store(status_id, Ordering::Relaxed);
    }

    /// Sets the number of operations that this rank has started, for replies to queries.
    pub fn set_started(&self, operations: u64) {
        self.group_listener.pending.begun.store(operations, Ordering::Release);
    }
}
