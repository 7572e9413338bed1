//! A wire that follows the script of a test.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::net::frame::{Frame, Kind};
use crate::net::wire::{Broken, Sink, Ticket, Wire};

/// Faults of a rank's wire to other nodes. The default injects none.
#[derive(Clone, Debug, Default)]
pub struct WireScript {
    /// Number of the message at which the rank dies: its connections end, and it sends and receives nothing more.
    pub death: Option<u64>,
    /// Every poll of the wire panics on threads whose names contain this text, until the group is aborted.
    pub panics: Option<&'static str>,
    /// Every poll reports progress.
    pub busy: bool,
    /// Number of panics.
    pub panicked: Arc<AtomicU64>,
    /// Number of abort frames sent.
    pub aborted: Arc<AtomicU64>,
}

pub(super) struct Scripted {
    /// `None` once the rank has died.
    wire: Option<Box<dyn Wire>>,
    script: WireScript,
    messages: u64,
    name: String,
    /// Destination of the last message.
    last_peer: usize,
    /// Tickets of messages that were not sent because the rank had died.
    unsent: Vec<Ticket>,
}

impl Scripted {
    pub(super) fn new(wire: Box<dyn Wire>, script: WireScript) -> Self {
        Self { name: wire.name(), wire: Some(wire), script, messages: 0, last_peer: 0, unsent: Vec::new() }
    }

    /// Counts a sent frame and applies the script.
    fn record_send(&mut self, peer: usize, frame: &Frame) {
        self.messages += u64::from(matches!(frame.kind, Kind::Data | Kind::Fragment));
        if frame.kind == Kind::Abort {
            self.script.aborted.fetch_add(1, Ordering::SeqCst);
        }
        if self.wire.is_some() && self.script.death.is_some_and(|death| death <= self.messages) {
            (self.wire, self.last_peer) = (None, peer);
        }
    }

    fn panic_by_script(&self) {
        let thread = std::thread::current();
        let here = self.script.panics.is_some_and(|which| thread.name().unwrap_or_default().contains(which));
        if here && self.script.aborted.load(Ordering::SeqCst) == 0 {
            self.script.panicked.fetch_add(1, Ordering::SeqCst);
            panic!("the wire is cut");
        }
    }
}

impl Wire for Scripted {
    fn name(&self) -> String {
        self.name.clone()
    }

    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        self.record_send(peer, frame);
        match &mut self.wire {
            // SAFETY: the caller fulfils the same contract.
            Some(wire) => unsafe { wire.send(peer, frame, payload, ticket) },
            None => self.unsent.push(ticket),
        }
    }

    unsafe fn post(&mut self, peer: usize, frame: &Frame, payload: *const u8) {
        self.record_send(peer, frame);
        if let Some(wire) = &mut self.wire {
            // SAFETY: the caller fulfils the same contract.
            unsafe { wire.post(peer, frame, payload) };
        }
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> bool {
        self.panic_by_script();
        self.unsent.drain(..).for_each(|ticket| sink.sent(ticket));
        let moved = self.wire.as_mut().is_some_and(|wire| wire.poll(sink));
        moved || self.script.busy
    }

    fn push(&mut self, sink: &mut dyn Sink) {
        self.wire.iter_mut().for_each(|wire| wire.push(sink));
    }

    fn watch(&mut self, peer: usize, elsewhere: bool, now: Instant) {
        self.wire.iter_mut().for_each(|wire| wire.watch(peer, elsewhere, now));
    }

    fn check(&mut self, now: Instant) {
        self.wire.iter_mut().for_each(|wire| wire.check(now));
    }

    fn broken(&self) -> Vec<Broken> {
        match &self.wire {
            Some(wire) => wire.broken(),
            None => vec![Broken { peer: self.last_peer, reason: "this rank has died by script".to_owned() }],
        }
    }

    fn drain_grace(&self) -> Duration {
        self.wire.as_ref().map_or(Duration::ZERO, |wire| wire.drain_grace())
    }

    fn messages_drained(&self) -> bool {
        self.wire.as_ref().is_none_or(|wire| wire.messages_drained())
    }

    fn local_error(&self) -> Option<(usize, String)> {
        self.wire.as_ref()?.local_error()
    }

    fn copies(&self) -> bool {
        self.wire.as_ref().is_some_and(|wire| wire.copies())
    }

    fn release_user_buffers(&mut self) {
        self.wire.iter_mut().for_each(|wire| wire.release_user_buffers());
    }

    fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.wire.iter_mut().for_each(|wire| wire.relocate(moved));
    }

    fn round_trip(&self, peer: usize) -> Option<Duration> {
        self.wire.as_ref()?.round_trip(peer)
    }

    fn unacknowledged(&self) -> Vec<(usize, u32)> {
        self.wire.as_ref().map_or_else(Vec::new, |wire| wire.unacknowledged())
    }

    fn expect(&mut self, bytes: usize) {
        self.wire.iter_mut().for_each(|wire| wire.expect(bytes));
    }

    fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.wire.as_ref().is_none_or(|wire| wire.interest(fds))
    }

    fn drained(&self) -> bool {
        self.wire.as_ref().is_none_or(|wire| wire.drained())
    }

    fn abandon(&mut self) {
        self.wire.iter_mut().for_each(|wire| wire.abandon());
    }

    fn finish(&mut self) -> bool {
        self.wire.as_mut().is_none_or(|wire| wire.finish())
    }

    fn close(&mut self) {
        self.wire.iter_mut().for_each(|wire| wire.close());
    }
}
