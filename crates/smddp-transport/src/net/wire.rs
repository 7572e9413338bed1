//! Interface of a wire: sends the frames of one communicator from this rank to ranks of other nodes.

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use super::frame::Frame;

/// Number of a sent payload, assigned by the sender. The wire reports it when the payload's memory is free.
pub(crate) type Ticket = u64;

/// Time to wait for frames that a process sent before its end was detected.
pub(crate) const DRAIN_GRACE: Duration = Duration::from_millis(250);

/// Largest payload that `send` copies or sends before it returns, in bytes; it may be in any memory. The memory of a
/// larger payload must not change until its ticket is reported or until [`Wire::release_user_buffers`]. A larger
/// payload is in the process's staging memory, or in any memory if [`Wire::copies`] returns true.
pub(crate) const INLINE_PAYLOAD: usize = 8 << 10;

/// Destination of a received payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Write it to this address, which has room for the whole payload. For more than [`INLINE_PAYLOAD`] bytes the
    /// address is in the staging memory, or in any memory if [`Wire::copies`] returns true.
    At(*mut u8),
    /// No target yet: the wire asks again at a later poll. Until then it delivers no later frame of that class and
    /// peer.
    Later,
    /// Discard the payload. The frame is still delivered.
    Discard,
}

/// Owner of a wire: receives its frames and completions.
pub(crate) trait Sink {
    /// Returns the target of the frame's payload.
    fn target(&mut self, peer: usize, frame: &Frame) -> Target;
    /// Delivers a frame whose payload is at its target. Called once for each frame, in the order of its class.
    fn received(&mut self, peer: usize, frame: &Frame);
    /// Reports that the memory of a sent payload is free.
    fn sent(&mut self, ticket: Ticket);
    /// Returns the bit set of classes on which this rank expects frames. The wire may read other classes less often.
    fn expected(&self) -> u8 {
        u8::MAX
    }
}

/// Peer that is no longer reachable, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Broken {
    pub(crate) peer: usize,
    pub(crate) reason: String,
}

/// One rank's endpoint for the frames of one communicator.
///
/// Between an ordered pair of ranks, the frames of a class ([`Frame::class`]) arrive exactly once and in the order in
/// which they were sent. A wire over an unordered transport (EFA) restores the order. One thread at a time owns a wire.
/// No method blocks.
pub(crate) trait Wire: Send {
    /// Returns the name for logs and errors: "tcp eth0 10.77.0.1", "fabric efa (libfabric 2.4), 4 rails".
    fn name(&self) -> String;
    /// Queues a frame and its payload of `frame.bytes` bytes, and sends what can be sent at once. The first frame opens
    /// the connection. `Sink::sent` reports `ticket`, at the earliest in the next `poll`.
    ///
    /// # Safety
    /// `payload` points to `frame.bytes` readable bytes, which follow the rule of [`INLINE_PAYLOAD`].
    unsafe fn send(&mut self, peer: usize, frame: &Frame, payload: *const u8, ticket: Ticket);
    /// Sends a frame with a payload of any size in any memory. The payload is sent or copied when this returns. Only
    /// for wires whose [`Wire::copies`] returns true.
    ///
    /// # Safety
    /// `payload` points to `frame.bytes` readable bytes.
    unsafe fn post(&mut self, _peer: usize, _frame: &Frame, _payload: *const u8) {
        debug_assert!(false, "this wire sends from the staging memory only");
    }
    /// Sends and receives what is ready, and reports it to the sink. Returns true if there was progress. Reads no
    /// clock: work that depends on the time is in [`Wire::check`].
    fn poll(&mut self, sink: &mut dyn Sink) -> bool;
    /// Sends what can be sent at once, without receiving.
    fn push(&mut self, _sink: &mut dyn Sink) {}
    /// Enables detection of the death of `peer`, for which this rank waits, even if this rank sends nothing to it.
    /// `elsewhere`: another mechanism than the wire detects it, too.
    fn watch(&mut self, peer: usize, elsewhere: bool, now: Instant);
    /// Detects lost peers and does what is due by `now`. Called at intervals while this rank waits.
    fn check(&mut self, _now: Instant) {}
    /// Returns the peers found broken until now. A peer that leaves in good order has sent its `Kind::Leave` frame
    /// before.
    fn broken(&self) -> Vec<Broken>;
    /// Returns how long, after a peer was found broken, frames that it sent before may still arrive. They may have the
    /// abort reason of its group.
    fn drain_grace(&self) -> Duration {
        Duration::ZERO
    }
    /// Returns a peer that this process cannot reach because of a local error, and the error. The peer may be alive.
    fn local_error(&self) -> Option<(usize, String)> {
        None
    }
    /// Returns the bit set of classes that have a connection with the peer, whichever rank opened it.
    fn connected_classes(&self, _peer: usize) -> u8 {
        0
    }
    /// Returns true if the transport copies payloads, so that a payload's memory is free before its receiver has it.
    /// Payloads may then be sent from any memory and received into any memory.
    fn copies(&self) -> bool {
        false
    }
    /// Releases memory outside the staging memory: copies payloads that are still to be sent from it, and discards
    /// payloads that still arrive for it.
    fn release_user_buffers(&mut self) {}
    /// Follows memory outside the staging memory that has moved: copies payloads that are still to be sent from it.
    /// Payloads that still arrive for a collective go to the new address.
    fn relocate(&mut self, _moved: &dyn Fn(*mut u8) -> *mut u8) {}
    /// Returns the kernel's minimum round-trip time to `peer`, if it measures one.
    fn round_trip(&self, _peer: usize) -> Option<Duration> {
        None
    }
    /// Returns peers that do not acknowledge retransmitted packets, each with the largest payload of a packet to it, in
    /// bytes.
    fn unacknowledged(&self) -> Vec<(usize, u32)> {
        Vec::new()
    }
    /// Sets the number of bytes that may be in flight to a peer at once.
    fn expect(&mut self, _bytes: usize) {}
    /// Adds the descriptors whose readiness (`events`: libc::POLLIN, POLLOUT) ends a sleep. Returns `false` if this
    /// wire has to be polled, so that no thread may sleep long.
    fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool;
    /// Returns true if everything that was sent has left this process.
    fn drained(&self) -> bool;
    /// Returns true if every message has left this process. Payloads of a dead group may remain queued for ever.
    fn messages_drained(&self) -> bool {
        self.drained()
    }
    /// Returns true while a connection that carries frames is not established.
    fn is_connecting(&self) -> bool {
        false
    }
    /// Stops receiving payloads, because the group is dead.
    fn abandon(&mut self) {}
    /// Ends sending. Returns true once everything has arrived that would be lost if this wire were dropped.
    fn finish(&mut self) -> bool {
        self.drained()
    }
    /// Frees the connections of a group that this rank has left, although the group may still be referenced.
    fn close(&mut self) {}
}
