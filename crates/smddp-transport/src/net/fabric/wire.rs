//! Wire of one group over the process's shared endpoint.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::endpoint::{FabricAddress, FabricEndpoint};
use crate::lock;
use crate::net::frame::Frame;
use crate::net::wire::{Broken, DRAIN_GRACE, Sink, Ticket, Wire};

/// Endpoint shared by the groups of this process.
pub(crate) type SharedEndpoint = Arc<Mutex<FabricEndpoint>>;

/// Wire of one group.
pub(crate) struct FabricWire {
    endpoint: SharedEndpoint,
    group: u32,
}

impl FabricWire {
    /// Creates the group at an endpoint, and returns the address that the other ranks need to send to it. They may send from now
    /// on, before their addresses are known here. `me`: this rank of `size`. `expected`: maximum number of ranks in other
    /// processes that use this wire.
    pub(crate) fn prepare(
        endpoint: &SharedEndpoint,
        me: usize,
        size: usize,
        expected: usize,
    ) -> Result<(Self, FabricAddress), String> {
        let (address, group) = lock(endpoint).prepare(me, size, expected)?;
        Ok((Self { endpoint: endpoint.clone(), group }, address))
    }

    /// `addresses`: by rank; `None` for this rank and for ranks that do not use this wire.
    pub(crate) fn connect(&mut self, addresses: &[Option<FabricAddress>]) -> Result<(), String> {
        lock(&self.endpoint).connect(self.group, addresses)
    }
}

impl Wire for FabricWire {
    fn name(&self) -> String {
        lock(&self.endpoint).name()
    }

    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        // SAFETY: the caller's guarantees are those of the endpoint.
        unsafe { lock(&self.endpoint).send(self.group, peer, frame, payload, ticket) };
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> bool {
        lock(&self.endpoint).poll(self.group, sink)
    }

    fn watch(&mut self, peer: usize, elsewhere: bool, now: Instant) {
        lock(&self.endpoint).watch(self.group, peer, elsewhere, now);
    }

    fn broken(&self) -> Vec<Broken> {
        let broken = lock(&self.endpoint).broken(self.group);
        broken.into_iter().map(|(peer, reason)| Broken { peer, reason }).collect()
    }

    fn drain_grace(&self) -> Duration {
        DRAIN_GRACE
    }

    fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        lock(&self.endpoint).interest(self.group, fds)
    }

    fn abandon(&mut self) {
        lock(&self.endpoint).abandon(self.group);
    }

    fn drained(&self) -> bool {
        lock(&self.endpoint).drained(self.group)
    }

    fn messages_drained(&self) -> bool {
        lock(&self.endpoint).messages_drained(self.group)
    }
}

impl Drop for FabricWire {
    fn drop(&mut self) {
        lock(&self.endpoint).close(self.group);
    }
}
