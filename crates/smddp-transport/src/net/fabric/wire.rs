//! The wire of one group over an engine that it shares with others.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::endpoint::{FabricAddress, FabricEndpoint};
use crate::lock;
use crate::net::frame::Frame;
use crate::net::wire::{Broken, DRAIN_GRACE, Sink, Ticket, Wire};

/// An engine, for the groups that use it.
pub(crate) type SharedEngine = Arc<Mutex<FabricEndpoint>>;

pub(crate) struct FabricWire {
    engine: SharedEngine,
    group: u32,
}

impl FabricWire {
    /// A group's place at an engine, and what the others need to send there: they may from here on, before theirs are known
    /// here. `me`: this rank of `size`; `expected`: at most so many of the others are in other processes and will be reached
    /// through this wire.
    pub(crate) fn prepare(
        engine: &SharedEngine,
        me: usize,
        size: usize,
        expected: usize,
    ) -> Result<(Self, FabricAddress), String> {
        let (address, group) = lock(engine).prepare(me, size, expected)?;
        Ok((Self { engine: engine.clone(), group }, address))
    }

    /// `addresses`: by rank; `None` for this rank and for those that are not reached this way.
    pub(crate) fn connect(&mut self, addresses: &[Option<FabricAddress>]) -> Result<(), String> {
        lock(&self.engine).connect(self.group, addresses)
    }
}

impl Wire for FabricWire {
    fn name(&self) -> String {
        lock(&self.engine).name()
    }

    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        // SAFETY: the caller's promise is the engine's.
        unsafe { lock(&self.engine).send(self.group, peer, frame, payload, ticket) };
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> bool {
        lock(&self.engine).poll(self.group, sink)
    }

    fn watch(&mut self, peer: usize, elsewhere: bool, now: Instant) {
        lock(&self.engine).watch(self.group, peer, elsewhere, now);
    }

    fn broken(&self) -> Vec<Broken> {
        let broken = lock(&self.engine).broken(self.group);
        broken.into_iter().map(|(peer, reason)| Broken { peer, reason }).collect()
    }

    fn drain_grace(&self) -> Duration {
        DRAIN_GRACE
    }

    fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        lock(&self.engine).interest(self.group, fds)
    }

    fn abandon(&mut self) {
        lock(&self.engine).abandon(self.group);
    }

    fn drained(&self) -> bool {
        lock(&self.engine).drained(self.group)
    }

    fn messages_drained(&self) -> bool {
        lock(&self.engine).messages_drained(self.group)
    }
}

impl Drop for FabricWire {
    fn drop(&mut self) {
        lock(&self.engine).close(self.group);
    }
}
