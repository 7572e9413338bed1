//! A wire that keeps the promises of `Wire` to its sink, and whose other ends send anything.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::lock;
use crate::net::frame::{CLASSES, Frame};
use crate::net::wire::{Broken, INLINE_PAYLOAD, Sink, Target, Ticket, Wire};

/// Frames of a class whose payloads are on their way at once.
const AHEAD: usize = 4;

/// A frame on its way in.
pub(super) struct Item {
    pub(super) frame: Frame,
    /// `None`: it has no place yet.
    pub(super) target: Option<Target>,
}

/// What the wire does at the next poll.
pub(super) enum Order {
    /// Asks for places on a class.
    Place(usize, usize),
    /// Brings the payload of the class's first frame, and tells of it.
    Arrive(usize, usize),
    /// A payload that was sent is out of hands.
    Sent(usize),
}

/// What is under way.
#[derive(Default)]
pub(crate) struct Line {
    /// By peer and class.
    pub(super) inbound: Vec<[VecDeque<Item>; CLASSES]>,
    /// (ticket, payload, bytes) of what was sent.
    pub(crate) outbound: Vec<(Ticket, *const u8, usize)>,
    pub(super) orders: Vec<Order>,
    /// It takes payloads from any memory and brings them to any.
    pub(crate) copies: bool,
}

// SAFETY: addresses of the rank's memory; one thread drives both.
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
                    // SAFETY: the sink's promise, which was held against the rank's memory (`in_place`).
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

    /// (address, bytes) of payloads that may be written at any time now, and of those that may be read.
    pub(super) fn under_way(&self) -> Vec<(*const u8, usize)> {
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
        assert!(self.copies(), "a payload from anywhere");
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
            let moved = !orders.is_empty();
            orders.into_iter().for_each(|order| line.execute(order, sink));
            moved
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
