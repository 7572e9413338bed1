//! The ranks of a group at their processes' listeners: this one's door, and where the others are called.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::address::{Credential, TcpAddress};
use super::endpoint::GroupListener;
use super::straggler_query::StragglerQuery;
use crate::net::interface::SelectedInterface;

pub(crate) struct Sideband {
    pub(super) me: usize,
    pub(super) group_listener: GroupListener,
    credential: Credential,
    /// By rank; `None` for those that are not reached this way.
    addresses: Vec<Option<TcpAddress>>,
}

impl Sideband {
    /// From here on callers are answered: the group does span nodes.
    /// `None`: the door has no token yet.
    pub(crate) fn new(
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
        Some(Self { me, group_listener, credential, addresses })
    }

    pub(crate) fn interface(&self) -> &SelectedInterface {
        &self.group_listener.endpoint.interface
    }

    /// A host that answers nothing for so long is gone.
    pub(super) fn peer_timeout(&self) -> Duration {
        self.group_listener.endpoint.peer_timeout
    }

    /// What this rank calls the others with.
    pub(super) fn credential(&self) -> &Credential {
        &self.credential
    }

    pub(super) fn size(&self) -> usize {
        self.addresses.len()
    }

    pub(super) fn address(&self, peer: usize) -> Option<&TcpAddress> {
        self.addresses.get(peer)?.as_ref()
    }

    /// Questions to `peers`, in that order, what they have begun, though they do not drive; whom nobody can ask is left out.
    /// Asked when a deadline has passed.
    pub(crate) fn straggler_query(&self, peers: &[usize]) -> StragglerQuery {
        let address = |&peer: &usize| Some((peer, self.address(peer)?.clone()));
        StragglerQuery::new(self.credential.clone(), peers.iter().filter_map(address))
    }

    /// What questions about this rank are about, for whoever answers them.
    pub(crate) fn set_query_subject(&self, subject: u64) {
        self.group_listener.pending.subject.store(subject, Ordering::Relaxed);
    }

    /// Others may be told that this rank has begun so many operations.
    pub(crate) fn set_started(&self, operations: u64) {
        self.group_listener.pending.begun.store(operations, Ordering::Release);
    }
}
