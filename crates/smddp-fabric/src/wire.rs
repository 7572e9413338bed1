//! Wire of one group over the process's shared endpoint.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use smddp_base::lock;
use smddp_net::frame::{ALL_CLASSES, Classes, Frame};
use smddp_net::wire::{Capabilities, Close, ConnectionStats, DRAIN_GRACE, Payload, PeerState, Sink, Wire};

use super::endpoint::{FabricAddress, FabricEndpoint};

/// Endpoint shared by the groups of this process.
pub type SharedEndpoint = Arc<Mutex<FabricEndpoint>>;

/// Wire of one group.
pub struct FabricWire {
    endpoint: SharedEndpoint,
    group: u32,
    capabilities: Capabilities,
    /// By rank. `Wire::peers` adds the ranks lost since its last call.
    states: Vec<PeerState>,
    /// Another mechanism detects lost processes and hosts, too.
    watched: bool,
}

impl FabricWire {
    /// Creates the group at an endpoint, and returns the address that the other ranks need to send to it. They may send from now
    /// on, before their addresses are known here. `me`: this rank of `size`. `expected`: maximum number of ranks in other
    /// processes that use this wire.
    ///
    /// # Errors
    /// The receive queue of a device has no room for the receive buffers of `expected` more peers. A later failure of the endpoint is
    /// reported by [`Wire::peers`].
    pub fn prepare(
        endpoint: &SharedEndpoint,
        me: usize,
        size: usize,
        expected: usize,
    ) -> Result<(Self, FabricAddress), String> {
        let (address, group, name) = {
            let mut endpoint = lock(endpoint);
            let (address, group) = endpoint.prepare(me, size, expected)?;
            (address, group, endpoint.name())
        };
        let wire = Self {
            endpoint: endpoint.clone(),
            group,
            capabilities: Capabilities { name, copies_payloads: false, drain_grace: DRAIN_GRACE },
            states: vec![PeerState::default(); size],
            watched: false,
        };
        Ok((wire, address))
    }

    /// Connects the group to its other ranks. `addresses`: by rank; `None` for this rank and for ranks that do not use this wire.
    ///
    /// # Errors
    /// - A rank uses another provider, or has no rail.
    /// - The message size of a rank is below the minimum.
    /// - A device rejects an address.
    /// - The receive queue of a device has no room for the receive buffers of the peers.
    pub fn connect(&mut self, addresses: &[Option<FabricAddress>]) -> Result<(), String> {
        lock(&self.endpoint).connect(self.group, addresses)
    }

    /// Requires and checks the checksum of each received frame, before the frame is delivered. Called before the peers
    /// have this rank's address.
    pub fn check_checksums(&mut self) {
        lock(&self.endpoint).check_checksums(self.group);
    }

    /// Declares that another mechanism detects lost processes and hosts, too. A peer that accepts no messages then counts as
    /// busy or stopped, not as lost.
    pub fn set_watched(&mut self) {
        self.watched = true;
    }
}

impl Wire for FabricWire {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: Payload) {
        // SAFETY: the caller's guarantees are those of the endpoint.
        unsafe { lock(&self.endpoint).send(self.group, peer, frame, payload) };
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> bool {
        lock(&self.endpoint).poll(self.group, sink)
    }

    /// Does nothing: the device sends posted messages. A queued message waits for a credit or a free queue entry, which `poll`
    /// receives.
    fn flush(&mut self, _: &mut dyn Sink) {}

    fn check(&mut self, now: Instant, waiting: &[usize]) {
        if !waiting.is_empty() {
            lock(&self.endpoint).watch(self.group, waiting, self.watched, now);
        }
    }

    fn peers(&mut self) -> &[PeerState] {
        lock(&self.endpoint).update_states(self.group, &mut self.states);
        &self.states
    }

    fn connection_stats(&self, _: usize) -> ConnectionStats {
        ConnectionStats::default()
    }

    fn wait_sources(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        lock(&self.endpoint).wait_sources(self.group, fds)
    }

    fn is_flushed(&self, classes: Classes) -> bool {
        let endpoint = lock(&self.endpoint);
        // The messages of all classes share one queue. Peers fetch large payloads, which a peer may never do for a collective of
        // a dead group.
        match classes {
            ALL_CLASSES => endpoint.is_drained(self.group),
            _ => endpoint.messages_sent(self.group),
        }
    }

    /// Does nothing: all payloads are in the staging memory.
    fn release_user_buffers(&mut self) {}

    /// Does nothing: all payloads are in the staging memory.
    fn relocate(&mut self, _: &dyn Fn(*mut u8) -> *mut u8) {}

    /// Does nothing: the receive buffers bound the bytes in flight.
    fn set_in_flight(&mut self, _: usize) {}

    fn close(&mut self, how: Close) -> bool {
        let mut endpoint = lock(&self.endpoint);
        if how == Close::Abort {
            endpoint.abandon(self.group);
        }
        endpoint.is_drained(self.group)
    }
}

impl Drop for FabricWire {
    fn drop(&mut self) {
        lock(&self.endpoint).close(self.group);
    }
}
