//! A wire whose peers are watched by other means: their processes' TCP listeners tell of their end, and answer for ranks
//! that do not drive. libfabric's providers notice a peer that is gone late or never while nothing is sent to it.

use std::os::fd::RawFd;
use std::time::Duration;

use super::frame::Frame;
use super::tcp::{Survey, Watches};
use super::wire::{Broken, Sink, Ticket, Wire};

pub(crate) struct Watched {
    wire: Box<dyn Wire>,
    watches: Watches,
}

impl Watched {
    pub(crate) fn new(wire: Box<dyn Wire>, watches: Watches) -> Self {
        Self { wire, watches }
    }
}

impl Wire for Watched {
    fn name(&self) -> String {
        self.wire.name()
    }

    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        // SAFETY: the caller's promise, which is the same.
        unsafe { self.wire.send(peer, frame, payload, ticket) };
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> bool {
        self.wire.poll(sink)
    }

    fn watch(&mut self, peer: usize) {
        self.wire.watch(peer);
        self.watches.watch(peer);
    }

    fn check(&mut self) {
        self.wire.check();
        self.watches.check();
    }

    fn survey(&self, peers: &[usize]) -> Survey {
        self.watches.survey(peers)
    }

    fn begun(&mut self, operations: u64) {
        self.watches.begun(operations);
    }

    fn broken(&self) -> Vec<Broken> {
        let mut broken = self.watches.broken();
        let known = |peer: usize| broken.iter().any(|b| b.peer == peer);
        let also: Vec<_> = self.wire.broken().into_iter().filter(|b| !known(b.peer)).collect();
        broken.extend(also);
        broken
    }

    fn unable(&self) -> Option<(usize, String)> {
        self.wire.unable()
    }

    fn copies(&self) -> bool {
        self.wire.copies()
    }

    fn round_trip(&self, peer: usize) -> Option<Duration> {
        self.wire.round_trip(peer)
    }

    fn expect(&mut self, bytes: usize) {
        self.wire.expect(bytes);
    }

    fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.watches.interest(fds);
        self.wire.interest(fds)
    }

    fn abandon(&mut self) {
        self.wire.abandon();
    }

    fn drained(&self) -> bool {
        self.wire.drained()
    }

    fn finish(&mut self) -> bool {
        self.wire.finish()
    }
}
