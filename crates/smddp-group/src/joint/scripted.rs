//! A wire that follows the script of a test.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use smddp_net::frame::{Classes, Frame, Kind};
use smddp_net::wire::{Capabilities, Close, ConnectionStats, Payload, PeerState, Sink, Ticket, Wire};

/// Faults of a rank's wire to other nodes. The default injects none.
#[derive(Clone, Debug, Default)]
pub struct WireScript {
    /// Number of the message at which the rank dies: its connections end, and it sends and receives nothing more.
    pub death: Option<u64>,
    /// Number of the message whose payload differs from its checksum.
    pub corrupts: Option<u64>,
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
    capabilities: Capabilities,
    /// States of the peers once the rank has died: it reports the destination of its last message as lost.
    lost: Vec<PeerState>,
    /// Tickets of messages that were not sent because the rank had died.
    unsent: Vec<Ticket>,
}

impl Scripted {
    pub(super) fn new(wire: Box<dyn Wire>, script: WireScript) -> Self {
        Self {
            capabilities: wire.capabilities().clone(),
            wire: Some(wire),
            script,
            messages: 0,
            lost: Vec::new(),
            unsent: Vec::new(),
        }
    }

    /// Counts a sent frame and applies the script.
    fn record_send(&mut self, peer: usize, frame: &Frame) {
        self.messages += u64::from(matches!(frame.kind, Kind::Data | Kind::Fragment));
        if frame.kind == Kind::Abort {
            self.script.aborted.fetch_add(1, Ordering::SeqCst);
        }
        if self.script.death.is_some_and(|death| death <= self.messages)
            && let Some(mut wire) = self.wire.take()
        {
            self.lost = vec![PeerState::default(); wire.peers().len()];
            self.lost[peer].broken = Some("this rank has died by script".to_owned());
            // Reported at once.
            self.capabilities.drain_grace = Duration::ZERO;
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
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: Payload) {
        self.record_send(peer, frame);
        let is_corrupted = self.script.corrupts == Some(self.messages) && frame.bytes > 0;
        let frame = &Frame { checksum: frame.checksum.map(|sum| sum ^ u32::from(is_corrupted)), ..*frame };
        match (&mut self.wire, payload) {
            // SAFETY: the caller fulfils the same contract.
            (Some(wire), _) => unsafe { wire.send(peer, frame, payload) },
            (None, Payload::Borrowed { ticket, .. }) => self.unsent.push(ticket),
            (None, Payload::None | Payload::Copied { .. }) => {}
        }
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> bool {
        self.panic_by_script();
        self.unsent.drain(..).for_each(|ticket| sink.sent(ticket));
        let moved = self.wire.as_mut().is_some_and(|wire| wire.poll(sink));
        moved || self.script.busy
    }

    fn flush(&mut self, sink: &mut dyn Sink) {
        self.wire.iter_mut().for_each(|wire| wire.flush(sink));
    }

    fn check(&mut self, now: Instant, waiting: &[usize]) {
        self.wire.iter_mut().for_each(|wire| wire.check(now, waiting));
    }

    fn peers(&mut self) -> &[PeerState] {
        self.wire.as_mut().map_or(&self.lost, |wire| wire.peers())
    }

    fn connection_stats(&self, peer: usize) -> ConnectionStats {
        self.wire.as_ref().map_or_else(ConnectionStats::default, |wire| wire.connection_stats(peer))
    }

    fn wait_sources(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.wire.as_ref().is_none_or(|wire| wire.wait_sources(fds))
    }

    fn is_flushed(&self, classes: Classes) -> bool {
        self.wire.as_ref().is_none_or(|wire| wire.is_flushed(classes))
    }

    fn release_user_buffers(&mut self) {
        self.wire.iter_mut().for_each(|wire| wire.release_user_buffers());
    }

    fn relocate(&mut self, moved: &dyn Fn(*mut u8) -> *mut u8) {
        self.wire.iter_mut().for_each(|wire| wire.relocate(moved));
    }

    fn set_in_flight(&mut self, bytes: usize) {
        self.wire.iter_mut().for_each(|wire| wire.set_in_flight(bytes));
    }

    fn close(&mut self, how: Close) -> bool {
        self.wire.as_mut().is_none_or(|wire| wire.close(how))
    }
}
