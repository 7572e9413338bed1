//! Wire that keeps the contract of `Wire` towards its sink, and whose peers send arbitrary frames.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use smddp_base::lock;
use smddp_net::frame::{ALL_CLASSES, CLASSES, Classes, Frame};
use smddp_net::wire::{
    Capabilities, Close, ConnectionStats, INLINE_PAYLOAD, Payload, PeerState, Sink, Target, Ticket, Wire,
};

/// Maximum frames per class whose payloads are in transfer.
const AHEAD: usize = 4;

/// ChannelState frame.
pub(super) struct Item {
    pub(super) frame: Frame,
    /// `None`: the sink has not assigned a target.
    pub(super) target: Option<Target>,
}

/// Action of the wire in the next poll.
pub(super) enum Order {
    /// Requests targets for the frames of a class.
    Place(usize, usize),
    /// Delivers the payload of the class's first frame and reports its arrival.
    Arrive(usize, usize),
    /// Completes a send.
    Sent(usize),
}

/// Frames in transfer.
#[derive(Default)]
pub(crate) struct Line {
    /// ChannelState frames by peer and class.
    pub(super) inbound: Vec<[VecDeque<Item>; CLASSES]>,
    /// (ticket, borrowed payload, its bytes) of incomplete sends.
    pub(crate) outbound: Vec<(Option<Ticket>, *const u8, usize)>,
    pub(super) orders: Vec<Order>,
    /// The connection attempts to all peers are in progress.
    pub(crate) connecting: bool,
}

// SAFETY: addresses of the rank's memory; one thread uses both.
unsafe impl Send for Line {}

#[derive(Clone)]
pub(crate) struct Shared {
    line: Arc<Mutex<Line>>,
    capabilities: Capabilities,
    peers: Vec<PeerState>,
}

impl Shared {
    /// `copies_payloads`: the wire transfers payloads from and to unregistered memory.
    pub(crate) fn new(size: usize, copies_payloads: bool) -> Self {
        let inbound = (0..size).map(|_| Default::default()).collect();
        let (name, drain_grace) = ("a script".to_owned(), Duration::ZERO);
        Self {
            line: Arc::new(Mutex::new(Line { inbound, ..Line::default() })),
            capabilities: Capabilities { name, copies_payloads, drain_grace },
            peers: vec![PeerState::default(); size],
        }
    }

    pub(crate) fn with<T>(&self, of: impl FnOnce(&mut Line) -> T) -> T {
        of(&mut lock(&self.line))
    }
}

impl Line {
    fn execute(&mut self, order: Order, sink: &mut dyn Sink) {
        match order {
            Order::Place(peer, class) => {
                for item in self.inbound[peer][class].iter_mut().take(AHEAD) {
                    if item.target.is_some() {
                        continue;
                    }
                    match sink.target(peer, &item.frame) {
                        Target::Later => break,
                        target => item.target = Some(target),
                    }
                }
            }
            Order::Arrive(peer, class) => {
                let class = &mut self.inbound[peer][class];
                let Some(target) = class.front().and_then(|item| item.target) else { return };
                let Some(item) = class.pop_front() else { return };
                if let Target::At(at) = target {
                    // SAFETY: the sink returned this target, and `check_owned` checked that the rank owns it.
                    unsafe { at.write_bytes(0xab, item.frame.bytes as usize) };
                }
                sink.received(peer, &item.frame);
            }
            Order::Sent(which) => {
                if let Some(at) = which.checked_rem(self.outbound.len()) {
                    self.outbound.swap_remove(at).0.into_iter().for_each(|ticket| sink.sent(ticket));
                }
            }
        }
    }

    /// Returns (address, bytes) of payloads that may be written at any time, and of payloads that may be read.
    pub(super) fn in_transfer(&self) -> Vec<(*const u8, usize)> {
        let items = self.inbound.iter().flatten().flatten();
        let inbound = items.filter_map(|item| match item.target {
            Some(Target::At(at)) => Some((at.cast_const(), item.frame.bytes as usize)),
            _ => None,
        });
        let outbound = self.outbound.iter().filter(|(_, _, bytes)| *bytes > INLINE_PAYLOAD);
        inbound.chain(outbound.map(|&(_, at, bytes)| (at, bytes))).collect()
    }
}

impl Wire for Shared {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    unsafe fn send(&mut self, _: usize, frame: &Frame, payload: Payload) {
        let bytes = frame.bytes as usize;
        let send = match payload {
            Payload::None => (None, std::ptr::null(), 0),
            Payload::Borrowed { at, ticket } => (Some(ticket), at, bytes),
            Payload::Copied { .. } => {
                let allowed = bytes <= INLINE_PAYLOAD || self.capabilities.copies_payloads;
                assert!(allowed, "unregistered payload on a wire that does not copy");
                (None, std::ptr::null(), 0)
            }
        };
        self.with(|line| line.outbound.push(send));
    }

    fn release_user_buffers(&mut self) {
        self.with(|line| {
            let placed = line.inbound.iter_mut().flatten().flatten().filter(|item| item.target.is_some());
            placed.for_each(|item| item.target = Some(Target::Discard));
            line.outbound.iter_mut().for_each(|(_, _, bytes)| *bytes = 0);
        });
    }

    fn poll(&mut self, sink: &mut dyn Sink) -> bool {
        self.with(|line| {
            let orders = std::mem::take(&mut line.orders);
            let progressed = !orders.is_empty();
            orders.into_iter().for_each(|order| line.execute(order, sink));
            progressed
        })
    }

    fn flush(&mut self, _: &mut dyn Sink) {}

    fn check(&mut self, _: Instant, _: &[usize]) {}

    fn peers(&mut self) -> &[PeerState] {
        let connecting = self.with(|line| line.connecting);
        self.peers.iter_mut().for_each(|peer| peer.connecting = connecting);
        &self.peers
    }

    fn connection_stats(&self, _: usize) -> ConnectionStats {
        ConnectionStats::default()
    }

    fn wait_sources(&self, _: &mut Vec<(RawFd, i16)>) -> bool {
        true
    }

    fn is_flushed(&self, _: Classes) -> bool {
        self.with(|line| line.outbound.is_empty())
    }

    fn relocate(&mut self, _: &dyn Fn(*mut u8) -> *mut u8) {}

    fn set_in_flight(&mut self, _: usize) {}

    fn close(&mut self, _: Close) -> bool {
        self.is_flushed(ALL_CLASSES)
    }
}
