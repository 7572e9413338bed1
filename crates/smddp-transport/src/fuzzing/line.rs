//! Wire that keeps the contract of `Wire` towards its sink, and whose peers send arbitrary frames.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::lock;
use crate::net::frame::{CLASSES, Frame};
use crate::net::wire::{Broken, INLINE_PAYLOAD, Sink, Target, Ticket, Wire};

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
    /// (ticket, payload, bytes) of incomplete sends.
    pub(crate) outbound: Vec<(Ticket, *const u8, usize)>,
    pub(super) orders: Vec<Order>,
    /// Transfers payloads from and to unregistered memory.
    pub(crate) copies: bool,
}

// SAFETY: addresses of the rank's memory; one thread uses both.
unsafe impl Send for Line {}

#[derive(Clone)]
pub(crate) struct Shared(pub(super) Arc<Mutex<Line>>);

impl Shared {
    pub(crate) fn new(size: usize) -> Self {
        let inbound = (0..size).map(|_| Default::default()).collect();
        Self(Arc::new(Mutex::new(Line { inbound, ..Line::default() })))
    }

    pub(crate) fn with<T>(&self, of: impl FnOnce(&mut Line) -> T) -> T {
        of(&mut lock(&self.0))
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
                    sink.sent(self.outbound.swap_remove(at).0);
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
    fn name(&self) -> String {
        "a script".to_owned()
    }

    unsafe fn send(&mut self, _: usize, frame: &Frame, payload: *const u8, ticket: Ticket) {
        self.with(|line| line.outbound.push((ticket, payload, frame.bytes as usize)));
    }

    unsafe fn post(&mut self, _: usize, _: &Frame, _: *const u8) {
        assert!(self.copies(), "unregistered payload on a wire that does not copy");
    }

    fn copies(&self) -> bool {
        self.with(|line| line.copies)
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

    fn watch(&mut self, _: usize, _: bool, _: Instant) {}

    fn broken(&self) -> Vec<Broken> {
        Vec::new()
    }

    fn interest(&self, _: &mut Vec<(RawFd, i16)>) -> bool {
        true
    }

    fn drained(&self) -> bool {
        self.with(|line| line.outbound.is_empty())
    }
}
