//! What a wire between nodes does: frames go from this rank to ranks of other nodes, for one communicator.

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use super::frame::Frame;

/// A sent payload's number, given by the sender; told again when its memory is free.
pub(crate) type Ticket = u64;

/// What a process said before its end may still be under way over a wire when that end is seen.
pub(crate) const DRAIN_GRACE: Duration = Duration::from_millis(250);

/// Payloads up to this many bytes may lie anywhere and are copied (or gone) when `send` returns; larger ones stay unchanged
/// until their ticket comes back, or [`Wire::release_user_buffers`]. They lie in the process's staging memory, or anywhere if the wire
/// [`Wire::copies`].
pub(crate) const INLINE_PAYLOAD: usize = 8 << 10;

/// Where an arriving payload goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// To this address, which has room for all of it. Over [`INLINE_PAYLOAD`] bytes it lies in the staging memory, or anywhere if the
    /// wire [`Wire::copies`].
    At(*mut u8),
    /// Nowhere yet: ask again at a later poll. Nothing behind it on that class of the pair is delivered meanwhile.
    Later,
    /// Nowhere: the payload is dropped, the frame is still delivered.
    Discard,
}

/// Whoever owns a wire's ends: takes what arrives.
pub(crate) trait Sink {
    fn target(&mut self, peer: usize, frame: &Frame) -> Target;
    /// The frame is here, its payload where `place` said. Called once for each frame, in the order of its class.
    fn received(&mut self, peer: usize, frame: &Frame);
    /// The payload's memory is free again.
    fn sent(&mut self, ticket: Ticket);
    /// Classes (bits) on which something is waited for; what comes on others may wait for a few looks.
    fn expected(&self) -> u8 {
        u8::MAX
    }
}

/// A peer that cannot be reached any more, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Broken {
    pub(crate) peer: usize,
    pub(crate) reason: String,
}

/// One rank's end of one communicator's frames. Between an ordered pair of ranks the frames of a class ([`Frame::class`])
/// arrive in the order in which they were sent, exactly once; whatever has no order (EFA) is put in order inside the wire. One owner at a time.
/// Nothing blocks.
pub(crate) trait Wire: Send {
    /// "tcp eth0 10.77.0.1", "fabric efa (libfabric 2.4), 4 rails": for logs and errors.
    fn name(&self) -> String;
    /// Queues a frame and its payload of `frame.bytes`, and sends at once what can be sent at once. Connects when
    /// first needed. `ticket` comes back through `Sink::sent`, at the earliest in the next `poll`.
    ///
    /// # Safety
    /// `payload` points at `frame.bytes` readable bytes, which keep to the rule of [`INLINE_PAYLOAD`].
    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: *const u8, ticket: Ticket);
    /// Sends a frame whose payload may lie anywhere, whatever its size, and is copied or gone when this returns. For wires that
    /// [`Wire::copies`].
    ///
    /// # Safety
    /// `payload` points at `frame.bytes` readable bytes.
    unsafe fn post(&mut self, _peer: usize, _frame: &Frame, _payload: *const u8) {
        debug_assert!(false, "this wire takes messages from the staging memory alone");
    }
    /// Moves on what can be moved on, and tells the sink; whether anything moved. Looks at no clock: what needs the time waits
    /// for [`Wire::check`].
    fn poll(&mut self, sink: &mut dyn Sink) -> bool;
    /// Sends at once what can be sent at once, without a look at what comes in.
    fn push(&mut self, _sink: &mut dyn Sink) {}
    /// Makes sure that the death of `peer` will be noticed though nothing is sent to it: this rank waits for it. `elsewhere`:
    /// something besides the wire tells of it, too.
    fn watch(&mut self, peer: usize, elsewhere: bool, now: Instant);
    /// Looks for peers that are gone, and does what is due by `now`. Called now and then while this rank waits for anything.
    fn check(&mut self, _now: Instant) {}
    /// Peers found broken so far. A peer that ends in good order has sent its `Kind::Leave` frame before.
    fn broken(&self) -> Vec<Broken>;
    /// For so long after a peer was found broken what it said before may still arrive: why its group failed, perhaps.
    fn drain_grace(&self) -> Duration {
        Duration::ZERO
    }
    /// A peer that this process cannot reach for want of something of its own, and of what. The peer may be well.
    fn local_error(&self) -> Option<(usize, String)> {
        None
    }
    /// Classes (bits) of which there is a connection with that peer already, by whomever it was made.
    fn connected_classes(&self, _peer: usize) -> u8 {
        0
    }
    /// Whether a payload's memory is free long before its reader has it: something on the way took a copy. Then payloads may
    /// leave from any memory and arrive in any.
    fn copies(&self) -> bool {
        false
    }
    /// Memory outside the staging memory is its owner's again: what is still to be sent from there is copied, and what
    /// still comes for it is dropped.
    fn release_user_buffers(&mut self) {}
    /// Memory outside the staging memory has moved: what is still to be sent from there is copied, and what still comes for a
    /// collective arrives at the new address.
    fn relocate(&mut self, _moved: &dyn Fn(*mut u8) -> *mut u8) {}
    /// The quickest there and back to `peer` that the kernel has seen, if one sees any.
    fn round_trip(&self, _peer: usize) -> Option<Duration> {
        None
    }
    /// Peers that do not acknowledge what is sent to them, however often the kernel sends it again, and the largest payload of
    /// a packet to them, in bytes.
    fn unacknowledged(&self) -> Vec<(usize, u32)> {
        Vec::new()
    }
    /// So many bytes may be on their way to a peer at once.
    fn expect(&mut self, _bytes: usize) {}
    /// Descriptors whose readiness (`events`: libc::POLLIN, POLLOUT) ends a sleep. `false`: this wire has to be
    /// polled, nobody may sleep long.
    fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool;
    /// Whether all that was sent is out of this process's hands.
    fn drained(&self) -> bool;
    /// Whether that holds for all messages: payloads of a dead group may stay where they are for ever.
    fn messages_drained(&self) -> bool {
        self.drained()
    }
    /// Returns true while a connection that carries frames is not established.
    fn is_connecting(&self) -> bool {
        false
    }
    /// The group is dead: what still arrives is of no use to anybody.
    fn abandon(&mut self) {}
    /// Nothing more will be sent: whether everything has arrived that would be lost if this wire were dropped.
    fn finish(&mut self) -> bool {
        self.drained()
    }
    /// Frees the connections of a group that this rank has left, although the group may still be referenced.
    fn close(&mut self) {}
}
